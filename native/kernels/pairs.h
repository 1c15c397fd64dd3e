// Whole numbers of two bytes, multiplied in pairs: twice as many products an instruction as float32
// has, and exact, so that all levels agree.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/lane_math.h"

namespace ts {

#if TS_LEVEL >= 2

inline Integers zero_integers() { return {_mm512_setzero_si512()}; }
/// Sixteen pairs, one a lane.
inline Integers load_pairs(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
/// One pair in each lane.
inline Integers broadcast_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
/// sum + a[0] * b[0] + a[1] * b[1] in each lane. GCC 12 would copy the sums of a loop otherwise.
TS_INLINE Integers add_pairs(Integers sum, Integers a, Integers b) {
  __m512i total = sum.v;
#ifdef TS_EMULATE_AVX512
  total = _mm512_dpwssd_epi32(total, a.v, b.v);
#else
  asm("vpdpwssd %2, %1, %0" : "+v"(total) : "v"(a.v), "v"(b.v));
#endif
  return {total};
}
/// Rounded, halves to even; below 2^15.
inline void store_codes(int16_t* p, Lanes a) {
  const __m256i codes = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
}

#elif TS_LEVEL == 1

inline Integers zero_integers() { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
inline Integers load_pairs(const int16_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)}};
}
inline Integers broadcast_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  const __m256i v = _mm256_set1_epi32(pair);
  return {{v, v}};
}
/// In this order: GCC 12 would multiply all first, and have no registers for the products.
TS_INLINE __m256i add_pairs(__m256i sum, __m256i a, __m256i b) {
  __m256i product;
  asm volatile("vpmaddwd %2, %3, %1; vpaddd %1, %0, %0"
               : "+x"(sum), "=&x"(product)
               : "x"(a), "x"(b));
  return sum;
}
TS_INLINE Integers add_pairs(Integers sum, Integers a, Integers b) {
  const __m256i low = add_pairs(sum.v[0], a.v[0], b.v[0]);
  return {{low, add_pairs(sum.v[1], a.v[1], b.v[1])}};
}
inline void store_codes(int16_t* p, Lanes a) {
  const __m256i mixed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v[0]), _mm256_cvtps_epi32(a.v[1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xD8));
}

#elif defined(__aarch64__)

inline Integers zero_integers() {
  const int32x4_t v = vdupq_n_s32(0);
  return {{v, v, v, v}};
}
inline Integers load_pairs(const int16_t* p) {
  Integers result;
  std::memcpy(&result, p, sizeof result);
  return result;
}
inline Integers broadcast_pair(const int16_t* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  const int32x4_t v = vdupq_n_s32(pair);
  return {{v, v, v, v}};
}
inline Integers add_pairs(Integers sum, const Integers& a, const Integers& b) {
  TS_UNROLL
  for (int i = 0; i < kParts; ++i) {
    const int16x8_t x = vreinterpretq_s16_s32(a.v[i]);
    const int16x8_t y = vreinterpretq_s16_s32(b.v[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    sum.v[i] = vaddq_s32(sum.v[i], vpaddq_s32(low, vmull_high_s16(x, y)));
  }
  return sum;
}
inline void store_codes(int16_t* p, const Lanes& a) {
  TS_UNROLL
  for (int i = 0; i < kParts; ++i) vst1_s16(p + 4 * i, vmovn_s32(vcvtnq_s32_f32(a.v[i])));
}

#else

inline Integers zero_integers() { return {}; }
inline Integers load_pairs(const int16_t* p) {
  Integers result;
  std::memcpy(result.v, p, sizeof result.v);
  return result;
}
inline Integers broadcast_pair(const int16_t* p) {
  Integers result;
  for (int32_t& pair : result.v) std::memcpy(&pair, p, sizeof pair);
  return result;
}
inline Integers add_pairs(Integers sum, const Integers& a, const Integers& b) {
  int16_t x[2 * kLanes];
  int16_t y[2 * kLanes];
  std::memcpy(x, a.v, sizeof x);
  std::memcpy(y, b.v, sizeof y);
  for (int i = 0; i < kLanes; ++i) {
    sum.v[i] += int32_t{x[2 * i]} * y[2 * i] + int32_t{x[2 * i + 1]} * y[2 * i + 1];
  }
  return sum;
}
inline void store_codes(int16_t* p, Lanes a) {
  const Lanes magic = broadcast(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  const Lanes most = broadcast(32767.0F);      // and no NaN
  a = subtract(add(smaller(a, most), magic), magic);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(a.v[i]);
}

#endif

}  // namespace ts
