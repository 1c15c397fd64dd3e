// Many rows on AVX-512: three groups of outputs are unpacked once and then meet four rows at a
// time.
//
// A broadcast of four activations serves three groups, so that the two multiplying ports and not
// the two loading ones are the limit. The bits are those of the kernels for few rows.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL >= 2

#include <cstdint>

#include "linear/dot.h"
#include "linear/kernels.h"
#include "linear/lanes.h"

namespace ts {

constexpr int kWideGroups = 3;
constexpr int kWideRows = 4;
constexpr int64_t kFewestWideRows = 32;  // fewer do not repay the unpacking (measured)

/// One 32-block of three groups, as the kernel reads it: bytes in VNNI order, float32 scales.
struct alignas(64) WideBlock {
  uint8_t quads[8][kWideGroups][64];
  float scale[kWideGroups][kGroupSize];
  float minimum[kWideGroups][kGroupSize];  // Q4_1 alone
};

/// Unpacks three groups that follow each other.
template <WeightType T>
void unpack_wide(const uint8_t* groups, int64_t num_inputs, WideBlock* blocks) {
  const int64_t size = group_bytes(T, num_inputs);
  for (int64_t index = 0; index < num_inputs / kBlockSize; ++index) {
    for (int g = 0; g < kWideGroups; ++g) {
      const uint8_t* group = groups + g * size;
      const uint8_t* scales = group + scale_offset(T, index);
      prefetch<quant_bytes(T) + scale_bytes(T)>(group + quant_offset(T, index));
      __m512i quads[8];
      load_quads<T>(group + quant_offset(T, index), quads);
      TS_UNROLL
      for (int i = 0; i < 8; ++i) _mm512_store_si512(blocks[index].quads[i][g], quads[i]);
      store_lanes(blocks[index].scale[g], load_halves(scales));
      if constexpr (T == WeightType::Q4_1) {
        store_lanes(blocks[index].minimum[g], load_halves(scales + 32));
      }
    }
  }
}

/// sums += quads of three groups x one plane of four rows, whose bytes are 64 apart.
inline void dot_plane(const WideBlock& block, const uint8_t* bytes,
                      __m512i sums[kWideRows][kWideGroups]) {
  TS_UNROLL
  for (int i = 0; i < 8; ++i) {
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

template <WeightType T>
inline void dot_wide(const WideBlock& block, const PanelBlock& panel, int row,
                     __m512i sums[kWideRows][kWideGroups]) {
  const uint8_t* bytes = row_bytes(panel, row);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    const __m512i start = high_start<T>(&panel.minus_sum[row + r]);
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = start;
  }
  dot_plane(block, bytes, sums);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = _mm512_slli_epi32(sums[r][g], 7);
  }
  dot_plane(block, bytes + kBlockSize, sums);
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) {
      sums[r][g] = finish_dot<T>(sums[r][g], &panel.minus_eight_sum[row + r]);
    }
  }
}

/// Fetches one block's share of the packed groups that come next, into the second-level cache.
template <WeightType T>
inline void prefetch_wide(const uint8_t* next, int64_t index) {
  constexpr int64_t share = kWideGroups * (quant_bytes(T) + scale_bytes(T));
  TS_UNROLL
  for (int64_t offset = 0; offset < share; offset += 64) {
    __builtin_prefetch(next + index * share + offset, 0, 2);
  }
}

/// Rows [row, row + 4) of a panel against three unpacked groups. Meanwhile the three packed groups
/// at `next` (if any) are fetched.
template <WeightType T>
void multiply_wide(const WideBlock* blocks, const PanelBlock* panel, int row, int64_t num_blocks,
                   const uint8_t* next, Lanes out[kWideRows][kWideGroups]) {
  Lanes sums[kWideRows][kWideGroups];
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) sums[r][g] = zero_lanes();
  }
  for (int64_t index = 0; index < num_blocks; ++index) {
    const WideBlock& block = blocks[index];
    if (next != nullptr) prefetch_wide<T>(next, index);
    __m512i dots[kWideRows][kWideGroups];
    dot_wide<T>(block, panel[index], row, dots);
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      const Lanes row_scale = broadcast(panel[index].scale[row + r]);
      const Lanes row_sum = broadcast(panel[index].scaled_sum[row + r]);
      TS_UNROLL
      for (int g = 0; g < kWideGroups; ++g) {
        const Lanes factor = multiply(load_lanes(block.scale[g]), row_scale);
        sums[r][g] = multiply_add(to_lanes({dots[r][g]}), factor, sums[r][g]);
        if constexpr (T == WeightType::Q4_1) {
          sums[r][g] = multiply_add(load_lanes(block.minimum[g]), row_sum, sums[r][g]);
        }
      }
    }
  }
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < kWideGroups; ++g) out[r][g] = sums[r][g];
  }
}

}  // namespace ts

#endif
