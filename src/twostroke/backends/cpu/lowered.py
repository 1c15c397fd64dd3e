"""A Program as the native executor walks through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen

if TYPE_CHECKING:
    from twostroke.backends.cpu.buffers import Buffer, Memory
    from twostroke.backends.cpu.layout import Channel, SharedLayout
    from twostroke.backends.cpu.records import ExpertRecord, OpRecord
    from twostroke.program import Op, ops


class Vector(Frozen):
    """A weight of one dimension as the kernels read it: float32, with `offset` added."""

    name: str
    offset: float = 0.0


class Lowered(Frozen):
    """A Program for the native executor.

    `records` name weights, vectors, ropes, buffers, teams, cuts and channels by their place in
    these tuples. A team is its ranks and this one's place among them, a channel the sender, the
    receiver and the value that it carries. This rank computes part `rows[0]` of `rows[1]` of a
    step's rows. `parts[i]` are the Program's operations that record i runs:
    each is in exactly one of them.
    """

    records: tuple[OpRecord, ...]
    parts: tuple[tuple[Op, ...], ...]
    matrices: tuple[str, ...]
    vectors: tuple[Vector, ...]
    ropes: tuple[ops.Rope, ...]
    experts: tuple[ExpertRecord, ...]
    memories: tuple[Memory, ...]
    buffers: tuple[Buffer, ...]
    teams: tuple[tuple[tuple[int, ...], int], ...]
    cuts: tuple[int, ...]
    channels: tuple[Channel, ...]
    rank: int = 0
    rows: tuple[int, int] = (0, 1)
    layout: SharedLayout | None = None
