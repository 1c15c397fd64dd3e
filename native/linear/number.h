// Conversions between float32, float16 and bfloat16, one number at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace ts {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// Exact. Written without branches, so that loops over it become vector code.
inline float float_from_half(uint16_t half) {
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  // 2^112 moves the exponent from float16's bias to float32's and makes subnormals normal.
  const uint32_t bits = bits_from_float(float_from_bits(magnitude) * 0x1p112f);
  const uint32_t special = (half & 0x7c00) == 0x7c00 ? 0x7f800000U : 0U;
  return float_from_bits(bits | special | sign);
}

inline float float_from_bfloat16(uint16_t value) {
  return float_from_bits(static_cast<uint32_t>(value) << 16);
}

/// Rounds to nearest even; a NaN stays one.
inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) {
    return static_cast<uint16_t>((bits >> 16) | 0x40);
  }
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace ts
