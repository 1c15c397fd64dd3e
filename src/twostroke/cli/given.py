"""Which options stand on the command line, and the refusal of those without effect."""

from __future__ import annotations

import click
from click.core import ParameterSource

from twostroke.core.errors import Field, UsageError


def is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def check_effect(name: str, other: str, *, has_effect: bool, value: str = "") -> None:
    """Refuse an option that is given without `other` (with `value`), on which its effect depends.

    Raises:
        UsageError: it has no effect.
    """
    if is_given(name) and not has_effect:
        reason = f"has no effect without {{other}}{value and ' '}{value}: add that, or leave "
        raise UsageError(f"{reason}{{this}} out.", field=name, other=Field(other), this=Field(name))


def check_batching(policy: str, *, is_server: bool = False) -> None:
    """Refuse options of a batching policy that is not chosen.

    A server starts a static batch that is not full after `--max-wait`; other commands know when no
    more requests come.

    Raises:
        UsageError: one has no effect.
    """
    has_wait = policy == "dynamic" or (is_server and policy == "static")
    check_effect("batch_size", "policy", has_effect=policy != "continuous", value="dynamic")
    check_effect("max_wait_s", "policy", has_effect=has_wait, value="dynamic")
