"""Files and batches of a server: their HTTP routes, their runner, and the cleanup."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from twostroke.core.message_text import counted_noun
from twostroke.server.batch import files, messages, openai, uploads
from twostroke.server.batch.file_routes import FileRoutes
from twostroke.server.batch.runner import BatchRunner
from twostroke.server.batch.uploads import Uploads
from twostroke.server.body.attached_files import AttachedFile
from twostroke.server.body.explain import MAX_NAME_LENGTH
from twostroke.server.http.errors import BodySizeError, UnknownPathError
from twostroke.server.storage import RecordsError
from twostroke.server.storage.folder import new_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from sqlite3 import Connection

    from starlette.routing import Route
    from starlette.types import ASGIApp

    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.body.attached_files import ReadFile
    from twostroke.server.http.fair_queue import Readers
    from twostroke.server.http.ignored import Ignored
    from twostroke.server.http.limits import RequestLimits
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.storage import Records

_SWEEP_INTERVAL_S: Final = 60.0
FORMS = {openai.PROTOCOL: openai.FORM, messages.PROTOCOL: messages.FORM}


class BatchService:
    """The files and batches of a server: their HTTP routes, batch runner and cleanup.

    Without `--records`, the routes answer with an error that says how to start the server.
    """

    def __init__(
        self,
        records: Records | None,
        limits: RequestLimits,
        max_running: Callable[[], int],
        keys: ApiKeys | None = None,
    ) -> None:
        """Create the service, which runs no batches before `start`.

        Args:
            records: the server's database and file folder; None without `--records`.
            limits: the limits of files, batches and requests.
            max_running: returns how many batch requests may be in the engine.
            keys: say before each batch request whether its tenant still has a valid key; None
                if no keys are needed.
        """
        self._records = records
        self._limits = limits
        self._runner = None
        if records is not None:
            may_run = keys.has_valid if keys is not None else lambda _tenant: True
            self._runner = BatchRunner(records, FORMS, limits, max_running, may_run)
        self._stopping: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    def routes(
        self, note: Callable[[Iterable[Ignored], ServedRequest], None], readers: Readers
    ) -> list[Route]:
        """Return the routes of files, uploads and batches, for OpenAI's and Anthropic's APIs.

        `note` records the ignored fields of a request; `readers` decode long bodies.
        """

        def records_and_runner() -> tuple[Records, BatchRunner]:
            if self._records is None or self._runner is None:
                message = "This server keeps no files or batches: start it with --records DIR."
                raise UnknownPathError(message)
            return self._records, self._runner

        quota = self._runner.quota if self._runner is not None else files.StorageQuota(self._limits)
        return [
            *FileRoutes(lambda: records_and_runner()[0], quota, self._limits).routes(),
            *Uploads(lambda: records_and_runner()[0], quota, self._limits, note, readers).routes(),
            *openai.routes(records_and_runner, self._limits, note, readers),
            *messages.MessageBatches(records_and_runner, quota, self._limits).routes(),
        ]

    def file_reader(self, tenant: str) -> ReadFile:
        """Return a function that reads stored files of a tenant, which a request attaches by id.

        The function blocks, so call it in a thread. It raises NoSuchFileError, and BodySizeError if
        the request's files are too large in total.
        """
        max_bytes = num_left = self._limits.max_body_bytes

        def read(file_id: str) -> AttachedFile:
            nonlocal num_left
            if self._records is None:
                reason = "This server stores no files: start it with --records DIR."
                raise files.NoSuchFileError(
                    f"No such file: '{file_id[:MAX_NAME_LENGTH]}'. {reason}"
                )
            with self._records.open_reader() as db:
                file = files.find(db, file_id, tenant)
                _, digest = files.size_and_digest(db, file_id)
            if file.bytes > num_left:
                raise BodySizeError(
                    f"The files of a request may have at most {counted_noun(max_bytes, 'byte')}."
                )
            num_left -= file.bytes
            path = self._records.files.path(file.id)
            try:
                content = path.read_bytes() if path.is_file() else b""
            except OSError:  # for example, another request has just deleted it
                content = b""
            is_whole = digest in {"", new_hash(content).hexdigest()}
            if len(content) != file.bytes or not is_whole:
                reason = f"The content of '{file.id}' is missing or damaged: upload it again."
                raise files.DamagedFileError(reason)
            return AttachedFile(file.filename, content)

        return read

    async def start(self, app: ASGIApp) -> None:
        """Continue the batches that have not ended, and start to delete expired files regularly."""
        if self._runner is not None and self._records is not None:
            self._sweeping = asyncio.create_task(_delete_expired_regularly(self._records))
            await self._runner.start(app)

    def drain(self) -> None:
        """Start to stop all batches; the next server process continues them."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._runner is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._runner.stop())

    async def stop(self) -> None:
        """Stop all batches, and wait until none of their requests run."""
        self.drain()
        if self._stopping is not None:
            await self._stopping


async def _delete_expired_regularly(records: Records) -> None:
    """Delete expired files and uploads at once, and then every minute."""
    while True:
        with suppress(RecordsError):  # the disk may work again in a minute
            await delete_expired(records, time.time())
        await asyncio.sleep(_SWEEP_INTERVAL_S)


async def delete_expired(records: Records, now_s: float) -> None:
    """Delete files and uploads that have expired at the Unix time `now_s`.

    Raises:
        RecordsError: the database cannot be written.
    """

    def work(db: Connection) -> list[str]:
        return [*files.delete_expired(db, now_s), *uploads.delete_expired(db, now_s)]

    ids = await records.write(work)
    await asyncio.to_thread(uploads.remove_files, records, ids)
