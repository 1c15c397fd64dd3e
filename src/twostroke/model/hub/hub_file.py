"""Fetches one public file of the Hugging Face hub by plain HTTP, without the hub's client.

The catalogue's models are single files with known checksums, so the hub's client, which is not
installed by default, is not needed. `HF_ENDPOINT` names a mirror. `HF_HUB_OFFLINE` turns requests
to the hub off.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

from twostroke.core import env
from twostroke.core.errors import DownloadError
from twostroke.core.files import file_size
from twostroke.model.hub.disk import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twostroke.model.hub.catalogue import HubFile

_TIMEOUT_S: Final = 10.0
RETRY_PAUSES_S: tuple[float, ...] = (1.0, 2.0, 4.0)  # between requests that return nothing
_RANGE: Final = re.compile(r"bytes (\d+)-")


class HubUnavailableError(DownloadError):
    """The Hugging Face hub cannot be reached, or does not have the file."""


def receive(file: HubFile, partial: Path, num_bytes: int, on_growth: Callable[[int], None]) -> None:
    """Download the missing end of a hub file, by plain HTTP requests.

    `partial` is the local file, which is complete when it has `num_bytes`. `on_growth` is called
    with its size as it grows. An interrupted transfer continues in the same call, or in a later
    call.

    Raises:
        HubUnavailableError: the hub cannot be reached, does not have the file, or stops
            sending.
    """
    if env.hub_is_offline():
        raise HubUnavailableError(f"{file} cannot be fetched: HF_HUB_OFFLINE is set.")
    size = file_size(partial) or 0
    pauses = iter(RETRY_PAUSES_S)
    while size < num_bytes:
        old_size = size
        problem = HubUnavailableError(
            f"The hub sent only the beginning of {file.path!r}: try again."
        )
        try:
            for received in _append(file, partial, size):
                size = received
                on_growth(size)
                if size > num_bytes:  # the file is wrong: do not fill the disk
                    break
        except HubUnavailableError as error:
            problem = error
        if size > old_size:
            pauses = iter(RETRY_PAUSES_S)
        elif (pause_s := next(pauses, None)) is None or old_size == 0:
            raise problem  # without a retry if nothing arrived: the caller may have another source
        else:
            time.sleep(pause_s)


def _append(file: HubFile, partial: Path, size: int) -> Iterator[int]:
    """Send one request for the rest of a hub file, and append the response to the local file.

    Yield the local file's size after each chunk.
    """
    import http.client  # commands that fetch nothing start without it
    import ssl
    import urllib.error
    import urllib.request

    headers = {"User-Agent": "twostroke", "Accept-Encoding": "identity"}
    if size:
        headers["Range"] = f"bytes={size}-"
    request = urllib.request.Request(file.url, headers=headers)  # noqa: S310 - checked by `env`
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            span = _RANGE.match(response.headers.get("Content-Range", ""))
            continues = response.status == 206 and span is not None and int(span[1]) == size
            with partial.open("ab" if continues else "wb") as out:
                while chunk := response.read1(CHUNK_BYTES):
                    out.write(chunk)
                    yield out.tell()
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"answered {file} with status {error.code}"
        raise HubUnavailableError(f"The hub at {env.hub_endpoint()} {reason}.") from None
    except (
        urllib.error.URLError,
        http.client.HTTPException,
        ConnectionError,
        TimeoutError,
        ssl.SSLError,  # raised while reading; earlier ones are inside an URLError
    ):
        raise HubUnavailableError(
            f"The hub at {env.hub_endpoint()} could not be reached for {file.repository!r}: check "
            "the network, the proxy settings or HF_ENDPOINT."
        ) from None
