// Products of one group of 16 outputs with up to eight rows: one kernel per weight type.
#pragma once

#include <cstdint>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

/// How far ahead of the loads the packed weights are fetched (measured; see microbench).
constexpr int64_t kPrefetchBytes = 2560;

/// The row counts that kernels exist for are the powers of two up to this.
template <WeightType T>
constexpr int max_kernel_rows() {
  if (TS_LEVEL >= 2) return 8;
  if (is_block_format(T)) return 4;
  return TS_LEVEL == 1 ? 2 : 1;
}

template <int64_t Bytes>
inline void prefetch(const uint8_t* p) {
  TS_UNROLL
  for (int64_t offset = 0; offset < Bytes; offset += 64) {
    __builtin_prefetch(p + kPrefetchBytes + offset);
  }
}

/// Block formats. `panel` holds 8 rows; rows [row, row + R) of them are computed.
template <WeightType T, int R>
void multiply_blocks(const uint8_t* group, const PanelBlock* panel, int row, int64_t num_blocks,
                     Lanes out[R]) {
  Lanes sums[R];
  TS_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = zero_lanes();
  for (int64_t index = 0; index < num_blocks; ++index) {
    const PanelBlock& block = panel[index];
    const uint8_t* quants = group + quant_offset(T, index);
    const uint8_t* scales = group + scale_offset(T, index);
    prefetch<quant_bytes(T) + scale_bytes(T)>(quants);
    Integers dots[R];
    dot_block<T, R>(quants, block, row, dots);
    const Lanes scale = load_halves(scales);
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      const Lanes factor = multiply(scale, broadcast(block.scale[row + r]));
      sums[r] = multiply_add(to_lanes(dots[r]), factor, sums[r]);
    }
    if constexpr (T == WeightType::Q4_1) {
      const Lanes minimum = load_halves(scales + 32);
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        sums[r] = multiply_add(minimum, broadcast(block.scaled_sum[row + r]), sums[r]);
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r) out[r] = sums[r];
}

/// Loads the weights of two inputs.
template <WeightType T>
inline void load_pair(const uint8_t* p, Lanes* even, Lanes* odd) {
  if constexpr (T == WeightType::F32) {
    *even = load_lanes(reinterpret_cast<const float*>(p));
    *odd = load_lanes(reinterpret_cast<const float*>(p) + kGroupSize);
  } else if constexpr (T == WeightType::F16) {
    *even = load_halves(p);
    *odd = load_halves(p + 32);
  } else {
    load_bfloat16_pairs(p, even, odd);
  }
}

/// Float formats: even and odd inputs are summed apart, then added.
template <WeightType T, int R>
void multiply_floats(const uint8_t* group, const FloatBlock* panel, int row, int64_t num_lines,
                     Lanes out[R]) {
  constexpr int64_t pair_bytes = 2 * kGroupSize * element_bytes(T);
  Lanes even_sums[R];
  Lanes odd_sums[R];
  TS_UNROLL
  for (int r = 0; r < R; ++r) even_sums[r] = odd_sums[r] = zero_lanes();
  for (int64_t line = 0; line < num_lines; ++line) {
    for (int64_t i = 0; i < kFloatsPerLine; i += 2) {
      Lanes even;
      Lanes odd;
      prefetch<pair_bytes>(group);
      load_pair<T>(group, &even, &odd);
      group += pair_bytes;
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        const float* x = panel[line].rows[row + r] + i;
        even_sums[r] = multiply_add(even, broadcast(x[0]), even_sums[r]);
        odd_sums[r] = multiply_add(odd, broadcast(x[1]), odd_sums[r]);
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r) out[r] = add(even_sums[r], odd_sums[r]);
}

}  // namespace ts
