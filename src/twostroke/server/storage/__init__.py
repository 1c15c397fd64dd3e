"""Records that outlive the process: one SQLite database and a folder of files.

`Records` is the database, `Folder` the files, and `beside` lets another program in. All raise
`RecordsError` where the disk fails.
"""

from twostroke.server.storage.database import Records, beside
from twostroke.server.storage.folder import Folder, FolderMarker, RecordsError, Temporary
from twostroke.server.storage.row_digests import DamagedRowError

__all__ = [
    "DamagedRowError",
    "Folder",
    "FolderMarker",
    "Records",
    "RecordsError",
    "Temporary",
    "beside",
]
