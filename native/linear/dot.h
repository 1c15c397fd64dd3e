// Exact integer dot products of one 32-block: 16 outputs of packed quants x rows of activations.
//
// Every level computes the same integers: sum of w * q, where w is the signed weight of Q4_0 and
// Q8_0 and the unsigned nibble of Q4_1. All partial sums fit in int32.
#pragma once

#include <cstdint>

#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

/// The rows' bytes of a block, at an address of which the compiler knows nothing: else GCC keeps a
/// pointer for each row, or broadcasts for later use, and moves all these in and out of its few
/// registers.
inline const uint8_t* row_bytes(const PanelBlock& block, int row) {
  const uint8_t* bytes = block.rows[row];
  asm("" : "+r"(bytes));
  return bytes;
}

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

#elif TS_LEVEL == 1 || defined(__SSE2__)

// A row's 64 bytes are int16; in each quad inputs 0 2 1 3, because a shift of the packed bytes
// yields the pairs (0, 2) and (1, 3). One multiply of int16 pairs costs as much as a multiply of
// bytes for each of two planes, and cannot saturate. SSE2, which every x86-64 has, does the same
// as AVX2 in halves.

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

#if TS_LEVEL == 1

using Pairs = __m256i;
inline Pairs load_pairs(const uint8_t* p) {
  return _mm256_load_si256(reinterpret_cast<const Pairs*>(p));
}
inline Pairs splat(int32_t value) { return _mm256_set1_epi32(value); }
inline Pairs mask_pairs(Pairs a, int mask) {
  return _mm256_and_si256(a, _mm256_set1_epi16(static_cast<int16_t>(mask)));
}
inline Pairs shift_right(Pairs a, int bits) { return _mm256_srli_epi16(a, bits); }
inline Pairs add(Pairs a, Pairs b) { return _mm256_add_epi32(a, b); }
inline Pairs multiply_pairs(Pairs a, Pairs b) { return _mm256_madd_epi16(a, b); }

#else

using Pairs = __m128i;
inline Pairs load_pairs(const uint8_t* p) {
  return _mm_load_si128(reinterpret_cast<const Pairs*>(p));
}
inline Pairs splat(int32_t value) { return _mm_set1_epi32(value); }
inline Pairs mask_pairs(Pairs a, int mask) {
  return _mm_and_si128(a, _mm_set1_epi16(static_cast<int16_t>(mask)));
}
inline Pairs shift_right(Pairs a, int bits) { return _mm_srli_epi16(a, bits); }
inline Pairs add(Pairs a, Pairs b) { return _mm_add_epi32(a, b); }
inline Pairs multiply_pairs(Pairs a, Pairs b) { return _mm_madd_epi16(a, b); }

#endif

constexpr int kParts = 64 / sizeof(Pairs);  // of 16 outputs

/// sums[r] += pairs x the given dword (two int16) of each row.
template <int R>
inline void dot_accumulate(Pairs sums[R], Pairs pairs, const uint8_t* bytes, int dword) {
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    int32_t activations;
    std::memcpy(&activations, bytes + 64 * r + 4 * dword, sizeof activations);
    sums[r] = add(sums[r], multiply_pairs(pairs, splat(activations)));
    asm("" : "+x"(sums[r]));  // GCC would add the products as a tree, and spill them all
  }
}

/// One part of the outputs, over all 32 inputs.
template <WeightType T, int R>
inline void dot_part(const uint8_t* quants, const uint8_t* bytes, Pairs sums[R]) {
  TS_UNROLL
  for (int i = 0; i < (T == WeightType::Q8_0 ? 8 : 4); ++i) {
    const Pairs packed = load_pairs(quants + 64 * i);
    if constexpr (T == WeightType::Q8_0) {
      dot_accumulate<R>(sums, mask_pairs(packed, 255), bytes, 2 * i);
      dot_accumulate<R>(sums, shift_right(packed, 8), bytes, 2 * i + 1);
    } else {
      dot_accumulate<R>(sums, mask_pairs(packed, 15), bytes, 2 * i);
      dot_accumulate<R>(sums, mask_pairs(shift_right(packed, 8), 15), bytes, 2 * i + 1);
      dot_accumulate<R>(sums, mask_pairs(shift_right(packed, 4), 15), bytes, 2 * i + 8);
      dot_accumulate<R>(sums, shift_right(packed, 12), bytes, 2 * i + 9);
    }
  }
}

/// What a row's sum starts from: takes back what was added to the weights.
template <WeightType T>
inline int32_t dot_start(const PanelBlock& block, int row) {
  if (T == WeightType::Q8_0) return block.minus_sum[row] * 128;
  return T == WeightType::Q4_0 ? block.minus_eight_sum[row] : 0;
}

template <WeightType T, int R>
inline void dot_block(const uint8_t* quants, const PanelBlock& block, int row, Integers sums[R]) {
  TS_UNROLL
  for (int part = 0; part < kParts; ++part) {
    Pairs totals[R];
    TS_UNROLL
    for (int r = 0; r < R; ++r) totals[r] = splat(dot_start<T>(block, row + r));
    dot_part<T, R>(quants + part * sizeof(Pairs), row_bytes(block, row), totals);
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      std::memcpy(reinterpret_cast<uint8_t*>(&sums[r]) + part * sizeof(Pairs), &totals[r],
                  sizeof(Pairs));
    }
  }
}

#else

// A row's 64 bytes are 32 x int16, in order.

inline void store_activations(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) values[i] = static_cast<int16_t>(q[i]);
  std::memcpy(row, values, sizeof values);
}

/// Quants of four inputs x 16 outputs, as numbers that the format's own sums can use.
template <WeightType T>
inline void load_quad(const uint8_t* quants, int quad, int16_t values[4][kGroupSize]) {
  constexpr bool bytes = T == WeightType::Q8_0;
  constexpr int offset = bytes ? 128 : T == WeightType::Q4_0 ? 8 : 0;
  uint32_t packed[kGroupSize];
  std::memcpy(packed, quants + 64 * (bytes ? quad : quad % 4), sizeof packed);
  const int first_shift = !bytes && quad >= 4 ? 4 : 0;
  for (int i = 0; i < 4; ++i) {
    const int shift = first_shift + 8 * i;
    for (int o = 0; o < kGroupSize; ++o) {
      values[i][o] = static_cast<int16_t>(((packed[o] >> shift) & (bytes ? 255 : 15)) - offset);
    }
  }
}

template <WeightType T, int R>
inline void dot_block(const uint8_t* quants, const PanelBlock& block, int row, Integers sums[R]) {
  int16_t activations[R][kBlockSize];
  for (int r = 0; r < R; ++r) {
    std::memcpy(activations[r], block.rows[row + r], sizeof activations[r]);
    sums[r] = Integers{};
  }
  for (int quad = 0; quad < kBlockSize / 4; ++quad) {
    int16_t weights[4][kGroupSize];
    load_quad<T>(quants, quad, weights);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < 4; ++i) {
        const int16_t activation = activations[r][4 * quad + i];
        for (int o = 0; o < kGroupSize; ++o) sums[r].v[o] += weights[i][o] * activation;
      }
    }
  }
}

#endif

}  // namespace ts
