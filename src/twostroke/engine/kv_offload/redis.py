"""Pages in a Redis server that several machines share, sealed so that it cannot read or change any.

This is the only module that imports redis and cryptography, the extra `store`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from twostroke.core import env
from twostroke.core.env import install_command
from twostroke.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis import Redis

    from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue

    T = TypeVar("T")

_logger = logging.getLogger("twostroke.cache")

_PREFIX: Final = b"twostroke:page:"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_ANSWER_S: Final = 1.0  # that connecting, and each part of an answer, may take
_PAUSE_S: Final = 30.0  # between tries after a failure
_STAY_S: Final = 7 * 86_400  # after a page's last use
_NUM_PROBED: Final = 4


class RedisTier:
    """Implements `Tier` with an entry of a Redis server for each page.

    The entry is sealed with AES-GCM, and the page's name with it, so an entry under another name,
    or of another kind of pages, does not open. Entries have names that nobody can tell without the
    secret, since a page's own name would let readers of the store try out prompts.
    """

    title = "store"

    def __init__(self, url: str, kind: KvCacheSpec) -> None:
        """Connect; a store that does not answer is asked again later.

        Raises:
            UsageError: the URL or the secret cannot be used, or the store refuses the password.
        """
        secret = env.store_key()
        self._redis, self.address = _client(url), _address(url)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from redis.exceptions import RedisError

        self._wrong_tag, self._failures = InvalidTag, (RedisError, OSError)
        self._cipher = AESGCM(_derived(secret, b"sealing"))
        self._naming = _derived(secret, b"naming")
        self._entry_bytes = _NONCE_BYTES + kind.page_bytes + _TAG_BYTES
        self._lock = threading.Lock()
        self._resume_s = self._resume_writing_s = 0.0
        self._is_gone = self._is_full = False
        self._ask(self._check_password, otherwise=None)

    @property
    def is_writable(self) -> bool:
        """Whether pages that are offered are written now."""
        return time.monotonic() >= max(self._resume_s, self._resume_writing_s)

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return those of the names that have an entry."""

        def look() -> list[int]:
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.exists(self._key(name))
            answers: list[int] = pipe.execute()
            return answers

        there = self._ask(look, otherwise=[0] * len(names))
        return {name for name, is_there in zip(names, there, strict=True) if is_there}

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Read and open an entry; one that does not open is removed."""
        key = self._key(name)

        def read() -> bytes:
            # No more than an entry has: a longer one is not ours, and may be very long.
            found: bytes = self._redis.getrange(key, 0, self._entry_bytes)  # type: ignore[assignment,unused-ignore]
            return found

        entry = self._ask(read, otherwise=b"")
        if not entry:
            return False
        if len(entry) == self._entry_bytes:
            with suppress(self._wrong_tag):
                page[:] = self._cipher.decrypt(entry[:_NONCE_BYTES], entry[_NONCE_BYTES:], name)
                return True
        _logger.warning("A damaged page was removed from the page store: %s.", key.decode())
        self._ask(lambda: self._redis.delete(key), otherwise=0)
        return False

    def offer(self, name: bytes, page: memoryview[Any], worth: PageValue) -> bool:
        """Write a page that is not there, unless a write failed a moment ago."""
        key, stay_s = self._key(name), max(_STAY_S, int(worth.until_s - time.time()))
        if time.monotonic() < self._resume_writing_s:
            return False

        def note_use() -> bool:
            pipe = self._redis.pipeline(transaction=False)
            pipe.exists(key)
            pipe.expire(key, stay_s, gt=True)
            return bool(pipe.execute()[0])

        def write() -> bool:
            self._redis.set(key, self._sealed(name, page), ex=stay_s)
            return True

        is_known = self._ask(note_use, otherwise=True, writes=True)
        return not is_known and self._ask(write, otherwise=False, writes=True)

    def probe(self) -> float:
        """Write an entry that nobody reads and that soon expires; return the fewest to read it."""
        name, times = os.urandom(32), []
        page = memoryview(bytearray(self._entry_bytes - _NONCE_BYTES - _TAG_BYTES))

        def write() -> bool:
            self._redis.set(self._key(name), self._sealed(name, page), ex=10)
            return True

        if self._ask(write, otherwise=False, writes=True):
            for _ in range(_NUM_PROBED):
                began_s = time.perf_counter()
                if self.fetch(name, page):
                    times.append(time.perf_counter() - began_s)
        return min(times, default=0.0)

    def size(self) -> None:
        """It is not known how much of the store is pages."""

    def close(self) -> None:
        """End all connections."""
        with suppress(*self._failures):
            self._redis.close()

    def _key(self, name: bytes) -> bytes:
        return _PREFIX + blake2b(name, key=self._naming, digest_size=32).hexdigest().encode()

    def _sealed(self, name: bytes, page: memoryview[Any]) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, page, name)

    def _check_password(self) -> None:
        from redis.exceptions import AuthenticationError, ResponseError

        try:
            self._redis.ping()
        except (AuthenticationError, ResponseError) as error:
            text = f"{self.address}: {str(error).removesuffix('.')}"  # some of its texts ask
            end = "" if text.endswith("?") else "."
            raise UsageError(text + end, field="page_store") from None

    def _ask(self, do: Callable[[], T], *, otherwise: T, writes: bool = False) -> T:
        """Do something with the store, or return `otherwise` if it failed lately or fails now."""
        if time.monotonic() < self._resume_s:
            return otherwise
        try:
            answer = do()
        except self._failures as error:
            self._fail(error, writes=writes)
            return otherwise
        with self._lock:
            is_back, self._is_gone = self._is_gone, False
            if writes:
                self._is_full = False
        if is_back:
            _logger.info("The page store %s answers again.", self.address)
        return answer

    def _fail(self, error: Exception, *, writes: bool) -> None:
        """Leave the store alone for a while, or only not write; say so when that begins."""
        from redis.exceptions import ResponseError

        answered = isinstance(error, ResponseError)  # and refused: it may be full, or a replica
        resume_s = time.monotonic() + _PAUSE_S
        with self._lock:
            if writes and answered:
                is_known, self._is_full, self._resume_writing_s = self._is_full, True, resume_s
            else:
                is_known, self._is_gone, self._resume_s = self._is_gone, True, resume_s
        if not is_known:
            what = "cannot be written" if writes and answered else "does not answer"
            _logger.warning(
                "The page store %s %s (%s); it is tried again in %.0f s.",
                *(self.address, what, error, _PAUSE_S),
            )


def check_store(url: str) -> None:
    """Refuse a store that could not be used whatever it answers, before a model is loaded.

    Raises:
        UsageError: the extra is not installed, or the URL or the secret cannot be used.
    """
    env.store_key()
    _client(url)


def _client(url: str) -> Redis:
    try:
        import cryptography  # noqa: F401 - both or none
        from redis import ConnectionError as Gone
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        reason = f"needs the extra [store]: {install_command('store')}."
        raise UsageError(reason, field="page_store") from None
    again = Retry(NoBackoff(), 1, (Gone,))  # a connection may have ended while it was not used
    try:
        client: Redis = Redis.from_url(
            url,
            password=urlsplit(url).password or env.store_password(),
            socket_connect_timeout=_ANSWER_S,
            socket_timeout=_ANSWER_S,
            socket_read_size=1 << 20,
            protocol=2,
            retry=again,
        )
        client.connection_pool.make_connection()
    except (TypeError, ValueError):  # their texts may have parts of the password
        reason = "must be a URL such as rediss://HOST:6379/0."
        raise UsageError(reason, field="page_store") from None
    return client


def _address(url: str) -> str:
    """Return the part of a URL that can be shown."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _derived(secret: bytes, use: bytes) -> bytes:
    return blake2b(key=secret, person=use, digest_size=32).digest()
