"""Reads the weights of a model's layer for multi-token prediction (MTP).

The layer's tensors stay in the file until speculation uses them, so a model with a damaged MTP
layer still answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.core.errors import UsageError
from twostroke.model.families.heads import TABLE
from twostroke.model.families.mtp import OUTPUT, mtp_weight, projection_half
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights.program_form import in_program_form
from twostroke.model.weights.tensors import check_shapes

if TYPE_CHECKING:
    from twostroke.model.families import ModelSpec
    from twostroke.model.program import Program
    from twostroke.model.weights.model import LoadedModel

_PROJECTION = "eh_proj"
_NORMS = ("enorm", "hnorm")  # of the embedding and of the hidden state, in the projection's order
_LAST_NORM = "shared_head_norm"


def mtp_tensors(target: LoadedModel, spec: ModelSpec, program: Program) -> dict[str, QuantTensor]:
    """Return the weights that the Program of a model's MTP layer reads.

    `spec` is the `mtp_spec` of `target`, and `program` its `mtp_program`. If the file has no
    separate embedding table, output matrix or last norm for the layer, the target's are used.

    Raises:
        UsageError: the model has no MTP layer.
        ModelFormatError: a tensor of the layer is missing, or has the wrong shape.
    """
    stored = target.mtp
    if stored is None:
        raise UsageError(
            f"{target.name} has no layer for multi-token prediction (MTP), or Twostroke does not "
            f"read it in the family {spec.architecture!r}: leave out --speculate mtp."
        )
    hidden = spec.hidden_size
    projection, last_norm = mtp_weight(spec, _PROJECTION), mtp_weight(spec, _LAST_NORM)
    halves = [mtp_weight(spec, projection_half(name)) for name in _NORMS]
    shapes = dict(program.weight_shapes)
    num_ids = shapes.pop(OUTPUT)[0]
    table_shape = shapes.pop(TABLE)
    for half in halves:
        del shapes[half]
    shapes[projection] = (hidden, len(halves) * hidden)
    shared = {
        TABLE: mtp_weight(spec, "embed_tokens"),
        OUTPUT: mtp_weight(spec, "shared_head_head"),
    }
    own_tables = [name for name in shared.values() if name in stored.tensors]
    shapes |= dict.fromkeys(own_tables, table_shape)
    tensors = in_program_form(stored.file, stored.tensors, spec, shapes, stored.names)
    tensors.setdefault(last_norm, target.tensors["output_norm.weight"])
    reader = f"the MTP layer of the family {spec.architecture!r}"
    check_shapes(stored.file, tensors, shapes, reader, stored.names.quoted)
    head = TABLE if target.spec.tied_embeddings else OUTPUT
    table = tensors.pop(shared[TABLE], target.tensors[TABLE])
    output = tensors.pop(shared[OUTPUT], target.tensors[head])
    parts = _column_parts(tensors.pop(projection), len(halves))
    return (
        tensors
        | dict(zip(halves, parts, strict=True))
        | {
            TABLE: table,
            OUTPUT: output.part(0, num_ids),
        }
    )


def _column_parts(matrix: QuantTensor, num_parts: int) -> list[QuantTensor]:
    """Cut a matrix into parts with the same number of inputs.

    The parts are views. If a block of the matrix's format would be cut, they are float16 copies.
    """
    width = matrix.shape[1] // num_parts
    spans = [(number * width, (number + 1) * width) for number in range(num_parts)]
    if matrix.order is None and width % matrix.format.block_size == 0:
        return [matrix.columns(first, end) for first, end in spans]
    values = matrix.dequantize()
    return [QuantTensor.from_floats(values[:, first:end], FORMATS["F16"]) for first, end in spans]
