"""Checks whether a request's tenant, API key or header forbids that an upstream API answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from starlette.types import Scope

    from twostroke.server.auth.keys import ApiKeys
    from twostroke.server.http.request_context import ServedRequest

    Headers = list[tuple[bytes, bytes]]

OVERFLOW_HEADER: Final = b"x-twostroke-overflow"  # of a request: allow, or never
_ALLOW: Final = b"allow"
_NEVER: Final = b"never"


class OverflowPermission:
    """Decides which requests must not be sent to an upstream API, whatever `--overflow` says.

    Only replicas may answer a request if its header `x-twostroke-overflow`, its API key or its
    tenant forbids upstreams.

    Attributes:
        never_for: tenants whose requests are never sent to an API, by the overflow file.
    """

    def __init__(self, keys: ApiKeys | None) -> None:
        """Create the check for a router with the API keys `keys`, which may be None.

        The set `never_for` is empty until the overflow file is read.
        """
        self._keys = keys
        self.never_for: frozenset[str] = frozenset()

    def refresh_owner(self, context: ServedRequest) -> None:
        """Replace a request's API key by the key's current state.

        The key may have changed while the request waited.
        """
        keys, key = self._keys, context.key
        current_key = keys.with_id(key.id) if keys is not None and key is not None else None
        if current_key is not None:
            context.set_owner(current_key)

    def is_denied(self, scope: Scope) -> bool:
        """Return whether a request's header, its key or its tenant forbids sending it to an API."""
        values = [value for name, value in scope["headers"] if name == OVERFLOW_HEADER]
        is_denied_by_request = any(value.strip().lower() != _ALLOW for value in values)
        return is_denied_by_request or self._is_denied_by_owner(scope)

    def headers(self, scope: Scope) -> Headers:
        """Return the header that forbids a replica to use upstreams; empty if overflow is allowed.

        The replica may itself be a router with upstreams.
        """
        return [(OVERFLOW_HEADER, _NEVER)] if self.is_denied(scope) else []

    def _is_denied_by_owner(self, scope: Scope) -> bool:
        context = served_of(scope)
        is_denied_by_key = context.key is not None and not context.key.overflow
        return is_denied_by_key or context.tenant in self.never_for
