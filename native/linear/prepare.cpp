// Prepares rows of activations: quantized blocks, padded float32 lines, or bfloat16 tiles.
#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/number.h"
#include "linear/tiles.h"

namespace ts {
namespace {

constexpr float kMaxQuant = 16256.0F;  // 127 * 128: the high plane stays within [-127, 127]
constexpr float kMaxCoarseQuant = 127.0F;

#if TS_LEVEL == 0

/// The largest magnitude of 32 numbers as its bits: as integers, magnitudes keep their order and
/// NaN comes last.
int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    largest = std::max(largest, static_cast<int32_t>(bits_from_float(x[i]) & 0x7fffffffU));
  }
  return largest;
}

/// q = x * inverse, rounded to the nearest even integer: below 2^22.
void round_block(const float* x, float inverse, int32_t* q) {
  // Adding 1.5 * 2^23 rounds and leaves the integer in the low bits.
  constexpr float magic = 12582912.0F;
  alignas(64) float shifted[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) shifted[i] = x[i] * inverse + magic;
  for (int i = 0; i < kBlockSize; ++i) {
    q[i] = static_cast<int32_t>(bits_from_float(shifted[i])) - 0x4b400000;
  }
}

/// The sums of the first 16 of 32 numbers and of the others.
void sum_halves(const int32_t* q, int32_t sums[2]) {
  for (int half = 0; half < 2; ++half) {
    sums[half] = 0;
    for (int i = 0; i < kGroupSize; ++i) sums[half] += q[half * kGroupSize + i];
  }
}

#endif

/// 32 numbers of one row as q * scale. If one of them is not finite, the scale is NaN.
struct Quantized {
  alignas(64) int32_t q[kBlockSize];
  float scale;
};

/// Quantizes 32 numbers, of which the largest is given as its bits, to [-max_quant, max_quant];
/// 1 / scale stays finite because tiny blocks count as zero.
Quantized quantize(const float* x, int32_t largest, float max_quant) {
  Quantized result;
  const float amax = float_from_bits(static_cast<uint32_t>(largest));
  const bool is_finite = largest < 0x7f800000;
  const bool usable = amax >= 0x1p-100f && is_finite;
  const float scale = usable ? amax / max_quant : 0.0F;
  const float inverse = usable ? 1.0F / scale : 0.0F;
  if (usable) {
    round_block(x, inverse, result.q);
  } else {
    std::fill_n(result.q, kBlockSize, 0);
  }
  result.scale = is_finite ? scale : float_from_bits(0x7fc00000U);
  return result;
}

/// Lays a row's numbers into a block as the level's kernels read them.
template <bool AsPairs, int Planes>
void store_block(const Quantized& numbers, PanelBlock<Planes>* block, int64_t row) {
  if constexpr (AsPairs) {
    store_pairs(numbers.q, block->rows[row]);
  } else {
    store_planes<Planes>(numbers.q, block->rows[row]);
  }
  block->scale[row] = numbers.scale;
  int32_t halves[2];
  sum_halves(numbers.q, halves);
  const int32_t sums[3] = {halves[0] + halves[1], halves[0], halves[1]};
  for (int part = 0; part < 3; ++part) {
    // Below 2^24: exact in float32.
    block->scaled_sum[part][row] = numbers.scale * static_cast<float>(sums[part]);
    block->minus_sum[part][row] = -sums[part];
  }
  block->minus_eight_sum[row] = 8 * block->minus_sum[0][row];
}

/// Rows of activations, `stride` floats apart.
struct InputRows {
  const float* x;
  int64_t stride;
  int64_t num_inputs;

  const float* row(int64_t index) const { return x + index * stride; }
  int64_t num_blocks() const { return num_inputs / kBlockSize; }
};

/// All rows of a panel side by side: its blocks then stay in the cache until they are written.
template <bool AsPairs, int Planes>
void prepare_panel(const InputRows& input, float max_quant, int64_t first_row,
                   PanelBlock<Planes>* panel) {
  for (int64_t block = 0; block < input.num_blocks(); ++block) {
    const float* values = input.row(first_row) + block * kBlockSize;
#if TS_LEVEL >= 1
    if (store_panel<AsPairs>(values, input.stride, max_quant, panel + block)) continue;
#endif
    for (int row = 0; row < kPanelRows; ++row, values += input.stride) {
      store_block<AsPairs>(quantize(values, largest_bits(values), max_quant), panel + block, row);
    }
  }
}

/// One row of a panel.
template <bool AsPairs, int Planes>
void prepare_row(const InputRows& input, float max_quant, int64_t row, PanelBlock<Planes>* panel) {
  const auto at = static_cast<int>(row % kPanelRows);
  const float* values = input.row(row);
  for (int64_t block = 0; block < input.num_blocks();) {
#if TS_LEVEL >= 1
    if (block + 8 <= input.num_blocks() &&
        store_eight<AsPairs>(values, max_quant, at, panel + block)) {
      block += 8;
      values += 8 * kBlockSize;
      continue;
    }
#endif
    store_block<AsPairs>(quantize(values, largest_bits(values), max_quant), panel + block, at);
    ++block;
    values += kBlockSize;
  }
}

/// Rows [row_begin, row_end); panels are `panel_step` blocks apart.
template <bool AsPairs, int Planes>
void prepare_blocks(const InputRows& input, float max_quant, int64_t row_begin, int64_t row_end,
                    int64_t panel_step, void* prepared) {
  auto* blocks = static_cast<PanelBlock<Planes>*>(prepared);
  for (int64_t begin = row_begin; begin < row_end;) {
    PanelBlock<Planes>* panel = blocks + begin / kPanelRows * panel_step;
    if (begin % kPanelRows == 0 && begin + kPanelRows <= row_end) {
      prepare_panel<AsPairs>(input, max_quant, begin, panel);
      begin += kPanelRows;
    } else {
      prepare_row<AsPairs>(input, max_quant, begin++, panel);
    }
  }
}

/// Writes which blocks of a stretch are fine, in order: those with the largest numbers, and of
/// equal ones the first. Returns how many.
int64_t choose_fine(const int32_t* largest, int64_t num_blocks, int32_t* places) {
  const int64_t num_fine = num_fine_blocks(num_blocks);
  int32_t ordered[kMixedStretch] = {};
  std::copy_n(largest, num_blocks, ordered);
  std::nth_element(ordered, ordered + num_fine - 1, ordered + num_blocks, std::greater<>());
  const int32_t least = ordered[num_fine - 1];
  int64_t num_equal = num_fine - std::count_if(ordered, ordered + num_fine - 1,
                                               [&](int32_t it) { return it > least; });
  int64_t count = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    if (largest[block] < least || (largest[block] == least && num_equal-- <= 0)) continue;
    places[count++] = static_cast<int32_t>(block);
  }
  return count;
}

/// Of one row, what rounding to coarse blocks took away from the fine ones, as their low planes.
template <bool AsPairs, int Planes>
void prepare_fine(const float* x, int64_t num_inputs, int64_t row, void* prepared) {
  const int64_t num_blocks = num_inputs / kBlockSize;
  auto* low = static_cast<PanelBlock<Planes>*>(prepared) +
              row / kPanelRows * mixed_panel_blocks<Planes>(num_blocks) + num_blocks;
  auto* places = reinterpret_cast<FinePlaces*>(low + num_fine_blocks(num_blocks));
  const int64_t at = row % kPanelRows;
  int32_t largest[kMixedStretch];
  int32_t fine[kMixedStretch / kMixedShare];
  for (int64_t begin = 0; begin < num_blocks; begin += kMixedStretch) {
    const int64_t count = std::min(num_blocks - begin, kMixedStretch);
    for (int64_t i = 0; i < count; ++i) largest[i] = largest_bits(x + (begin + i) * kBlockSize);
    const int64_t num_fine = choose_fine(largest, count, fine);
    for (int64_t i = 0; i < num_fine; ++i) {
      const int64_t block = begin + fine[i];
      const float* values = x + block * kBlockSize;
      const Quantized high = quantize(values, largest[fine[i]], kMaxCoarseQuant);
      Quantized rest = quantize(values, largest[fine[i]], kMaxQuant);
      for (int k = 0; k < kBlockSize; ++k) rest.q[k] -= 128 * high.q[k];
      store_block<AsPairs>(rest, low++, at);
      (*places++)[at] = static_cast<int32_t>(block);
    }
  }
}

/// Coarse blocks, and what the fine ones lack.
template <bool AsPairs, int Planes>
void prepare_mixed(const InputRows& input, int64_t row_begin, int64_t row_end, void* prepared) {
  prepare_blocks<AsPairs, Planes>(input, kMaxCoarseQuant, row_begin, row_end,
                                  mixed_panel_blocks<Planes>(input.num_blocks()), prepared);
  for (int64_t row = row_begin; row < row_end; ++row) {
    prepare_fine<AsPairs, Planes>(input.row(row), input.num_inputs, row, prepared);
  }
}

/// False if the form has other things than quantized blocks.
bool prepare_quants(Preparation form, const InputRows& input, int64_t row_begin, int64_t row_end,
                    void* prepared) {
  const bool is_coarse = form == Preparation::CoarseBlocks || form == Preparation::CoarsePairs;
  const float max_quant = is_coarse ? kMaxCoarseQuant : kMaxQuant;
  const int64_t num_blocks = input.num_blocks();
  if constexpr (kHasPlanes) {
    if (form == Preparation::Blocks) {
      prepare_blocks<false, 2>(input, max_quant, row_begin, row_end, num_blocks, prepared);
      return true;
    }
    if (form == Preparation::CoarseBlocks) {
      prepare_blocks<false, 1>(input, max_quant, row_begin, row_end, num_blocks, prepared);
      return true;
    }
    if (form == Preparation::MixedBlocks) {
      prepare_mixed<false, 1>(input, row_begin, row_end, prepared);
      return true;
    }
  }
  if constexpr (kHasPairs) {
    if (form == Preparation::Pairs || form == Preparation::CoarsePairs) {
      prepare_blocks<true, 2>(input, max_quant, row_begin, row_end, num_blocks, prepared);
      return true;
    }
    if (form == Preparation::MixedPairs) {
      prepare_mixed<true, 2>(input, row_begin, row_end, prepared);
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

#if TS_LEVEL == 3

/// Lays 32 numbers as bfloat16, rounded to nearest even.
void store_bfloat16(const __m512 numbers[2], uint8_t* out) {
  const auto rounded = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(numbers[1], numbers[0]));
  _mm512_store_si512(out, rounded);
}

/// 32 inputs of one row; what rounding takes away goes to `low` if there is one.
void prepare_tile_line(const float* x, int64_t count, uint8_t* high, uint8_t* low) {
  const auto mask = static_cast<uint32_t>((uint64_t{1} << count) - 1);
  __m512 numbers[2];
  for (int i = 0; i < 2; ++i) {
    const auto half = static_cast<__mmask16>(mask >> (16 * i));
    numbers[i] = _mm512_maskz_loadu_ps(half, x + 16 * i);
  }
  store_bfloat16(numbers, high);
  if (low == nullptr) return;
  for (int i = 0; i < 2; ++i) {
    const auto* stored = reinterpret_cast<const __m256i*>(high) + i;
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_load_si256(stored)), 16);
    numbers[i] = _mm512_sub_ps(numbers[i], _mm512_castsi512_ps(bits));
  }
  store_bfloat16(numbers, low);
}

void prepare_tiles(const float* x, int64_t num_inputs, int64_t row, bool is_split, void* prepared) {
  const int64_t num_tiles = round_up(num_inputs, kBlockSize) / kBlockSize;
  const int64_t size = is_split ? 2 * kTileBytes : kTileBytes;
  uint8_t* tiles = static_cast<uint8_t*>(prepared) +
                   row / kTileRows * row_tile_bytes(num_inputs, is_split) + row % kTileRows * 64;
  for (int64_t tile = 0; tile < num_tiles; ++tile, tiles += size) {
    const int64_t first = tile * kBlockSize;
    prepare_tile_line(x + first, std::min(num_inputs - first, kBlockSize), tiles,
                      is_split ? tiles + kTileBytes : nullptr);
  }
}

#endif

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
    case Preparation::MixedBlocks:
      return num_panels * mixed_panel_blocks<1>(num_blocks) *
             static_cast<int64_t>(sizeof(PanelBlock<1>));
    case Preparation::MixedPairs:
      return num_panels * mixed_panel_blocks<2>(num_blocks) *
             static_cast<int64_t>(sizeof(PanelBlock<2>));
    case Preparation::Floats:
      return num_panels * num_blocks * 2 * static_cast<int64_t>(sizeof(FloatBlock));
    case Preparation::Tiles:
      return round_up(num_rows, kTileRows) / kTileRows * row_tile_bytes(num_inputs, false);
    case Preparation::SplitTiles:
      return round_up(num_rows, kTileRows) / kTileRows * row_tile_bytes(num_inputs, true);
  }
  return -1;
}

void prepare_rows(WeightType type, RowKind kind, const float* x, int64_t x_stride,
                  int64_t num_inputs, int64_t row_begin, int64_t row_end, void* prepared) {
  const Preparation form = preparation(type, kind);
  const InputRows input = {x, x_stride, num_inputs};
  if (prepare_quants(form, input, row_begin, row_end, prepared)) return;
  for (int64_t row = row_begin; row < row_end; ++row) {
    if (form == Preparation::Floats) {
      prepare_floats(input.row(row), num_inputs, row, prepared);
      continue;
    }
#if TS_LEVEL == 3
    prepare_tiles(input.row(row), num_inputs, row, form == Preparation::SplitTiles, prepared);
#endif
  }
}

bool same_preparation(WeightType a, WeightType b, bool may_be_mixed) {
  constexpr RowKind kinds[] = {RowKind::Generated, RowKind::Prompt, RowKind::PrecisePrompt,
                               RowKind::Coarse};
  const auto is_same = [&](RowKind kind) { return preparation(a, kind) == preparation(b, kind); };
  return std::all_of(std::begin(kinds), std::end(kinds), is_same) &&
         (!may_be_mixed || is_same(RowKind::Mixed));
}

}  // namespace ts
