// Takes GGUF's quantized blocks apart.
#include "linear/source.h"

#include <cstring>

#include "linear/layout.h"

namespace ts {
namespace {

constexpr int kSuperSize = 256;  // inputs of a block with two steps of scales

uint16_t read_half(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

/// 32 codes: the first 16 in the low nibbles, the others in the high ones.
void read_nibbles(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = p[i] & 15;
    codes[16 + i] = p[i] >> 4;
  }
}

/// Adds 16 to the codes whose bit is set.
void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
  const uint32_t bits = read_half(p) | static_cast<uint32_t>(read_half(p + 2)) << 16;
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | (bits >> i & 1) << 4);
  }
}

void read_bytes(const uint8_t* p, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = p[i] ^ 0x80;
}

/// A plane of `bits` for 256 codes, ORed in at bit `shift`: of each run of `run` bytes first the
/// lowest bits of all, then the next.
void add_plane(const uint8_t* p, int bits, int run, int shift, uint8_t* codes) {
  const int mask = (1 << bits) - 1;
  for (int first = 0; first < kSuperSize; p += run) {
    for (int bit = 0; bit < 8; bit += bits, first += run) {
      for (int i = 0; i < run; ++i) {
        codes[first + i] = static_cast<uint8_t>(codes[first + i] | (p[i] >> bit & mask) << shift);
      }
    }
  }
}

/// Q4_K, Q5_K: 8 scales and 8 minimums of 6 bits in 12 bytes.
void read_scales_and_minimums(const uint8_t* p, SourceBlock* block) {
  for (int i = 0; i < 4; ++i) {
    block->scale_steps[i] = static_cast<int8_t>(p[i] & 63);
    block->minimum_steps[i] = static_cast<int8_t>(p[4 + i] & 63);
    block->scale_steps[4 + i] = static_cast<int8_t>((p[8 + i] & 15) | (p[i] >> 6) << 4);
    block->minimum_steps[4 + i] = static_cast<int8_t>(p[8 + i] >> 4 | (p[4 + i] >> 6) << 4);
  }
}

/// Q2_K: 16 bytes, a scale in the low nibble and a minimum in the high one.
void read_nibble_scales(const uint8_t* p, SourceBlock* block) {
  for (int i = 0; i < 16; ++i) {
    block->scale_steps[i] = static_cast<int8_t>(p[i] & 15);
    block->minimum_steps[i] = static_cast<int8_t>(p[i] >> 4);
  }
}

/// Q3_K: 16 scales of 6 bits, plus 32, in 12 bytes.
void read_six_bit_scales(const uint8_t* p, SourceBlock* block) {
  for (int i = 0; i < 16; ++i) {
    const int low = p[i % 8] >> i / 8 * 4 & 15;
    const int high = p[8 + i % 4] >> i / 4 * 2 & 3;
    block->scale_steps[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

/// IQ4_XS: 8 scales of 6 bits, plus 32: the high bits in 2 bytes, the low ones in 4.
void read_split_scales(const uint8_t* p, SourceBlock* block) {
  for (int i = 0; i < 8; ++i) {
    const int high = p[i / 4] >> i % 4 * 2 & 3;
    const int low = p[2 + i / 2] >> i % 2 * 4 & 15;
    block->scale_steps[i] = static_cast<int8_t>((low | high << 4) - 32);
  }
}

float read_float(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

/// Neighbours side by side.
void read_neighbours(const uint8_t* p, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count / 2; ++i) {
    codes[2 * i] = p[i] & 15;
    codes[2 * i + 1] = p[i] >> 4;
  }
}

/// Groups: scale, zero point, codes. Tables of E2M1 are doubled, so that scales are halved.
void read_groups(WeightType type, const uint8_t* p, SourceBlock* block) {
  const int64_t inputs = source_size(type).inputs;
  const BlockFormat format = block_format(type);
  const int64_t size = inputs / format.num_subs;
  const float factor = format.has_table() ? 0.5F : 1.0F;
  for (int sub = 0; sub < format.num_subs; ++sub) {
    block->float_scales[sub] = factor * read_float(p);
    p += sizeof(float);
    if (format.has_zero) block->zero = *p++;
    uint8_t* codes = block->codes + sub * size;
    if (format.num_bits() == 8) {
      std::memcpy(codes, p, static_cast<size_t>(size));
    } else {
      read_neighbours(p, size, codes);
    }
    p += size * format.num_bits() / 8;
  }
}

/// Codebook formats: the scale, a byte for each step, then one for each code.
void read_looked_up(WeightType type, const uint8_t* p, SourceBlock* block) {
  const auto num_steps = static_cast<size_t>(8 * block_format(type).num_subs);
  block->scale = read_half(p);
  std::memcpy(block->scale_steps, p + 2, num_steps);
  std::memcpy(block->codes, p + 2 + num_steps, sizeof block->codes);
}

/// Formats of 32 inputs a block.
void read_small_block(WeightType type, const uint8_t* p, SourceBlock* block) {
  const bool has_minimum = type == WeightType::Q4_1 || type == WeightType::Q5_1;
  block->scale = read_half(p);
  if (has_minimum) block->minimum = read_half(p + 2);
  p += has_minimum ? 4 : 2;
  if (type == WeightType::Q8_0) return read_bytes(p, block->codes);
  const bool has_fifth_bits = type == WeightType::Q5_0 || type == WeightType::Q5_1;
  read_nibbles(p + (has_fifth_bits ? 4 : 0), block->codes);
  if (has_fifth_bits) add_fifth_bits(p, block->codes);
}

}  // namespace

void read_block(WeightType type, const uint8_t* p, SourceBlock* block) {
  uint8_t* codes = block->codes;
  if (block_format(type).scales == Scales::Floats) return read_groups(type, p, block);
  if (source_size(type).inputs == kSuperSize) std::memset(codes, 0, sizeof block->codes);
  switch (type) {
    case WeightType::Q2_K:
      read_nibble_scales(p, block);
      add_plane(p + 16, 2, 32, 0, codes);
      block->scale = read_half(p + 80);
      block->minimum = read_half(p + 82);
      return;
    case WeightType::Q3_K:
      add_plane(p + 32, 2, 32, 0, codes);
      add_plane(p, 1, 32, 2, codes);
      read_six_bit_scales(p + 96, block);
      block->scale = read_half(p + 108);
      return;
    case WeightType::Q4_K:
    case WeightType::Q5_K:
      block->scale = read_half(p);
      block->minimum = read_half(p + 2);
      read_scales_and_minimums(p + 4, block);
      if (type == WeightType::Q4_K) return add_plane(p + 16, 4, 32, 0, codes);
      add_plane(p + 16, 1, 32, 4, codes);
      return add_plane(p + 48, 4, 32, 0, codes);
    case WeightType::Q6_K:
      add_plane(p, 4, 64, 0, codes);
      add_plane(p + 128, 2, 32, 4, codes);
      std::memcpy(block->scale_steps, p + 192, 16);
      block->scale = read_half(p + 208);
      return;
    case WeightType::IQ4_XS:
      block->scale = read_half(p);
      read_split_scales(p + 2, block);
      for (int i = 0; i < 8; ++i) read_nibbles(p + 8 + 16 * i, codes + 32 * i);
      return;
    case WeightType::TQ2_0:
      block->scale = read_half(p + 64);
      return add_plane(p, 2, 32, 0, codes);
    case WeightType::IQ1G16:
    case WeightType::IQ2G16:
    case WeightType::IQ2G32:
    case WeightType::IQ3XXS:
    case WeightType::IQ3S:
      return read_looked_up(type, p, block);
    default:
      return read_small_block(type, p, block);
  }
}

}  // namespace ts
