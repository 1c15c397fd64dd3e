"""The headers by which a replica knows whose request it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.server.auth.keys import TENANT_HEADER
from twostroke.server.http.request_context import served_of

if TYPE_CHECKING:
    from starlette.types import Scope

    Headers = list[tuple[bytes, bytes]]

CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key", TENANT_HEADER))


def credentials(scope: Scope, replica_key: str | None) -> Headers:
    """Return the client's own, or with a `replica_key` this and the client's tenant."""
    if replica_key is None:
        return [pair for pair in scope["headers"] if pair[0] in CREDENTIALS - {TENANT_HEADER}]
    served = served_of(scope)
    found = [(b"authorization", b"Bearer " + replica_key.encode())]
    if served.tenant:
        classes = served.key.classes if served.key is not None else None
        named = "" if classes is None else f" {','.join(classes)}"
        found.append((TENANT_HEADER, f"{served.tenant} {served.weight:.9g}{named}".encode()))
    return found
