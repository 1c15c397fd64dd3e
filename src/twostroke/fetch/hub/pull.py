"""Fetching a model of the hub into the hub's own cache: resumed, checked, and refused early."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import DownloadError, TwostrokeError
from twostroke.core.files import read_json
from twostroke.fetch.disk import Place, locked, mega
from twostroke.fetch.hub.cache import RepoCache
from twostroke.fetch.hub.choice import CONFIG, INDEX, SAFETENSORS, Choice, choose, shards
from twostroke.fetch.hub.client import HubClient, RepoListing, TransientError
from twostroke.fetch.hub.gate import Gate
from twostroke.fetch.hub.partial import PartialFile
from twostroke.fetch.progress import Progress, file_sha256, ignore
from twostroke.fetch.store import Record, StoredFile, hub_folder, read_record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twostroke.fetch.hub.choice import RepoFile
    from twostroke.fetch.hub.names import HubName
    from twostroke.fetch.progress import Inspect, Watcher

NUM_RETRIES: Final = 5  # in a row, without a byte in between
PAUSE_S = 1.0  # the first pause; each further one is longer by as much


def pull_hub(name: HubName, inspect: Inspect, watch: Watcher) -> Record:
    """Fetch what `name` asks for, unless it is there, write its record, and return it.

    Raises:
        ModelNotFoundError: no such repository, revision or file.
        ModelFormatError: a model that cannot run here; at most some megabytes were fetched.
        DownloadError: network, disk, rights or checksum; what has arrived is kept for a next try.
    """
    client = HubClient()
    pull = _Pull(client, name, inspect, watch)
    try:
        return pull.run()
    except KeyboardInterrupt:
        kept = pull.kept_bytes()
        rest = f"{mega(kept)} are kept, and the next try goes on from there"
        message = f"Fetching '{name}' was interrupted; {rest if kept else 'nothing was kept'}."
        raise KeyboardInterrupt(message) from None
    except TransientError as error:
        raise error.error from None
    except OSError as error:
        raise pull.place.error(str(name), error) from None


class _Pull:
    """One download; `done_bytes` of the `total_bytes` of what was missing are there."""

    def __init__(self, client: HubClient, name: HubName, inspect: Inspect, watch: Watcher) -> None:
        self.client = client
        self.name = name
        self.inspect = inspect
        self.watch = watch
        self.cache = RepoCache(client.cache_folder, name.repo)
        self.place = Place(client.cache_folder, "HF_HOME")
        self.listing = RepoListing("", (), None)
        self.were_here: set[RepoFile] = set()
        self.wanted: list[RepoFile] = []
        self.done_bytes = 0
        self.total_bytes = 0

    def run(self) -> Record:
        is_online = self.look()
        choice = choose(self.name, self.listing.files)
        if choice.note:
            self.watch(Progress("choose", 0, None, choice.note))
        self.were_here = {file for file in self.listing.files if self.is_here(file)}
        if choice.entry is None:
            choice = self.small_files(choice)
        self.fetch(choice.files, choice.entry)
        if is_online and not self.were_here.issuperset(choice.files):
            self.cache.remember(self.name, self.listing.commit)
        return self.record(choice)

    def look(self) -> bool:
        """Ask the hub for the files; False if it cannot be asked, and its cache knows them."""
        for attempt in range(1, NUM_RETRIES + 1):
            try:
                self.listing = self.client.listing(self.name)
                return True
            except TransientError as error:
                if error.offline and self.look_into_cache():
                    return False
                if error.offline or attempt == NUM_RETRIES:
                    raise
                _pause(error.wait_s, attempt)
        raise AssertionError

    def look_into_cache(self) -> bool:
        known = self.cache.known(self.name)
        if known is None:
            return False
        self.listing = RepoListing(*known, None)
        try:
            choose(self.name, self.listing.files)
        except TwostrokeError:  # what the cache lacks, the hub may have
            return False
        return True

    def is_here(self, file: RepoFile) -> bool:
        return self.cache.has(self.listing.commit, file)

    def path(self, name: str) -> Path:
        return self.cache.snapshot(self.listing.commit) / name

    def small_files(self, choice: Choice) -> Choice:
        """Fetch the configuration, see whether it can run, then what else is small."""
        self.fetch([file for file in choice.files if file.path == CONFIG], None)
        self.inspect(self.path(CONFIG), f"{self.name.repo}/{CONFIG}")
        self.fetch(choice.files, None)
        has_index = any(file.path == INDEX for file in choice.files)
        index = read_json(self.path(INDEX)) if has_index else None
        return shards(choice, index, self.listing.files)

    def fetch(self, files: Sequence[RepoFile], entry: str | None) -> None:
        """Make every file be there; `entry` is the GGUF file that is looked into first."""
        missing = [file for file in files if not self.is_here(file)]
        if not missing:  # the cache may be one that can only be read
            return
        self.place.folder.mkdir(parents=True, exist_ok=True)
        self.wanted = [file for file in missing if not self.cache.has_blob(file)]
        num_bytes = sum(file.num_bytes for file in self.wanted)
        self.total_bytes = self.done_bytes + num_bytes
        self.place.need(str(self.name), num_bytes - self.kept_bytes())
        for file in missing:
            with locked(self.cache.lock(file), self.wait):
                if self.is_here(file):
                    continue
                if not self.cache.has_blob(file):
                    self.download(file, Gate(self.inspect) if file.path == entry else None)
                self.cache.link(self.listing.commit, file)

    def wait(self) -> None:
        self.watch(Progress("wait", 0, None))

    def kept_bytes(self) -> int:
        """Return how much of what is wanted is on the disk."""
        kept = 0
        for file in self.wanted:
            partial = self.cache.partial(file)
            if self.cache.has_blob(file):
                kept += file.num_bytes
            elif partial.exists():
                kept += partial.stat().st_size
        return kept

    def download(self, file: RepoFile, gate: Gate | None) -> None:
        with PartialFile(self.cache.partial(file), file, self.watch) as partial:
            before, failures = self.done_bytes, 0
            while partial.size < file.num_bytes:
                start = partial.size
                lost = self.receive(file, partial, before, gate)
                if partial.size < file.num_bytes:
                    failures = 1 if partial.size > start else failures + 1
                    if failures > NUM_RETRIES:
                        raise lost
                    _pause(lost.wait_s, failures)
            if gate is not None:
                gate.check(partial)
            partial.finish(self.cache.blob(file))

    def receive(
        self, file: RepoFile, partial: PartialFile, before: int, gate: Gate | None
    ) -> TransientError:
        """Take what one request gives; return what to say if it was too little."""
        try:
            chunks = self.client.chunks(self.name, self.listing.commit, file.path, partial.size)
            for offset, chunk in chunks:
                partial.write(offset, chunk)
                self.done_bytes = before + partial.size
                self.watch(Progress("download", self.done_bytes, self.total_bytes))
                if gate is not None:
                    gate.look(partial)
        except TransientError as error:
            return error
        message = f"The hub ends {file.path!r} of '{self.name}' too early: try again."
        return TransientError(DownloadError(message))

    def record(self, choice: Choice) -> Record:
        """Write down what was fetched."""
        commit, repo = self.listing.commit, self.name.repo
        key = f"{self.name.revision}\n{choice.entry}".encode()
        short = hashlib.sha256(key).hexdigest()[:8]
        file = hub_folder() / f"{repo.replace('/', '--')}-{short}.json"
        old = read_record(file)
        family, number_format = self.facts(choice)
        record = Record(
            file=file,
            name=self.own_name(choice),
            title=f"{repo.split('/')[1]} ({number_format})",
            path=self.path(choice.entry or ""),
            files=tuple(self.stored(one, old) for one in choice.files),
            source=(f"{self.client.endpoint}/{repo}/tree/{commit}",),
            licence=self.listing.licence or (old.licence if old else None),
            family=family,
            number_format=number_format,
            asked=tuple(dict.fromkeys((*(old.asked if old else ()), str(self.name)))),
            snapshot=self.cache.snapshot(commit),
        )
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            record.write()
        except OSError as error:
            raise Place(file.parent).error(f"the record of {self.name}", error) from None
        return record

    def facts(self, choice: Choice) -> tuple[str | None, str | None]:
        """Return the model's family and the format of its numbers."""
        if choice.entry is not None:
            return self.inspect(self.path(choice.entry), choice.entry), choice.number_format
        config = read_json(self.path(CONFIG))
        dtype = config.get("dtype") or config.get("torch_dtype")
        short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
        family = self.inspect(self.path(CONFIG), f"{self.name.repo}/{CONFIG}")
        return family, short.get(str(dtype), SAFETENSORS)

    def own_name(self, choice: Choice) -> str:
        """Return the shortest name that leads to just this model."""
        for selector in (None, choice.number_format, SAFETENSORS):
            name = replace(self.name, file=selector)
            try:
                found = choose(name, self.listing.files)
            except TwostrokeError:
                continue
            if found.entry == choice.entry and found.note is None:
                return str(name)
        return str(replace(self.name, file=choice.entry))

    def stored(self, file: RepoFile, old: Record | None) -> StoredFile:
        path = self.path(file.path)
        before = {one.path: one for one in old.files} if old else {}
        known = len(file.digest) == 64
        sha256 = file.digest if known else file_sha256(path, ignore)
        ours = before[path].ours if path in before else file not in self.were_here
        return StoredFile(path, file.num_bytes, sha256, ours)


def _pause(wait_s: float, attempt: int) -> None:
    time.sleep(max(wait_s, attempt) * PAUSE_S)
