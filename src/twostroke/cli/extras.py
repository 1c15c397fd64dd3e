"""Commands that need an extra say which."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from twostroke.core.errors import BackendError
from twostroke.core.extras import install_command

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Raise BackendError if an import in the block fails because there is no PyTorch."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BackendError(f"{what} needs PyTorch: {install_command('train')}.") from None
