"""A model's own layer for multi-token prediction (MTP), as a proposer of draft tokens."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Self

from twostroke.backends.create import is_native, options_for_drafts
from twostroke.backends.reference.operations import rms_norm
from twostroke.core.errors import ModelFormatError, TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.core.options import PARTNER
from twostroke.engine.drafters import HeadsSize, create_heads_runner, in_packed_format
from twostroke.engine.speculation import AcceptanceRate, EagleHeads
from twostroke.engine.speculation.draft_model import FIRST_PRIOR, PROBABILITY_PRIOR
from twostroke.engine.speculation.heads import MAX_WAITING_STATES, HeadKind
from twostroke.model.families import ARCHITECTURES, build_program
from twostroke.model.families.family import MtpInput
from twostroke.model.families.mtp import OUTPUT, mtp_program, mtp_spec
from twostroke.model.program import BatchShape, ops
from twostroke.model.weights.mtp import mtp_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.backends.interface import Backend
    from twostroke.core.hardware import Hardware
    from twostroke.core.options import ComputeOptions, EngineOptions
    from twostroke.engine.model_card import ModelCard
    from twostroke.engine.speculation.heads import HiddenNorm
    from twostroke.model.families import ModelSpec
    from twostroke.model.program import Program
    from twostroke.model.quant import QuantTensor
    from twostroke.model.weights import LoadedModel

_WINDOW = 1024  # tokens that the layer's attention reads
_LATENT_LENGTH = 2048  # tokens after which the sequence of a layer without a window starts again
_NUM_PROMPT_STATES = 256  # rows of a prompt, at its end, that the layer computes
_MAX_REQUESTS = 16  # that have keys and values at once; more streams leave no time for drafts
_MIN_DRAFT_IDS = 32768
_HEAD_SHARE = 0.06  # of the arithmetic of the target's row, for the logits of a draft

_logger = logging.getLogger("twostroke.engine")


class MtpLayer(Frozen):
    """The MTP layer of a model. Its tensors are mapped and checked; no weights are read yet.

    Attributes:
        target: the model.
        spec: the `mtp_spec` of the model.
        program: the layer's Program.
        tensors: the layer's weights; it shares some of them with the target model.
        is_optional: whether the engine starts without the layer if it cannot be built.
    """

    target: LoadedModel
    spec: ModelSpec
    program: Program
    tensors: Mapping[str, QuantTensor]
    is_optional: bool

    @classmethod
    def from_options(
        cls, options: EngineOptions, target: LoadedModel, card: ModelCard
    ) -> Self | None:
        """Open a model's MTP layer if the options use it; else return None.

        The method "auto" uses the layer, except if the options name draft heads or a draft model,
        or if the backend, or the division over several ranks, works better without drafts.

        Raises:
            UsageError: the method is "mtp", and the model has no MTP layer.
            ModelFormatError: the method is "mtp", and the layer's tensors are damaged.
        """
        speculation = options.speculation
        is_required = speculation.method == "mtp"
        if not is_required and (speculation.method != "auto" or target.mtp is None):
            return None
        has_drafter = speculation.heads or speculation.draft not in {None, PARTNER}
        runs_alone = options.compute.backend != "gpu" and options.parallel.num_ranks == 1
        if not is_required and (has_drafter or not runs_alone):
            return None
        spec = mtp_spec(target.spec, _WINDOW)
        program = mtp_program(spec, _num_draft_ids(card, spec))
        try:
            tensors = mtp_tensors(target, spec, program)
        except ModelFormatError as error:
            if is_required:
                raise
            _logger.warning("The MTP layer is not used (--speculate ngram: no layer): %s", error)
            return None
        return cls(target, spec, program, tensors, is_optional=not is_required)

    def build(
        self, options: EngineOptions, backend: Backend, hardware: Hardware | None
    ) -> EagleHeads | None:
        """Read the layer's weights, and return the layer as a proposer of draft tokens.

        The layer shares the threads of `backend`: close it before `backend`. Returns None if the
        layer is optional and cannot be built.

        Raises:
            MemoryLimitError: the keys and values do not fit into memory with the target's.
            BackendError: the backend cannot run the layer.
        """
        length = self.spec.context_length
        window = self.spec.window_of(self.spec.num_layers - 1)
        if window is None:
            length = min(length, _LATENT_LENGTH)
        size = HeadsSize(
            context_length=length,
            num_tokens=length if window is None else min(length, window.size),
            num_requests=min(options.batch.effective_max_running, _MAX_REQUESTS),
            max_rows=_NUM_PROMPT_STATES + MAX_WAITING_STATES,
        )
        try:
            runner, step_time = create_heads_runner(
                (self.program, self._packed_tensors(options.compute)),
                size,
                options.compute,
                backend,
                hardware,
                name=f"The MTP layer of {self.target.name}",
                remedy="choose another method for --speculate",
            )
        except TwostrokeError as error:
            if not self.is_optional:
                raise
            _logger.warning("The MTP layer is not used (--speculate ngram: no layer): %s", error)
            return None
        return EagleHeads(
            runner,
            step_time,
            AcceptanceRate(PROBABILITY_PRIOR, FIRST_PRIOR),
            range(self.program.weight_shapes[OUTPUT][0]),
            context_length=length,
            token_budget=size.max_rows,
            kind=self._kind(),
        )

    def _packed_tensors(self, compute: ComputeOptions) -> Mapping[str, QuantTensor]:
        """Return the layer's weights; for native kernels, float matrices are quantized to Q8_0.

        Experts stay as they are, since a row reads only a few.
        """
        if not is_native(options_for_drafts(compute)):
            return self.tensors
        products = [op for op in self.program.ops if isinstance(op, ops.Linear | ops.Logits)]
        packed = {op.weight: in_packed_format(self.tensors[op.weight]) for op in products}
        return {**self.tensors, **packed}

    def _kind(self) -> HeadKind:
        """Return how the layer reads hidden states."""
        is_normed = ARCHITECTURES[self.spec.architecture].mtp is MtpInput.NORMED
        return HeadKind(
            name="mtp",
            target_norm=_last_norm(build_program(self.target.spec), self.target.tensors),
            own_norm=_last_norm(self.program, self.tensors) if is_normed else None,
            num_prompt_states=_NUM_PROMPT_STATES,
            max_requests=_MAX_REQUESTS,
        )


def _num_draft_ids(card: ModelCard, spec: ModelSpec) -> int:
    """Return the number of token ids, from 0 on, that the layer can propose.

    Tokenizers give frequent tokens low ids. Computing the logits of a whole large vocabulary would
    take a large part of a small model's step.
    """
    row = card.cost.per_step().of(BatchShape.decode((0,)))
    num_paying = int(_HEAD_SHARE * row.flops / (2 * spec.hidden_size))
    return min(spec.vocab_size, max(_MIN_DRAFT_IDS, num_paying))


def _last_norm(program: Program, tensors: Mapping[str, QuantTensor]) -> HiddenNorm:
    """Return a Program's final norm as a function of hidden states (rows, width)."""
    norm = next(op for op in program.ops if op.output == program.last_states)
    assert isinstance(norm, ops.RMSNorm)
    assert norm.weight is not None
    return partial(rms_norm, norm, weight=tensors[norm.weight].dequantize())
