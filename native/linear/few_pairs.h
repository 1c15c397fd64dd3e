// Up to four rows against packed codes on AVX2, as pairs of int16: the codes are unpacked as they
// pass, for all rows and both parts of the outputs at once. Four rows' sums fill the registers,
// next to two vectors of codes, a number of a row and its product.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL == 1

#include <cstring>
#include <type_traits>

#include "linear/dot.h"
#include "linear/dot_pairs.h"
#include "linear/kernels.h"
#include "linear/lanes.h"
#include "linear/scales.h"

namespace ts {

/// Fewer rows are better met as bytes of two planes (measured, docs/development/kernels/avx2.md),
/// if there are any.
template <WeightType T>
constexpr int fewest_pair_rows() {
  return !has_planes(T) ? 1 : block_format(T).num_subs == 2 ? 2 : 3;
}

/// A quad of codes of 16 outputs, which are pairs where they lie but for a shift and a mask.
template <WeightType T>
struct PackedQuad {
  const uint8_t* quants;
  int quad;

  TS_INLINE PackedQuad(const uint8_t* packed, int index) : quants(packed), quad(index) {}

  TS_INLINE __m256i pairs(int part, int odd) const {
    return load_quad<T>(quants + 32 * part, quad, odd);
  }
};

/// The same where it pays to make them bytes first: two pairs are then a mask and a shift away.
template <WeightType T>
struct ByteQuad {
  __m256i bytes[2];

  TS_INLINE ByteQuad(const uint8_t* packed, int index)
      : bytes{load_byte_quad<T>(packed, index, 0), load_byte_quad<T>(packed, index, 1)} {}

  TS_INLINE __m256i pairs(int part, int odd) const { return pairs_of(bytes[part], odd); }
};

/// The same from a buffer of bytes: with two sub-blocks, unpacking would push sums out of the
/// registers.
struct BufferedQuad {
  __m256i bytes[2];

  TS_INLINE BufferedQuad(const uint8_t* buffer, int index)
      : bytes{load_pairs(buffer + 64 * index), load_pairs(buffer + 64 * index + 32)} {}

  TS_INLINE __m256i pairs(int part, int odd) const { return pairs_of(bytes[part], odd); }
};

/// Makes a block's codes the bytes that a BufferedQuad reads.
template <WeightType T>
TS_INLINE void unpack_to_bytes(const uint8_t* quants, uint8_t* buffer) {
  TS_UNROLL
  for (int quad = 0; quad < kQuads; ++quad) {
    const ByteQuad<T> codes(quants, quad);
    TS_UNROLL
    for (int part = 0; part < 2; ++part) {
      _mm256_store_si256(reinterpret_cast<__m256i*>(buffer + 64 * quad) + part, codes.bytes[part]);
    }
  }
  asm("" : "+r"(buffer) : : "memory");
}

/// Which of the three ways a format goes (measured, docs/development/kernels/avx2.md).
template <WeightType T>
constexpr bool is_buffered() {
  return block_format(T).num_subs == 2;
}

template <WeightType T>
constexpr bool is_met_packed() {
  return !is_buffered<T>() && block_format(T).num_bits() == 4 && !block_format(T).has_table();
}

template <WeightType T>
using Quad = std::conditional_t<is_buffered<T>(), BufferedQuad,
                                std::conditional_t<is_met_packed<T>(), PackedQuad<T>, ByteQuad<T>>>;

/// sums = a sub-block's codes, packed or in the buffer, x R rows of pairs, from the offset's part
/// on.
template <WeightType T, int R>
TS_INLINE void dot_few(const uint8_t* codes, const PanelBlock<2>& block, int row, int sub,
                       Integers sums[R]) {
  constexpr int count = block_format(T).quads_per_sub();
  const uint8_t* bytes = row_bytes(block, row) + 8 * sub * count;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    sums[r].v[0] = sums[r].v[1] = start_of<T>(block, row + r, sub);
  }
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    asm("" : "+r"(codes));  // GCC would unpack all that a byte holds at once, and spill it
    const Quad<T> quad(codes, sub * count + i);
    TS_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const __m256i pairs[2] = {quad.pairs(0, odd), quad.pairs(1, odd)};
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        int32_t two;
        std::memcpy(&two, bytes + 2 * kBlockSize * r + 8 * i + 4 * odd, sizeof two);
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
}

/// R rows of a panel of pairs, from `row` on, against a group.
template <WeightType T, int R>
void multiply_few(const uint8_t* group, const PanelBlock<2>* panel, int row, int64_t num_blocks,
                  Lanes out[R]) {
  constexpr BlockFormat format = block_format(T);
  alignas(64) uint8_t buffer[64 * kQuads];
  ScaleReader<T> reader;
  Lanes sums[R];
  TS_UNROLL
  for (int r = 0; r < R; ++r) sums[r] = zero_lanes();
  for (int64_t index = 0; index < num_blocks; ++index) {
    const PanelBlock<2>& block = panel[index];
    fetch_weights<format.block_bytes(), R>(group + index * format.block_bytes());
    reader.enter(group, index);
    const uint8_t* codes = group + format.quant_offset(index);
    if constexpr (is_buffered<T>()) {
      unpack_to_bytes<T>(codes, buffer);
      codes = buffer;
    }
    TS_UNROLL
    for (int sub = 0; sub < format.num_subs; ++sub) {
      Integers dots[R];
      dot_few<T, R>(codes, block, row, sub, dots);
      if constexpr (format.has_zero) {
        const int32_t* minus_sum = minus_sums<T>(block, row, sub);
        TS_UNROLL
        for (int r = 0; r < R; ++r) dots[r] = add_multiple(dots[r], reader.zeros, minus_sum[r]);
      }
      const float* row_scales = block.scale + row;
      asm("" : "+r"(row_scales), "+x"(dots[R - 1].v[1]));  // or GCC would load them before
      Lanes scale;
      Lanes minimum;
      reader.read(sub, &scale, &minimum);
      TS_UNROLL
      for (int r = 0; r < R; ++r) {
        const Lanes factor = multiply(scale, broadcast(row_scales[r]));
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

}  // namespace ts

#endif
