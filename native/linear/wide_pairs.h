// Four rows against an unpacked group on AVX2, as pairs of int16.
//
// A multiply of bytes takes twice as many products, but only of one plane, and its sums must be
// widened: once weights are unpacked for many rows, int16 needs fewer instructions for 15 bits.
#pragma once

#include "linear/wide_block.h"

#if TS_LEVEL == 1

#include <cstring>

namespace ts {

/// Makes two planes of a row into the int16 that `store_pairs` would have laid there.
inline void pairs_from_planes(const uint8_t* planes, uint8_t* pairs) {
  const __m256i high = load_pairs(planes);
  const __m256i low = load_pairs(planes + kBlockSize);
  const __m256i upper = _mm256_set1_epi16(-256);
  const __m256i even = _mm256_add_epi16(_mm256_srai_epi16(_mm256_slli_epi16(high, 8), 1),
                                        _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8));
  const __m256i odd = _mm256_add_epi16(_mm256_srai_epi16(_mm256_and_si256(high, upper), 1),
                                       _mm256_srai_epi16(low, 8));
  const __m256i first = _mm256_unpacklo_epi32(even, odd);
  const __m256i second = _mm256_unpackhi_epi32(even, odd);
  auto* out = reinterpret_cast<__m256i*>(pairs);
  _mm256_store_si256(out, _mm256_permute2x128_si256(first, second, 0x20));
  _mm256_store_si256(out + 1, _mm256_permute2x128_si256(first, second, 0x31));
}

/// Copies blocks of a panel, with the planes of its first `num_rows` rows made into pairs.
inline void copy_as_pairs(const PanelBlock<2>* from, int64_t num_blocks, int num_rows,
                          PanelBlock<2>* to) {
  for (int64_t index = 0; index < num_blocks; ++index) {
    for (int row = 0; row < num_rows; ++row) {
      pairs_from_planes(from[index].rows[row], to[index].rows[row]);
    }
    // Scales and sums are what follows the rows.
    std::memcpy(reinterpret_cast<uint8_t*>(to + index) + sizeof from->rows,
                reinterpret_cast<const uint8_t*>(from + index) + sizeof from->rows,
                sizeof *from - sizeof from->rows);
  }
}

/// sums = a sub-block's pairs of a group x four rows.
template <int NumSubs>
TS_INLINE void dot_wide(const WideBlock<NumSubs, 1>& block, const uint8_t* bytes, int sub,
                        Integers sums[kWideRows]) {
  constexpr int count = kWideLines / NumSubs;
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    const int line = sub * count + i;
    const __m256i pairs[2] = {load_pairs(block.lines[line][0]),
                              load_pairs(block.lines[line][0] + 32)};
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      int32_t two;
      std::memcpy(&two, bytes + 2 * kBlockSize * r + 4 * line, sizeof two);
      const __m256i activations = splat(two);
      TS_UNROLL
      for (int part = 0; part < 2; ++part) {
        __m256i& sum = sums[r].v[part];
        const __m256i product = multiply_pairs(pairs[part], activations);
        sum = i == 0 ? product : add(sum, product);
        asm("" : "+x"(sum));  // GCC would add the products as a tree, and spill them all
      }
    }
  }
}

/// Adds one sub-block's part to the sums of four rows.
template <int R, int NumSubs, bool HasMinimum, int G>
TS_INLINE void add_wide_sub(const WideBlock<NumSubs, G>& block, const PanelBlock<2>& panel, int row,
                            int sub, Lanes sums[R][G]) {
  static_assert(R == kWideRows && G == 1);
  Integers dots[kWideRows];
  dot_wide<NumSubs>(block, row_bytes(panel, row), sub, dots);
  const float* scaled_sum = panel.scaled_sum[sum_index(NumSubs, sub)] + row;
  const Lanes scale = load_lanes(block.scale[sub][0]);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const Lanes factor = multiply(scale, broadcast(panel.scale[row + r]));
    sums[r][0] = multiply_add(to_lanes(dots[r]), factor, sums[r][0]);
    if constexpr (HasMinimum) {
      const Lanes minimum = load_lanes(block.minimum[sub][0]);
      sums[r][0] = multiply_add(minimum, broadcast(scaled_sum[r]), sums[r][0]);
    }
  }
}

}  // namespace ts

#endif
