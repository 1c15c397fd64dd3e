// Products of one group of 16 outputs with up to eight rows: one kernel per weight type.
#pragma once

#include <cstdint>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"
#include "linear/scales.h"
#include "linear/tuning.h"

namespace ts {

/// How far ahead of the loads the packed weights are fetched, into the second-level or the
/// first-level cache (measured, docs/development/kernels/avx2.md, avx512.md).
constexpr bool kFetchesFar = TS_LEVEL >= 1;
constexpr int64_t kAheadBytes = kFetchesFar ? 12288 : 2560;
constexpr int64_t kNearAheadBytes = 8192;

/// Most rows that a kernel takes.
template <WeightType T>
constexpr int max_kernel_rows() {
  if (TS_LEVEL >= 2) return 8;
#if defined(__aarch64__)
  return is_block_format(T) ? 8 : 2;
#endif
  // Codes in two planes take long to unpack.
  if (TS_LEVEL == 1 && has_planes(T) && block_format(T).high_bits != 0) return 8;
  if (is_block_format(T)) return 4;
  return TS_LEVEL == 1 ? 2 : 1;
}

/// Whether there is a kernel for R rows: for the powers of two, and on AVX2, where arithmetic is
/// the limit, for three rows of one plane. There, codes without planes are met as pairs
/// (few_pairs.h).
template <WeightType T, int R, int Planes>
constexpr bool has_kernel() {
  if (TS_LEVEL == 1 && is_block_format(T) && !has_planes(T)) return false;
  if (R == 3) return TS_LEVEL == 1 && Planes == 1;
  return (R & (R - 1)) == 0 && R <= max_kernel_rows<T>();
}

/// Prefetches that many bytes of packed weights, which are read a while after those at `p` and meet
/// R rows. Only one or two rows are faster with weights in the first-level cache.
template <int64_t Bytes, int R>
inline void fetch_weights(const uint8_t* p) {
  if (TS_LEVEL == 2 && R <= 2 && tuning().fetches_weights_near) {
    TS_UNROLL
    for (int64_t offset = 0; offset < Bytes; offset += 64) {
      fetch(p + kNearAheadBytes + offset, false);
    }
    return;
  }
  TS_UNROLL
  for (int64_t offset = 0; offset < Bytes; offset += 64) {
    fetch(p + kAheadBytes + offset, kFetchesFar);
  }
}

/// Blocks of a panel that meet all of the weights, in order.
struct EveryBlock {
  static constexpr bool is_every = true;
  TS_INLINE int64_t operator()(int64_t index) const { return index; }
};

/// Blocks of a panel that meet some of the weights: those at a row's places.
struct FineBlocks {
  static constexpr bool is_every = false;
  const FinePlaces* places;
  int row;

  TS_INLINE int64_t operator()(int64_t index) const { return places[index][row]; }
};

#if !defined(__aarch64__)

/// Block formats. `panel` holds 8 rows; rows [row, row + R) of them are computed. `place_of(i)` is
/// the block of weights that the panel's block i meets.
template <WeightType T, int R, int Planes, typename Places>
__attribute__((noinline)) void multiply_blocks(const uint8_t* group,
                                               const PanelBlock<Planes>* panel, int row,
                                               int64_t num_blocks, Places place_of, Lanes out[R]) {
  constexpr BlockFormat format = block_format(T);
  ScaleReader<T> reader;
  Lanes sums[R];
  TS_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = zero_lanes();
  for (int64_t index = 0; index < num_blocks; ++index) {
    const PanelBlock<Planes>& block = panel[index];
    if constexpr (Places::is_every) {
      fetch_weights<format.block_bytes(), R>(group + index * format.block_bytes());
    }
    const int64_t place = place_of(index);
    const Codes<T> codes = load_codes<T>(group + format.quant_offset(place));
    reader.template enter<!Places::is_every>(group, place);
    TS_UNROLL
    for (int sub = 0; sub < format.num_subs; ++sub) {
      Integers dots[R];
      dot_sub<T, R>(codes, block, row, sub, dots);
      if constexpr (format.has_zero) {
        const int32_t* minus_sum = minus_sums<T>(block, row, sub);
        TS_UNROLL
        for (int r = 0; r < R; ++r) dots[r] = add_multiple(dots[r], reader.zeros, minus_sum[r]);
      }
      Lanes scale;
      Lanes minimum;
      reader.read(sub, &scale, &minimum);
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Lanes factor = multiply(scale, broadcast(block.scale[row + r]));
        sums[r] = multiply_add(to_lanes(dots[r]), factor, sums[r]);
      }
      if constexpr (format.has_minimum) {
        const float* scaled_sum = block.scaled_sum[sum_index(format.num_subs, sub)] + row;
        TS_UNROLL
        for (int r = 0; r < R; ++r) {
          sums[r] = multiply_add(minimum, broadcast(scaled_sum[r]), sums[r]);
        }
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r) out[r] = sums[r];
}

#endif

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
      fetch_weights<pair_bytes, R>(group);
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
