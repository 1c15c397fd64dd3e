"""The Hugging Face hub: lists a repository's files and downloads them to the hub's cache."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from twostroke.core.env import install_command
from twostroke.core.errors import DownloadError, ModelFormatError, ModelNotFoundError
from twostroke.core.files import file_size, move_into_place, write_text
from twostroke.core.frozen import Frozen
from twostroke.model.hub.disk import CHUNK_BYTES, file_sha256
from twostroke.model.hub.file_selection import RepoFile
from twostroke.model.hub.names import is_safe_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twostroke.model.hub.disk import Watcher
    from twostroke.model.hub.names import HubName

    T = TypeVar("T")

RETRY_PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0)  # before a request is repeated
_RETRY_STATUSES: Final = {408, 429, 500, 502, 503, 504}
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_LOGIN_ADVICE: Final = "log in with 'hf auth login' or set HF_TOKEN"


class HubUnreachableError(DownloadError):
    """The Hugging Face hub could not be reached; only files in its cache can be used."""


class Listing(Frozen):
    """The files and the licence of a hub repository at one commit.

    If `is_cached`, the hub could not be reached, and these are the files in the hub's cache.
    """

    commit: str
    files: tuple[RepoFile, ...]
    licence: str | None
    is_cached: bool = False


class Hub:
    """Access to one repository of the Hugging Face hub; every failure is a TwostrokeError."""

    def __init__(self, name: HubName) -> None:
        """Import the package huggingface_hub; raise DownloadError if it is not installed."""
        try:
            import huggingface_hub
            from huggingface_hub import constants, errors, utils
        except ImportError:
            raise DownloadError(
                "Models of the Hugging Face hub need the package huggingface_hub: run "
                f"{install_command('hub')}, or give the path of a model."
            ) from None
        self.name = name
        self.cache = Path(constants.HF_HUB_CACHE)
        self.endpoint: str = constants.ENDPOINT
        self._client: Any = huggingface_hub
        self._errors: Any = errors
        self._utils: Any = utils
        self._utils.disable_progress_bars("huggingface_hub.http_get")  # callers show their own
        self._timeout_s: float = constants.HF_HUB_DOWNLOAD_TIMEOUT
        # The exceptions of the HTTP library that this version of the client uses.
        self._failures: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__

    @property
    def web_url(self) -> str:
        """The web address of the repository on the hub."""
        return f"{self.endpoint}/{self.name.repo}"

    def listing(self) -> Listing:
        """Return the repository's files on the hub, or in the hub's cache if it is unreachable.

        Raises HubUnreachableError if the cache has none.
        """
        api = self._client.HfApi(library_name="twostroke")
        try:
            info = self._retry(
                lambda: api.model_info(
                    self.name.repo,
                    revision=self.name.revision,
                    files_metadata=True,
                    timeout=self._timeout_s,
                )
            )
            return _listing(info)
        except HubUnreachableError:
            cached = self._cached_listing()
            if cached is None:
                raise
            return cached
        except (ValueError, TypeError, KeyError, AttributeError):
            raise DownloadError(
                f"{self.endpoint} did not describe the repository {self.name.repo!r}: check "
                "HF_ENDPOINT, and whether the network wants a login."
            ) from None

    def _cached_listing(self) -> Listing | None:
        try:
            folder = Path(
                self._client.snapshot_download(
                    self.name.repo, revision=self.name.revision, local_files_only=True
                )
            )
        except self._errors.LocalEntryNotFoundError:
            return None
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = [
            RepoFile(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths
        ]
        return Listing(folder.name, tuple(files), None, is_cached=True)

    def snapshot(self, commit: str) -> Path:
        """Return the folder in the hub's cache that holds the files of a commit."""
        return self._folder / "snapshots" / commit

    def lock_path(self, file: RepoFile) -> Path:
        """Return the path of a large file's lock file, which the hub's own programs lock, too."""
        return self.cache / ".locks" / self._folder.name / f"{file.sha256}.lock"

    def missing_bytes(self, file: RepoFile) -> int:
        """Return how many bytes of a repository's file are still to be downloaded."""
        if file.sha256 is None or self._has_blob(file):
            return 0
        return file.num_bytes - (file_size(self._partial(file)) or 0)

    def transfer(
        self, commit: str, file: RepoFile, on_growth: Callable[[Path, int], None], watch: Watcher
    ) -> None:
        """Download a large file into the hub's cache; continue an earlier incomplete download.

        `on_growth` is called with the partial file and its size. If it raises a ModelFormatError,
        the file is deleted. `watch` gets the progress of the SHA-256 check.
        """
        if self._has_blob(file):
            return
        partial = self._partial(file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._receive_all(commit, file, partial, on_growth)
        except ModelFormatError:
            partial.unlink()
            raise
        if file_sha256(partial, watch) != file.sha256:
            partial.unlink()
            raise DownloadError(
                f"{file.path!r} arrived damaged and was deleted: try again. If it happens "
                "again, the hub or a mirror (HF_ENDPOINT) sends damaged files."
            )
        move_into_place(partial, self._blob(file))

    def link(self, commit: str, file: RepoFile) -> None:
        """Make a file appear in the commit's folder of the hub's cache.

        A large file, which `transfer` has downloaded, is linked there. A small file is downloaded
        first.
        """
        force = file.sha256 is None  # the copy in the cache is damaged
        self._retry(
            lambda: self._client.hf_hub_download(
                self.name.repo, file.path, revision=commit, force_download=force
            )
        )

    def remember(self, commit: str) -> None:
        """Store in the hub's cache which commit the requested revision (branch or tag) means.

        The model is then found later without the network.
        """
        ref = self._folder / "refs" / self.name.revision
        if self.name.revision != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_text(ref, commit)

    @property
    def _folder(self) -> Path:
        return self.cache / f"models--{self.name.repo.replace('/', '--')}"

    def _blob(self, file: RepoFile) -> Path:
        return self._folder / "blobs" / str(file.sha256)

    def _has_blob(self, file: RepoFile) -> bool:
        return file_size(self._blob(file)) == file.num_bytes

    def _partial(self, file: RepoFile) -> Path:
        return self._folder / "blobs" / f"{file.sha256}.incomplete"

    def _receive_all(
        self, commit: str, file: RepoFile, partial: Path, on_growth: Callable[[Path, int], None]
    ) -> None:
        """Download a file's missing bytes, with several requests if connections break.

        Raises the last error if several requests in a row received nothing.
        """
        size = file_size(partial) or 0
        num_failures = 0
        while size < file.num_bytes:
            old_size = size
            problem = DownloadError(f"The hub ends {file.path!r} too early: try again.")
            try:
                for size in self._receive(commit, file, partial):
                    on_growth(partial, size)
                    if size > file.num_bytes:  # more than announced
                        return
            except HubUnreachableError as error:
                problem = error
            if size < file.num_bytes:
                num_failures = 0 if size > old_size else num_failures + 1
                if num_failures > len(RETRY_PAUSES_S):
                    raise problem
                time.sleep(RETRY_PAUSES_S[0])

    def read_range(self, commit: str, file: RepoFile, start: int, num_bytes: int) -> bytes:
        """Return a byte range of a repository's file; the range is never taken from the cache."""
        if not num_bytes:
            return b""
        response = self._retry(lambda: self._get(commit, file, f"{start}-{start + num_bytes - 1}"))
        skipped = 0 if response.status_code == 206 else start  # a server without ranges
        content = bytearray()
        try:
            for chunk in response.iter_bytes(CHUNK_BYTES):
                content += chunk
                if len(content) >= skipped + num_bytes:
                    break
        except self._failures as error:
            raise self._user_error(error) from None
        finally:
            response.close()
        requested = bytes(content[skipped : skipped + num_bytes])
        if len(requested) < num_bytes:
            raise DownloadError(f"The hub ends {file.path!r} too early: try again.")
        return requested

    def _receive(self, commit: str, file: RepoFile, partial: Path) -> Iterator[int]:
        """Append the response to one download request to a partial file.

        Yield the partial file's size after each chunk.
        """
        response = self._retry(lambda: self._get(commit, file, f"{file_size(partial) or 0}-"))
        try:
            # A server without ranges starts again.
            with partial.open("ab" if response.status_code == 206 else "wb") as out:
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    out.write(chunk)
                    out.flush()
                    yield out.tell()
        except self._failures as error:
            raise self._user_error(error) from None
        finally:
            response.close()

    def _get(self, commit: str, file: RepoFile, span: str) -> Any:
        """Request a byte range of a repository's file, such as "0-99"; return the response."""
        url = self._client.hf_hub_url(
            self.name.repo, file.path, revision=commit, endpoint=self.endpoint
        )
        headers = self._utils.build_hf_headers(library_name="twostroke")
        headers |= {"Accept-Encoding": "identity", "Range": f"bytes={span}"}
        return self._open(url, headers)

    def _open(self, url: str, headers: dict[str, str]) -> Any:
        client = self._utils.get_session()
        request = client.build_request("GET", url, headers=headers, timeout=self._timeout_s)
        response = client.send(request, stream=True, follow_redirects=True)
        try:
            self._utils.hf_raise_for_status(response)
        except self._failures:
            response.close()
            raise
        return response

    def _retry(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, a request to the hub; repeat it while the hub is busy."""
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                return call()
            except self._failures as error:
                if pause_s is None or _status(error) not in _RETRY_STATUSES:
                    raise self._user_error(error) from None
            time.sleep(pause_s)
        raise AssertionError

    def _user_error(self, error: BaseException) -> BaseException:
        """Convert an error of the hub's client to an error that tells the user what to do."""
        errors = self._errors
        repo = self.name.repo
        status = _status(error)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubUnreachableError(f"{repo!r} cannot be fetched: HF_HUB_OFFLINE is set.")
        if isinstance(error, errors.GatedRepoError):
            return DownloadError(
                f"{repo!r} is gated: accept its licence at {self.web_url}; {_LOGIN_ADVICE}."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            revision = self.name.revision
            return ModelNotFoundError(f"{repo!r} has no revision {revision!r}: see {self.web_url}.")
        if isinstance(error, errors.RepositoryNotFoundError):
            return ModelNotFoundError(
                f"The hub has no model {repo!r}, or you may not read it: check the name, or "
                f"{_LOGIN_ADVICE}."
            )
        if status in {401, 403}:
            return DownloadError(f"You may not read {repo!r} ({self.web_url}): {_LOGIN_ADVICE}.")
        if status is not None:
            advice = (
                "it is busy; try again later"
                if status in _RETRY_STATUSES
                else f"see {self.web_url}"
            )
            return DownloadError(f"The hub answered {repo!r} with status {status}: {advice}.")
        if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
            return error  # from the disk, not from the network
        return HubUnreachableError(
            f"The hub at {self.endpoint} could not be reached for {repo!r}: check the network, the "
            "proxy settings or HF_ENDPOINT."
        )


def unfinished_files(caches: set[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield each partly downloaded file in the hub's cache and in `caches`, with its lock file."""
    with suppress(ImportError):
        from huggingface_hub import constants

        caches = caches | {Path(constants.HF_HUB_CACHE)}
    for cache in sorted(caches):
        for path in sorted(cache.glob("models--*/blobs/*.incomplete")):
            if len(path.stem) == 64:  # the client's files have other names
                yield path, cache / ".locks" / path.parents[1].name / f"{path.stem}.lock"


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _listing(info: Any) -> Listing:
    if not _COMMIT.fullmatch(info.sha):
        raise ValueError(info.sha)
    return Listing(info.sha, tuple(_repo_files(info.siblings)), _licence(info))


def _repo_files(siblings: list[Any]) -> Iterator[RepoFile]:
    """Yield the files of a repository's listing, as the hub's client returns it.

    Files without a size are left out, and files whose path leads out of the repository.
    """
    for sibling in siblings:
        sha256 = sibling.lfs.sha256 if sibling.lfs else None
        size = sibling.lfs.size if sibling.lfs else sibling.size
        is_valid = isinstance(size, int) and (sha256 is None or _SHA256.fullmatch(sha256))
        if is_valid and is_safe_path(sibling.rfilename):
            yield RepoFile(sibling.rfilename, size, sha256)


def _licence(info: Any) -> str | None:
    """Return the licence that a hub repository names, as text for users; None if it names none.

    The text includes the licence's address, if the repository gives one.
    """
    card = info.card_data
    name = getattr(card, "license_name", None) or getattr(card, "license", None)
    link = getattr(card, "license_link", None)
    text = f"{name} ({link})" if link else str(name)
    return "".join(filter(str.isprintable, text))[:200] if name else None
