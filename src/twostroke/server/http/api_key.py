"""API keys: their owners, limits and classes of service."""

from __future__ import annotations

import re
import time
from typing import Final

from msgspec import field

from twostroke.core.errors import RequestError, UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS

MAX_LENGTH: Final = 512  # of a key, and of the names of keys and tenants
WORD: Final = re.compile(rf"[!-~]{{1,{MAX_LENGTH}}}")
FORM: Final = f"1 to {MAX_LENGTH} printable ASCII characters without spaces"
CLASSES: Final = tuple(name for name in SERVICE_TIERS if name != BATCH_SERVICE_TIER)
_MAX_LIMIT: Final = 10**12
# These paths need no key: load balancers and supervisors ask them.
OPEN_PATHS: Final = ("/health", "/health/live", "/health/ready", "/health/progress")


class ClassError(RequestError):
    """A key's requests may not have the class of service that one asks for."""

    http_status = 403
    code = "class_not_allowed"


class KeyLimits(Frozen):
    """The limits of a key's use; None is no limit. `parallel` requests may run at the same time."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if a limit is out of range."""
        check_range(self, *self.__struct_fields__, low=1, high=_MAX_LIMIT)


class Key(Frozen, kw_only=True):
    """A key and its owner. Times are Unix times in seconds.

    Attributes:
        id: how people call it, and the beginning of the key; empty for one of a file.
        name: its purpose; keys that are not revoked have different names.
        tenant: to whom it belongs.
        digest: SHA-256 of the key. A key has 256 random bits, too many to guess, so that neither
            salt nor a slow hash would add anything.
        weight: its tenant's share of the engine under load, relative to other tenants.
        classes: the classes of service that its requests may have; None for all. Where the default
            is not among them, requests that name none have the first.
        expires_at: from then on it is refused.
        revoked_at: since when it is refused for good.
    """

    id: str = ""
    name: str = ""
    tenant: str
    digest: str
    weight: float = 1.0
    classes: tuple[str, ...] | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if the weight is out of range, or a class is unknown."""
        check_range(self, "weight", low=0.01, high=1000)
        for name in self.classes or ():
            if name not in CLASSES:
                reason = f"must be classes of {', '.join(CLASSES)}, got '{name}'"
                raise UsageError(f"{reason}.{nearest(name, CLASSES)}", field="classes")

    def class_of(self, service: str, priority: int, *, is_named: bool) -> tuple[str, int]:
        """Return class and priority of a request that asks for these.

        Where it does not name a class (`is_named`), it has the first one of the key.

        Raises:
            ClassError: the key may not have the class, or a priority before all of its classes.
        """
        if self.classes is None:
            return service, priority
        named = ", ".join(self.classes)
        if service not in self.classes:
            if is_named:
                reason = f"is '{service}', and this key may have: {named}."
                raise ClassError(reason, field="service_tier")
            is_own = priority != SERVICE_TIERS[service]
            service = self.classes[0]
            priority = priority if is_own else SERVICE_TIERS[service]
        if priority < (first := min(SERVICE_TIERS[name] for name in self.classes)):
            reason = f"must be at least {first} for this key, whose classes are: {named}."
            raise ClassError(reason, field="priority")
        return service, priority

    @property
    def state(self) -> str:
        """Valid, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        is_over = self.expires_at is not None and self.expires_at <= time.time()
        return "expired" if is_over else "valid"
