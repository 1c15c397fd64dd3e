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

/// The largest magnitude of 32 numbers as its bits: as integers, magnitudes keep their order and
/// NaN comes last.
int32_t largest_bits(const float* x) {
  int32_t largest = 0;
  for (int i = 0; i < kBlockSize; ++i) {
    largest = std::max(largest, static_cast<int32_t>(bits_from_float(x[i]) & 0x7fffffffU));
  }
  return largest;
}

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
  // Adding 1.5 * 2^23 rounds to the nearest even integer and leaves it in the low bits.
  constexpr float magic = 12582912.0F;
  alignas(64) float shifted[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) shifted[i] = (usable ? x[i] : 0.0F) * inverse + magic;
  for (int i = 0; i < kBlockSize; ++i) {
    result.q[i] = static_cast<int32_t>(bits_from_float(shifted[i])) - 0x4b400000;
  }
  result.scale = is_finite ? scale : float_from_bits(0x7fc00000U);
  return result;
}

/// The sum of 16 numbers.
int32_t sum_of(const int32_t* q) {
  int32_t sum = 0;
  for (int i = 0; i < kGroupSize; ++i) sum += q[i];
  return sum;
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
  const int32_t first = sum_of(numbers.q);
  const int32_t second = sum_of(numbers.q + kGroupSize);
  const int32_t sums[3] = {first + second, first, second};
  for (int part = 0; part < 3; ++part) {
    // Below 2^24: exact in float32.
    block->scaled_sum[part][row] = numbers.scale * static_cast<float>(sums[part]);
    block->minus_sum[part][row] = -sums[part];
  }
  block->minus_eight_sum[row] = 8 * block->minus_sum[0][row];
}

template <bool AsPairs, int Planes>
void prepare_blocks(const float* x, int64_t num_inputs, float max_quant, int64_t row,
                    void* prepared) {
  const int64_t num_blocks = num_inputs / kBlockSize;
  auto* panel = static_cast<PanelBlock<Planes>*>(prepared) + row / kPanelRows * num_blocks;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float* values = x + block * kBlockSize;
    store_block<AsPairs>(quantize(values, largest_bits(values), max_quant), panel + block,
                         row % kPanelRows);
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

/// Coarse blocks, and for the fine ones what rounding took away, as their low planes.
template <bool AsPairs, int Planes>
void prepare_mixed(const float* x, int64_t num_inputs, int64_t row, void* prepared) {
  const int64_t num_blocks = num_inputs / kBlockSize;
  auto* coarse = static_cast<PanelBlock<Planes>*>(prepared) +
                 row / kPanelRows * mixed_panel_blocks<Planes>(num_blocks);
  auto* low = coarse + num_blocks;
  auto* places = reinterpret_cast<FinePlaces*>(low + num_fine_blocks(num_blocks));
  const int64_t at = row % kPanelRows;
  int32_t largest[kMixedStretch];
  int32_t fine[kMixedStretch / kMixedShare];
  for (int64_t begin = 0; begin < num_blocks; begin += kMixedStretch) {
    const int64_t count = std::min(num_blocks - begin, kMixedStretch);
    for (int64_t i = 0; i < count; ++i) largest[i] = largest_bits(x + (begin + i) * kBlockSize);
    const int64_t num_fine = choose_fine(largest, count, fine);
    int64_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t block = begin + i;
      const float* values = x + block * kBlockSize;
      const Quantized high = quantize(values, largest[i], kMaxCoarseQuant);
      store_block<AsPairs>(high, coarse + block, at);
      if (next == num_fine || fine[next] != i) continue;
      Quantized rest = quantize(values, largest[i], kMaxQuant);
      for (int k = 0; k < kBlockSize; ++k) rest.q[k] -= 128 * high.q[k];
      store_block<AsPairs>(rest, low++, at);
      (*places++)[at] = static_cast<int32_t>(block);
      ++next;
    }
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
    if (form == Preparation::MixedBlocks) {
      prepare_mixed<false, 1>(x, num_inputs, row, prepared);
      return true;
    }
  }
  if constexpr (kHasPairs) {
    if (form == Preparation::Pairs || form == Preparation::CoarsePairs) {
      prepare_blocks<true, 2>(x, num_inputs, max_quant, row, prepared);
      return true;
    }
    if (form == Preparation::MixedPairs) {
      prepare_mixed<true, 2>(x, num_inputs, row, prepared);
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
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* values = x + row * x_stride;
    if (prepare_quants(form, values, num_inputs, row, prepared)) continue;
    if (form == Preparation::Floats) {
      prepare_floats(values, num_inputs, row, prepared);
      continue;
    }
#if TS_LEVEL == 3
    prepare_tiles(values, num_inputs, row, form == Preparation::SplitTiles, prepared);
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
