// A few rows, mostly four, against unpacked groups with VNNI.
//
// A broadcast of four activations serves three groups (or two, where the number of groups is no
// multiple of three), so that the two multiplying ports and not the two loading ones are the limit.
#pragma once

#include "linear/wide_block.h"

#if TS_LEVEL >= 2

#include <cstring>

namespace ts {

/// sums += a sub-block's quads of G groups x one plane of R rows.
template <int R, int Planes, int NumSubs, int G>
TS_INLINE void dot_wide_plane(const WideBlock<NumSubs, G>& block, int sub, const uint8_t* bytes,
                              __m512i sums[R][G]) {
  constexpr int count = kQuads / NumSubs;
  TS_UNROLL
  for (int i = sub * count; i < (sub + 1) * count; ++i) {
    __m512i quads[G];
    TS_UNROLL
    for (int g = 0; g < G; ++g) quads[g] = _mm512_load_si512(block.lines[i][g]);
    TS_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t four;
      std::memcpy(&four, bytes + Planes * kBlockSize * r + 4 * i, sizeof four);
      const __m512i activations = _mm512_set1_epi32(four);
      TS_UNROLL
      for (int g = 0; g < G; ++g) {
        sums[r][g] = _mm512_dpbusd_epi32(sums[r][g], quads[g], activations);
      }
    }
  }
}

/// The shift by 7 makes the 128 of signed weights of what the sums start from.
template <int R, int NumSubs, bool HasMinimum, int G, int Planes>
TS_INLINE void dot_wide(const WideBlock<NumSubs, G>& block, const PanelBlock<Planes>& panel,
                        int row, int sub, __m512i sums[R][G]) {
  const uint8_t* bytes = row_bytes(panel, row);
  const int32_t* minus_sum = panel.minus_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    const int32_t minus_offset = Planes == 1 ? 128 * minus_sum[r] : minus_sum[r];
    const __m512i start = HasMinimum ? _mm512_setzero_si512() : _mm512_set1_epi32(minus_offset);
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = start;
  }
  dot_wide_plane<R, Planes>(block, sub, bytes, sums);
  if constexpr (Planes == 1) return;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = _mm512_slli_epi32(sums[r][g], 7);
  }
  dot_wide_plane<R, Planes>(block, sub, bytes + kBlockSize, sums);
}

/// Adds one sub-block's part to the sums of R rows and G groups.
template <int R, int NumSubs, bool HasMinimum, int G, int Planes>
TS_INLINE void add_wide_sub(const WideBlock<NumSubs, G>& block, const PanelBlock<Planes>& panel,
                            int row, int sub, Lanes sums[R][G]) {
  __m512i dots[R][G];
  dot_wide<R, NumSubs, HasMinimum, G>(block, panel, row, sub, dots);
  const float* scaled_sum = panel.scaled_sum[sum_index(NumSubs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
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

}  // namespace ts

#endif
