// Pairs of int16, which cannot saturate: dot products on SSE2, which every x86-64 has, and what
// AVX2 shares with it (few_pairs.h, wide_pairs.h).
//
// A row's 64 bytes are int16; in each quad inputs 0 2 1 3, because a shift of the packed bytes
// yields the pairs (0, 2) and (1, 3).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/tables.h"

namespace ts {

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
inline Pairs shift_left(Pairs a, int bits) { return _mm256_slli_epi16(a, bits); }
inline Pairs combine(Pairs a, Pairs b) { return _mm256_or_si256(a, b); }
inline Pairs add(Pairs a, Pairs b) { return _mm256_add_epi32(a, b); }
inline Pairs multiply_pairs(Pairs a, Pairs b) { return _mm256_madd_epi16(a, b); }

#else

inline void store_pairs(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int quad = 0; quad < kBlockSize; quad += 4) {
    values[quad] = static_cast<int16_t>(q[quad]);
    values[quad + 1] = static_cast<int16_t>(q[quad + 2]);
    values[quad + 2] = static_cast<int16_t>(q[quad + 1]);
    values[quad + 3] = static_cast<int16_t>(q[quad + 3]);
  }
  std::memcpy(row, values, sizeof values);
}

using Pairs = __m128i;
inline Pairs load_pairs(const uint8_t* p) {
  return _mm_load_si128(reinterpret_cast<const Pairs*>(p));
}
inline Pairs splat(int32_t value) { return _mm_set1_epi32(value); }
inline Pairs mask_pairs(Pairs a, int mask) {
  return _mm_and_si128(a, _mm_set1_epi16(static_cast<int16_t>(mask)));
}
inline Pairs shift_right(Pairs a, int bits) { return _mm_srli_epi16(a, bits); }
inline Pairs shift_left(Pairs a, int bits) { return _mm_slli_epi16(a, bits); }
inline Pairs combine(Pairs a, Pairs b) { return _mm_or_si128(a, b); }
inline Pairs add(Pairs a, Pairs b) { return _mm_add_epi32(a, b); }
inline Pairs multiply_pairs(Pairs a, Pairs b) { return _mm_madd_epi16(a, b); }
/// One by one: SSE2 cannot shuffle by a variable.
template <WeightType T>
inline Pairs look_up(Pairs codes) {
  uint16_t values[8];
  std::memcpy(values, &codes, sizeof values);
  for (uint16_t& value : values) value = code_table(T)[value];
  std::memcpy(&codes, values, sizeof values);
  return codes;
}

#endif

constexpr int kParts = 64 / sizeof(Pairs);  // of 16 outputs

/// A quad's even or odd bits from a plane, moved to bit `left` of each pair.
template <int Bits>
TS_INLINE Pairs load_plane(const uint8_t* plane, int quad, int odd, int left) {
  const Pairs packed = load_pairs(plane + 64 * (quad % Bits));
  const int first = 8 * odd + quad / Bits * Bits;
  const Pairs moved =
      first < left ? shift_left(packed, left - first) : shift_right(packed, first - left);
  if (left == 0 && first + Bits == 16) return moved;
  return mask_pairs(moved, ((1 << Bits) - 1) << left);
}

template <WeightType T>
TS_INLINE Pairs load_quad(const uint8_t* quants, int quad, int odd) {
  constexpr BlockFormat format = block_format(T);
  Pairs codes = load_plane<format.low_bits>(quants, quad, odd, 0);
  if constexpr (format.high_bits != 0) {
    const uint8_t* plane = quants + 64 * format.low_bits;
    codes = combine(codes, load_plane<format.high_bits>(plane, quad, odd, format.low_bits));
  }
#if TS_LEVEL == 0
  if constexpr (format.has_table()) return look_up<T>(codes);
#else
  static_assert(!format.has_table());
#endif
  return codes;
}

#if TS_LEVEL == 0

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

/// One part of the outputs, over all inputs of the sub-block.
template <WeightType T, int R>
TS_INLINE void dot_part(const uint8_t* quants, const uint8_t* bytes, int sub, Pairs sums[R]) {
  constexpr BlockFormat format = block_format(T);
  constexpr int shared = format.low_bits;  // vectors, each with the low bits of several quads
  constexpr int count = format.quads_per_sub();
  static_assert(count % shared == 0);
  TS_UNROLL
  for (int vector = 0; vector < shared; ++vector) {
    TS_UNROLL
    for (int i = 0; i < count / shared; ++i) {
      const int quad = sub * count + i * shared + vector;
      dot_accumulate<R>(sums, load_quad<T>(quants, quad, 0), bytes, 2 * quad);
      dot_accumulate<R>(sums, load_quad<T>(quants, quad, 1), bytes, 2 * quad + 1);
    }
  }
}

/// Packed: each row's sums would push them out of the registers anyway.
template <WeightType T>
struct Codes {
  const uint8_t* quants;
};

template <WeightType T>
inline Codes<T> load_codes(const uint8_t* quants) {
  return {quants};
}

template <WeightType T, int R, int Planes>
TS_INLINE void dot_sub(const Codes<T>& codes, const PanelBlock<Planes>& block, int row, int sub,
                       Integers sums[R]) {
  constexpr int offset = block_format(T).offset;
  const int32_t* minus_sum = minus_sums<T>(block, row, sub);
  TS_UNROLL
  for (int part = 0; part < kParts; ++part) {
    Pairs totals[R];
    TS_UNROLL
    for (int r = 0; r < R; ++r) totals[r] = splat(offset_part(offset, minus_sum[r]));
    dot_part<T, R>(codes.quants + part * sizeof(Pairs), row_bytes(block, row), sub, totals);
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      std::memcpy(reinterpret_cast<uint8_t*>(&sums[r]) + part * sizeof(Pairs), &totals[r],
                  sizeof(Pairs));
    }
  }
}

#endif

}  // namespace ts
