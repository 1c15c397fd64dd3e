"""Mixtures of experts, as one operation and as the two into which ranks divide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.frozen import Frozen
from twostroke.model.program.operation import Activation, Operation
from twostroke.model.program.sharding import Sharding, TermParts, Weight
from twostroke.model.program.work import Cost, ShareOfExperts, each_row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from twostroke.model.program.kv_layout import CacheFormat
    from twostroke.model.program.operation import Work


class Expert(Frozen):
    """Names of one expert's matrices: gate and up (ffn_width, width), down (width, ffn_width)."""

    gate: str
    up: str
    down: str

    def weights(self, width: int, ffn_width: int) -> tuple[Weight, ...]:
        """Return the three."""
        wide, narrow = (ffn_width, width), (width, ffn_width)
        return Weight(self.gate, wide), Weight(self.up, wide), Weight(self.down, narrow)


class MixtureOfExperts(Operation):
    """`output = sum over chosen experts e of share[e] * down_e(activation(gate_e x) * up_e x)`.

    `scores` is the value with the router's products, one for each expert. The shares are their
    softmax; each row chooses the `num_used` experts with the largest (of equal ones the first),
    and with `normalize` the chosen shares are divided by their sum (arXiv:2401.04088). The sum is
    in the order of the choice. If the scores `are_shares` (see `Route`), the largest are chosen
    as well, and are the shares as they are.
    """

    x: str
    scores: str
    experts: tuple[Expert, ...]
    width: int
    ffn_width: int
    num_used: int
    normalize: bool
    activation: Activation = Activation.SILU
    are_shares: bool = False

    reads = ("x", "scores")
    sharding = Sharding.WHOLE
    label = "experts"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Three matrices of each expert."""
        return tuple(w for e in self.experts for w in e.weights(self.width, self.ffn_width))

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """The products of the chosen experts; the matrices of the others stay unread."""
        terms, total = self.steps
        yield from terms.work(weight_bytes, cache)
        yield from total.work(weight_bytes, cache)

    @property
    def steps(self) -> tuple[Operation, ...]:
        """The terms, and their sum."""
        terms = f"{self.output}.terms"
        return (
            ExpertTerms(
                terms,
                self.x,
                self.scores,
                self.experts,
                0,
                len(self.experts),
                self.width,
                self.ffn_width,
                self.num_used,
                self.activation,
            ),
            SumTerms(
                self.output,
                terms,
                self.scores,
                self.width,
                self.num_used,
                self.normalize,
                self.are_shares,
            ),
        )


class ExpertTerms(Operation):
    """The results of a mixture's chosen experts: `num_used` in a row, `hidden` values each.

    Fields are those of `MixtureOfExperts`. `output` has, for each row and each of its chosen
    experts in the order of the choice, `down_e(activation(gate_e x) * up_e x)`. This rank has the
    `experts` from number `first_expert` on, of `num_experts`; the terms of others are undefined.
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
    sharding = Sharding.BY_COLUMN_PARTS
    label = "experts"

    @property
    def width(self) -> int:
        """Values in a row of the output."""
        return self.num_used * self.hidden

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Three matrices of each expert."""
        return tuple(w for e in self.experts for w in e.weights(self.hidden, self.ffn_width))

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """The products of the chosen experts that are here; the other matrices stay unread."""
        del cache
        flops = self.num_used * self.ffn_width * (6 * self.hidden + 5)
        yield each_row, Cost(flops * len(self.experts) // self.num_experts)
        names = [name for e in self.experts for name in (e.gate, e.up, e.down)]
        stored = sum([weight_bytes[name] for name in names])  # some have 45,000: no Weight for each
        yield ShareOfExperts(self.num_used, self.num_experts), Cost(0, stored)

    @property
    def length(self) -> int:
        """The experts."""
        return len(self.experts)

    def part(self, first: int, end: int) -> Self:
        """Return the terms of the experts from `first` to `end`."""
        experts = self.experts[first:end]
        return self._changed(experts=experts, first_expert=self.first_expert + first)

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Read whole rows."""

    def parts_by(self, cuts: tuple[int, ...]) -> TermParts:
        """Return how the terms lie on ranks with experts cut so."""
        return TermParts(cuts, self.scores, self.num_used)


class SumTerms(Operation):
    """`output` is the sum of a row's terms times their shares, in the order of the choice."""

    x: str
    scores: str
    width: int
    num_used: int
    normalize: bool
    are_shares: bool = False

    reads = ("x", "scores")
    sharding = Sharding.WHOLE
    label = "sum of experts"


class Route(Operation):
    """`output[e]` is the share of expert e if a row chooses it, else -1 (arXiv:2412.19437).

    Scores are the softmax of x, or its sigmoid if `is_sigmoid`. The choice is by scores plus
    `bias`: of `num_groups` equal groups of neighbours the `num_used_groups` whose `group_best`
    largest have the largest sum, and in these the `num_used` largest; of equal ones the first.
    Shares are the scores, with `normalize` divided by their sum, times `scale`, and times those of
    `factors`, above 0, one for each expert.
    """

    x: str
    width: int
    num_used: int
    normalize: bool
    scale: float = 1.0
    bias: str | None = None
    is_sigmoid: bool = False
    num_groups: int = 1
    num_used_groups: int = 1
    group_best: int = 1
    factors: str | None = None

    reads = ("x",)
    sharding = Sharding.WHOLE
    label = "choice of experts"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The bias of the choice and the factors, if there are any."""
        names = [name for name in (self.bias, self.factors) if name is not None]
        return tuple([Weight(name, (self.width,)) for name in names])
