// Sixteen float32 lanes on NEON, which every AArch64 processor has: four vectors of four.
//
// The bits are those of AVX2 and AVX-512: multiply_add rounds once.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "linear/layout.h"

namespace ts {

constexpr int kParts = 4;  // of 16 outputs, a vector each

struct Integers {
  int32x4_t v[kParts];
};

struct Lanes {
  float32x4_t v[kParts];
};

/// Each part of the lanes by itself.
template <class Make>
TS_INLINE Lanes by_parts(const Make& make) {
  return {{make(0), make(1), make(2), make(3)}};
}

inline Lanes broadcast(float value) {
  return by_parts([&](int) { return vdupq_n_f32(value); });
}
inline Lanes zero_lanes() { return broadcast(0.0F); }
inline Lanes load_lanes(const float* p) {
  return by_parts([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store_lanes(float* p, const Lanes& a) {
  TS_UNROLL
  for (int i = 0; i < kParts; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
inline Lanes add(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline Lanes multiply(const Lanes& a, const Lanes& b) {
  return by_parts([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline Lanes multiply_add(const Lanes& a, const Lanes& b, const Lanes& c) {
  return by_parts([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
inline Lanes to_lanes(const Integers& a) {
  return by_parts([&](int i) { return vcvtq_f32_s32(a.v[i]); });
}

inline Lanes load_halves(const uint16_t* p) {
  return by_parts([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline Lanes load_halves(const uint8_t* p) {
  return load_halves(reinterpret_cast<const uint16_t*>(p));
}

/// Sixteen bytes, in order, as floats.
inline Lanes widen_bytes(int8x16_t bytes) {
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes));
  const int16x8_t high = vmovl_high_s8(bytes);
  return to_lanes({{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low),
                    vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}});
}

inline Lanes load_bytes(const int8_t* p) { return widen_bytes(vld1q_s8(p)); }
inline Lanes load_bytes(const uint8_t* p) { return load_bytes(reinterpret_cast<const int8_t*>(p)); }

inline Integers load_integers(const uint8_t* p) {
  const uint8x16_t bytes = vld1q_u8(p);
  const int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes)));
  const int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
           vmovl_high_s16(high)}};
}
inline Integers add_multiple(const Integers& a, const Integers& b, int32_t factor) {
  return {{vmlaq_n_s32(a.v[0], b.v[0], factor), vmlaq_n_s32(a.v[1], b.v[1], factor),
           vmlaq_n_s32(a.v[2], b.v[2], factor), vmlaq_n_s32(a.v[3], b.v[3], factor)}};
}

inline void load_nibbles(const uint8_t* p, Lanes* low, Lanes* high) {
  const uint8x16_t bytes = vld1q_u8(p);
  *low = widen_bytes(vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))));
  *high = widen_bytes(vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)));
}

inline void load_bfloat16_pairs(const uint8_t* p, Lanes* even, Lanes* odd) {
  TS_UNROLL
  for (int i = 0; i < kParts; ++i) {
    const uint32x4_t pairs = vld1q_u32(reinterpret_cast<const uint32_t*>(p) + 4 * i);
    even->v[i] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    odd->v[i] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000U)));
  }
}

/// The order of the sums is that of every level: lanes 8 apart, then 4, 2 and 1.
inline float sum_across(const Lanes& a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

}  // namespace ts
