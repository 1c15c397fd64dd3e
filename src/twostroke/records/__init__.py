"""Records that outlive the process: one SQLite database and a folder of files.

`Records` is the database, `Folder` the files; both raise `RecordsError` where the disk fails.
"""

from twostroke.records.database import Records
from twostroke.records.errors import RecordsError
from twostroke.records.folder import Folder, Temporary

__all__ = ["Folder", "Records", "RecordsError", "Temporary"]
