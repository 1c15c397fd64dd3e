"""Operations of a divided Program: they move values between ranks."""

from __future__ import annotations

from twostroke.core.frozen import Frozen
from twostroke.program.ops import Activation, Expert, Operation


class ColumnParts(Frozen):
    """Member i of a team holds the columns from `cuts[i]` to `cuts[i + 1]` of each row."""

    cuts: tuple[int, ...]


class RowParts(Frozen):
    """Of the n rows of a step, member i of `count` holds those from n * i // count on."""

    count: int


class TokenParts(Frozen):
    """Member i of a team holds the rows whose token is in `range(cuts[i], cuts[i + 1])`."""

    cuts: tuple[int, ...]


class TermParts(Frozen):
    """Member i of a team holds the terms of the experts in `range(cuts[i], cuts[i + 1])`.

    `scores` names the value by which each row chooses `num_used` experts.
    """

    cuts: tuple[int, ...]
    scores: str
    num_used: int


Parts = ColumnParts | RowParts | TokenParts | TermParts


class AllGather(Operation):
    """`output` is the whole of `x`, of which each member of the team holds its part.

    `team` are ranks in the order of their parts, and this rank is `team[place]`. With a `root`
    only that rank gets the whole; nothing may read the output on the others.
    """

    x: str
    width: int
    parts: Parts
    team: tuple[int, ...]
    place: int
    root: int | None = None

    reads = ("x",)
    label = "gather"


class TakeColumns(Operation):
    """`output` is `width` columns of `x`, from column `first` on."""

    x: str
    width: int
    first: int

    reads = ("x",)
    label = "columns"


class Send(Operation):
    """`x` goes to another rank; `output` is a name that nothing reads."""

    x: str
    width: int
    to: int

    reads = ("x",)


class Receive(Operation):
    """`output` comes from another rank, all of its rows."""

    width: int
    sender: int


class ExpertTerms(Operation):
    """The terms of a mixture's chosen experts: `num_used` in a row, `hidden` values each.

    Fields are those of `MixtureOfExperts`, without the shares: `output` has, for each row and each
    of its chosen experts in the order of the choice, `down_e(activation(gate_e x) * up_e x)`. This
    rank has only `experts`, which are number `first_expert` and on of `num_experts`; it leaves the
    terms of the others alone.
    """

    x: str
    scores: str
    experts: tuple[Expert, ...]
    first_expert: int
    num_experts: int
    hidden: int
    ffn_width: int
    num_used: int
    activation: Activation = Activation.SILU

    reads = ("x", "scores")

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_used * self.hidden


class SumTerms(Operation):
    """`output` is the sum of a row's terms times their shares, in the order of the choice."""

    x: str
    scores: str
    width: int
    num_used: int
    normalize: bool

    reads = ("x", "scores")
