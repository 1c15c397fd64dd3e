// Dot products with VNNI: bytes of codes x two int8 planes of activations.
//
// A row's 64 bytes are two planes, q = 128 hi + lo: 32 x hi in [-127, 127], 32 x lo. A coarse row
// has 32 bytes: a plane of q.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/tables.h"

namespace ts {

/// Unsigned bytes in VNNI order.
template <WeightType T>
struct Codes {
  __m512i quads[kQuads];
};

/// A quad's bits from a plane, moved to bit `left` of each byte.
template <int Bits>
TS_INLINE __m512i load_plane(const uint8_t* plane, int quad, int left) {
  const __m512i bytes = _mm512_load_si512(plane + 64 * (quad % Bits));
  if constexpr (Bits == 8) return bytes;
  const int right = quad / Bits * Bits - left;
  const __m512i moved = right < 0 ? _mm512_slli_epi16(bytes, static_cast<unsigned>(-right))
                                  : _mm512_srli_epi16(bytes, static_cast<unsigned>(right));
  return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(((1 << Bits) - 1) << left)));
}

template <WeightType T>
TS_INLINE Codes<T> load_codes(const uint8_t* quants) {
  constexpr BlockFormat format = block_format(T);
  Codes<T> codes;
  TS_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    codes.quads[i] = load_plane<format.low_bits>(quants, i, 0);
    if constexpr (format.high_bits != 0) {
      const uint8_t* plane = quants + 64 * format.low_bits;
      const __m512i high = load_plane<format.high_bits>(plane, i, format.low_bits);
      codes.quads[i] = _mm512_or_si512(codes.quads[i], high);
    }
    if constexpr (format.has_table()) {
      const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(code_table(T)));
      codes.quads[i] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes.quads[i]);
    }
  }
  return codes;
}

/// sum += quads x one dword of four activations. GCC 12 would spend a register and an
/// instruction on the broadcast.
inline void dot_accumulate(__m512i* sum, __m512i quads, const uint8_t* activations) {
#ifdef TS_EMULATE_AVX512
  int32_t four;
  std::memcpy(&four, activations, sizeof four);
  *sum = _mm512_dpbusd_epi32(*sum, quads, _mm512_set1_epi32(four));
#else
  asm("vpdpbusd %2%{1to16%}, %1, %0"
      : "+v"(*sum)
      : "v"(quads), "m"(*reinterpret_cast<const uint32_t (*)[1]>(activations)));
#endif
}

/// What the sum of a row starts from before the high plane: for an offset of 128, which the shift
/// by 7 that follows makes of it.
template <WeightType T>
inline __m512i high_start(const int32_t* minus_sum) {
  return block_format(T).offset == 128 ? _mm512_set1_epi32(*minus_sum) : _mm512_setzero_si512();
}

/// Takes back any other offset.
template <WeightType T, int Planes>
inline __m512i take_back(__m512i sum, const PanelBlock<Planes>& block, int row, int sub) {
  constexpr int offset = block_format(T).offset;
  if constexpr (offset == 0 || offset == 128) return sum;
  if constexpr (T == WeightType::Q4_0) {
    return _mm512_add_epi32(sum, _mm512_set1_epi32(block.minus_eight_sum[row]));
  }
  const __m512i minus_sum = _mm512_set1_epi32(*minus_sums<T>(block, row, sub));
  return _mm512_add_epi32(sum, _mm512_slli_epi32(minus_sum, shift_of(offset)));
}

/// sums += a sub-block's quads x one plane of R rows.
template <WeightType T, int R, int Planes>
TS_INLINE void dot_plane(const Codes<T>& codes, const uint8_t* bytes, int sub, Integers sums[R]) {
  constexpr int count = block_format(T).quads_per_sub();
  TS_UNROLL
  for (int i = sub * count; i < (sub + 1) * count; ++i) {
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      dot_accumulate(&sums[r].v, codes.quads[i], bytes + Planes * kBlockSize * r + 4 * i);
    }
  }
}

/// Few rows: the planes in sums of their own, for shorter chains of dependent instructions.
template <WeightType T, int R>
TS_INLINE void dot_sub_apart(const Codes<T>& codes, const PanelBlock<2>& block, int row, int sub,
                             Integers sums[R]) {
  const uint8_t* bytes = row_bytes(block, row);
  const int32_t* minus_sum = minus_sums<T>(block, row, sub);
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    Integers high = {high_start<T>(minus_sum + r)};
    Integers low = {take_back<T>(_mm512_setzero_si512(), block, row + r, sub)};
    dot_plane<T, 1, 2>(codes, bytes + 64 * r, sub, &high);
    dot_plane<T, 1, 2>(codes, bytes + 64 * r + kBlockSize, sub, &low);
    sums[r].v = _mm512_add_epi32(_mm512_slli_epi32(high.v, 7), low.v);
  }
}

/// One plane: the sums start from the offset's part, which costs one shift.
template <WeightType T, int R>
TS_INLINE void dot_sub_coarse(const Codes<T>& codes, const PanelBlock<1>& block, int row, int sub,
                              Integers sums[R]) {
  constexpr int offset = block_format(T).offset;
  const int32_t* minus_sum = minus_sums<T>(block, row, sub);
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    if constexpr (offset == 0) {
      sums[r].v = _mm512_setzero_si512();
    } else if constexpr (T == WeightType::Q4_0) {
      sums[r].v = _mm512_set1_epi32(block.minus_eight_sum[row + r]);
    } else {
      sums[r].v = _mm512_slli_epi32(_mm512_set1_epi32(minus_sum[r]), shift_of(offset));
    }
  }
  dot_plane<T, R, 1>(codes, row_bytes(block, row), sub, sums);
}

/// The shift makes an offset of 128 of what the sums start from.
template <WeightType T, int R, int Planes>
TS_INLINE void dot_sub(const Codes<T>& codes, const PanelBlock<Planes>& block, int row, int sub,
                       Integers sums[R]) {
  if constexpr (Planes == 1) {
    dot_sub_coarse<T, R>(codes, block, row, sub, sums);
  } else if constexpr (R <= 2) {
    dot_sub_apart<T, R>(codes, block, row, sub, sums);
  } else {
    const uint8_t* bytes = row_bytes(block, row);
    const int32_t* minus_sum = minus_sums<T>(block, row, sub);
    TS_UNROLL
    for (int r = 0; r < R; ++r) sums[r].v = high_start<T>(minus_sum + r);
    dot_plane<T, R, 2>(codes, bytes, sub, sums);
    TS_UNROLL
    for (int r = 0; r < R; ++r) sums[r].v = _mm512_slli_epi32(sums[r].v, 7);
    dot_plane<T, R, 2>(codes, bytes + kBlockSize, sub, sums);
    TS_UNROLL
    for (int r = 0; r < R; ++r) sums[r].v = take_back<T>(sums[r].v, block, row + r, sub);
  }
}

}  // namespace ts
