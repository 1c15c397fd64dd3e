// What lane_math.h promises of sixteen lanes, on NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "linear/lanes.h"

namespace ts {

inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t smaller(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}

inline Lanes subtract(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline Lanes divide(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
/// FMAX and FMIN would take a NaN from either side.
inline Lanes larger(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return larger(a.v[i], b.v[i]); });
}
inline Lanes smaller(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return smaller(a.v[i], b.v[i]); });
}
inline Lanes choose_first(int count, const Lanes& a, const Lanes& b) {
  const int32x4_t lanes = {0, 1, 2, 3};
  return by_parts([&](int i) {
    const uint32x4_t keep = vcltq_s32(lanes, vdupq_n_s32(count - 4 * i));
    return vbslq_f32(keep, a.v[i], b.v[i]);
  });
}
inline Lanes zero_below(const Lanes& a, const Lanes& x, float limit) {
  return by_parts([&](int i) {
    const uint32x4_t below = vcltq_f32(x.v[i], vdupq_n_f32(limit));
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.v[i]), below));
  });
}
template <int Distance>
inline Lanes swap_lanes(const Lanes& a) {
  return by_parts([&](int i) {
    if constexpr (Distance == 1) return vrev64q_f32(a.v[i]);
    if constexpr (Distance == 2) return vextq_f32(a.v[i], a.v[i], 2);
    if constexpr (Distance >= 4) return a.v[i ^ Distance / 4];
  });
}
inline Lanes scale_by_power(const Lanes& a, const Lanes& shifted) {
  return by_parts([&](int i) {
    const uint32x4_t power = vshlq_n_u32(vreinterpretq_u32_f32(shifted.v[i]), 23);
    const uint32x4_t bits = vaddq_u32(power, vdupq_n_u32(0x3f800000U));
    return vmulq_f32(a.v[i], vreinterpretq_f32_u32(bits));
  });
}
inline void store_halves(uint16_t* p, const Lanes& a) {
  TS_UNROLL
  for (int i = 0; i < kParts; ++i) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
  }
}
inline Lanes load_bfloat16s(const uint16_t* p) {
  return by_parts(
      [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)); });
}

inline float largest_across(const Lanes& a) {
  const float32x4_t four = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vrev64q_f32(two)), 0);
}

}  // namespace ts
