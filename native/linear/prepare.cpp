// Prepares rows of activations: quantized blocks, padded float32 lines, or bfloat16 tiles.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/number.h"

namespace ts {
namespace {

constexpr float kMaxQuant = 16256.0F;  // 127 * 128: the high plane stays within [-127, 127]
constexpr float kMaxCoarseQuant = 127.0F;

/// The largest magnitude of 32 numbers as its bits: as integers, magnitudes keep their order and
/// NaN comes last.
int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    largest = std::max(largest, static_cast<int32_t>(bits_from_float(x[i]) & 0x7fffffffU));
  }
  return largest;
}

/// Quantizes 32 numbers of one row to [-max_quant, max_quant]; 1 / scale stays finite because tiny
/// blocks count as zero.
template <bool AsPairs, int Planes>
void prepare_block(const float* x, float max_quant, PanelBlock<Planes>* block, int64_t row) {
  const int32_t largest = largest_bits(x);
  const float amax = float_from_bits(static_cast<uint32_t>(largest));
  const bool is_finite = largest < 0x7f800000;
  const bool usable = amax >= 0x1p-100f && is_finite;
  const float scale = usable ? amax / max_quant : 0.0F;
  const float inverse = usable ? 1.0F / scale : 0.0F;
  // Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low bits.
  constexpr float magic = 12582912.0F;
  alignas(64) float shifted[kBlockSize];
  alignas(64) int32_t q[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) shifted[i] = (usable ? x[i] : 0.0F) * inverse + magic;
  for (int i = 0; i < kBlockSize; ++i) {
    q[i] = static_cast<int32_t>(bits_from_float(shifted[i])) - 0x4b400000;
  }
  if constexpr (AsPairs) {
    store_pairs(q, block->rows[row]);
  } else {
    store_planes<Planes>(q, block->rows[row]);
  }
  block->scale[row] = is_finite ? scale : float_from_bits(0x7fc00000U);
  // Integers below 2^24: exact in float32, in any order.
  const Lanes minus_magic = broadcast(-magic);
  const float first = sum_across(add(load_lanes(shifted), minus_magic));
  const float second = sum_across(add(load_lanes(shifted + kGroupSize), minus_magic));
  const float sums[3] = {first + second, first, second};
  for (int part = 0; part < 3; ++part) {
    block->scaled_sum[part][row] = block->scale[row] * sums[part];
    block->minus_sum[part][row] = -static_cast<int32_t>(sums[part]);
  }
  block->minus_eight_sum[row] = 8 * block->minus_sum[0][row];
}

template <bool AsPairs, int Planes>
void prepare_blocks(const float* x, int64_t num_inputs, float max_quant, int64_t row,
                    void* prepared) {
  const int64_t num_blocks = num_inputs / kBlockSize;
  auto* panel = static_cast<PanelBlock<Planes>*>(prepared) + row / kPanelRows * num_blocks;
  for (int64_t block = 0; block < num_blocks; ++block) {
    prepare_block<AsPairs>(x + block * kBlockSize, max_quant, panel + block, row % kPanelRows);
  }
}

/// False if the form has other things than quantized blocks.
bool prepare_quants(Preparation form, const float* x, int64_t num_inputs, int64_t row,
                    void* prepared) {
  const bool is_coarse = form == Preparation::CoarseBlocks || form == Preparation::CoarsePairs;
  const float max_quant = is_coarse ? kMaxCoarseQuant : kMaxQuant;
  if constexpr (kHasPlanes) {
    if (form == Preparation::Blocks) {
      prepare_blocks<false, 2>(x, num_inputs, max_quant, row, prepared);
      return true;
    }
    if (form == Preparation::CoarseBlocks) {
      prepare_blocks<false, 1>(x, num_inputs, max_quant, row, prepared);
      return true;
    }
  }
  if constexpr (kHasPairs) {
    if (form == Preparation::Pairs || form == Preparation::CoarsePairs) {
      prepare_blocks<true, 2>(x, num_inputs, max_quant, row, prepared);
      return true;
    }
  }
  return false;
}

void prepare_floats(const float* x, int64_t num_inputs, int64_t row, void* prepared) {
  const int64_t num_lines = round_up(num_inputs, kBlockSize) / kFloatsPerLine;
  FloatBlock* panel = static_cast<FloatBlock*>(prepared) + row / kPanelRows * num_lines;
  for (int64_t line = 0; line < num_lines; ++line) {
    float* destination = panel[line].rows[row % kPanelRows];
    const int64_t first = line * kFloatsPerLine;
    const int64_t count = std::clamp(num_inputs - first, int64_t{0}, kFloatsPerLine);
    std::fill(std::copy_n(x + std::min(first, num_inputs), count, destination),
              destination + kFloatsPerLine, 0.0F);
  }
}

/// 32 inputs of one row; what is rounded away goes to `low` if there is one.
void prepare_tile_line(const float* x, int64_t count, uint8_t* high, uint8_t* low) {
  uint16_t line[kBlockSize] = {};
  for (int64_t i = 0; i < count; ++i) line[i] = bfloat16_from_float(x[i]);
  std::memcpy(high, line, sizeof line);
  if (low == nullptr) return;
  uint16_t rest[kBlockSize] = {};
  for (int64_t i = 0; i < count; ++i) {
    rest[i] = bfloat16_from_float(x[i] - float_from_bfloat16(line[i]));
  }
  std::memcpy(low, rest, sizeof rest);
}

void prepare_tiles(const float* x, int64_t num_inputs, int64_t row, bool is_split, void* prepared) {
  const int64_t num_tiles = round_up(num_inputs, kBlockSize) / kBlockSize;
  const int64_t size = is_split ? 2 * kTileBytes : kTileBytes;
  uint8_t* tiles =
      static_cast<uint8_t*>(prepared) + row / kTileRows * num_tiles * size + row % kTileRows * 64;
  for (int64_t tile = 0; tile < num_tiles; ++tile, tiles += size) {
    const int64_t first = tile * kBlockSize;
    prepare_tile_line(x + first, std::min(num_inputs - first, kBlockSize), tiles,
                      is_split ? tiles + kTileBytes : nullptr);
  }
}

}  // namespace

int64_t prepared_bytes(WeightType type, RowKind kind, int64_t num_inputs, int64_t num_rows) {
  const int64_t num_blocks = round_up(num_inputs, kBlockSize) / kBlockSize;
  const int64_t num_panels = round_up(num_rows, kPanelRows) / kPanelRows;
  switch (preparation(type, kind)) {
    case Preparation::Blocks:
    case Preparation::Pairs:
    case Preparation::CoarsePairs:
      return num_panels * num_blocks * static_cast<int64_t>(sizeof(PanelBlock<2>));
    case Preparation::CoarseBlocks:
      return num_panels * num_blocks * static_cast<int64_t>(sizeof(PanelBlock<1>));
    case Preparation::Floats:
      return num_panels * num_blocks * 2 * static_cast<int64_t>(sizeof(FloatBlock));
    case Preparation::Tiles:
      return round_up(num_rows, kTileRows) / kTileRows * num_blocks * kTileBytes;
    case Preparation::SplitTiles:
      return round_up(num_rows, kTileRows) / kTileRows * num_blocks * 2 * kTileBytes;
  }
  return -1;
}

void prepare_rows(WeightType type, RowKind kind, const float* x, int64_t x_stride,
                  int64_t num_inputs, int64_t row_begin, int64_t row_end, void* prepared) {
  const Preparation form = preparation(type, kind);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* values = x + row * x_stride;
    if (prepare_quants(form, values, num_inputs, row, prepared)) continue;
    if (form == Preparation::Floats) {
      prepare_floats(values, num_inputs, row, prepared);
    } else {
      prepare_tiles(values, num_inputs, row, form == Preparation::SplitTiles, prepared);
    }
  }
}

bool same_preparation(WeightType a, WeightType b) {
  constexpr RowKind kinds[] = {RowKind::Generated, RowKind::Prompt, RowKind::PrecisePrompt,
                               RowKind::Coarse};
  return std::all_of(std::begin(kinds), std::end(kinds),
                     [&](RowKind kind) { return preparation(a, kind) == preparation(b, kind); });
}

}  // namespace ts
