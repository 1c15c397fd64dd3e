// Packs weights from GGUF's row-major layout into groups of 16 outputs, and reads rows back.
#include <algorithm>
#include <cstring>

#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/number.h"

namespace ts {
namespace {

/// Bytes of one 32-block in GGUF: float16 d, for Q4_1 float16 m, then the quants.
constexpr int64_t source_block_bytes(WeightType type) {
  return type == WeightType::Q8_0 ? 34 : type == WeightType::Q4_1 ? 20 : 18;
}

constexpr int64_t source_quant_offset(WeightType type) { return type == WeightType::Q4_1 ? 4 : 2; }

/// Copies one 32-block of one output into its column of the group.
/// GGUF keeps input i in the low nibble of byte i and input i + 16 in the high one, which is
/// already quad j beside quad j + 4.
void pack_block(WeightType type, const uint8_t* source, uint8_t* quants, uint8_t* scales,
                int64_t column) {
  std::memcpy(scales + 2 * column, source, 2);
  if (type == WeightType::Q4_1) {
    std::memcpy(scales + 32 + 2 * column, source + 2, 2);
  }
  source += source_quant_offset(type);
  const int64_t num_quads = quant_bytes(type) / 64;
  const uint8_t flip = type == WeightType::Q8_0 ? 0x80 : 0;  // w + 128 as a byte
  for (int64_t quad = 0; quad < num_quads; ++quad) {
    for (int64_t i = 0; i < 4; ++i) {
      quants[64 * quad + 4 * column + i] = source[4 * quad + i] ^ flip;
    }
  }
}

void pack_block_row(WeightType type, int64_t num_inputs, const uint8_t* source, uint8_t* group,
                    int64_t column) {
  for (int64_t block = 0; block < num_inputs / kBlockSize; ++block) {
    pack_block(type, source + block * source_block_bytes(type), group + quant_offset(type, block),
               group + scale_offset(type, block), column);
  }
}

/// Where the element of one output and input lies in a packed group of a float format.
int64_t element_offset(WeightType type, int64_t input, int64_t column) {
  if (type == WeightType::BF16) {
    return (input / 2 * kGroupSize + column) * 4 + input % 2 * 2;
  }
  return (input * kGroupSize + column) * element_bytes(type);
}

void pack_float_row(WeightType type, int64_t num_inputs, const uint8_t* source, uint8_t* group,
                    int64_t column) {
  const int64_t size = element_bytes(type);
  for (int64_t input = 0; input < num_inputs; ++input) {
    std::memcpy(group + element_offset(type, input, column), source + input * size,
                static_cast<size_t>(size));
  }
}

void unpack_block(WeightType type, const uint8_t* quants, const uint8_t* scales, int64_t column,
                  float* out) {
  uint16_t half[2] = {0, 0};
  std::memcpy(&half[0], scales + 2 * column, 2);
  if (type == WeightType::Q4_1) {
    std::memcpy(&half[1], scales + 32 + 2 * column, 2);
  }
  const float scale = float_from_half(half[0]);
  const float minimum = float_from_half(half[1]);
  for (int64_t i = 0; i < kBlockSize; ++i) {
    const int64_t quad = i / 4;
    if (type == WeightType::Q8_0) {
      const int quant = quants[64 * quad + 4 * column + i % 4] - 128;
      out[i] = static_cast<float>(quant) * scale;
      continue;
    }
    const uint8_t byte = quants[64 * (quad % 4) + 4 * column + i % 4];
    const int quant = quad < 4 ? byte & 15 : byte >> 4;
    out[i] = type == WeightType::Q4_0 ? static_cast<float>(quant - 8) * scale
                                      : static_cast<float>(quant) * scale + minimum;
  }
}

float unpack_element(WeightType type, const uint8_t* group, int64_t input, int64_t column) {
  const uint8_t* element = group + element_offset(type, input, column);
  if (type == WeightType::F32) {
    float value;
    std::memcpy(&value, element, sizeof value);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof bits);
  return type == WeightType::F16 ? float_from_half(bits) : float_from_bfloat16(bits);
}

bool is_known(WeightType type) {
  return is_block_format(type) || type == WeightType::F32 || type == WeightType::F16 ||
         type == WeightType::BF16;
}

}  // namespace

int64_t packed_bytes(WeightType type, int64_t num_outputs, int64_t num_inputs) {
  if (!is_known(type) || num_outputs < 1 || num_inputs < 1 ||
      (is_block_format(type) && num_inputs % kBlockSize != 0)) {
    return -1;
  }
  return num_groups(num_outputs) * group_bytes(type, num_inputs);
}

void pack_groups(WeightType type, int64_t num_outputs, int64_t num_inputs, const void* source,
                 void* packed, int64_t group_begin, int64_t group_end) {
  const bool blocks = is_block_format(type);
  const int64_t row_bytes = blocks ? num_inputs / kBlockSize * source_block_bytes(type)
                                   : num_inputs * element_bytes(type);
  const int64_t size = group_bytes(type, num_inputs);
  for (int64_t index = group_begin; index < group_end; ++index) {
    uint8_t* group = static_cast<uint8_t*>(packed) + index * size;
    std::memset(group, 0, static_cast<size_t>(size));
    const int64_t first = index * kGroupSize;
    const int64_t num_columns = std::min(kGroupSize, num_outputs - first);
    for (int64_t column = 0; column < num_columns; ++column) {
      const uint8_t* row = static_cast<const uint8_t*>(source) + (first + column) * row_bytes;
      if (blocks) {
        pack_block_row(type, num_inputs, row, group, column);
      } else {
        pack_float_row(type, num_inputs, row, group, column);
      }
    }
  }
}

void unpack_row(const PackedWeight& weight, int64_t row, float* out) {
  const int64_t num_inputs = weight.num_inputs;
  const uint8_t* group = weight.data + row / kGroupSize * group_bytes(weight.type, num_inputs);
  const int64_t column = row % kGroupSize;
  if (is_block_format(weight.type)) {
    for (int64_t block = 0; block < num_inputs / kBlockSize; ++block) {
      unpack_block(weight.type, group + quant_offset(weight.type, block),
                   group + scale_offset(weight.type, block), column, out + block * kBlockSize);
    }
    return;
  }
  for (int64_t input = 0; input < num_inputs; ++input) {
    out[input] = unpack_element(weight.type, group, input, column);
  }
}

}  // namespace ts
