"""The Redis tier: encrypted pages in a Redis server that several machines share.

The server can neither read the pages nor change them unnoticed. This is the only module that
imports redis and cryptography, the extra `store`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, TypeVar

from twostroke.core import env
from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.urls import redis_address, redis_password

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from redis import Redis

    from twostroke.engine.kv_offload.tier import KvCacheSpec, PageValue

    T = TypeVar("T")

_logger = logging.getLogger("twostroke.cache")

_KEY_PREFIX: Final = b"twostroke:page:"
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_TIMEOUT_S: Final = 1.0  # for connecting, and for each part of an answer
_RETRY_PAUSE_S: Final = 30.0  # after a failure
_EXPIRY_S: Final = 7 * 86_400  # after a page's last use
_NUM_PROBES: Final = 4
# Longer pages and snapshots have several entries: each must be sent within the timeout.
_MAX_ENTRY_BYTES: Final = 4 << 20


class RedisTier:
    """Stores KV pages in a Redis server: the `OffloadTier` with an entry for each page.

    Snapshots of several megabytes have several entries; the first entry is written last. Entries
    are encrypted and authenticated with AES-GCM together with the page's name, so an entry
    that was moved to another name cannot be decrypted. The key of an entry is a keyed hash of the
    page's name: with the plain name, readers of the store could test guesses of prompts.
    """

    title = "store"

    def __init__(self, url: str, spec: KvCacheSpec) -> None:
        """Connect to the Redis server; a server that does not answer is tried again later.

        Raises:
            UsageError: the URL or the secret is not valid, or the server refuses the password.
        """
        secret = env.store_key()
        self._redis = _client(url)
        self.address = redis_address(url)
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from redis.exceptions import RedisError

        self._invalid_tag = InvalidTag
        self._failures = (RedisError, OSError)
        self._cipher = AESGCM(_derive_key(secret, b"sealing"))
        self._name_key = _derive_key(secret, b"naming")
        self._page_bytes = spec.page_bytes
        self._lock = threading.Lock()
        self._retry_s = 0.0
        self._retry_write_s = 0.0
        self._is_lost = False
        self._is_full = False
        self._call(self._check_password, otherwise=None)

    @property
    def is_writable(self) -> bool:
        """Whether offered KV pages are written now: no call or write has failed recently."""
        return time.monotonic() >= max(self._retry_s, self._retry_write_s)

    def find(self, names: Sequence[bytes]) -> set[bytes]:
        """Return the names of KV pages that have an entry in Redis."""

        def count_entries() -> list[int]:
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.exists(self._key(name))
            answers: list[int] = pipe.execute()
            return answers

        counts = self._call(count_entries, otherwise=[0] * len(names))
        return {name for name, count in zip(names, counts, strict=True) if count}

    def fetch(self, name: bytes, page: memoryview[Any]) -> bool:
        """Fill a KV page from its encrypted entries in Redis, and return whether that worked.

        An entry that cannot be decrypted is removed.
        """
        return all(self._fetch_entry(*entry) for entry in _entries(name, page))

    def _fetch_entry(self, name: bytes, part: memoryview[Any]) -> bool:
        """Fill a part of a page from one entry; return False if it is missing or damaged."""
        key = self._key(name)
        num_bytes = _NONCE_BYTES + len(part) + _TAG_BYTES

        def read() -> bytes:
            # At most the length of an entry: a longer one is foreign, and may be very long.
            data: bytes = self._redis.getrange(key, 0, num_bytes)  # type: ignore[assignment,unused-ignore]
            return data

        entry = self._call(read, otherwise=b"")
        if not entry:
            return False
        if len(entry) == num_bytes:
            with suppress(self._invalid_tag):
                part[:] = self._cipher.decrypt(entry[:_NONCE_BYTES], entry[_NONCE_BYTES:], name)
                return True
        _logger.warning("A damaged page was removed from the page store: %s.", key.decode())
        self._call(lambda: self._redis.delete(key), otherwise=0)
        return False

    def offer(self, name: bytes, page: memoryview[Any], value: PageValue) -> bool:
        """Write a KV page that is not stored, unless a write to Redis has failed recently.

        Returns whether the page was written.
        """
        entries = _entries(name, page)
        expiry_s = max(_EXPIRY_S, int(value.keep_until_s - time.time()))
        if time.monotonic() < self._retry_write_s:
            return False

        def note_use() -> bool:
            pipe = self._redis.pipeline(transaction=False)
            for entry_name, _ in entries:
                pipe.exists(self._key(entry_name))
                pipe.expire(self._key(entry_name), expiry_s, gt=True)
            return all(pipe.execute()[::2])

        is_known = self._call(note_use, otherwise=True, writes=True)
        # `find` looks for the first entry, which is written last.
        return not is_known and all(
            self._call(partial(self._set, entry_name, part, expiry_s), otherwise=False, writes=True)
            for entry_name, part in reversed(entries)
        )

    def _set(self, name: bytes, part: memoryview[Any], expiry_s: int) -> bool:
        self._redis.set(self._key(name), self._encrypted(name, part), ex=expiry_s)
        return True

    def probe(self) -> float:
        """Write a short-lived entry to Redis; return the shortest time to read it, in seconds."""
        name = os.urandom(32)
        times = []
        page = memoryview(bytearray(self._page_bytes))

        def write() -> bool:
            return all(self._set(*entry, expiry_s=10) for entry in _entries(name, page))

        if self._call(write, otherwise=False, writes=True):
            for _ in range(_NUM_PROBES):
                began_s = time.perf_counter()
                if self.fetch(name, page):
                    times.append(time.perf_counter() - began_s)
        return min(times, default=0.0)

    def size(self) -> None:
        """Return None, meaning unknown: the Redis server may have other entries than pages."""

    def close(self) -> None:
        """Close all connections to the Redis server."""
        with suppress(*self._failures):
            self._redis.close()

    def _key(self, name: bytes) -> bytes:
        return _KEY_PREFIX + blake2b(name, key=self._name_key, digest_size=32).hexdigest().encode()

    def _encrypted(self, name: bytes, page: memoryview[Any]) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, page, name)

    def _check_password(self) -> None:
        from redis.exceptions import AuthenticationError, ResponseError

        try:
            self._redis.ping()
        except (AuthenticationError, ResponseError) as error:
            text = f"{self.address}: {str(error).removesuffix('.')}"  # some texts are questions
            end = "" if text.endswith("?") else "."
            raise UsageError(text + end, field="page_store") from None

    def _call(self, operation: Callable[[], T], *, otherwise: T, writes: bool = False) -> T:
        """Run an operation on the Redis server, unless calls are paused after a failure.

        Returns the operation's result, or `otherwise` if it fails or was not run. `writes`: whether
        the operation writes.
        """
        if time.monotonic() < self._retry_s:
            return otherwise
        try:
            answer = operation()
        except self._failures as error:
            self._fail(error, writes=writes)
            return otherwise
        with self._lock:
            is_back, self._is_lost = self._is_lost, False
            if writes:
                self._is_full = False
        if is_back:
            _logger.info("The page store %s answers again.", self.address)
        return answer

    def _fail(self, error: Exception, *, writes: bool) -> None:
        """Pause all calls of the Redis server, or only writes, after an error.

        The beginning of a pause is logged.
        """
        from redis.exceptions import ResponseError

        # A server that answers with an error may be full, or a replica that is read-only.
        refuses_write = writes and isinstance(error, ResponseError)
        retry_s = time.monotonic() + _RETRY_PAUSE_S
        with self._lock:
            if refuses_write:
                was_paused = self._is_full
                self._is_full = True
                self._retry_write_s = retry_s
            else:
                was_paused = self._is_lost
                self._is_lost = True
                self._retry_s = retry_s
        if not was_paused:
            _logger.warning(
                "The page store %s %s (%s); it is tried again in %.0f s.",
                self.address,
                "cannot be written" if refuses_write else "does not answer",
                error,
                _RETRY_PAUSE_S,
            )


def _entries(name: bytes, page: memoryview[Any]) -> list[tuple[bytes, memoryview[Any]]]:
    """Split a page into Redis entries: return the name and the bytes of each.

    The first entry has the name of the page.
    """
    parts = [
        page[start : start + _MAX_ENTRY_BYTES]
        for start in range(0, max(1, len(page)), _MAX_ENTRY_BYTES)
    ]
    return [
        (blake2b(name + number.to_bytes(4, "little"), digest_size=32).digest(), part)
        if number
        else (name, part)
        for number, part in enumerate(parts)
    ]


def check_store(url: str) -> None:
    """Check the options for a Redis server without connecting, before a model is loaded.

    Raises:
        UsageError: the extra is not installed, or the URL or the secret is not valid.
    """
    env.store_key()
    _client(url)


def _client(url: str) -> Redis:
    try:
        import cryptography  # noqa: F401 - both or none
        from redis import ConnectionError as RedisConnectionError
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError:
        reason = f"needs the extra [store]: {install_command('store')}."
        raise UsageError(reason, field="page_store") from None
    # One retry, because a connection may have ended while it was not used.
    retry = Retry(NoBackoff(), 1, (RedisConnectionError,))
    try:
        client: Redis = Redis.from_url(
            url,
            password=redis_password(url),
            socket_connect_timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            socket_read_size=1 << 20,
            protocol=2,
            retry=retry,
        )
        client.connection_pool.make_connection()
    except (TypeError, ValueError):  # the messages may have parts of the password
        reason = "must be a URL such as rediss://HOST:6379/0."
        raise UsageError(reason, field="page_store") from None
    return client


def _derive_key(secret: bytes, use: bytes) -> bytes:
    return blake2b(key=secret, person=use, digest_size=32).digest()
