"""Notices that this machine will soon be taken away, as spot machines get them.

`--drain-notice` names where a notice appears: the metadata service of a cloud, a URL, or a file.
The server asks every two seconds, and drains when there is a notice, as after SIGTERM.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable  # noqa: TC003 - msgspec reads it
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from twostroke.core.errors import UsageError, nearest
from twostroke.core.frozen import Frozen
from twostroke.core.urls import server_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_INTERVAL_S: Final = 2.0
_TIMEOUT_S: Final = 1.0
_MAX_BODY_BYTES: Final = 1 << 20
_TOKEN_TTL_S: Final = 21_600  # of AWS, which allows at most 6 hours
_LINK_LOCAL: Final = "http://169.254.169.254"
_NO_NOTICE_BODIES: Final = frozenset((b"", b"false", b"none", b"null"))
_ENDING_EVENTS: Final = frozenset(("Preempt", "Terminate"))  # of Azure
_logger = logging.getLogger("twostroke.serve")


class Cloud(Frozen):
    """How a cloud tells a machine that it will be taken away.

    Attributes:
        address: the URL of its metadata service.
        has_notice: returns whether there is a notice, from the service's URL.
    """

    address: str
    has_notice: Callable[[str], bool]


class DrainNotice:
    """Waits for the notice that this machine will be taken away."""

    def __init__(self, source: str) -> None:
        """Look for notices at `source`: a name in `CLOUDS`, a URL, or the path of a file.

        Raises:
            UsageError: the URL is not valid, or the file's folder does not exist.
        """
        self.source = source
        self._last_error = ""
        self._has_notice: Callable[[], bool]
        if source in CLOUDS:
            cloud = CLOUDS[source]
            self._has_notice = partial(cloud.has_notice, cloud.address)
        elif "://" in source:
            server_url(source, field="drain_notice")
            self._has_notice = partial(_url_has_notice, source)
        else:
            path = Path(source)
            if "/" not in source or not path.parent.is_dir():  # a word is a cloud's misspelt name
                reason = (
                    f"must be {', '.join(CLOUDS)}, a URL, or a file in a folder that exists, such "
                    f"as ./notice, got '{source}'.{nearest(source, CLOUDS)}"
                )
                raise UsageError(reason, field="drain_notice")
            self._has_notice = path.exists

    async def wait(self) -> None:
        """Return when there is a notice. Errors are logged, once each, and the wait continues."""
        while True:
            if await asyncio.to_thread(self.is_given):
                return
            await asyncio.sleep(_INTERVAL_S)

    def is_given(self) -> bool:
        """Return whether there is a notice now; False, too, if the source cannot be read."""
        error_text = ""
        try:
            return self._has_notice()
        except OSError as error:
            error_text = error.strerror or str(error)
        except (http.client.HTTPException, ValueError, TypeError) as error:
            error_text = str(error)
        finally:
            if error_text and error_text != self._last_error:
                text = "Notices that this machine ends cannot be read (--drain-notice %s): %s."
                _logger.warning(text, self.source, error_text)
            self._last_error = error_text
        return False


def aws_has_notice(address: str) -> bool:
    """Return whether AWS has given notice that it interrupts this EC2 spot instance.

    The notice is the metadata item `spot/instance-action`, which appears two minutes before the
    interruption. The request sends a session token (IMDSv2), since an instance may refuse requests
    without a token.
    """
    ttl = {"x-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
    status, token = _fetch(f"{address}/latest/api/token", ttl, method="PUT")
    headers = {"x-aws-ec2-metadata-token": token.decode()} if status == 200 else {}
    status, body = _fetch(f"{address}/latest/meta-data/spot/instance-action", headers)
    if status == 404:
        return False
    return bool(_json_object(status, body).get("action"))


def gcp_has_notice(address: str) -> bool:
    """Return whether Google Cloud preempts this spot VM, which ends 30 seconds later."""
    url = f"{address}/computeMetadata/v1/instance/preempted"
    status, body = _fetch(url, {"metadata-flavor": "Google"})
    _check_status(status)
    return body.strip() == b"TRUE"


def azure_has_notice(address: str) -> bool:
    """Return whether Azure evicts this spot VM, which ends at least 30 seconds later.

    The metadata service also lists events of other VMs in the same scale set or availability set;
    an event counts only if it names this VM.
    """
    headers = {"metadata": "true"}
    status, body = _fetch(f"{address}/metadata/scheduledevents?api-version=2020-07-01", headers)
    events = _json_object(status, body).get("Events") or []
    names = {
        name
        for event in events
        if isinstance(event, dict) and event.get("EventType") in _ENDING_EVENTS
        for name in event.get("Resources") or ()
    }
    if not names:
        return False
    url = f"{address}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    status, body = _fetch(url, headers)
    _check_status(status)
    return body.decode().strip() in names


CLOUDS: Final = {
    "aws": Cloud(_LINK_LOCAL, aws_has_notice),
    "gcp": Cloud("http://metadata.google.internal", gcp_has_notice),
    "azure": Cloud(_LINK_LOCAL, azure_has_notice),
}


def _url_has_notice(url: str) -> bool:
    """Return whether a URL has a notice, by the status and the body of its response.

    There is none if the status is 204 or 404, or if the body is empty, `false`, `none` or `null`.
    """
    status, body = _fetch(url, {})
    if status in {204, 404}:
        return False
    _check_status(status)
    return body.strip().lower() not in _NO_NOTICE_BODIES


def _fetch(url: str, headers: Mapping[str, str], method: str = "GET") -> tuple[int, bytes]:
    """Return the status and the body of a response, without proxies and redirects.

    Raises:
        TimeoutError: the whole response has not come in time.
    """
    parts = urlsplit(url)
    is_encrypted = parts.scheme == "https"
    port = parts.port or (443 if is_encrypted else 80)
    host = parts.hostname or ""
    target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    sock = socket.create_connection((host, port), timeout=_TIMEOUT_S)
    connection = http.client.HTTPConnection(host, port)
    with closing(connection), _shut_down_late(sock):
        connection.sock = sock
        if is_encrypted:
            connection.sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        connection.request(method, target, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read(_MAX_BODY_BYTES)


@contextmanager
def _shut_down_late(sock: socket.socket) -> Iterator[None]:
    """Shut a socket down if the `with` block takes longer than `_TIMEOUT_S`.

    The socket's own timeout limits each read only, and a slow response may need any number of
    reads.

    Raises:
        TimeoutError: the block took too long, even if it ended without an error.
    """
    is_late = threading.Event()
    own_sock = sock.dup()  # TLS replaces the original

    def shut_down() -> None:
        is_late.set()
        with suppress(OSError):
            own_sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_TIMEOUT_S, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if not is_late.is_set():
            raise
    finally:
        timer.cancel()
        timer.join()
        own_sock.close()
    if is_late.is_set():
        raise TimeoutError(f"the response takes longer than {_TIMEOUT_S:g} s")


def _json_object(status: int, body: bytes) -> dict[str, Any]:
    _check_status(status)
    value = json.loads(body)
    return value if isinstance(value, dict) else {}


def _check_status(status: int) -> None:
    if status != 200:
        raise ValueError(f"the response has status {status}")
