// Matrix products y = x W^T over packed weights: the interface of one instruction-set level.
//
// A weight matrix is packed once (`pack_groups`), the rows of x are prepared once for all the
// weights that read them (`prepare_rows`), and `multiply` then computes any range of outputs.
// Nothing here starts threads: the caller splits rows (prepare) and groups of outputs (multiply)
// among its own. A row's result depends on that row, the weight and the level alone: not on the
// other rows, on how many there are, nor on how the groups were split (bit for bit).
//
// Quantized weights meet activations of 15 bits: per 32 inputs, scale = amax / 16256 and
// q = round(x / scale), so that integer dot products are exact in int32 over the 16 or 32 inputs
// that share a scale of the weight; then one float multiply-add for each of these sub-blocks (and
// one more for its minimum), in their order. A block whose amax is below 2^-100 counts as zero; one
// with an infinity or a NaN gives NaN. Coarse rows have activations of 8 bits instead, scale = amax
// / 127. Mixed rows are coarse, and what they lack to 15 bits in the eighth of blocks with the
// largest amax is a second product, added to the first: against codes of up to 5 bits in one
// sub-block and without a table; other quantized weights meet 15 bits. F32, F16 and BF16 weights
// meet float32 activations, whatever the kind of row: even and odd inputs are summed apart, in
// order, then added. The AMX level computes prompt rows (not of F32 weights) with bfloat16 tiles
// instead: weights and activations are rounded to bfloat16, for precise rows to the sum of two, of
// which the product of the two small terms is left out.
#pragma once

#include <cstdint>

namespace ts {

/// The numbers are GGUF's; from 256 on ours: groups of 16, 32 or 128 inputs that share a float32
/// scale, with a zero point (Z) or without, of integers or of E2M1 floats; and what GGUF's codebook
/// formats become, with scales of 16 (G16) or 32 inputs.
enum class WeightType : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  BF16 = 30,
  TQ2_0 = 35,
  Int4G32 = 256,
  Int4G128 = 257,
  Int4G32Z = 258,
  Int4G128Z = 259,
  Int8G32 = 260,
  Int8G128 = 261,
  E2M1G16 = 262,
  E2M1G32 = 263,
  IQ1G16 = 264,
  IQ2G16 = 265,
  IQ2G32 = 266,
  IQ3XXS = 267,
  IQ3S = 268,
};

/// What a row of activations is; it alone chooses the arithmetic.
enum class RowKind : int32_t {
  Generated = 0,
  Prompt = 1,
  PrecisePrompt = 2,  // a prompt's, where small differences have large consequences
  Coarse = 3,         // any, with activations of 8 bits where weights are quantized
  Mixed = 4,          // any, with 15 where they are large, and 8 elsewhere
};

/// Outputs come in groups of this many; the last group is padded with zeros.
constexpr int64_t kGroupSize = 16;

/// Many prompt rows are multiplied fastest with a multiple of this many groups at once.
#if TS_LEVEL == 3
constexpr int64_t kGroupsTogether = 2;  // a tile each, side by side
#elif TS_LEVEL == 2
constexpr int64_t kGroupsTogether = 3;  // linear/wide.h
#else
constexpr int64_t kGroupsTogether = 1;
#endif

/// A packed matrix (num_outputs, num_inputs). `data` is aligned to 64 bytes and not owned. With an
/// `order` (num_inputs, not owned) column i belongs to the input order[i]; only who prepares its
/// rows minds that.
struct PackedWeight {
  WeightType type;
  int64_t num_outputs;
  int64_t num_inputs;
  const uint8_t* data;
  const int32_t* order;
};

constexpr int64_t num_groups(int64_t num_outputs) {
  return (num_outputs + kGroupSize - 1) / kGroupSize;
}

/// Bytes of a packed matrix (a multiple of 64), or -1 for an unknown type, a size below 1, or a
/// block format whose num_inputs is not a multiple of its block in GGUF (32 or 256; of groups 32).
int64_t packed_bytes(WeightType type, int64_t num_outputs, int64_t num_inputs);

/// Packs groups [group_begin, group_end) of the matrix. `source` is the whole matrix in GGUF's
/// row-major layout (any alignment), `packed` the whole destination (64-byte aligned).
void pack_groups(WeightType type, int64_t num_outputs, int64_t num_inputs, const void* source,
                 void* packed, int64_t group_begin, int64_t group_end);

/// Writes one row's num_inputs weights, dequantized exactly as the format defines.
void unpack_row(const PackedWeight& weight, int64_t row, float* out);

/// Bytes of a prepared block of rows. The layout of a row does not depend on num_rows.
int64_t prepared_bytes(WeightType type, RowKind kind, int64_t num_inputs, int64_t num_rows);

/// Prepares rows [row_begin, row_end) of x (row 0 at `x`, rows x_stride floats apart) for weights
/// of the given type. `prepared` (64-byte aligned) is the whole block; different threads may
/// prepare different rows of it at the same time.
void prepare_rows(WeightType type, RowKind kind, const float* x, int64_t x_stride,
                  int64_t num_inputs, int64_t row_begin, int64_t row_end, void* prepared);

/// Whether rows of any kind prepared for a weight of type `a` serve one of type `b`;
/// `may_be_mixed` says whether that may be Mixed.
bool same_preparation(WeightType a, WeightType b, bool may_be_mixed);

/// Computes outputs of groups [group_begin, group_end) for all rows: out[row * out_stride + output]
/// is set, or added to (of mixed rows, one product after the other). `out` points at row 0, output
/// 0 of the whole result (any alignment); outputs of other groups are not touched.
void multiply(const PackedWeight& weight, RowKind kind, const void* prepared, int64_t num_rows,
              int64_t group_begin, int64_t group_end, float* out, int64_t out_stride,
              bool accumulate);

/// Asks the operating system for the tile registers: once, before threads are made. True if they
/// may be used; other levels have nothing to ask for and return true.
bool request_tiles();

/// Up to how many rows kernels of block formats compute as many as the next power of two, some of
/// them for nothing.
int rows_together();

/// "portable", "avx2", "avx512", "amx", "amx_emulated" or "neon_dotprod".
const char* level_name();

}  // namespace ts
