// What the kernels need of sixteen lanes beyond products: order, parts of them, exponentials.
#pragma once

#include <cstdint>

#include "linear/lanes.h"

#if defined(__aarch64__)
#include "kernels/lane_math_neon.h"
#endif

namespace ts {

constexpr int kLanes = 16;

#if TS_LEVEL >= 2

inline Lanes subtract(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes divide(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
/// The larger of each lane; `b` where either is NaN.
inline Lanes larger(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
/// The smaller of each lane; `b` where either is NaN.
inline Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline __mmask16 first_mask(int count) { return static_cast<__mmask16>((1U << count) - 1); }
/// `a` in the first `count` lanes, `b` in the others.
inline Lanes choose_first(int count, Lanes a, Lanes b) {
  return {_mm512_mask_mov_ps(b.v, first_mask(count), a.v)};
}
/// `a` where it is not below `limit` (so also where it is NaN), 0 elsewhere; tested on `x`.
inline Lanes zero_below(Lanes a, Lanes x, float limit) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, a.v)};
}
/// Each lane gets the one that is `Distance` (1, 2, 4 or 8) apart: its index with one bit flipped.
template <int Distance>
inline Lanes swap_lanes(Lanes a) {
  if constexpr (Distance == 1) return {_mm512_permute_ps(a.v, 0xB1)};
  if constexpr (Distance == 2) return {_mm512_permute_ps(a.v, 0x4E)};
  if constexpr (Distance == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xB1)};
  if constexpr (Distance == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4E)};
}
/// a * 2^n for n given as the float n + 1.5 * 2^23, n from -126 to 127.
inline Lanes scale_by_power(Lanes a, Lanes shifted) {
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  const __m512i one = _mm512_set1_epi32(0x3f800000);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(_mm512_add_epi32(power, one)))};
}
inline void store_halves(uint16_t* p, Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes load_halves(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Lanes load_bfloat16s(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Lanes load_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}

#elif TS_LEVEL == 1

inline Lanes subtract(Lanes a, Lanes b) {
  return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}};
}
inline Lanes divide(Lanes a, Lanes b) {
  return {{_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}};
}
inline Lanes larger(Lanes a, Lanes b) {
  return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}};
}
inline Lanes smaller(Lanes a, Lanes b) {
  return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}};
}
inline Lanes choose_first(int count, Lanes a, Lanes b) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * half), lane);
    result.v[half] = _mm256_blendv_ps(b.v[half], a.v[half], _mm256_castsi256_ps(keep));
  }
  return result;
}
inline Lanes zero_below(Lanes a, Lanes x, float limit) {
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    const __m256 keep = _mm256_cmp_ps(x.v[half], _mm256_set1_ps(limit), _CMP_NLT_UQ);
    result.v[half] = _mm256_and_ps(keep, a.v[half]);
  }
  return result;
}
template <int Distance>
inline Lanes swap_lanes(Lanes a) {
  if constexpr (Distance == 8) return {{a.v[1], a.v[0]}};
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    if constexpr (Distance == 1) result.v[half] = _mm256_permute_ps(a.v[half], 0xB1);
    if constexpr (Distance == 2) result.v[half] = _mm256_permute_ps(a.v[half], 0x4E);
    if constexpr (Distance == 4) {
      result.v[half] = _mm256_permute2f128_ps(a.v[half], a.v[half], 1);
    }
  }
  return result;
}
inline Lanes scale_by_power(Lanes a, Lanes shifted) {
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted.v[half]), 23);
    const __m256i bits = _mm256_add_epi32(power, _mm256_set1_epi32(0x3f800000));
    result.v[half] = _mm256_mul_ps(a.v[half], _mm256_castsi256_ps(bits));
  }
  return result;
}
inline void store_halves(uint16_t* p, Lanes a) {
  for (int half = 0; half < 2; ++half) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + half,
                     _mm256_cvtps_ph(a.v[half], _MM_FROUND_TO_NEAREST_INT));
  }
}
inline Lanes load_halves(const uint16_t* p) {
  const auto* halves = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))}};
}
inline Lanes load_bfloat16s(const uint16_t* p) {
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + half);
    result.v[half] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  return result;
}
inline Lanes load_bytes(const int8_t* p) {
  Lanes result;
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * half));
    result.v[half] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
  return result;
}

#elif !defined(__aarch64__)

inline Lanes subtract(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] -= b.v[i];
  return a;
}
inline Lanes divide(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] /= b.v[i];
  return a;
}
inline Lanes larger(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline Lanes smaller(Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline Lanes choose_first(int count, Lanes a, Lanes b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = i < count ? a.v[i] : b.v[i];
  return a;
}
inline Lanes zero_below(Lanes a, Lanes x, float limit) {
  for (int i = 0; i < kLanes; ++i) a.v[i] = x.v[i] < limit ? 0.0F : a.v[i];
  return a;
}
template <int Distance>
inline Lanes swap_lanes(Lanes a) {
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = a.v[i ^ Distance];
  return result;
}
inline Lanes scale_by_power(Lanes a, Lanes shifted) {
  for (int i = 0; i < kLanes; ++i) {
    a.v[i] *= float_from_bits((bits_from_float(shifted.v[i]) << 23) + 0x3f800000U);
  }
  return a;
}
inline uint16_t half_from_float(float value) {
  const uint32_t sign = (bits_from_float(value) >> 16) & 0x8000;
  const uint32_t bits = bits_from_float(value) & 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24
    const float sum = float_from_bits(bits) + 0.5F;
    return static_cast<uint16_t>(sign | (bits_from_float(sum) - 0x3f000000));
  }
  const uint32_t rounded = bits + 0xfff + ((bits >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}
inline void store_halves(uint16_t* p, Lanes a) {
  for (int i = 0; i < kLanes; ++i) p[i] = half_from_float(a.v[i]);
}
inline Lanes load_halves(const uint16_t* p) {
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = float_from_half(p[i]);
  return result;
}
inline Lanes load_bfloat16s(const uint16_t* p) {
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = float_from_bfloat16(p[i]);
  return result;
}
inline Lanes load_bytes(const int8_t* p) {
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result.v[i] = static_cast<float>(p[i]);
  return result;
}

#endif

#if TS_LEVEL >= 2

/// The first `count` numbers, then zeros.
inline Lanes load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(first_mask(count), p)};
}
inline void store_first(float* p, Lanes a, int count) {
  _mm512_mask_storeu_ps(p, first_mask(count), a.v);
}

#else

inline Lanes load_first(const float* p, int count) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(count));
  return load_lanes(lanes);
}

inline void store_first(float* p, Lanes a, int count) {
  float lanes[kLanes];
  store_lanes(lanes, a);
  std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(count));
}

#endif

#if TS_LEVEL >= 1

inline float largest_across(Lanes a) {
  const __m256 eight = _mm256_max_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

#elif !defined(__aarch64__)

inline float largest_across(Lanes a) {
  float largest = a.v[0];
  for (int i = 1; i < kLanes; ++i) largest = largest > a.v[i] ? largest : a.v[i];
  return largest;
}

#endif

/// (2^f - 1) / f for f from -0.5 to 0.5, fitted at Chebyshev nodes.
inline Lanes exp2_slope(Lanes f) {
  Lanes p = broadcast(0.00015461447463365068F);
  p = multiply_add(p, f, broadcast(0.001339086735133181F));
  p = multiply_add(p, f, broadcast(0.009618056669885529F));
  p = multiply_add(p, f, broadcast(0.05550357104253126F));
  p = multiply_add(p, f, broadcast(0.2402265092234275F));
  return multiply_add(p, f, broadcast(0.6931471880293425F));
}

/// 2^x to 1e-7 relative; 0 below -126, 2^127 above 127, exactly 1 at 0.
inline Lanes exp2(Lanes x) {
  const Lanes magic = broadcast(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes clamped = larger(broadcast(-126.0F), smaller(broadcast(127.0F), x));
  const Lanes shifted = add(clamped, magic);
  const Lanes f = subtract(clamped, subtract(shifted, magic));  // -0.5 to 0.5
  const Lanes p = multiply_add(exp2_slope(f), f, broadcast(1.0F));
  return zero_below(scale_by_power(p, shifted), x, -126.0F);
}

/// tanh(x) to a few units in the last place; 0 at 0.
inline Lanes tanh(Lanes x) {
  // e^2x - 1 = 2^n (2^f - 1) + (2^n - 1) for 2 x / ln 2 = n + f: nothing cancels near 0.
  const Lanes magic = broadcast(12582912.0F);
  const Lanes scaled = multiply(x, broadcast(2.88539008177792681F));
  const Lanes clamped = larger(broadcast(-64.0F), smaller(broadcast(64.0F), scaled));
  const Lanes shifted = add(clamped, magic);
  const Lanes f = subtract(clamped, subtract(shifted, magic));
  const Lanes power = scale_by_power(broadcast(1.0F), shifted);
  const Lanes fraction = multiply(exp2_slope(f), f);
  const Lanes m = multiply_add(fraction, power, subtract(power, broadcast(1.0F)));
  return divide(m, add(m, broadcast(2.0F)));
}

}  // namespace ts
