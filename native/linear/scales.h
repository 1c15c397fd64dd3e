// Scales and minimums of packed block formats, as the kernels of every level read them.
#pragma once

#include <cstdint>

#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

/// Reads along one group, block after block. The minimum of a format without one is not set, nor
/// are its zero points.
template <WeightType T>
class ScaleReader {
 public:
  /// Must be called with each block, from the first on, or with `IsAlone` set.
  template <bool IsAlone = false>
  TS_INLINE void enter(const uint8_t* group, int64_t block) {
    scales_ = group + kFormat.scale_offset(block);
    if constexpr (kFormat.has_zero) zeros = load_integers(scales_ + kFormat.zero_offset());
    if constexpr (kFormat.two_steps()) {
      if (!IsAlone && block % kFormat.blocks_per_unit() != 0) return;
      const uint8_t* halves = group + kFormat.unit_scale_offset(block);
      unit_scale_ = load_halves(halves);
      if constexpr (kFormat.unit != 1.0F) {
        unit_scale_ = multiply(unit_scale_, broadcast(kFormat.unit));
      }
      if constexpr (kFormat.has_minimum) unit_minimum_ = load_halves(halves + 2 * kGroupSize);
    }
  }

  TS_INLINE void read(int sub, Lanes* scale, Lanes* minimum) const {
    const uint8_t* scales = scales_ + sub * kFormat.scale_step();
    if constexpr (kFormat.scales == Scales::Nibbles) {
      load_nibbles(scales, scale, minimum);
      *scale = multiply(unit_scale_, *scale);
      *minimum = multiply(unit_minimum_, *minimum);
    } else {
      *scale = load(scales, unit_scale_);
      if constexpr (kFormat.has_minimum) {
        *minimum = load(scales + kFormat.minimum_offset(), unit_minimum_);
      }
    }
  }

  Integers zeros;  // of the last block

 private:
  static constexpr BlockFormat kFormat = block_format(T);

  static Lanes load(const uint8_t* p, const Lanes& unit) {
    if constexpr (kFormat.two_steps()) return multiply(unit, load_bytes(p));
    if constexpr (kFormat.scales == Scales::Floats) {
      return load_lanes(reinterpret_cast<const float*>(p));
    }
    return load_halves(p);
  }

  const uint8_t* scales_ = nullptr;
  Lanes unit_scale_ = zero_lanes();
  Lanes unit_minimum_ = zero_lanes();
};

}  // namespace ts
