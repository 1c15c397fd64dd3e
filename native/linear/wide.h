// Many rows on AVX-512: groups of outputs are unpacked once and then meet four rows at a time.
//
// A broadcast of four activations serves three groups (or two, where the number of groups is no
// multiple of three), so that the two multiplying ports and not the two loading ones are the limit.
// The bits are those of the kernels for few rows.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL >= 2

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/kernels.h"
#include "linear/lanes.h"
#include "linear/scales.h"

namespace ts {

/// Blocks that are unpacked at a time: of three groups, some 30 KB, which stay in the first-level
/// cache while all rows pass by. A multiple of every format's unit.
constexpr int64_t kWideBlocks = 16;
constexpr int kWideRows = 4;

/// How many of the groups that are left go together: threes, then twos, never one alone unless it
/// is the only one.
constexpr int wide_groups(int64_t left) {
  return left >= 3 && left != 4 ? 3 : static_cast<int>(left < 2 ? left : 2);
}

/// Fewer rows do not repay the unpacking, of which whole bytes need least (measured).
template <WeightType T>
constexpr int64_t fewest_wide_rows() {
  return block_format(T).num_bits() == 8 ? 32 : 16;
}

/// What the kernel needs to know of a format: a format without minimums has signed weights.
template <WeightType T>
struct WideShape {
  static constexpr int num_subs = block_format(T).num_subs;
  static constexpr bool has_minimum = block_format(T).has_minimum;
  static_assert(has_minimum == (block_format(T).offset == 0));
};

/// One 32-block of G groups, as the kernel reads it: bytes in VNNI order, 128 added to signed ones;
/// float32 scales; minimums where the format has them.
template <int NumSubs, int G>
struct alignas(64) WideBlock {
  uint8_t quads[kQuads][G][64];
  float scale[NumSubs][G][kGroupSize];
  float minimum[NumSubs][G][kGroupSize];
};

/// Unpacks one block of a group into its column of a wide one.
template <WeightType T, int G>
TS_INLINE void unpack_wide_block(const uint8_t* group, int64_t index, const ScaleReader<T>& reader,
                                 int g, WideBlock<WideShape<T>::num_subs, G>* block) {
  constexpr BlockFormat format = block_format(T);
  constexpr int to_bytes = format.has_minimum ? 0 : 128 - format.offset;
  const Codes<T> codes = load_codes<T>(group + format.quant_offset(index));
  TS_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    const __m512i bytes = _mm512_add_epi8(codes.quads[i], _mm512_set1_epi8(to_bytes));
    _mm512_store_si512(block->quads[i][g], bytes);
  }
  TS_UNROLL
  for (int sub = 0; sub < format.num_subs; ++sub) {
    Lanes scale;
    Lanes minimum;
    reader.read(sub, &scale, &minimum);
    store_lanes(block->scale[sub][g], scale);
    if constexpr (format.has_minimum) store_lanes(block->minimum[sub][g], minimum);
  }
}

/// Unpacks blocks [begin, end) of G groups that follow each other.
template <WeightType T, int G>
void unpack_wide(const uint8_t* groups, int64_t num_inputs, int64_t begin, int64_t end,
                 WideBlock<WideShape<T>::num_subs, G>* blocks) {
  const int64_t size = group_bytes(T, num_inputs);
  ScaleReader<T> readers[G];
  for (int64_t index = begin; index < end; ++index) {
    for (int g = 0; g < G; ++g) {
      const uint8_t* group = groups + g * size;
      readers[g].enter(group, index);
      unpack_wide_block<T, G>(group, index, readers[g], g, blocks + (index - begin));
    }
  }
}

/// sums += a sub-block's quads of G groups x one plane of four rows, whose bytes are 64 apart.
template <int NumSubs, int G>
TS_INLINE void dot_plane(const WideBlock<NumSubs, G>& block, int sub, const uint8_t* bytes,
                         __m512i sums[kWideRows][G]) {
  constexpr int count = kQuads / NumSubs;
  TS_UNROLL
  for (int i = sub * count; i < (sub + 1) * count; ++i) {
    __m512i quads[G];
    TS_UNROLL
    for (int g = 0; g < G; ++g) quads[g] = _mm512_load_si512(block.quads[i][g]);
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      int32_t four;
      std::memcpy(&four, bytes + 64 * r + 4 * i, sizeof four);
      const __m512i activations = _mm512_set1_epi32(four);
      TS_UNROLL
      for (int g = 0; g < G; ++g) {
        sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], quads[g], activations);
      }
    }
  }
}

/// The shift by 7 makes the 128 of signed weights of what the sums start from.
template <int NumSubs, bool HasMinimum, int G>
TS_INLINE void dot_wide(const WideBlock<NumSubs, G>& block, const PanelBlock& panel, int row,
                        int sub, __m512i sums[kWideRows][G]) {
  const uint8_t* bytes = row_bytes(panel, row);
  const int32_t* minus_sum = panel.minus_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const __m512i start = HasMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(minus_sum[r]);
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = start;
  }
  dot_plane(block, sub, bytes, sums);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = _mm512_slli_epi32(sums[r][g], 7);
  }
  dot_plane(block, sub, bytes + kBlockSize, sums);
}

/// Adds one sub-block's part to the sums of four rows and G groups.
template <int NumSubs, bool HasMinimum, int G>
TS_INLINE void add_wide_sub(const WideBlock<NumSubs, G>& block, const PanelBlock& panel, int row,
                            int sub, Lanes sums[kWideRows][G]) {
  __m512i dots[kWideRows][G];
  dot_wide<NumSubs, HasMinimum, G>(block, panel, row, sub, dots);
  const float* scaled_sum = panel.scaled_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const Lanes row_scale = broadcast(panel.scale[row + r]);
    const Lanes row_sum = broadcast(scaled_sum[r]);
    TS_UNROLL
    for (int g = 0; g < G; ++g) {
      const Lanes factor = multiply(load_lanes(block.scale[sub][g]), row_scale);
      sums[r][g] = multiply_add(to_lanes({dots[r][g]}), factor, sums[r][g]);
      if constexpr (HasMinimum) {
        sums[r][g] = multiply_add(load_lanes(block.minimum[sub][g]), row_sum, sums[r][g]);
      }
    }
  }
}

/// The packed blocks that come next, of groups `group_bytes` apart; none if there are no
/// bytes of them for each block.
struct NextBlocks {
  const uint8_t* data;
  int64_t group_bytes;
  int64_t block_bytes;

  template <int G>
  TS_INLINE void fetch(int64_t index) const {
    for (int64_t offset = 0; offset < block_bytes; offset += 64) {
      const uint8_t* line = data + index * block_bytes + offset;
      TS_UNROLL
      for (int g = 0; g < G; ++g) __builtin_prefetch(line + g * group_bytes, 0, 2);
    }
  }
};

/// Adds unpacked blocks of G groups to the sums of rows [row, row + 4) of a panel, or writes them
/// if these are the first blocks. Meanwhile the next ones are fetched into the second-level cache.
template <int NumSubs, bool HasMinimum, int G>
void multiply_wide(const WideBlock<NumSubs, G>* blocks, const PanelBlock* panel, int row,
                   int64_t num_blocks, const NextBlocks& next, bool is_first,
                   Lanes in_out[kWideRows][G]) {
  Lanes sums[kWideRows][G];
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = is_first ? zero_lanes() : in_out[r][g];
  }
  for (int64_t index = 0; index < num_blocks; ++index) {
    next.fetch<G>(index);
    TS_UNROLL
    for (int sub = 0; sub < NumSubs; ++sub) {
      add_wide_sub<NumSubs, HasMinimum, G>(blocks[index], panel[index], row, sub, sums);
    }
  }
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) in_out[r][g] = sums[r][g];
  }
}

}  // namespace ts

#endif
