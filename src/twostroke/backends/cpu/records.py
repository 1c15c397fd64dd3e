"""The structs of the C interface, field for field as in native/executor/records.h."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum

import numpy as np

from twostroke.backends.sampling.rows import RESULT, ROW
from twostroke.model.program import Activation

NONE = -1
MAX_OUTPUTS = 4


class OpKind(IntEnum):
    """Number of the native kernel that computes an operation record."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    GATED = 3
    ROPE = 4
    ATTENTION = 5
    ACTIVATION = 6
    ADD = 7
    LOGITS = 8
    SCALE = 9
    TAP = 10
    EXPERTS = 11
    EXTERNAL_INPUT = 12
    GATHER = 13
    SEND = 14
    RECEIVE = 15
    TERMS = 16
    SUM_TERMS = 17
    COPY = 18
    PIECES = 19
    HEAD_PRODUCTS = 20
    JOIN = 21
    ROUTE = 22
    GATE_ROWS = 23
    CONVOLUTION = 24
    DELTA_RULE = 25
    MAMBA2 = 26


# The kernels' numbers for activation functions.
ACTIVATIONS = {
    Activation.IDENTITY: NONE,
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.SIGMOID: 2,
    Activation.SWIGLU_OAI: 3,
    Activation.RELU: 4,
}


class Precision(IntEnum):
    """How precisely a record's matrix products represent their inputs."""

    PLAIN = 0
    PRECISE = 1
    COARSE = 2
    MIXED = 3


class PartsKind(IntEnum):
    """How a gathered value is divided over the ranks before the gather."""

    COLUMNS = 0
    ROWS = 1
    TOKENS = 2
    TERMS = 3


class KvTarget(IntEnum):
    """Whether the result of a matrix product is stored in KV pages, as keys or as values."""

    NOTHING = 0
    KEYS = 1
    VALUES = 2


class ExpertShareKind(IntEnum):
    """How the weights of a row's chosen experts are computed from the router's scores.

    `ALL_SCORES`: normalized over all experts. `CHOSEN_SCORES`: normalized over the chosen experts.
    `SCORES`: the scores are the weights. `OF_INPUTS`: the sigmoid of the scores, which multiplies
    the experts' inputs.
    """

    ALL_SCORES = 0
    CHOSEN_SCORES = 1
    SCORES = 2
    OF_INPUTS = 3


class CacheFormatCode(IntEnum):
    """Number of the KV cache format in native code."""

    F16 = 0
    BF16 = 1
    INT8 = 2
    INT16 = 3


class OutputRecord(ctypes.Structure):
    """C struct: one matrix product of an operation, or the output of other operations."""

    _fields_ = (
        ("weight", c_int32),
        ("bias", c_int32),
        ("buffer", c_int32),
        ("width", c_int32),
        ("norm", c_int32),
        ("head_dim", c_int32),
        ("epsilon", c_float),
        ("rope", c_int32),
        ("store", c_int32),
    )


class OpRecord(ctypes.Structure):
    """C struct: a group of fused operations; which fields are used depends on `kind`."""

    _fields_ = (
        ("kind", c_int32),
        ("x", c_int32),
        ("y", c_int32),
        ("z", c_int32),
        ("width", c_int32),
        ("norm", c_int32),
        ("epsilon", c_float),
        ("num_groups", c_int32),
        ("accumulate", c_int32),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("group", c_int32),
        ("first_head", c_int32),
        ("scale", c_float),
        ("factor", c_float),
        ("soft_cap", c_float),
        ("activation", c_int32),
        ("is_stored", c_int32),
        ("tap", c_int32),
        ("window", c_int32),
        ("is_chunked", c_int32),
        ("first_expert", c_int32),
        ("num_experts", c_int32),
        ("own_expert", c_int32),
        ("num_own", c_int32),
        ("num_used", c_int32),
        ("shares", c_int32),
        ("precision", c_int32),
        ("team", c_int32),
        ("parts", c_int32),
        ("first_cut", c_int32),
        ("num_parts", c_int32),
        ("channel", c_int32),
        ("x_head", c_int32),
        ("x_first", c_int32),
        ("x_width", c_int32),
        ("is_sigmoid", c_int32),
        ("num_used_groups", c_int32),
        ("group_best", c_int32),
        ("kernel", c_int32),
        ("is_tiled", c_int32),
        ("gates_channels", c_int32),
        ("is_wide", c_int32),
        ("num_outputs", c_int32),
        ("outputs", OutputRecord * MAX_OUTPUTS),
    )


class ExpertRecord(ctypes.Structure):
    """C struct: the three matrices of an expert, as indices of weights, and their biases."""

    _fields_ = tuple(
        (name, c_int32) for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    )


class RopeRecord(ctypes.Structure):
    """C struct: the frequencies of a rotary position embedding, and its attention temperature."""

    _fields_ = (
        ("inverse_frequencies", POINTER(c_double)),
        ("magnitude", c_double),
        ("temperature_scale", c_double),
        ("temperature_length", c_int64),
        ("temperature_offset", c_int64),
        ("num_pairs", c_int32),
        ("is_interleaved", c_int32),
        ("head_dim", c_int32),
        ("reserved", c_int32),
    )


class LayerRecord(ctypes.Structure):
    """C struct: the shape of an attention layer's keys and values, and the rank's index."""

    _fields_ = (
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("group", c_int32),
        ("num_places", c_int32),
        ("place", c_int32),
        ("balance", c_void_p),
        ("values_are_keys", c_int32),
    )


class WeightRecord(ctypes.Structure):
    """C struct: a packed weight matrix (`PackedWeight` in native code)."""

    _fields_ = (
        ("type", c_int32),
        ("num_outputs", c_int64),
        ("num_inputs", c_int64),
        ("data", c_void_p),
        ("order", c_void_p),
    )


class MemoryRecord(ctypes.Structure):
    """C struct: a memory of rows for intermediate values, which ranks may share."""

    _fields_ = (("offset", c_int64), ("width", c_int32), ("num_rows", c_int32))


class BufferRecord(ctypes.Structure):
    """C struct: columns of a memory, for one intermediate value."""

    _fields_ = (("memory", c_int32), ("first_column", c_int32))


class TeamRecord(ctypes.Structure):
    """C struct: a team of ranks that gather values."""

    _fields_ = (
        ("first_rank", c_int32),
        ("size", c_int32),
        ("place", c_int32),
        ("barrier", c_int32),
        ("prepared_offset", c_int64),
        ("prepared_bytes", c_int64),
        ("tiles_offset", c_int64),
        ("tile_bytes", c_int64),
    )


class ChannelRecord(ctypes.Structure):
    """C struct: a channel by which one rank sends values to another."""

    _fields_ = (("offset", c_int64), ("peer", c_int32), ("number", c_int32))


# Arguments: context, ranks of the team, size of the team, input of this rank, output, and the
# number of input bytes of each rank.
AllGatherFunction = CFUNCTYPE(
    c_int32, c_void_p, POINTER(c_int32), c_int32, c_void_p, c_void_p, POINTER(c_int64)
)
# Arguments: context, the other rank, data, and number of bytes.
SendFunction = CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_int64)
ReceiveFunction = SendFunction


class LinkRecord(ctypes.Structure):
    """C struct: how ranks reach each other, by shared memory or functions.

    As in native/executor/link.h.
    """

    _fields_ = (
        ("context", c_void_p),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("shared", c_void_p),
        ("shared_bytes", c_int64),
        ("all_gather", AllGatherFunction),
        ("send", SendFunction),
        ("receive", ReceiveFunction),
    )


LINK_HEAD_BYTES = 65536  # at the beginning of shared memory: barriers and channels
CHANNEL_SLOTS = 4
MAX_TEAMS, MAX_CHANNELS = 255, 256


class PlanRecord(ctypes.Structure):
    """C struct: a lowered Program, with all tables to which its records refer."""

    _fields_ = (
        ("ops", POINTER(OpRecord)),
        ("weights", POINTER(WeightRecord)),
        ("vectors", POINTER(c_void_p)),
        ("ropes", POINTER(RopeRecord)),
        ("layers", POINTER(LayerRecord)),
        ("experts", POINTER(ExpertRecord)),
        ("memories", POINTER(MemoryRecord)),
        ("buffers", POINTER(BufferRecord)),
        ("teams", POINTER(TeamRecord)),
        ("team_ranks", POINTER(c_int32)),
        ("cuts", POINTER(c_int32)),
        ("channels", POINTER(ChannelRecord)),
        ("state_layers", POINTER(c_int64)),
        ("link", POINTER(LinkRecord)),
        ("num_ops", c_int32),
        ("num_weights", c_int32),
        ("num_vectors", c_int32),
        ("num_ropes", c_int32),
        ("num_layers", c_int32),
        ("num_groups", c_int32),
        ("num_experts", c_int32),
        ("num_memories", c_int32),
        ("num_buffers", c_int32),
        ("num_teams", c_int32),
        ("num_team_ranks", c_int32),
        ("num_cuts", c_int32),
        ("num_channels", c_int32),
        ("num_state_layers", c_int32),
        ("cache_format", c_int32),
        ("num_pages", c_int64),
        ("num_states", c_int64),
        ("page_size", c_int64),
        ("max_rows", c_int64),
        ("row_part", c_int32),
        ("num_row_parts", c_int32),
    )


class NodeRecord(ctypes.Structure):
    """C struct: a NUMA node and the number of threads on its cores, as in native/nodes.h."""

    _fields_ = (
        ("cores", POINTER(c_int32)),
        ("num_cores", c_int32),
        ("number", c_int32),
        ("num_threads", c_int32),
    )


# Elements of a step's arrays. A slice: consecutive rows of one request, all prompt or all generated
# rows. A store: a row that is also stored in the pages of another table. A copy: pages to copy.
# A state: the slots of a slice's recurrent states, before its first row and after its last, unless
# the step has a slot for the state after each row (`row_states`).
SLICE = np.dtype([(name, np.int32) for name in ("row", "num_rows", "position", "table")])
STORE = np.dtype([(name, np.int32) for name in ("row", "table")])
COPY = np.dtype([(name, np.int32) for name in ("source", "target")])
STATE = np.dtype([(name, np.int32) for name in ("read", "write")])


class StepRecord(ctypes.Structure):
    """C struct: input and output of a step, as addresses of arrays that the caller keeps alive."""

    _fields_ = (
        ("tokens", c_void_p),
        ("slices", c_void_p),
        ("page_tables", c_void_p),
        ("sampled_rows", c_void_p),
        ("only_best", c_void_p),
        ("samples", c_void_p),
        ("results", c_void_p),
        ("logits", c_void_p),
        ("taps", POINTER(c_void_p)),
        ("external", c_void_p),
        ("stores", c_void_p),
        ("copies", c_void_p),
        ("states", c_void_p),
        ("row_states", c_void_p),
        ("table_stride", c_int64),
        ("num_rows", c_int32),
        ("num_generated", c_int32),
        ("num_slices", c_int32),
        ("num_sampled", c_int32),
        ("num_stores", c_int32),
        ("num_copies", c_int32),
        ("elapsed_s", c_double),
        ("kernel_s", c_double),
        ("collective_s", c_double),
    )


# In the order of `ts_record_size`.
RECORD_SIZES = (
    ctypes.sizeof(OpRecord),
    ctypes.sizeof(RopeRecord),
    ctypes.sizeof(LayerRecord),
    ctypes.sizeof(PlanRecord),
    SLICE.itemsize,
    ctypes.sizeof(StepRecord),
    ctypes.sizeof(WeightRecord),
    STORE.itemsize,
    COPY.itemsize,
    ctypes.sizeof(NodeRecord),
    ROW.itemsize,
    RESULT.itemsize,
    ctypes.sizeof(LinkRecord),
    LINK_HEAD_BYTES,
    STATE.itemsize,
)
