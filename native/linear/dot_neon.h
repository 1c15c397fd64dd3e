// Dot products on NEON: four outputs (a part) with one row at a time (see blocks_neon.h).
//
// With SDOT a row's 64 bytes are two planes, q = 128 hi + lo: 32 x hi in [-127, 127], 32 x lo in
// [-64, 63], and a coarse row has 32 bytes: a plane of q; its operands are both signed. Without it
// they are 32 x int16, in order, and codes are widened to int16.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/tables.h"

namespace ts {

/// A quad's bits of four outputs from a plane, moved to bit `left` of each byte.
template <int Bits>
TS_INLINE uint8x16_t load_plane(const uint8_t* plane, int quad, int left) {
  const uint8x16_t bytes = vld1q_u8(plane + 64 * (quad % Bits));
  if constexpr (Bits == 8) return bytes;
  const int right = quad / Bits * Bits - left;
  const uint8x16_t moved = right < 0 ? bytes << -right : bytes >> right;
  if (right + Bits == 8) return moved;
  return moved & vdupq_n_u8(static_cast<uint8_t>(((1 << Bits) - 1) << left));
}

/// Likewise the whole codes, before any table.
template <WeightType T>
TS_INLINE uint8x16_t load_quad(const uint8_t* quants, int quad) {
  constexpr BlockFormat format = block_format(T);
  uint8x16_t codes = load_plane<format.low_bits>(quants, quad, 0);
  if constexpr (format.high_bits != 0) {
    const uint8_t* plane = quants + 64 * format.low_bits;
    codes |= load_plane<format.high_bits>(plane, quad, format.low_bits);
  }
  return codes;
}

#if defined(__ARM_FEATURE_DOTPROD)

template <int Planes>
inline void store_planes(const int32_t* q, uint8_t* row) {
  for (int i = 0; i < kBlockSize; ++i) {
    if constexpr (Planes == 1) {
      row[i] = static_cast<uint8_t>(q[i]);
      continue;
    }
    const int32_t high = (q[i] + 64) >> 7;
    row[i] = static_cast<uint8_t>(high);
    row[kBlockSize + i] = static_cast<uint8_t>(q[i] - high * 128);
  }
}

/// What of a format's offset signed codes do not take in.
constexpr int offset_beside(const BlockFormat& format) {
  return format.offset == 128 ? 0 : format.offset;
}

/// Bytes as SDOT wants them: an offset of 128 makes them signed, others are small enough.
template <WeightType T>
TS_INLINE int8x16_t signed_quad(const uint8_t* quants, int quad) {
  constexpr BlockFormat format = block_format(T);
  const uint8x16_t sign = vdupq_n_u8(0x80);
  uint8x16_t codes = load_quad<T>(quants, quad);
  if constexpr (format.has_table()) {
    codes = vqtbl1q_u8(vld1q_u8(code_table(T)), codes);
  }
  if constexpr (format.offset == 128) codes ^= sign;
  return vreinterpretq_s8_u8(codes);
}

template <WeightType T>
struct PartCodes {
  int8x16_t quads[block_format(T).quads_per_sub()];
};

/// A sub-block's codes of four outputs; `quants` point at those of the part.
template <WeightType T>
TS_INLINE PartCodes<T> load_part(const uint8_t* quants, int sub) {
  constexpr int count = block_format(T).quads_per_sub();
  PartCodes<T> codes;
  TS_UNROLL
  for (int i = 0; i < count; ++i) codes.quads[i] = signed_quad<T>(quants, sub * count + i);
  return codes;
}

/// sum += four quads x 16 activations.
TS_INLINE int32x4_t dot_four(int32x4_t sum, const int8x16_t* quads, const uint8_t* activations) {
  const int8x16_t sixteen = vreinterpretq_s8_u8(vld1q_u8(activations));
  sum = vdotq_laneq_s32(sum, quads[0], sixteen, 0);
  sum = vdotq_laneq_s32(sum, quads[1], sixteen, 1);
  sum = vdotq_laneq_s32(sum, quads[2], sixteen, 2);
  return vdotq_laneq_s32(sum, quads[3], sixteen, 3);
}

/// start + codes x one row.
template <WeightType T, int Planes>
TS_INLINE int32x4_t dot_row(const PartCodes<T>& codes, const uint8_t* row, int sub,
                            int32x4_t start) {
  constexpr int count = block_format(T).quads_per_sub();
  int32x4_t high = vdupq_n_s32(0);
  int32x4_t low = start;
  TS_UNROLL
  for (int i = 0; i < count; i += 4) {
    const uint8_t* activations = row + 4 * (sub * count + i);
    if constexpr (Planes == 1) {
      low = dot_four(low, codes.quads + i, activations);
    } else {
      high = dot_four(high, codes.quads + i, activations);
      low = dot_four(low, codes.quads + i, activations + kBlockSize);
    }
  }
  return Planes == 1 ? low : vaddq_s32(vshlq_n_s32(high, 7), low);
}

#else

inline void store_pairs(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) values[i] = static_cast<int16_t>(q[i]);
  std::memcpy(row, values, sizeof values);
}

constexpr int offset_beside(const BlockFormat& format) { return format.offset; }

/// Inputs 0 and 1 of each quad, then inputs 2 and 3, as int16: four outputs of one input, four of
/// the next.
template <WeightType T>
struct PartCodes {
  int16x8_t pairs[2 * block_format(T).quads_per_sub()];
};

/// An index beyond the vector yields the zeros of the upper bytes.
alignas(16) constexpr uint8_t kPairOrder[2][16] = {
    {0, 99, 4, 99, 8, 99, 12, 99, 1, 99, 5, 99, 9, 99, 13, 99},
    {2, 99, 6, 99, 10, 99, 14, 99, 3, 99, 7, 99, 11, 99, 15, 99}};

template <WeightType T>
TS_INLINE PartCodes<T> load_part(const uint8_t* quants, int sub) {
  constexpr BlockFormat format = block_format(T);
  constexpr int count = format.quads_per_sub();
  PartCodes<T> codes;
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    uint8x16_t quad = load_quad<T>(quants, sub * count + i);
    if constexpr (format.has_table()) quad = vqtbl1q_u8(vld1q_u8(code_table(T)), quad);
    TS_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint8x16_t pair = vqtbl1q_u8(quad, vld1q_u8(kPairOrder[half]));
      codes.pairs[2 * i + half] = vreinterpretq_s16_u8(pair);
    }
  }
  return codes;
}

template <WeightType T, int Planes>
TS_INLINE int32x4_t dot_row(const PartCodes<T>& codes, const uint8_t* row, int sub,
                            int32x4_t start) {
  constexpr int count = block_format(T).quads_per_sub();
  int32x4_t sum = start;
  TS_UNROLL
  for (int i = 0; i < count; ++i) {
    const uint8_t* four = row + 8 * (sub * count + i);
    const int16x4_t q = vld1_s16(reinterpret_cast<const int16_t*>(four));
    const int16x8_t* pairs = codes.pairs + 2 * i;
    sum = vmlal_lane_s16(sum, vget_low_s16(pairs[0]), q, 0);
    sum = vmlal_high_lane_s16(sum, pairs[0], q, 1);
    sum = vmlal_lane_s16(sum, vget_low_s16(pairs[1]), q, 2);
    sum = vmlal_high_lane_s16(sum, pairs[1], q, 3);
  }
  return sum;
}

#endif

}  // namespace ts
