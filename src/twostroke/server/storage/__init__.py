"""The data that outlives the server process: one SQLite database, and a folder of files."""

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
