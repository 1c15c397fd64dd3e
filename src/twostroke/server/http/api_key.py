"""An API key's owner, limits and service tiers; and the paths that need no key."""

from __future__ import annotations

import re
import time
from typing import Final

from msgspec import field

from twostroke.core.errors import RequestError, UsageError, nearest
from twostroke.core.frozen import Frozen, check_range
from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS

MAX_WORD_LENGTH: Final = 512  # of a key, a key's name, and a tenant's name
WORD_PATTERN: Final = re.compile(rf"[!-~]{{1,{MAX_WORD_LENGTH}}}")
WORD_FORM: Final = f"1 to {MAX_WORD_LENGTH} printable ASCII characters without spaces"
CLASSES: Final = tuple(name for name in SERVICE_TIERS if name != BATCH_SERVICE_TIER)
_MAX_LIMIT: Final = 10**12
# These paths need no key, as load balancers and supervisors request them.
OPEN_PATHS: Final = ("/health", "/health/live", "/health/ready", "/health/progress")


class ClassError(RequestError):
    """The API key does not allow the request's service tier or priority."""

    http_status = 403
    code = "class_not_allowed"


class KeyLimits(Frozen):
    """The rate limits of one API key; None for no limit. `parallel` limits requests at one time."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None

    def __post_init__(self) -> None:
        """Check the rate limits.

        Raises:
            UsageError: a limit is out of range.
        """
        check_range(self, *self.__struct_fields__, low=1, high=_MAX_LIMIT)


class Key(Frozen, kw_only=True):
    """An API key and its owner. Times are Unix times in seconds.

    Attributes:
        id: the public name and beginning of the key; empty for a key from a file.
        name: the key's purpose; no two valid keys have the same name.
        tenant: the owner.
        digest: the SHA-256 of the key. A key has 256 random bits, which cannot be guessed, so a
            salt or a slow hash would not add security.
        weight: the tenant's share of the engine under load, relative to other tenants.
        classes: the service tiers that requests may have; None for all. If the default tier is not
            among these tiers, a request that names no tier gets the first of them.
        limits: the limits of the key.
        overflow: whether a router may send its requests to APIs of vendors (`--overflow`).
        created_at: when the key was created.
        expires_at: when the key expires; None for never.
        revoked_at: when the key was revoked; None if it is not.
    """

    id: str = ""
    name: str = ""
    tenant: str
    digest: str
    weight: float = 1.0
    classes: tuple[str, ...] | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    overflow: bool = True
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None

    def __post_init__(self) -> None:
        """Check the key's weight and service tiers.

        Raises:
            UsageError: the weight is out of range, or a service tier is unknown.
        """
        check_range(self, "weight", low=0.01, high=1000)
        for name in self.classes or ():
            if name not in CLASSES:
                reason = f"must be classes of {', '.join(CLASSES)}, got '{name}'"
                raise UsageError(f"{reason}.{nearest(name, CLASSES)}", field="classes")

    def resolve_service_tier(
        self, service_tier: str, priority: int, *, is_named: bool
    ) -> tuple[str, int]:
        """Return the service tier and the priority that a request with this API key gets.

        Args:
            service_tier: the service tier that the request asks for.
            priority: the priority that the request asks for.
            is_named: whether the client named the service tier. If not, and the key does not
                allow the default tier, the key's first tier replaces it.

        Raises:
            ClassError: the key does not allow the tier, or such a high priority.
        """
        if self.classes is None:
            return service_tier, priority
        named = ", ".join(self.classes)
        if service_tier not in self.classes:
            if is_named:
                reason = f"is '{service_tier}', and this key may have: {named}."
                raise ClassError(reason, field="service_tier")
            has_custom_priority = priority != SERVICE_TIERS[service_tier]
            service_tier = self.classes[0]
            priority = priority if has_custom_priority else SERVICE_TIERS[service_tier]
        if priority < (min_priority := min(SERVICE_TIERS[name] for name in self.classes)):
            reason = f"must be at least {min_priority} for this key, whose classes are: {named}."
            raise ClassError(reason, field="priority")
        return service_tier, priority

    @property
    def state(self) -> str:
        """The API key's state: "valid", "expired" or "revoked"."""
        if self.revoked_at is not None:
            return "revoked"
        is_expired = self.expires_at is not None and self.expires_at <= time.time()
        return "expired" if is_expired else "valid"
