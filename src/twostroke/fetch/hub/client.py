"""The hub over HTTP, through its own client: the only module that imports huggingface_hub.

That package is the extra `hub`: it is imported when a name asks for the hub, and never before.
Addresses, tokens, mirrors and proxies are its business (HF_ENDPOINT, HF_TOKEN, HF_HOME, ...).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.errors import DownloadError, ModelNotFoundError
from twostroke.fetch.hub.choice import RepoFile
from twostroke.fetch.hub.names import is_safe_path
from twostroke.fetch.progress import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twostroke.fetch.hub.names import HubName

MAX_WAIT_S: Final = 30.0  # a hub that asks for more patience is told of, not waited for
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# None remaining until so many seconds have gone: `"api";r=0;t=55` (draft-ietf-httpapi-ratelimit).
_RATE_LIMIT = re.compile(r";\s*r=0;\s*t=(?P<seconds>\d{1,6})")
_BUSY = {408, 429, 500, 502, 503, 504}


class TransientError(Exception):
    """What may go away by itself: `error` is what to say if it does not."""

    def __init__(self, error: DownloadError, wait_s: float = 1.0, *, offline: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.wait_s = wait_s
        self.offline = offline


@dataclass(frozen=True, slots=True)
class RepoListing:
    """A repository at one commit: its files, with sizes and digests, and its licence."""

    commit: str
    files: tuple[RepoFile, ...]
    licence: str | None


class HubClient:
    """Asks the hub; every failure is a TwostrokeError, or a TransientError."""

    def __init__(self) -> None:
        """Import the client; DownloadError if it is not installed."""
        try:
            from huggingface_hub import HfApi, constants, errors, get_token, hf_hub_url, utils
        except ImportError:
            raise DownloadError(
                "Models of the Hugging Face hub need the package huggingface_hub: install it "
                "with pip install 'twostroke[hub]', or give the path of a downloaded model."
            ) from None
        self._api = HfApi(library_name="twostroke")
        self._errors: Any = errors
        self._http: Any = utils  # get_session and its like are public, if not exported to mypy
        self._url = hf_hub_url
        self._token = get_token
        self._timeout_s: float = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self.endpoint: str = constants.ENDPOINT
        self.cache_folder = Path(constants.HF_HUB_CACHE)
        # HTTP errors and those of sockets, whichever HTTP library this version stands on.
        self._failures: tuple[type[BaseException], ...] = errors.HfHubHTTPError.__bases__

    def listing(self, name: HubName) -> RepoListing:
        """Return what the hub knows of a repository at a revision."""
        try:
            info = self._api.model_info(
                name.repo, revision=name.revision, files_metadata=True, timeout=self._timeout_s
            )
            files = tuple(_repo_files(info.siblings or []))
            licence = _licence(info)
            commit = info.sha or ""
        except self._failures as error:
            raise self._told(error, name) from None
        except (ValueError, TypeError, KeyError, AttributeError):
            commit = ""
        if not _COMMIT.fullmatch(commit):
            raise DownloadError(
                f"{self.endpoint} answered for {name.repo!r} with something that describes no "
                "repository: check HF_ENDPOINT, or whether the network wants a login."
            )
        return RepoListing(commit, files, licence)

    def chunks(
        self, name: HubName, commit: str, path: str, start: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield a file's bytes from `start` on, each piece with its offset.

        A server that knows no ranges begins at 0 again: the offsets say so.
        """
        url = self._url(name.repo, path, revision=commit, endpoint=self.endpoint)
        headers = self._http.build_hf_headers(library_name="twostroke")
        headers["Accept-Encoding"] = "identity"  # offsets count the file's own bytes
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with self._http.get_session().stream(
                "GET", url, headers=headers, timeout=self._timeout_s, follow_redirects=True
            ) as response:
                self._http.hf_raise_for_status(response)
                offset = start if response.status_code == 206 else 0
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    yield offset, chunk
                    offset += len(chunk)
        except self._failures as error:
            raise self._told(error, name) from None

    def _told(self, error: BaseException, name: HubName) -> BaseException:
        """Turn a failure into what a user can do about it."""
        response: Any = getattr(error, "response", None)
        if response is not None:
            return self._answered(error, response, name)
        if isinstance(error, self._errors.OfflineModeIsEnabled):
            message = f"{name.repo!r} cannot be fetched: HF_HUB_OFFLINE is set, unset it."
            return TransientError(DownloadError(message), offline=True)
        if isinstance(error, OSError) and error.errno and error.filename:
            return error  # of the disk, not of the network
        message = (
            f"The hub at {self.endpoint} could not be reached for {name.repo!r}: check the "
            "network, the proxy settings or HF_ENDPOINT."
        )
        return TransientError(DownloadError(message), offline=True)

    def _answered(self, error: BaseException, response: Any, name: HubName) -> Exception:
        """Return what to say about an answer that is a refusal."""
        errors, repo, page = self._errors, name.repo, f"{self.endpoint}/{name.repo}"
        if isinstance(error, errors.GatedRepoError):
            return DownloadError(self._gated(repo, page))
        if isinstance(error, errors.RevisionNotFoundError):
            return ModelNotFoundError(f"{repo!r} has no revision {name.revision!r}: see {page}.")
        if isinstance(error, errors.EntryNotFoundError):
            return ModelNotFoundError(f"A file of {repo!r} is gone from the hub: see {page}.")
        if isinstance(error, errors.DisabledRepoError):
            return DownloadError(f"The hub has disabled {repo!r}: see {page}.")
        status = int(response.status_code)
        if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
            return ModelNotFoundError(
                f"The hub has no model {repo!r} that you may see: check its spelling, or, if it "
                f"is private, {_login()}."
            )
        return self._refused(status, response, repo, page)

    def _gated(self, repo: str, page: str) -> str:
        if self._token():
            return (
                f"Your token has no access to {repo!r} yet: accept its licence at {page} with the "
                "account that the token belongs to."
            )
        return f"{repo!r} is gated: accept its licence at {page}, then {_login()}."

    def _refused(self, status: int, response: Any, repo: str, page: str) -> Exception:
        if status in {401, 403}:
            return DownloadError(
                f"The hub refuses {repo!r} with status {status}: the token is wrong or may not "
                f"read it; {_login()}, and see {page}."
            )
        if status not in _BUSY:
            return DownloadError(f"The hub refuses {repo!r} with status {status}: see {page}.")
        wait_s = self._wanted_wait_s(response.headers)
        if status == 429:
            later = f"in {wait_s:.0f} s" if wait_s else "later"
            advice = "" if self._token() else f"; {_login()} to be allowed more"
            message = (
                f"The hub limits how often you may ask for {repo!r}: try again {later}{advice}."
            )
        else:
            message = f"The hub is out of order for {repo!r} (status {status}): try again later."
        if wait_s > MAX_WAIT_S:
            return DownloadError(message)
        return TransientError(DownloadError(message), wait_s or 1.0)

    @staticmethod
    def _wanted_wait_s(headers: Any) -> float:
        """Return how long the hub wants to be left alone; 0 if it does not say."""
        limit = _RATE_LIMIT.search(str(headers.get("RateLimit", "")))
        text = limit["seconds"] if limit else str(headers.get("Retry-After", ""))
        return float(text) if text.isdecimal() else 0.0


def _repo_files(siblings: list[Any]) -> Iterator[RepoFile]:
    """Yield the files that can be fetched and checked; names that lead elsewhere are none."""
    for sibling in siblings:
        lfs = sibling.lfs
        size = sibling.size if lfs is None else lfs.size
        digest = sibling.blob_id if lfs is None else lfs.sha256
        if not isinstance(size, int) or not _DIGEST.fullmatch(digest or ""):
            continue
        if is_safe_path(sibling.rfilename):
            yield RepoFile(sibling.rfilename, size, digest)


def _licence(info: Any) -> str | None:
    """Return the licence's name, and where it can be read if it is not a common one."""
    card = info.card_data
    name = getattr(card, "license_name", None) or getattr(card, "license", None)
    if isinstance(name, list):
        name = ", ".join(str(one) for one in name)
    link = getattr(card, "license_link", None)
    if not isinstance(name, str):
        tags = [tag for tag in info.tags or () if str(tag).startswith("license:")]
        return tags[0].removeprefix("license:") if tags else None
    shown = f"{name} ({link})" if isinstance(link, str) and link.startswith("http") else name
    return "".join(c for c in shown if c.isprintable())[:200]


def _login() -> str:
    return "log in with 'hf auth login' or set HF_TOKEN"
