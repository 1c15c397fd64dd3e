// Block formats on NEON: a block is multiplied four outputs at a time.
//
// The 32 registers do not hold the sums of 16 outputs and a few rows, and the codes
// beside them: sums stay in memory, which is near, and a part's codes meet up to eight rows.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/kernels.h"
#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

/// Four float16.
TS_INLINE float32x4_t load_four_halves(const uint8_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

/// Four bytes, the first being the lowest of the word.
TS_INLINE uint32_t load_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

/// Four int8 as floats.
TS_INLINE float32x4_t widen_word(uint32_t word) {
  const int16x8_t shorts = vmovl_s8(vcreate_s8(word));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
}

/// As ScaleReader reads them, of four outputs. The minimum of a format without one is not set.
template <WeightType T>
TS_INLINE void read_part(const uint8_t* group, int64_t block, int sub, int part, float32x4_t* scale,
                         float32x4_t* minimum) {
  constexpr BlockFormat format = block_format(T);
  const uint8_t* scales = group + format.scale_offset(block) + sub * format.scale_step();
  if constexpr (format.scales == Scales::Floats) {
    *scale = vld1q_f32(reinterpret_cast<const float*>(scales) + 4 * part);
    return;
  }
  if constexpr (!format.two_steps()) {
    *scale = load_four_halves(scales + 8 * part);
    if constexpr (format.has_minimum) {
      *minimum = load_four_halves(scales + format.minimum_offset() + 8 * part);
    }
    return;
  }
  const uint8_t* halves = group + format.unit_scale_offset(block) + 8 * part;
  const uint32_t steps = load_word(scales + 4 * part);
  if constexpr (format.scales == Scales::Nibbles) {
    *scale = vmulq_f32(load_four_halves(halves), widen_word(steps & 0x0f0f0f0fU));
    *minimum = vmulq_f32(load_four_halves(halves + 32), widen_word(steps >> 4 & 0x0f0f0f0fU));
  } else {
    *scale = vmulq_f32(load_four_halves(halves), widen_word(steps));
    if constexpr (format.unit != 1.0F) *scale = vmulq_n_f32(*scale, format.unit);
    if constexpr (format.has_minimum) {
      const uint32_t minimums = load_word(scales + format.minimum_offset() + 4 * part);
      *minimum = vmulq_f32(load_four_halves(halves + 32), widen_word(minimums));
    }
  }
}

/// The zero points of four outputs.
template <WeightType T>
TS_INLINE int32x4_t read_zeros(const uint8_t* group, int64_t block, int part) {
  constexpr BlockFormat format = block_format(T);
  const uint8_t* zeros = group + format.scale_offset(block) + format.zero_offset() + 4 * part;
  const uint16x8_t shorts = vmovl_u8(vcreate_u8(load_word(zeros)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(shorts)));
}

/// Adds a sub-block's part to the sums of rows [row, row + R).
template <WeightType T, int R, int Planes>
TS_INLINE void add_part(const uint8_t* group, int64_t place, const PanelBlock<Planes>& block,
                        int row, int sub, int part, Lanes sums[R]) {
  constexpr BlockFormat format = block_format(T);
  constexpr int offset = offset_beside(format);
  const PartCodes<T> codes = load_part<T>(group + format.quant_offset(place) + 16 * part, sub);
  const uint8_t* bytes = row_bytes(block, row);
  const int32_t* minus_sum = minus_sums<T>(block, row, sub);
  const float* scaled_sum = block.scaled_sum[sum_index(format.num_subs, sub)] + row;
  float32x4_t scale;
  float32x4_t minimum;
  read_part<T>(group, place, sub, part, &scale, &minimum);
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    int32x4_t start = vdupq_n_s32(offset_part(offset, minus_sum[r]));
    if constexpr (format.has_zero) {
      start = vmlaq_n_s32(start, read_zeros<T>(group, place, part), minus_sum[r]);
    }
    const int32x4_t dots = dot_row<T, Planes>(codes, bytes + block.kRowBytes * r, sub, start);
    const float32x4_t factor = vmulq_n_f32(scale, block.scale[row + r]);
    float32x4_t sum = vfmaq_f32(sums[r].v[part], vcvtq_f32_s32(dots), factor);
    if constexpr (format.has_minimum) sum = vfmaq_n_f32(sum, minimum, scaled_sum[r]);
    sums[r].v[part] = sum;
  }
}

/// `panel` holds 8 rows; rows [row, row + R) of them are computed. `place_of(i)` is the block of
/// weights that the panel's block i meets.
template <WeightType T, int R, int Planes, typename Places>
void multiply_blocks(const uint8_t* group, const PanelBlock<Planes>* panel, int row,
                     int64_t num_blocks, Places place_of, Lanes out[R]) {
  constexpr BlockFormat format = block_format(T);
  TS_UNROLL
  for (int r = 0; r < R; ++r) out[r] = zero_lanes();
  for (int64_t index = 0; index < num_blocks; ++index) {
    if constexpr (Places::is_every) {
      fetch_weights<format.block_bytes(), R>(group + index * format.block_bytes());
    }
    TS_UNROLL
    for (int sub = 0; sub < format.num_subs; ++sub) {
      // Unrolled, it would take the sums into registers, and move them in and out.
#pragma GCC unroll 1
      for (int part = 0; part < kParts; ++part) {
        add_part<T, R>(group, place_of(index), panel[index], row, sub, part, out);
      }
    }
  }
}

}  // namespace ts
