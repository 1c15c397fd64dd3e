// Sixteen float32 lanes (one per output of a group) on each instruction-set level.
//
// load_bytes makes int8 into floats; load_nibbles the low and the high nibbles of 16 bytes;
// load_integers widens unsigned bytes. add_multiple(a, b, factor) is a + b * factor and may wrap.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear/layout.h"
#include "linear/number.h"

#if TS_LEVEL >= 1 || defined(__SSE2__)
#include <immintrin.h>
#endif

// Unrolls a loop of constant length wholly, so that arrays of lanes live in registers.
#if defined(__clang__)
#define TS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TS_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__aarch64__)
#include "linear/lanes_neon.h"
#endif

namespace ts {

#if TS_LEVEL >= 2

struct Integers {
  __m512i v;
};

struct Lanes {
  __m512 v;
};

inline Lanes zero_lanes() { return {_mm512_setzero_ps()}; }
inline Lanes load_lanes(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store_lanes(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes broadcast(float value) { return {_mm512_set1_ps(value)}; }
inline Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes multiply(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes to_lanes(Integers a) { return {_mm512_cvtepi32_ps(a.v)}; }

inline Lanes load_halves(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)))};
}

inline Lanes load_bytes(const uint8_t* p) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  return to_lanes({_mm512_cvtepi8_epi32(bytes)});
}

inline Integers load_integers(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Integers add_multiple(Integers a, Integers b, int32_t factor) {
  return {_mm512_add_epi32(a.v, _mm512_mullo_epi32(b.v, _mm512_set1_epi32(factor)))};
}

inline void load_nibbles(const uint8_t* p, Lanes* low, Lanes* high) {
  const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(p));
  const __m512i both = _mm512_cvtepu8_epi32(bytes);
  *low = to_lanes({_mm512_and_si512(both, _mm512_set1_epi32(15))});
  *high = to_lanes({_mm512_srli_epi32(both, 4)});
}

inline void load_bfloat16_pairs(const uint8_t* p, Lanes* even, Lanes* odd) {
  const __m512i pairs = _mm512_load_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
}

inline __m256 upper_half(Lanes a) { return _mm512_extractf32x8_ps(a.v, 1); }
inline __m256 lower_half(Lanes a) { return _mm512_castps512_ps256(a.v); }

#elif TS_LEVEL == 1

struct Integers {
  __m256i v[2];
};

struct Lanes {
  __m256 v[2];
};

inline Lanes zero_lanes() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
inline Lanes load_lanes(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline void store_lanes(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
inline Lanes broadcast(float value) {
  const __m256 v = _mm256_set1_ps(value);
  return {{v, v}};
}
inline Lanes add(Lanes a, Lanes b) {
  return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}};
}
inline Lanes multiply(Lanes a, Lanes b) {
  return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}};
}
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
inline Lanes to_lanes(Integers a) {
  return {{_mm256_cvtepi32_ps(a.v[0]), _mm256_cvtepi32_ps(a.v[1])}};
}

inline Lanes load_halves(const uint8_t* p) {
  const __m128i* halves = reinterpret_cast<const __m128i*>(p);
  return {{_mm256_cvtph_ps(_mm_load_si128(halves)), _mm256_cvtph_ps(_mm_load_si128(halves + 1))}};
}

inline Lanes load_bytes(const uint8_t* p) {
  Integers bytes;
  for (int half = 0; half < 2; ++half) {
    const auto* eight = reinterpret_cast<const __m128i*>(p + 8 * half);
    bytes.v[half] = _mm256_cvtepi8_epi32(_mm_loadl_epi64(eight));
  }
  return to_lanes(bytes);
}

inline Integers load_integers(const uint8_t* p) {
  Integers result;
  for (int half = 0; half < 2; ++half) {
    const auto* eight = reinterpret_cast<const __m128i*>(p + 8 * half);
    result.v[half] = _mm256_cvtepu8_epi32(_mm_loadl_epi64(eight));
  }
  return result;
}
inline Integers add_multiple(Integers a, Integers b, int32_t factor) {
  const __m256i factors = _mm256_set1_epi32(factor);
  for (int half = 0; half < 2; ++half) {
    a.v[half] = _mm256_add_epi32(a.v[half], _mm256_mullo_epi32(b.v[half], factors));
  }
  return a;
}

inline void load_nibbles(const uint8_t* p, Lanes* low, Lanes* high) {
  for (int half = 0; half < 2; ++half) {
    const auto* eight = reinterpret_cast<const __m128i*>(p + 8 * half);
    const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(eight));
    low->v[half] = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
    high->v[half] = _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
  }
}

inline void load_bfloat16_pairs(const uint8_t* p, Lanes* even, Lanes* odd) {
  for (int half = 0; half < 2; ++half) {
    const __m256i pairs = _mm256_load_si256(reinterpret_cast<const __m256i*>(p) + half);
    even->v[half] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    odd->v[half] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
  }
}

inline __m256 upper_half(Lanes a) { return a.v[1]; }
inline __m256 lower_half(Lanes a) { return a.v[0]; }

#elif !defined(__aarch64__)

struct Integers {
  int32_t v[kGroupSize];
};

/// A vector, and no array: GCC 12 leaves loops over several rows of arrays one number at a time.
struct Lanes {
  typedef float Vector __attribute__((vector_size(4 * kGroupSize), aligned(16)));
  Vector v;
};

/// Taking zeros away keeps every sign; adding them would not.
inline Lanes broadcast(float value) { return {value - Lanes::Vector{}}; }
inline Lanes zero_lanes() { return {Lanes::Vector{}}; }
inline Lanes load_lanes(const float* p) {
  Lanes result;
  std::memcpy(&result.v, p, sizeof result.v);
  return result;
}
inline void store_lanes(float* p, const Lanes& a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Lanes add(const Lanes& a, const Lanes& b) { return {a.v + b.v}; }
inline Lanes multiply(const Lanes& a, const Lanes& b) { return {a.v * b.v}; }
/// Two roundings, unlike the other levels: without FMA, std::fma would be a call per lane.
inline Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
  return {a.v * b.v + c.v};
}
inline Lanes to_lanes(const Integers& a) {
  Lanes result;
  for (int i = 0; i < kGroupSize; ++i) result.v[i] = static_cast<float>(a.v[i]);
  return result;
}

/// Not inlined: GCC 12 vectorizes this loop only in a function by itself.
__attribute__((noinline)) inline Lanes load_halves(const uint8_t* p) {
  uint16_t halves[kGroupSize];
  std::memcpy(halves, p, sizeof halves);
  Lanes result;
  for (int i = 0; i < kGroupSize; ++i) result.v[i] = float_from_half(halves[i]);
  return result;
}

inline Lanes load_bytes(const uint8_t* p) {
  Lanes result;
  for (int i = 0; i < kGroupSize; ++i) {
    result.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  }
  return result;
}

inline Integers load_integers(const uint8_t* p) {
  Integers result;
  for (int i = 0; i < kGroupSize; ++i) result.v[i] = p[i];
  return result;
}
inline Integers add_multiple(Integers a, const Integers& b, int32_t factor) {
  for (int i = 0; i < kGroupSize; ++i) {
    a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) +
                                  static_cast<uint32_t>(b.v[i]) * static_cast<uint32_t>(factor));
  }
  return a;
}

inline void load_nibbles(const uint8_t* p, Lanes* low, Lanes* high) {
  for (int i = 0; i < kGroupSize; ++i) {
    low->v[i] = static_cast<float>(p[i] & 15);
    high->v[i] = static_cast<float>(p[i] >> 4);
  }
}

inline void load_bfloat16_pairs(const uint8_t* p, Lanes* even, Lanes* odd) {
  uint32_t pairs[kGroupSize];
  std::memcpy(pairs, p, sizeof pairs);
  for (int i = 0; i < kGroupSize; ++i) {
    even->v[i] = float_from_bits(pairs[i] << 16);
    odd->v[i] = float_from_bits(pairs[i] & 0xffff0000U);
  }
}

/// The order of the sums is that of every level: lanes 8 apart, then 4, 2 and 1.
inline float sum_across(Lanes a) {
  for (int width = kGroupSize / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  }
  return a.v[0];
}

#endif

#if TS_LEVEL >= 1

/// The order of the sums is that of every level: lanes 8 apart, then 4, 2 and 1.
inline float sum_across(Lanes a) {
  const __m256 eight = _mm256_add_ps(lower_half(a), upper_half(a));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#endif

}  // namespace ts
