// Where things lie in packed weights and in prepared activations: shared by packing and kernels.
//
// Packed block formats: per group of 16 outputs, per pair of 32-blocks along the inputs:
// quants of block 0, quants of block 1, scales of block 0, scales of block 1 (all on 64-byte
// lines; the second half of the last pair is zero if the number of blocks is odd).
//   Q8_0 quants: 8 vectors of 64 bytes; vector k4 holds inputs 4 k4 .. 4 k4 + 3 of output 0, then
//     of output 1, ...: the order that VNNI wants. Bytes are unsigned: weight + 128.
//   Q4_x quants: 4 such vectors; vector j holds quad j in the low nibbles, quad j + 4 in the high.
//   scales: 16 x float16 d; for Q4_1 then 16 x float16 m.
// Packed float formats: inputs padded with zeros to a multiple of 32.
//   F32, F16: per input, 16 outputs. BF16: per pair of inputs, 16 outputs x 2 (an AMX tile's rows).
#pragma once

#include <cstdint>

#include "linear/linear.h"

#ifndef TS_LEVEL
#error "TS_LEVEL must be 0 (portable), 1 (AVX2), 2 (AVX-512 with VNNI) or 3 (AMX)"
#endif

namespace ts {

constexpr int64_t kBlockSize = 32;  // inputs that share a scale
constexpr int64_t kPanelRows = 8;   // rows of activations that lie together
constexpr int64_t kTileRows = 16;   // rows of an AMX tile
constexpr int64_t kTileBytes = 1024;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr bool is_block_format(WeightType type) {
  return type == WeightType::Q4_0 || type == WeightType::Q4_1 || type == WeightType::Q8_0;
}

/// Bytes of the quants of 16 outputs x 32 inputs.
constexpr int64_t quant_bytes(WeightType type) { return type == WeightType::Q8_0 ? 512 : 256; }

/// Bytes of the scales (and mins) of 16 outputs.
constexpr int64_t scale_bytes(WeightType type) { return type == WeightType::Q4_1 ? 64 : 32; }

constexpr int64_t element_bytes(WeightType type) { return type == WeightType::F32 ? 4 : 2; }

constexpr int64_t quant_offset(WeightType type, int64_t block) {
  const int64_t pair_bytes = 2 * (quant_bytes(type) + scale_bytes(type));
  return block / 2 * pair_bytes + block % 2 * quant_bytes(type);
}

constexpr int64_t scale_offset(WeightType type, int64_t block) {
  const int64_t pair_bytes = 2 * (quant_bytes(type) + scale_bytes(type));
  return block / 2 * pair_bytes + 2 * quant_bytes(type) + block % 2 * scale_bytes(type);
}

/// Bytes of one packed group of 16 outputs.
constexpr int64_t group_bytes(WeightType type, int64_t num_inputs) {
  if (is_block_format(type)) {
    return quant_offset(type, round_up(num_inputs / kBlockSize, 2));
  }
  return round_up(num_inputs, kBlockSize) * kGroupSize * element_bytes(type);
}

/// 32 inputs of 8 rows, quantized; panels of 8 rows follow each other, each with all its blocks.
/// What a row's 64 bytes hold is the level's own business (two int8 planes, or int16).
struct alignas(64) PanelBlock {
  uint8_t rows[kPanelRows][64];
  float scale[kPanelRows];
  float scaled_sum[kPanelRows];         // scale * sum of q
  int32_t minus_sum[kPanelRows];        // -(sum of q)
  int32_t minus_eight_sum[kPanelRows];  // -8 (sum of q)
};
static_assert(sizeof(PanelBlock) == 640);

/// 16 inputs of 8 rows in float32, for F32, F16 and BF16 weights.
constexpr int64_t kFloatsPerLine = 16;
struct alignas(64) FloatBlock {
  float rows[kPanelRows][kFloatsPerLine];
};

/// What the rows were made into. Tiles: 16 rows x 32 inputs of bfloat16, 1 KB each.
enum class Preparation { Blocks, Floats, Tiles };

constexpr Preparation preparation(WeightType type, RowKind kind) {
  if (TS_LEVEL == 3 && kind == RowKind::Prompt && type != WeightType::F32) {
    return Preparation::Tiles;
  }
  return is_block_format(type) ? Preparation::Blocks : Preparation::Floats;
}

}  // namespace ts
