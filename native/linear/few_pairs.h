// Four rows against packed codes of 4 bits on AVX2, as pairs of int16: the codes are unpacked as
// they pass, for all rows and both parts of the outputs at once.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL == 1

#include <cstring>

#include "linear/dot.h"
#include "linear/dot_pairs.h"
#include "linear/kernels.h"
#include "linear/lanes.h"
#include "linear/scales.h"

namespace ts {

/// Whether four rows meet the codes as pairs: codes of 4 bits, whose unpacking each time takes less
/// than what bytes of two planes take more (measured, docs/adr/0029).
template <WeightType T>
constexpr bool few_as_pairs() {
  if constexpr (!is_block_format(T)) return false;
  if constexpr (is_block_format(T)) {
    return has_planes(T) && block_format(T).num_subs == 1 && block_format(T).num_bits() == 4;
  }
}

/// Rows whose sums fill the registers, next to two vectors of codes.
constexpr int kFewRows = 4;

/// sums = a block's codes x four rows of pairs, from the offset's part on.
template <WeightType T>
TS_INLINE void dot_few(const uint8_t* quants, const PanelBlock<2>& block, int row,
                       Integers sums[kFewRows]) {
  constexpr BlockFormat format = block_format(T);
  const int32_t* minus_sum = minus_sums<T>(block, row, 0);
  const uint8_t* bytes = row_bytes(block, row);
  TS_UNROLL
  for (int r = 0; r < kFewRows; ++r) {
    sums[r].v[0] = sums[r].v[1] = splat(offset_part(format.offset, minus_sum[r]));
  }
  TS_UNROLL
  for (int i = 0; i < 2 * kQuads; ++i) {
    const __m256i pairs[2] = {load_quad<T>(quants, i / 2, i % 2),
                              load_quad<T>(quants + 32, i / 2, i % 2)};
    TS_UNROLL
    for (int r = 0; r < kFewRows; ++r) {
      int32_t two;
      std::memcpy(&two, bytes + 2 * kBlockSize * r + 4 * i, sizeof two);
      const __m256i activations = splat(two);
      TS_UNROLL
      for (int part = 0; part < 2; ++part) {
        __m256i& sum = sums[r].v[part];
        sum = add(sum, multiply_pairs(pairs[part], activations));
        asm("" : "+x"(sum));  // GCC would add the products as a tree, and spill them all
      }
    }
  }
}

/// Four rows of a panel of pairs, from `row` on, against a group.
template <WeightType T>
void multiply_few(const uint8_t* group, const PanelBlock<2>* panel, int row, int64_t num_blocks,
                  Lanes out[kFewRows]) {
  constexpr BlockFormat format = block_format(T);
  static_assert(format.num_subs == 1);
  ScaleReader<T> reader;
  Lanes sums[kFewRows];
  TS_UNROLL
  for (int r = 0; r < kFewRows; ++r) sums[r] = zero_lanes();
  for (int64_t index = 0; index < num_blocks; ++index) {
    const PanelBlock<2>& block = panel[index];
    prefetch<format.block_bytes()>(group + index * format.block_bytes());
    Integers dots[kFewRows];
    dot_few<T>(group + format.quant_offset(index), block, row, dots);
    reader.enter(group, index);
    Lanes scale;
    Lanes minimum;
    reader.read(0, &scale, &minimum);
    TS_UNROLL
    for (int r = 0; r < kFewRows; ++r) {
      const Lanes factor = multiply(scale, broadcast(block.scale[row + r]));
      sums[r] = multiply_add(to_lanes(dots[r]), factor, sums[r]);
    }
    if constexpr (format.has_minimum) {
      const float* scaled_sum = block.scaled_sum[sum_index(1, 0)] + row;
      TS_UNROLL
      for (int r = 0; r < kFewRows; ++r) {
        sums[r] = multiply_add(minimum, broadcast(scaled_sum[r]), sums[r]);
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < kFewRows; ++r) out[r] = sums[r];
}

}  // namespace ts

#endif
