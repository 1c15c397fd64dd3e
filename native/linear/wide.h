// Many rows on AVX-512: three groups of outputs are unpacked once and then meet four rows at a
// time.
//
// A broadcast of four activations serves three groups, so that the two multiplying ports and not
// the two loading ones are the limit. The bits are those of the kernels for few rows.
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
constexpr int kWideGroups = 3;
constexpr int kWideRows = 4;

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

/// One 32-block of three groups, as the kernel reads it: bytes in VNNI order, 128 added to signed
/// ones; float32 scales; minimums where the format has them.
template <int NumSubs>
struct alignas(64) WideBlock {
  uint8_t quads[kQuads][kWideGroups][64];
  float scale[NumSubs][kWideGroups][kGroupSize];
  float minimum[NumSubs][kWideGroups][kGroupSize];
};

/// Unpacks one block of a group into its column of a wide one.
template <WeightType T>
TS_INLINE void unpack_wide_block(const uint8_t* group, int64_t index, const ScaleReader<T>& reader,
                                 int g, WideBlock<WideShape<T>::num_subs>* block) {
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

/// Unpacks blocks [begin, end) of three groups that follow each other.
template <WeightType T>
void unpack_wide(const uint8_t* groups, int64_t num_inputs, int64_t begin, int64_t end,
                 WideBlock<WideShape<T>::num_subs>* blocks) {
  const int64_t size = group_bytes(T, num_inputs);
  ScaleReader<T> readers[kWideGroups];
  for (int64_t index = begin; index < end; ++index) {
    for (int g = 0; g < kWideGroups; ++g) {
      const uint8_t* group = groups + g * size;
      readers[g].enter(group, index);
      unpack_wide_block<T>(group, index, readers[g], g, blocks + (index - begin));
    }
  }
}

/// sums += a sub-block's quads of three groups x one plane of four rows, whose bytes are 64 apart.
template <int NumSubs>
TS_INLINE void dot_plane(const WideBlock<NumSubs>& block, int sub, const uint8_t* bytes,
                         __m512i sums[kWideRows][kWideGroups]) {
  constexpr int count = kQuads / NumSubs;
  TS_UNROLL
  for (int i = sub * count; i < (sub + 1) * count; ++i) {
    __m512i quads[kWideGroups];
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) quads[g] = _mm512_load_si512(block.quads[i][g]);
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      int32_t four;
      std::memcpy(&four, bytes + 64 * r + 4 * i, sizeof four);
      const __m512i activations = _mm512_set1_epi32(four);
      TS_UNROLL
      for (int g = 0; g < kWideGroups; ++g) {
        sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], quads[g], activations);
      }
    }
  }
}

/// The shift by 7 makes the 128 of signed weights of what the sums start from.
template <int NumSubs, bool HasMinimum>
TS_INLINE void dot_wide(const WideBlock<NumSubs>& block, const PanelBlock& panel, int row, int sub,
                        __m512i sums[kWideRows][kWideGroups]) {
  const uint8_t* bytes = row_bytes(panel, row);
  const int32_t* minus_sum = panel.minus_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const __m512i start = HasMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(minus_sum[r]);
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = start;
  }
  dot_plane(block, sub, bytes, sums);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = _mm512_slli_epi32(sums[r][g], 7);
  }
  dot_plane(block, sub, bytes + kBlockSize, sums);
}

/// Adds one sub-block's part to the sums of four rows and three groups.
template <int NumSubs, bool HasMinimum>
TS_INLINE void add_wide_sub(const WideBlock<NumSubs>& block, const PanelBlock& panel, int row,
                            int sub, Lanes sums[kWideRows][kWideGroups]) {
  __m512i dots[kWideRows][kWideGroups];
  dot_wide<NumSubs, HasMinimum>(block, panel, row, sub, dots);
  const float* scaled_sum = panel.scaled_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const Lanes row_scale = broadcast(panel.scale[row + r]);
    const Lanes row_sum = broadcast(scaled_sum[r]);
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) {
      const Lanes factor = multiply(load_lanes(block.scale[sub][g]), row_scale);
      sums[r][g] = multiply_add(to_lanes({dots[r][g]}), factor, sums[r][g]);
      if constexpr (HasMinimum) {
        sums[r][g] = multiply_add(load_lanes(block.minimum[sub][g]), row_sum, sums[r][g]);
      }
    }
  }
}

/// The packed blocks that come next, of three groups `group_bytes` apart; none if there are no
/// bytes of them for each block.
struct NextBlocks {
  const uint8_t* data;
  int64_t group_bytes;
  int64_t block_bytes;

  TS_INLINE void fetch(int64_t index) const {
    for (int64_t offset = 0; offset < block_bytes; offset += 64) {
      const uint8_t* line = data + index * block_bytes + offset;
      TS_UNROLL
      for (int g = 0; g < kWideGroups; ++g) __builtin_prefetch(line + g * group_bytes, 0, 2);
    }
  }
};

/// Adds unpacked blocks of three groups to the sums of rows [row, row + 4) of a panel. Meanwhile
/// the next ones are fetched into the second-level cache.
template <int NumSubs, bool HasMinimum>
void multiply_wide(const WideBlock<NumSubs>* blocks, const PanelBlock* panel, int row,
                   int64_t num_blocks, const NextBlocks& next,
                   Lanes in_out[kWideRows][kWideGroups]) {
  Lanes sums[kWideRows][kWideGroups];
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = in_out[r][g];
  }
  for (int64_t index = 0; index < num_blocks; ++index) {
    next.fetch(index);
    TS_UNROLL
    for (int sub = 0; sub < NumSubs; ++sub) {
      add_wide_sub<NumSubs, HasMinimum>(blocks[index], panel[index], row, sub, sums);
    }
  }
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) in_out[r][g] = sums[r][g];
  }
}

}  // namespace ts

#endif
