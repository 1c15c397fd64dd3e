"""Records that outlive the process: one SQLite database and a folder of files.

A server opens `Records`, which holds the database and, as `Folder`, the files. Another program uses
`open_database` at the same time. All of them raise `RecordsError` when the disk fails.
"""

from twostroke.server.storage.database import Records, open_database
from twostroke.server.storage.folder import Folder, FolderMarker, RecordsError, Temporary
from twostroke.server.storage.row_digests import DamagedRowError

__all__ = [
    "DamagedRowError",
    "Folder",
    "FolderMarker",
    "Records",
    "RecordsError",
    "Temporary",
    "open_database",
]
