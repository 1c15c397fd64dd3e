"""Connections to the Redis server that routers share, and the checks of the server.

This is the only module of the fleet that imports redis, of the extra `store`.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from twostroke.core.env import install_command
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.urls import redis_address, redis_password
from twostroke.fleet.shared_records.script import PREFIX, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Iterator

_TIMEOUT_S: Final = 2.0  # of commands and of a router's start
_MIN_VERSION: Final = (5, 0)  # scripts that read the clock may write since then
_PLACE_IN_SCRIPT: Final = re.compile(r"\s*script: \w+, on @user_script:\d+\.?$")
_FORBIDDEN: Final = re.compile(r"no permissions|can't run this command|ACL failure", re.IGNORECASE)
_BAD_URL: Final = "must be a URL such as rediss://HOST:6379/0."


class StoreError(TwostrokeError):
    """The Redis server that routers share does not answer, or refuses a command."""

    exit_code = 1


class StoreConnection:
    """A router's connection to the store.

    Attributes:
        address: the server, for logs, without the password.
    """

    def __init__(self, url: str) -> None:
        """Prepare a connection; nothing is sent before the first call.

        Raises:
            UsageError: the extra is not installed, or the URL is not valid.
        """
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisError

        self.address = redis_address(url)
        self._failures = (RedisError, OSError, TimeoutError)
        self._redis = Redis.from_url(
            url,
            password=redis_password(url),
            socket_connect_timeout=_TIMEOUT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 0),  # type: ignore[arg-type,unused-ignore]
        )
        self._script = self._redis.register_script(SCRIPT)

    async def run(self, batch: dict[str, Any]) -> list[Any]:
        """Run the script for a batch, and return its reply.

        Raises:
            StoreError: the server does not answer, or refuses the script.
        """
        try:
            reply: list[Any] = await self._script(keys=[PREFIX], args=[json.dumps(batch)])
        except self._failures as error:
            raise StoreError(_reason(error)) from None
        return reply

    async def read_keys(self) -> dict[bytes, bytes]:
        """Return the records of all API keys by id.

        Raises:
            StoreError: the server does not answer.
        """
        try:
            records: Any = await self._redis.hgetall(PREFIX + "keys")
        except self._failures as error:
            raise StoreError(_reason(error)) from None
        return dict(records)

    async def disconnect(self) -> None:
        """Close the connection; the next call opens another one."""
        with suppress(*self._failures):
            await self._redis.connection_pool.disconnect()


@contextmanager
def open_store(url: str) -> Iterator[Any]:
    """Open a connection to the store for a `twostroke` command, and check the server.

    Redis errors inside the `with` block become a `StoreError`.

    Raises:
        UsageError: the extra is not installed, the URL is not valid, the server refuses the
            password, is too old, read-only, part of a cluster, or may remove entries when its
            memory is full.
        StoreError: the server does not answer.
    """
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import AuthenticationError, RedisError, ResponseError
        from redis.retry import Retry
    except ImportError:
        reason = f"needs the extra [store]: {install_command('store')}."
        raise UsageError(reason, field="store") from None
    try:
        client = Redis.from_url(
            url,
            password=redis_password(url),
            socket_connect_timeout=_TIMEOUT_S,
            socket_timeout=_TIMEOUT_S,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
        )
        client.connection_pool.make_connection()
    except (TypeError, ValueError):  # the messages may have parts of the password
        raise UsageError(_BAD_URL, field="store") from None
    address = redis_address(url)
    try:
        _check_server(client.info(), address)
        yield client
    except (AuthenticationError, ResponseError) as error:
        raise UsageError(f"{address} refuses: {_reason(error)}.", field="store") from None
    except (RedisError, OSError) as error:
        raise StoreError(f"The store {address} does not answer ({_reason(error)}).") from None
    finally:
        with suppress(RedisError, OSError):
            client.close()


def check_scripts(client: Any) -> None:
    """Check that the server lets a router run its script.

    Call this inside the block of `open_store`, which reports the server's error.
    """
    client.register_script("return 1")()


def keeps_nothing(client: Any) -> bool:
    """Return whether the server writes nothing to disk, so that a restart loses all data."""
    facts = client.info()
    is_saved = facts.get("aof_enabled") == 1
    with suppress(Exception):  # servers of clouds refuse the command
        is_saved |= bool(client.config_get("save").get("save"))
    return not is_saved


def _check_server(facts: dict[str, Any], address: str) -> None:
    """Check that the Redis server can keep the records that routers share.

    `facts` is the server's reply to INFO.

    Raises:
        UsageError: it is too old, read-only, part of a cluster, or may remove entries.
    """
    version = str(facts.get("redis_version", "0"))
    numbers = tuple(int(word) for word in version.split(".")[:2] if word.isdecimal())
    if numbers < _MIN_VERSION:
        reason = f"{address} has version {version} of Redis, and routers need 5.0 or newer."
        raise UsageError(reason, field="store")
    if facts.get("role") == "slave":
        reason = f"{address} is a read-only replica: name the primary server."
        raise UsageError(reason, field="store")
    if facts.get("cluster_enabled"):
        reason = (
            f"{address} is a node of a Redis Cluster, whose nodes cannot change several entries in "
            "one step: name a server without cluster mode."
        )
        raise UsageError(reason, field="store")
    policy = str(facts.get("maxmemory_policy", "noeviction"))
    if facts.get("maxmemory") and policy != "noeviction":
        reason = (
            f"{address} removes entries when its memory is full (maxmemory-policy {policy}), and "
            "routers need them all: set the policy to noeviction."
        )
        raise UsageError(reason, field="store")


def _reason(error: BaseException) -> str:
    """Return the message of a Redis error, in a form that fits into a sentence."""
    text = _PLACE_IN_SCRIPT.sub("", str(error)).strip().removesuffix(".")
    if _FORBIDDEN.search(text):
        return f"its access rules forbid a command: {text}"
    return text or type(error).__name__
