// Dot products on AVX2: bytes of codes x int8 planes of activations, for codes of up to 7 bits, and
// on AVX-VNNI for all codes.
//
// A row's bytes are those of AVX-512: two planes, q = 128 hi + lo, 32 x hi in [-127, 127], then 32
// x lo in [-64, 63]; or one of q, for activations of 8 bits. A multiply of bytes adds pairs of
// products into int16, and the smaller the codes, the more of these sums fit before they must be
// widened. Codes of 8 bits would overflow at once: they are multiplied as int16, as are others
// where several rows of two planes meet them (few_pairs.h, wide_pairs.h). AVX-VNNI adds four
// products to a sum of 32 bits at once, which needs neither.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/dot_pairs.h"
#include "linear/lanes.h"
#include "linear/tables.h"

namespace ts {

/// Packed: a sub-block at a time is unpacked.
template <WeightType T>
struct Codes {
  const uint8_t* quants;
};

template <WeightType T>
inline Codes<T> load_codes(const uint8_t* quants) {
  return {quants};
}

/// A quad's bits from a plane of codes, moved to bit `left` of each byte.
template <int Bits>
TS_INLINE __m256i load_byte_plane(const uint8_t* plane, int quad, int part, int left) {
  const __m256i bytes = load_pairs(plane + 64 * (quad % Bits) + 32 * part);
  const int right = quad / Bits * Bits - left;
  const __m256i moved = right < 0 ? shift_left(bytes, -right) : shift_right(bytes, right);
  return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(((1 << Bits) - 1) << left)));
}

template <WeightType T>
TS_INLINE __m256i look_up_bytes(__m256i codes) {
  const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(code_table(T)));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

/// A quad's codes of 8 outputs, looked up where the format has a table.
template <WeightType T>
TS_INLINE __m256i load_byte_quad(const uint8_t* quants, int quad, int part) {
  constexpr BlockFormat format = block_format(T);
  if constexpr (format.low_bits == 8) {
    return load_pairs(quants + 64 * quad + 32 * part);
  } else {
    __m256i codes = load_byte_plane<format.low_bits>(quants, quad, part, 0);
    if constexpr (format.high_bits != 0) {
      const uint8_t* plane = quants + 64 * format.low_bits;
      codes = combine(codes, load_byte_plane<format.high_bits>(plane, quad, part, format.low_bits));
    }
    if constexpr (format.has_table()) return look_up_bytes<T>(codes);
    return codes;
  }
}

/// Codes 0 and 2 of a quad's bytes as int16, or 1 and 3.
TS_INLINE __m256i pairs_of(__m256i bytes, int odd) {
  return odd ? shift_right(bytes, 8) : mask_pairs(bytes, 255);
}

/// Codes of a sub-block where they lie packed.
template <WeightType T>
struct PackedCodes {
  const uint8_t* quants;
  int first;  // quad

  TS_INLINE __m256i load(int quad, int part) const {
    return load_byte_quad<T>(quants, first + quad, part);
  }
};

/// Unpacked ones, for rows that pass one after the other. They lie in memory: left to itself, GCC
/// keeps half of them in registers and the sums in memory.
template <WeightType T>
struct UnpackedCodes {
  const uint8_t* quads;

  TS_INLINE UnpackedCodes(const PackedCodes<T>& codes, __m256i* buffer) {
    constexpr int count = block_format(T).quads_per_sub();
    TS_UNROLL
    for (int quad = 0; quad < count; ++quad) {
      _mm256_store_si256(buffer + 2 * quad, codes.load(quad, 0));
      _mm256_store_si256(buffer + 2 * quad + 1, codes.load(quad, 1));
    }
    quads = reinterpret_cast<const uint8_t*>(buffer);
    asm("" : "+r"(quads) : : "memory");
  }

  TS_INLINE __m256i load(int quad, int part) const {
    return load_pairs(quads + 64 * quad + 32 * part);
  }
};

/// How many quads' products with activations of at most `most` add up within int16.
template <WeightType T>
constexpr int quads_together(int most) {
  int together = block_format(T).quads_per_sub();
  while (2 * together * most * ((1 << block_format(T).value_bits()) - 1) > 32767) together /= 2;
  return together;
}

#if defined(TS_AVX_VNNI)

/// sums + products of unsigned bytes of `codes` and signed bytes of `activations`, four to a sum.
TS_INLINE __m256i add_byte_products(__m256i sums, __m256i codes, __m256i activations) {
#if defined(TS_EMULATE_AVX_VNNI)
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(activations, 8), 8));
  const __m256i odd =
      _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), _mm256_srai_epi16(activations, 8));
  return add(sums, add(even, odd));
#else
  return _mm256_dpbusd_avx_epi32(sums, codes, activations);
#endif
}

/// Adds a sub-block's codes x R rows to their totals. Rows and planes are lines of 32 bytes.
template <WeightType T, int R, int Planes, typename Source>
TS_INLINE void dot_rows(const Source& codes, const uint8_t* lines, __m256i totals[R][2]) {
  constexpr int count = block_format(T).quads_per_sub();
  __m256i high[R][2];  // sums of the first of two planes
  TS_UNROLL
  for (int r = 0; r < R; ++r) high[r][0] = high[r][1] = _mm256_setzero_si256();
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    const __m256i quads[2] = {codes.load(i, 0), codes.load(i, 1)};
    TS_UNROLL
    for (int line = 0; line < R * Planes; ++line) {
      int32_t four;
      std::memcpy(&four, lines + kBlockSize * line + 4 * i, sizeof four);
      const __m256i activations = splat(four);
      TS_UNROLL
      for (int part = 0; part < 2; ++part) {
        const bool is_high = Planes == 2 && line % 2 == 0;
        __m256i& sum = is_high ? high[line / Planes][part] : totals[line / Planes][part];
        sum = add_byte_products(sum, quads[part], activations);
        asm("" : "+x"(sum));  // in this order, or GCC would need more registers
      }
    }
  }
  if constexpr (Planes == 2) {
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      totals[r][0] = add(totals[r][0], _mm256_slli_epi32(high[r][0], 7));
      totals[r][1] = add(totals[r][1], _mm256_slli_epi32(high[r][1], 7));
    }
  }
}

#else

/// Adds a sub-block's codes x R rows to their totals. Rows and planes are lines of 32 bytes.
template <WeightType T, int R, int Planes, typename Source>
TS_INLINE void dot_rows(const Source& codes, const uint8_t* lines, __m256i totals[R][2]) {
  constexpr int count = block_format(T).quads_per_sub();
  constexpr int together[2] = {quads_together<T>(127), quads_together<T>(64)};
  __m256i sums[R * Planes][2];
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    const __m256i quads[2] = {codes.load(i, 0), codes.load(i, 1)};
    TS_UNROLL
    for (int line = 0; line < R * Planes; ++line) {
      const int plane = line % Planes;
      int32_t four;
      std::memcpy(&four, lines + kBlockSize * line + 4 * i, sizeof four);
      const __m256i activations = splat(four);
      TS_UNROLL
      for (int part = 0; part < 2; ++part) {
        __m256i& sum = sums[line][part];
        const __m256i product = _mm256_maddubs_epi16(quads[part], activations);
        sum = i % together[plane] == 0 ? product : _mm256_add_epi16(sum, product);
        asm("" : "+x"(sum));  // GCC would add the products as a tree, and spill them all
        if ((i + 1) % together[plane] == 0) {
          const __m256i factors = _mm256_set1_epi16(Planes == 2 && plane == 0 ? 128 : 1);
          __m256i& total = totals[line / Planes][part];
          total = add(total, multiply_pairs(sum, factors));
        }
      }
    }
  }
}

#endif

/// What the sums start from: the offset's part.
template <WeightType T, int Planes>
TS_INLINE __m256i start_of(const PanelBlock<Planes>& block, int row, int sub) {
  constexpr int offset = block_format(T).offset;
  if constexpr (offset == 0) return _mm256_setzero_si256();
  if constexpr (T == WeightType::Q4_0) return splat(block.minus_eight_sum[row]);
  const __m256i minus_sum = splat(*minus_sums<T>(block, row, sub));
  return _mm256_slli_epi32(minus_sum, shift_of(offset));
}

template <WeightType T, int R, int Planes>
TS_INLINE void dot_sub(const Codes<T>& packed, const PanelBlock<Planes>& block, int row, int sub,
                       Integers sums[R]) {
  if constexpr (has_planes(T)) {
    constexpr int count = block_format(T).quads_per_sub();
    // As many rows as have their sums in the registers.
    constexpr int step = std::min(R, 4 / Planes);
    const PackedCodes<T> codes = {packed.quants, sub * count};
    const uint8_t* lines = row_bytes(block, row) + 4 * codes.first;
    __m256i totals[R][2];
    TS_UNROLL
    for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = start_of<T>(block, row + r, sub);
    if constexpr (R == step) {
      dot_rows<T, R, Planes>(codes, lines, totals);
    } else {
      __m256i buffer[2 * count];
      const UnpackedCodes<T> unpacked(codes, buffer);
      TS_UNROLL
      for (int r = 0; r < R; r += step) {
        dot_rows<T, step, Planes>(unpacked, lines + Planes * kBlockSize * r, totals + r);
        asm("" : "+r"(lines) : : "memory");
      }
    }
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      sums[r].v[0] = totals[r][0];
      sums[r].v[1] = totals[r][1];
    }
  }
}

}  // namespace ts
