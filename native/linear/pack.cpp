// Packs weights from their source's row-major layout into groups of 16 outputs, and reads rows
// back.
#include <algorithm>
#include <cstring>

#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/number.h"
#include "linear/source.h"
#include "linear/tables.h"

namespace ts {
namespace {

/// Each of a quad's four bytes with only its lowest `bits`.
constexpr uint32_t byte_mask(int bits) { return 0x01010101U * ((1U << bits) - 1); }

/// Writes bits [shift, shift + bits) of a block's codes to one column of a plane.
TS_INLINE void put_plane(const uint32_t quads[kQuads], int bits, int shift, uint8_t* plane,
                         int64_t column) {
  for (int vector = 0; vector < bits; ++vector) {
    uint32_t word = 0;
    for (int quad = vector; quad < kQuads; quad += bits) {
      word |= (quads[quad] >> shift & byte_mask(bits)) << quad / bits * bits;
    }
    std::memcpy(plane + 64 * vector + 4 * column, &word, sizeof word);
  }
}

/// ORs what put_plane wrote back into the codes.
void get_plane(const uint8_t* plane, int bits, int shift, int64_t column, uint32_t quads[kQuads]) {
  for (int vector = 0; vector < bits; ++vector) {
    uint32_t word;
    std::memcpy(&word, plane + 64 * vector + 4 * column, sizeof word);
    for (int quad = vector; quad < kQuads; quad += bits) {
      quads[quad] |= (word >> quad / bits * bits & byte_mask(bits)) << shift;
    }
  }
}

void put_half(uint16_t half, uint8_t* halves, int64_t column) {
  std::memcpy(halves + 2 * column, &half, sizeof half);
}

float get_half(const uint8_t* halves, int64_t column) {
  uint16_t half;
  std::memcpy(&half, halves + 2 * column, sizeof half);
  return float_from_half(half);
}

/// The scales of sub-block `sub`, the source's number `step`; `scales` are those of its block.
TS_INLINE void put_steps(const BlockFormat& format, const SourceBlock& source, int64_t step,
                         int sub, uint8_t* scales, int64_t column) {
  uint8_t* place = scales + sub * format.scale_step() + column;
  const auto scale = static_cast<uint8_t>(source.scale_steps[step]);
  *place = scale;
  if (!format.has_minimum) return;
  const auto minimum = static_cast<uint8_t>(source.minimum_steps[step]);
  if (format.scales == Scales::Nibbles) {
    *place = static_cast<uint8_t>(scale | minimum << 4);
  } else {
    place[format.minimum_offset()] = minimum;
  }
}

/// Copies one of GGUF's blocks of one output into its column of the group; `first` counts blocks
/// of 32.
template <WeightType T>
void pack_source_block(const SourceBlock& source, int64_t first, uint8_t* group, int64_t column) {
  constexpr BlockFormat format = block_format(T);
  for (int64_t i = 0; i < source_size(T).inputs / kBlockSize; ++i) {
    uint32_t quads[kQuads];
    std::memcpy(quads, source.codes + i * kBlockSize, sizeof quads);
    uint8_t* quants = group + format.quant_offset(first + i);
    put_plane(quads, format.low_bits, 0, quants, column);
    put_plane(quads, format.high_bits, format.low_bits, quants + 64 * format.low_bits, column);
    if (!format.two_steps()) continue;
    for (int sub = 0; sub < format.num_subs; ++sub) {
      const int64_t step = i * format.num_subs + sub;
      put_steps(format, source, step, sub, group + format.scale_offset(first + i), column);
    }
  }
  if constexpr (format.scales == Scales::Floats) {
    uint8_t* scales = group + format.scale_offset(first);
    for (int sub = 0; sub < format.num_subs; ++sub) {
      std::memcpy(scales + sub * format.scale_step() + 4 * column, source.float_scales + sub,
                  sizeof(float));
    }
    if (format.has_zero) scales[format.zero_offset() + column] = source.zero;
    return;
  }
  // With two steps, minimums are subtracted.
  constexpr uint16_t sign = format.two_steps() ? 0x8000 : 0;
  uint8_t* halves =
      group + (format.two_steps() ? format.unit_scale_offset(first) : format.scale_offset(first));
  put_half(source.scale, halves, column);
  if (format.has_minimum) put_half(source.minimum ^ sign, halves + 2 * kGroupSize, column);
}

template <WeightType T>
void pack_block_row(int64_t num_inputs, const uint8_t* source, uint8_t* group, int64_t column) {
  constexpr SourceSize size = source_size(T);
  for (int64_t input = 0; input < num_inputs; input += size.inputs, source += size.bytes) {
    SourceBlock block;
    read_block(T, source, &block);
    pack_source_block<T>(block, input / kBlockSize, group, column);
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

void pack_row(WeightType type, int64_t num_inputs, const uint8_t* source, uint8_t* group,
              int64_t column) {
  with_type(type, [&](auto constant) {
    if constexpr (is_block_format(constant())) {
      pack_block_row<constant()>(num_inputs, source, group, column);
    } else {
      pack_float_row(type, num_inputs, source, group, column);
    }
  });
}

/// The factor of (code - offset) in a sub-block, and the number added to the product.
struct SubScale {
  float scale;
  float minimum;
};

SubScale unpack_scale(const BlockFormat& format, const uint8_t* group, int64_t block, int sub,
                      int64_t column) {
  if (format.scales == Scales::Floats) {
    SubScale factors = {0.0F, 0.0F};
    std::memcpy(&factors.scale,
                group + format.scale_offset(block) + sub * format.scale_step() + 4 * column,
                sizeof factors.scale);
    return factors;
  }
  const uint8_t* halves =
      group + (format.two_steps() ? format.unit_scale_offset(block) : format.scale_offset(block));
  const float scale = get_half(halves, column) * format.unit;
  const float minimum = format.has_minimum ? get_half(halves + 2 * kGroupSize, column) : 0.0F;
  if (!format.two_steps()) return {scale, minimum};
  const uint8_t* steps = group + format.scale_offset(block) + sub * format.scale_step() + column;
  if (format.scales == Scales::Nibbles) {
    return {scale * static_cast<float>(*steps & 15), minimum * static_cast<float>(*steps >> 4)};
  }
  const int8_t scale_step = static_cast<int8_t>(steps[0]);
  const int8_t minimum_step =
      format.has_minimum ? static_cast<int8_t>(steps[format.minimum_offset()]) : int8_t{0};
  return {scale * static_cast<float>(scale_step), minimum * static_cast<float>(minimum_step)};
}

void unpack_block(WeightType type, const uint8_t* group, int64_t block, int64_t column,
                  float* out) {
  const BlockFormat format = block_format(type);
  uint32_t quads[kQuads] = {};
  const uint8_t* quants = group + format.quant_offset(block);
  get_plane(quants, format.low_bits, 0, column, quads);
  get_plane(quants + 64 * format.low_bits, format.high_bits, format.low_bits, column, quads);
  uint8_t codes[kBlockSize];
  std::memcpy(codes, quads, sizeof codes);
  const uint8_t* zeros = group + format.scale_offset(block) + format.zero_offset();
  const int offset = format.offset + (format.has_zero ? zeros[column] : 0);
  const int size = 4 * format.quads_per_sub();
  for (int sub = 0; sub < format.num_subs; ++sub) {
    const SubScale factors = unpack_scale(format, group, block, sub, column);
    for (int i = sub * size; i < (sub + 1) * size; ++i) {
      const int code = format.has_table() ? code_table(type)[codes[i]] : codes[i];
      const float value = static_cast<float>(code - offset) * factors.scale;
      out[i] = format.has_minimum ? value + factors.minimum : value;
    }
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

/// Inputs that the rows of a type must fill; 0 if the type is unknown.
int64_t input_unit(WeightType type) {
  if (block_format(type).scales == Scales::Floats)
    return kBlockSize;  // the last group may be short
  if (is_block_format(type)) return source_size(type).inputs;
  return with_type(type, [](auto) {}) ? 1 : 0;
}

}  // namespace

int64_t packed_bytes(WeightType type, int64_t num_outputs, int64_t num_inputs) {
  const int64_t unit = input_unit(type);
  if (unit == 0 || num_outputs < 1 || num_inputs < 1 || num_inputs % unit != 0) return -1;
  return num_groups(num_outputs) * group_bytes(type, num_inputs);
}

void pack_groups(WeightType type, int64_t num_outputs, int64_t num_inputs, const void* source,
                 void* packed, int64_t group_begin, int64_t group_end) {
  const SourceSize unit =
      is_block_format(type) ? source_size(type) : SourceSize{1, element_bytes(type)};
  const int64_t row_bytes = round_up(num_inputs, unit.inputs) / unit.inputs * unit.bytes;
  const int64_t size = group_bytes(type, num_inputs);
  for (int64_t index = group_begin; index < group_end; ++index) {
    uint8_t* group = static_cast<uint8_t*>(packed) + index * size;
    std::memset(group, 0, static_cast<size_t>(size));
    const int64_t first = index * kGroupSize;
    const int64_t num_columns = std::min(kGroupSize, num_outputs - first);
    for (int64_t column = 0; column < num_columns; ++column) {
      const uint8_t* row = static_cast<const uint8_t*>(source) + (first + column) * row_bytes;
      pack_row(type, num_inputs, row, group, column);
    }
  }
}

void unpack_row(const PackedWeight& weight, int64_t row, float* out) {
  const int64_t num_inputs = weight.num_inputs;
  const uint8_t* group = weight.data + row / kGroupSize * group_bytes(weight.type, num_inputs);
  const int64_t column = row % kGroupSize;
  if (is_block_format(weight.type)) {
    for (int64_t block = 0; block < num_inputs / kBlockSize; ++block) {
      unpack_block(weight.type, group, block, column, out + block * kBlockSize);
    }
    return;
  }
  for (int64_t input = 0; input < num_inputs; ++input) {
    out[input] = unpack_element(weight.type, group, input, column);
  }
}

}  // namespace ts
