// Exact integer dot products of a sub-block: 16 outputs of packed quants x rows of activations.
//
// Every level computes the same integers: sum of (code - offset) * q, where a format with a table
// looks its codes up first. All partial sums fit in int32. A level defines
//   store_planes<Planes>(q, row), store_pairs(q, row) or both: lays 32 quantized numbers into a
//   row's bytes, for types that has_planes() names or for others, Codes<T>, load_codes<T>(quants):
//   a block's codes, as far as it pays to unpack them for all rows, dot_sub<T, R>(codes, block,
//   row, sub, sums): sub-block `sub` x rows [row, row + R).
// NEON goes by four outputs instead: PartCodes<T>, load_part<T>(quants, sub) and
//   dot_row<T, Planes>(codes, row, sub, start).
#pragma once

#include <cstdint>

#include "linear/layout.h"

namespace ts {

template <int Planes>
void store_planes(const int32_t* q, uint8_t* row);
void store_pairs(const int32_t* q, uint8_t* row);

/// The rows' bytes of a block, at an address of which the compiler knows nothing: else GCC keeps a
/// pointer for each row, or broadcasts for later use, and moves all these in and out of its few
/// registers.
template <int Planes>
inline const uint8_t* row_bytes(const PanelBlock<Planes>& block, int row) {
  const uint8_t* bytes = block.rows[row];
  asm("" : "+r"(bytes));
  return bytes;
}

/// The correction for each 1 of offset, for rows from `row` on.
template <WeightType T, int Planes>
inline const int32_t* minus_sums(const PanelBlock<Planes>& block, int row, int sub) {
  return block.minus_sum[sum_index(block_format(T).num_subs, sub)] + row;
}

/// The offset's part of a row's sums. It may wrap: kernels for several rows also compute rows that
/// were not prepared, and drop their sums, which can have any value.
inline int32_t offset_part(int offset, int32_t minus_sum) {
  return static_cast<int32_t>(static_cast<uint32_t>(offset) * static_cast<uint32_t>(minus_sum));
}

/// Bits to shift by instead of multiplying with a power of two.
constexpr int shift_of(int power) { return power <= 1 ? 0 : 1 + shift_of(power / 2); }

}  // namespace ts

#if TS_LEVEL >= 1
#include "linear/quantize_avx2.h"
#endif
#if TS_LEVEL >= 2
#include "linear/dot_avx512.h"
#elif TS_LEVEL == 1
#include "linear/dot_avx2.h"
#elif defined(__SSE2__)
#include "linear/dot_pairs.h"
#elif defined(__aarch64__)
#include "linear/dot_neon.h"
#else
#include "linear/dot_plain.h"
#endif
