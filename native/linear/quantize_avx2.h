// Quantizing rows with AVX2, which every vector level of x86 has: 32 numbers of one row, or of the
// eight rows of a panel at once. The bits are those of the plain loops in prepare.cpp, of which GCC
// makes code that spends three cycles on a number; those of a panel take half a cycle.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "linear/layout.h"
#include "linear/number.h"

namespace ts {

constexpr int32_t kSmallestBits = 27 << 23;  // of 2^-100: blocks of smaller numbers count as zero

/// 32 floats in order.
struct FloatVectors {
  __m256 v[4];
};

/// 32 int32 in order.
struct IntegerVectors {
  __m256i v[4];
};

TS_INLINE FloatVectors load_block(const float* x) {
  return {{_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8), _mm256_loadu_ps(x + 16),
           _mm256_loadu_ps(x + 24)}};
}

TS_INLINE IntegerVectors load_block(const int32_t* q) {
  const auto* vectors = reinterpret_cast<const __m256i*>(q);
  return {{_mm256_load_si256(vectors), _mm256_load_si256(vectors + 1),
           _mm256_load_si256(vectors + 2), _mm256_load_si256(vectors + 3)}};
}

/// The largest magnitude of 32 numbers as its bits: as integers, magnitudes keep their order and
/// NaN comes last.
TS_INLINE int32_t largest_bits(const float* x) {
  const FloatVectors values = load_block(x);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto bits = [&](int i) {
    return _mm256_and_si256(_mm256_castps_si256(values.v[i]), magnitude);
  };
  const __m256i eight =
      _mm256_max_epi32(_mm256_max_epi32(bits(0), bits(1)), _mm256_max_epi32(bits(2), bits(3)));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(four);
}

/// q = x * inverse, rounded to the nearest even integer: below 2^22.
TS_INLINE void round_block(const float* x, float inverse, int32_t* q) {
  const FloatVectors values = load_block(x);
  const __m256 magic = _mm256_set1_ps(12582912.0F);  // 1.5 * 2^23
  for (int i = 0; i < 4; ++i) {
    const __m256 product = _mm256_mul_ps(values.v[i], _mm256_set1_ps(inverse));
    const __m256i shifted = _mm256_castps_si256(_mm256_add_ps(product, magic));
    _mm256_store_si256(reinterpret_cast<__m256i*>(q) + i,
                       _mm256_sub_epi32(shifted, _mm256_castps_si256(magic)));
  }
}

/// The sums of the first 16 of 32 numbers and of the others.
TS_INLINE void sum_halves(const int32_t* q, int32_t sums[2]) {
  const IntegerVectors values = load_block(q);
  const __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(values.v[0], values.v[1]),
                                          _mm256_add_epi32(values.v[2], values.v[3]));
  const __m128i fours =
      _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  const __m128i halves = _mm_hadd_epi32(fours, fours);
  sums[0] = _mm_cvtsi128_si32(halves);
  sums[1] = _mm_extract_epi32(halves, 1);
}

/// 32 numbers as int16, of which each vector has the halves of two: 0-3, 8-11, 4-7, 12-15; then the
/// next sixteen.
TS_INLINE void narrow_block(const int32_t* q, __m256i words[2]) {
  const IntegerVectors values = load_block(q);
  words[0] = _mm256_packs_epi32(values.v[0], values.v[1]);
  words[1] = _mm256_packs_epi32(values.v[2], values.v[3]);
}

/// What narrow_block made, as bytes in order.
TS_INLINE void store_bytes(__m256i first, __m256i second, uint8_t* out) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
}

/// Two planes, q = 128 hi + lo: 32 x hi in [-127, 127], then 32 x lo in [-64, 63]; or one of q.
template <int Planes>
TS_INLINE void store_planes(const int32_t* q, uint8_t* row) {
  __m256i words[2];
  narrow_block(q, words);
  if constexpr (Planes == 1) return store_bytes(words[0], words[1], row);
  __m256i high[2];
  __m256i low[2];
  for (int i = 0; i < 2; ++i) {
    high[i] = _mm256_srai_epi16(_mm256_add_epi16(words[i], _mm256_set1_epi16(64)), 7);
    low[i] = _mm256_sub_epi16(words[i], _mm256_slli_epi16(high[i], 7));
  }
  store_bytes(high[0], high[1], row);
  store_bytes(low[0], low[1], row + kBlockSize);
}

/// int16, of each quad inputs 0 2 1 3 (dot_pairs.h).
inline void store_pairs(const int32_t* q, uint8_t* row) {
  __m256i words[2];
  narrow_block(q, words);
  for (int i = 0; i < 2; ++i) {
    constexpr int order = _MM_SHUFFLE(3, 1, 2, 0);
    const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words[i], order), order);
    const __m256i in_order = _mm256_permute4x64_epi64(pairs, _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(row) + i, in_order);
  }
}

/// Combines the eight numbers of each vector into one: number i of the result is that of vector i.
template <class Combine>
TS_INLINE __m256i reduce_each(const __m256i v[8], const Combine& combine) {
  __m256i pairs[4];
  for (int i = 0; i < 4; ++i) {
    pairs[i] = combine(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                       _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
  }
  __m256i fours[2];
  for (int i = 0; i < 2; ++i) {
    fours[i] = combine(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                       _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
  }
  return combine(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                 _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

/// Scales and sums of eight blocks, as a panel has them of its eight rows.
struct EightSums {
  alignas(32) float scale[8];
  alignas(32) float scaled_sum[3][8];
  alignas(32) int32_t minus_sum[3][8];
  alignas(32) int32_t minus_eight_sum[8];
};

TS_INLINE EightSums make_sums(__m256 scale, __m256i first, __m256i second) {
  EightSums result;
  _mm256_store_ps(result.scale, scale);
  const __m256i all = _mm256_add_epi32(first, second);
  const __m256i sums[3] = {all, first, second};
  const __m256i zero = _mm256_setzero_si256();
  for (int part = 0; part < 3; ++part) {
    _mm256_store_ps(result.scaled_sum[part], _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums[part])));
    _mm256_store_si256(reinterpret_cast<__m256i*>(result.minus_sum[part]),
                       _mm256_sub_epi32(zero, sums[part]));
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(result.minus_eight_sum),
                     _mm256_slli_epi32(_mm256_sub_epi32(zero, all), 3));
  return result;
}

/// Copies the sums of block number `index` to row `row` of a panel.
template <int Planes>
TS_INLINE void store_sums(const EightSums& sums, int index, PanelBlock<Planes>* block, int row) {
  block->scale[row] = sums.scale[index];
  for (int part = 0; part < 3; ++part) {
    block->scaled_sum[part][row] = sums.scaled_sum[part][index];
    block->minus_sum[part][row] = sums.minus_sum[part][index];
  }
  block->minus_eight_sum[row] = sums.minus_eight_sum[index];
}

/// Eight blocks of 32 numbers, and where the bytes of each go.
struct EightBlocks {
  const float* x;
  int64_t stride;  // floats from a block to the next
  uint8_t* bytes;
  int64_t bytes_step;
};

/// Quantizes these blocks. False, and nothing is of use, if one of them counts as zero or has a
/// number that is not finite.
template <bool AsPairs, int Planes>
TS_INLINE bool quantize_eight(const EightBlocks& blocks, float max_quant, EightSums* sums) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest[8];
  for (int i = 0; i < 8; ++i) {
    const FloatVectors values = load_block(blocks.x + i * blocks.stride);
    __m256i bits[4];
    for (int k = 0; k < 4; ++k) {
      bits[k] = _mm256_and_si256(_mm256_castps_si256(values.v[k]), magnitude);
    }
    largest[i] =
        _mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3]));
  }
  const __m256i bits =
      reduce_each(largest, [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); });
  const __m256i is_large = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(kSmallestBits - 1));
  const __m256i is_finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), bits);
  if (_mm256_movemask_epi8(_mm256_and_si256(is_large, is_finite)) != -1) return false;
  const __m256 scale = _mm256_div_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(max_quant));
  alignas(32) float inverse[8];
  _mm256_store_ps(inverse, _mm256_div_ps(_mm256_set1_ps(1.0F), scale));
  __m256i first[8];
  __m256i second[8];
  for (int i = 0; i < 8; ++i) {
    alignas(32) int32_t q[kBlockSize];
    round_block(blocks.x + i * blocks.stride, inverse[i], q);
    const IntegerVectors values = load_block(q);
    first[i] = _mm256_add_epi32(values.v[0], values.v[1]);
    second[i] = _mm256_add_epi32(values.v[2], values.v[3]);
    if constexpr (AsPairs) {
      store_pairs(q, blocks.bytes + i * blocks.bytes_step);
    } else {
      store_planes<Planes>(q, blocks.bytes + i * blocks.bytes_step);
    }
  }
  const auto add = [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); };
  *sums = make_sums(scale, reduce_each(first, add), reduce_each(second, add));
  return true;
}

/// The same block of a panel's eight rows.
template <bool AsPairs, int Planes>
TS_INLINE bool store_panel(const float* x, int64_t stride, float max_quant,
                           PanelBlock<Planes>* block) {
  EightSums sums;
  const EightBlocks blocks = {x, stride, block->rows[0], sizeof block->rows[0]};
  if (!quantize_eight<AsPairs, Planes>(blocks, max_quant, &sums)) return false;
  std::memcpy(block->scale, sums.scale, sizeof sums.scale);
  std::memcpy(block->scaled_sum, sums.scaled_sum, sizeof sums.scaled_sum);
  std::memcpy(block->minus_sum, sums.minus_sum, sizeof sums.minus_sum);
  std::memcpy(block->minus_eight_sum, sums.minus_eight_sum, sizeof sums.minus_eight_sum);
  return true;
}

/// Eight blocks of a row, one after the other.
template <bool AsPairs, int Planes>
TS_INLINE bool store_eight(const float* x, float max_quant, int row, PanelBlock<Planes>* block) {
  EightSums sums;
  const EightBlocks blocks = {x, kBlockSize, block->rows[row], sizeof *block};
  if (!quantize_eight<AsPairs, Planes>(blocks, max_quant, &sums)) return false;
  for (int i = 0; i < 8; ++i) store_sums(sums, i, block + i, row);
  return true;
}

}  // namespace ts
