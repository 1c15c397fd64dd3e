"""Mixture of experts: one operation, which ranks replace by two operations."""

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
    """The names of an expert's matrices: gate, up (ffn_width, width), down (width, ffn_width).

    Each matrix may have a bias, which is added to its products. An expert without a gate projection
    names the same matrix as gate and up.
    """

    gate: str
    up: str
    down: str
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None

    def weights(self, width: int, ffn_width: int) -> tuple[Weight, ...]:
        """Return the names and shapes of the expert's matrices, and of their biases."""
        up_shape, down_shape = (ffn_width, width), (width, ffn_width)
        shapes = (up_shape, up_shape, down_shape)
        by_name = dict(zip(self.matrices, shapes, strict=True))
        matrices = [Weight(name, shape) for name, shape in by_name.items()]
        biases = [
            Weight(bias, (shape[0],))
            for bias, shape in zip(self.biases, shapes, strict=True)
            if bias is not None
        ]
        return (*matrices, *biases)

    @property
    def matrices(self) -> tuple[str, str, str]:
        """Return the names of the matrices: gate, up, down."""
        return self.gate, self.up, self.down

    @property
    def biases(self) -> tuple[str | None, str | None, str | None]:
        """Return the names of the biases of the matrices: gate, up, down."""
        return self.gate_bias, self.up_bias, self.down_bias


class MixtureOfExperts(Operation):
    """A mixture of experts: the weighted sum of the outputs of each row's chosen experts.

    `output = sum over chosen experts e of share[e] * down_e(activation(gate_e x) * up_e x)`, where
    products include the bias of their matrix if there is one.

    `scores` names the router's logits, one for each expert. The shares (routing weights) are their
    softmax. Each row chooses the `num_used` experts with the largest shares; of equal shares, the
    first. With `normalize` the chosen shares are divided by their sum (arXiv:2401.04088). Terms are
    added in the order of the choice. If `are_shares`, the scores come from a `Route` operation and
    are shares already: the experts with the largest shares are chosen, and their shares are used
    unchanged.

    With `scales_inputs` (Llama 4) the share of a chosen expert is the sigmoid of its logit, and
    multiplies the input of the expert: `output = sum over chosen experts e of e(share[e] * x)`.
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
    scales_inputs: bool = False

    reads = ("x", "scores")
    sharding = Sharding.REPLICATED
    label = "experts"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the three matrices of each expert, and of their biases."""
        return tuple(w for e in self.experts for w in e.weights(self.width, self.ffn_width))

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of the chosen experts' products; other experts' matrices are not read."""
        terms, total = self.steps
        yield from terms.work(weight_bytes, cache)
        yield from total.work(weight_bytes, cache)

    @property
    def steps(self) -> tuple[Operation, ...]:
        """Return the two operations that ranks can divide: the experts' outputs, and their sum."""
        terms = f"{self.output}.terms"
        return (
            ExpertTerms(
                terms,
                x=self.x,
                scores=self.scores,
                experts=self.experts,
                first_expert=0,
                num_experts=len(self.experts),
                hidden=self.width,
                ffn_width=self.ffn_width,
                num_used=self.num_used,
                activation=self.activation,
                scales_inputs=self.scales_inputs,
            ),
            SumTerms(
                self.output,
                x=terms,
                scores=self.scores,
                width=self.width,
                num_used=self.num_used,
                normalize=self.normalize,
                are_shares=self.are_shares,
                scales_inputs=self.scales_inputs,
            ),
        )


class ExpertTerms(Operation):
    """The outputs of a row's chosen experts, before `SumTerms` adds them; a rank has some experts.

    For each row and each of its chosen experts, in the order of the choice, `output` has
    `down_e(activation(gate_e x) * up_e x)`: `num_used` outputs of `hidden` values. Of the model's
    `num_experts`, this rank has `experts`, numbered from `first_expert` on; the outputs of experts
    on other ranks are undefined. Fields that `MixtureOfExperts` also has mean the same.
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
    scales_inputs: bool = False

    reads = ("x", "scores")
    sharding = Sharding.BY_COLUMN_PARTS
    label = "experts"

    @property
    def width(self) -> int:
        """Return the number of values in a row of the output: of all chosen experts."""
        return self.num_used * self.hidden

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the matrices and biases of this rank's experts."""
        return tuple(w for e in self.experts for w in e.weights(self.hidden, self.ffn_width))

    def work(self, weight_bytes: Mapping[str, int], cache: CacheFormat) -> Work:
        """Yield the cost of the chosen experts' products on this rank.

        Matrices of other experts are not read.
        """
        del cache
        num_products = len({*self.experts[0].matrices}) if self.experts else 0
        flops = self.num_used * self.ffn_width * (2 * num_products * self.hidden + 5)
        yield each_row, Cost(flops * len(self.experts) // self.num_experts)
        names = [n for e in self.experts for n in {*e.matrices, *e.biases} if n is not None]
        stored = sum([weight_bytes[name] for name in names])  # up to 90,000 names
        yield ShareOfExperts(self.num_used, self.num_experts), Cost(0, stored)

    @property
    def length(self) -> int:
        """Return the number of experts; they are the units that ranks divide."""
        return len(self.experts)

    def part(self, first: int, end: int) -> Self:
        """Return the operation with only the experts `first` to `end`, for one rank."""
        experts = self.experts[first:end]
        return self._changed(experts=experts, first_expert=self.first_expert + first)

    def part_reads(self, field: str, first: int, end: int) -> None:
        """Return None, because the part of each rank reads all columns of its inputs."""

    def parts_by(self, cuts: tuple[int, ...]) -> TermParts:
        """Return how the output is divided over ranks, if the list of experts is cut at `cuts`."""
        return TermParts(cuts, self.scores, self.num_used)


class SumTerms(Operation):
    """Adds the outputs of a row's chosen experts (`ExpertTerms`) times their weights.

    The terms are added in the order in which the experts were chosen. If their inputs were scaled
    (`scales_inputs`), the weights are 1.
    """

    x: str
    scores: str
    width: int
    num_used: int
    normalize: bool
    are_shares: bool = False
    scales_inputs: bool = False

    reads = ("x", "scores")
    sharding = Sharding.REPLICATED
    label = "sum of experts"


class Route(Operation):
    """Router of a mixture of experts: gives a row's chosen experts their weights.

    `output[e]` is the share (routing weight) of expert e if a row chooses it, else -1
    (arXiv:2412.19437).

    Scores are the softmax of x, or its sigmoid if `is_sigmoid`. Experts are ranked by score plus
    `bias`; of equal experts, the lower number is first. Neighbouring experts form `num_groups`
    groups of the same size. The rank of a group is the sum over its `group_best` best experts. A
    row chooses the `num_used_groups` best groups, and then the `num_used` best experts in these
    groups. Shares are the scores, divided by their sum with `normalize`, times `scale`, times
    `factors` (positive, one for each expert).
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
    sharding = Sharding.REPLICATED
    label = "choice of experts"

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Return the names and shapes of the router's bias and factors, if the model has them."""
        names = [name for name in (self.bias, self.factors) if name is not None]
        return tuple([Weight(name, (self.width,)) for name in names])
