// Exact integer dot products of one 32-block: 16 outputs of packed quants x rows of activations.
//
// Every level computes the same integers: sum of w * q, where w is the signed weight of Q4_0 and
// Q8_0 and the unsigned nibble of Q4_1. All partial sums fit in int32.
#pragma once

#include <cstdint>

#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

#if TS_LEVEL >= 2

// A row's 64 bytes are two int8 planes, q = 128 hi + lo: 32 x hi in [-127, 127], 32 x lo.

inline void store_activations(const int32_t* q, uint8_t* row) {
  for (int i = 0; i < kBlockSize; ++i) {
    const int32_t high = (q[i] + 64) >> 7;
    row[i] = static_cast<uint8_t>(high);
    row[kBlockSize + i] = static_cast<uint8_t>(q[i] - high * 128);
  }
}

/// Eight vectors of unsigned bytes in VNNI order.
template <WeightType T>
inline void load_quads(const uint8_t* quants, __m512i quads[8]) {
  if constexpr (T == WeightType::Q8_0) {
    TS_UNROLL
    for (int i = 0; i < 8; ++i) quads[i] = _mm512_load_si512(quants + 64 * i);
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
    TS_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512i packed = _mm512_load_si512(quants + 64 * i);
      quads[i] = _mm512_and_si512(packed, mask);
      quads[i + 4] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    }
  }
}

/// sum += quads x one dword of four activations. GCC 12 would spend a register and an
/// instruction on the broadcast.
inline void dot_accumulate(__m512i* sum, __m512i quads, const uint8_t* activations) {
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(*sum)
      : "v"(quads), "m"(*reinterpret_cast<const uint32_t (*)[1]>(activations)));
}

/// The rows' bytes of a block, at an address that the compiler cannot tell from any other: else
/// GCC keeps one pointer a row, and moves them in and out of its few registers.
inline const uint8_t* row_bytes(const PanelBlock& block, int row) {
  const uint8_t* bytes = block.rows[row];
  asm("" : "+r"(bytes));
  return bytes;
}

/// What the sum of a row starts from before the high plane. For Q8_0, shifted left by 7, this is
/// the -128 S that takes back the 128 added to the weights.
template <WeightType T>
inline __m512i high_start(const int32_t* minus_sum) {
  return T == WeightType::Q8_0 ? _mm512_set1_epi32(*minus_sum) : _mm512_setzero_si512();
}

/// Ends a row's integer sum: takes back the 8 subtracted from Q4_0's nibbles.
template <WeightType T>
inline __m512i finish_dot(__m512i sum, const int32_t* minus_eight_sum) {
  return T == WeightType::Q4_0 ? _mm512_add_epi32(sum, _mm512_set1_epi32(*minus_eight_sum)) : sum;
}

/// Few rows: the planes in sums of their own, for shorter chains of dependent instructions.
template <WeightType T, int R>
inline void dot_block_apart(const __m512i quads[8], const PanelBlock& block, int row,
                            Integers sums[R]) {
  const uint8_t* bytes = row_bytes(block, row);
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    __m512i high = high_start<T>(&block.minus_sum[row + r]);
    __m512i low = _mm512_setzero_si512();
    TS_UNROLL
    for (int i = 0; i < 8; ++i) {
      dot_accumulate(&high, quads[i], bytes + 64 * r + 4 * i);
      dot_accumulate(&low, quads[i], bytes + 64 * r + kBlockSize + 4 * i);
    }
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    sums[r].v = finish_dot<T>(sum, &block.minus_eight_sum[row + r]);
  }
}

template <WeightType T, int R>
inline void dot_block(const uint8_t* quants, const PanelBlock& block, int row, Integers sums[R]) {
  __m512i quads[8];
  load_quads<T>(quants, quads);
  if constexpr (R <= 2) {
    dot_block_apart<T, R>(quads, block, row, sums);
    return;
  }
  const uint8_t* bytes = row_bytes(block, row);
  TS_UNROLL
  for (int r = 0; r < R; ++r) sums[r].v = high_start<T>(&block.minus_sum[row + r]);
  TS_UNROLL
  for (int i = 0; i < 8; ++i) {
    TS_UNROLL
    for (int r = 0; r < R; ++r) dot_accumulate(&sums[r].v, quads[i], bytes + 64 * r + 4 * i);
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r) sums[r].v = _mm512_slli_epi32(sums[r].v, 7);
  TS_UNROLL
  for (int i = 0; i < 8; ++i) {
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      dot_accumulate(&sums[r].v, quads[i], bytes + 64 * r + kBlockSize + 4 * i);
    }
  }
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    sums[r].v = finish_dot<T>(sums[r].v, &block.minus_eight_sum[row + r]);
  }
}

#elif TS_LEVEL == 1

// A row's 64 bytes are int16; in each quad inputs 0 2 1 3, because a shift of the packed bytes
// yields the pairs (0, 2) and (1, 3). One multiply of int16 pairs costs as much as a multiply of
// bytes for each of two planes, and cannot saturate.

inline void store_activations(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int quad = 0; quad < kBlockSize; quad += 4) {
    values[quad] = static_cast<int16_t>(q[quad]);
    values[quad + 1] = static_cast<int16_t>(q[quad + 2]);
    values[quad + 2] = static_cast<int16_t>(q[quad + 1]);
    values[quad + 3] = static_cast<int16_t>(q[quad + 3]);
  }
  std::memcpy(row, values, sizeof values);
}

/// sums[r] += pairs x the given dword (two int16) of each row, for 8 outputs.
template <int R>
inline void dot_accumulate(__m256i sums[R], __m256i pairs, const PanelBlock& block, int row,
                           int dword) {
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    int32_t activations;
    std::memcpy(&activations, block.rows[row + r] + 4 * dword, sizeof activations);
    const __m256i products = _mm256_madd_epi16(pairs, _mm256_set1_epi32(activations));
    sums[r] = _mm256_add_epi32(sums[r], products);
  }
}

template <WeightType T, int R>
inline void dot_half(const uint8_t* quants, const PanelBlock& block, int row, __m256i sums[R]) {
  TS_UNROLL
  for (int i = 0; i < (T == WeightType::Q8_0 ? 8 : 4); ++i) {
    const __m256i packed = _mm256_load_si256(reinterpret_cast<const __m256i*>(quants + 64 * i));
    if constexpr (T == WeightType::Q8_0) {
      const __m256i mask = _mm256_set1_epi16(255);
      dot_accumulate<R>(sums, _mm256_and_si256(packed, mask), block, row, 2 * i);
      dot_accumulate<R>(sums, _mm256_srli_epi16(packed, 8), block, row, 2 * i + 1);
    } else {
      const __m256i mask = _mm256_set1_epi16(15);
      const __m256i high = _mm256_srli_epi16(packed, 4);
      const __m256i odd = _mm256_srli_epi16(packed, 8);
      dot_accumulate<R>(sums, _mm256_and_si256(packed, mask), block, row, 2 * i);
      dot_accumulate<R>(sums, _mm256_and_si256(odd, mask), block, row, 2 * i + 1);
      dot_accumulate<R>(sums, _mm256_and_si256(high, mask), block, row, 2 * i + 8);
      dot_accumulate<R>(sums, _mm256_srli_epi16(packed, 12), block, row, 2 * i + 9);
    }
  }
}

template <WeightType T, int R>
inline void dot_block(const uint8_t* quants, const PanelBlock& block, int row, Integers sums[R]) {
  TS_UNROLL
  for (int half = 0; half < 2; ++half) {
    __m256i part[R];
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      part[r] = _mm256_setzero_si256();
      if constexpr (T == WeightType::Q8_0) {
        part[r] = _mm256_slli_epi32(_mm256_set1_epi32(block.minus_sum[row + r]), 7);
      } else if constexpr (T == WeightType::Q4_0) {
        part[r] = _mm256_set1_epi32(block.minus_eight_sum[row + r]);
      }
    }
    dot_half<T, R>(quants + 32 * half, block, row, part);
    TS_UNROLL
    for (int r = 0; r < R; ++r) sums[r].v[half] = part[r];
  }
}

#else

// A row's 64 bytes are 32 x int16, in order.

inline void store_activations(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) values[i] = static_cast<int16_t>(q[i]);
  std::memcpy(row, values, sizeof values);
}

/// Quants of input i: for 16 outputs, as numbers that the format's own sums can use.
template <WeightType T>
inline void load_input(const uint8_t* quants, int i, int16_t values[kGroupSize]) {
  constexpr bool bytes = T == WeightType::Q8_0;
  constexpr int offset = bytes ? 128 : T == WeightType::Q4_0 ? 8 : 0;
  const uint8_t* line = quants + 64 * (bytes ? i / 4 : i / 4 % 4) + i % 4;
  const int shift = !bytes && i >= 16 ? 4 : 0;
  const int mask = bytes ? 255 : 15;
  for (int o = 0; o < kGroupSize; ++o) {
    values[o] = static_cast<int16_t>(((line[4 * o] >> shift) & mask) - offset);
  }
}

template <WeightType T, int R>
inline void dot_block(const uint8_t* quants, const PanelBlock& block, int row, Integers sums[R]) {
  int16_t activations[R][kBlockSize];
  for (int r = 0; r < R; ++r) {
    std::memcpy(activations[r], block.rows[row + r], sizeof activations[r]);
    sums[r] = Integers{};
  }
  for (int i = 0; i < kBlockSize; ++i) {
    int16_t weights[kGroupSize];
    load_input<T>(quants, i, weights);
    for (int r = 0; r < R; ++r) {
      for (int o = 0; o < kGroupSize; ++o) sums[r].v[o] += weights[o] * activations[r][i];
    }
  }
}

#endif

}  // namespace ts
