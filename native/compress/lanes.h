// Arithmetic on one input's values for a few outputs at a time, in loops that become vector code.
#pragma once

#include <cmath>
#include <cstdint>

#include "linear/number.h"

namespace ts::rounding {

constexpr int kLanes = 64;  // outputs that are rounded together

struct alignas(64) Row {
  float v[kLanes];
};

template <typename Function>
inline void each_lane(Function&& function) {
  for (int o = 0; o < kLanes; ++o) function(o);
}

/// To the nearest whole number, even ones from the middle; |x| must be below 2^22.
inline float whole(float x) { return (x + 12582912.0f) - 12582912.0f; }

inline float clipped(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

inline float inverse_or_zero(float x) {
  const bool is_tiny = std::fabs(x) < 1e-30f;
  return is_tiny ? 0.0f : 1.0f / (is_tiny ? 1.0f : x);
}

/// As float16 holds it.
inline float as_half(float x) {
  const uint32_t bits = bits_from_float(x);
  const float normal = float_from_bits((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffU);
  const float tiny = (x + 0.75f) - 0.75f;  // in steps of 2^-24
  return std::fabs(x) < 0x1p-14f ? tiny : normal;
}

inline float as_bfloat(float x) {
  const uint32_t bits = bits_from_float(x);
  return float_from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffffU);
}

}  // namespace ts::rounding
