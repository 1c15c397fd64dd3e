"""One function a model family: `ModelSpec` in, `Program` out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import ModelFormatError, nearest
from twostroke.models.llama import llama
from twostroke.models.spec import ModelSpec, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.program import Program

ARCHITECTURES: dict[str, Callable[[ModelSpec], Program]] = {
    "llama": llama,
}


def build_program(spec: ModelSpec) -> Program:
    """Build the Program of a model.

    Raises:
        ModelFormatError: the architecture is not one of `ARCHITECTURES`.
    """
    family = ARCHITECTURES.get(spec.architecture)
    if family is None:
        known = ", ".join(sorted(ARCHITECTURES))
        hint = nearest(spec.architecture, ARCHITECTURES)
        message = f"{spec.name}: architecture '{spec.architecture}' is not supported"
        raise ModelFormatError(f"{message}; supported: {known}.{hint}")
    return family(spec)


__all__ = ["ARCHITECTURES", "ModelSpec", "RopeSpec", "build_program"]
