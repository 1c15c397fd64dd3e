// What errors of some inputs take from the values of others, for a few outputs at a time.
#pragma once

#include "compress/lanes.h"
#include "linear/lanes.h"

namespace ts::rounding {

constexpr int kPanel = 256;  // inputs whose errors later panels see at once: whole super-blocks

constexpr int kTileRows = TS_LEVEL >= 2 ? 8 : 2;
constexpr int kTileLanes = 32;  // two Lanes

/// target[r] -= sum of matrix[r][i] * errors[i], i below `count`, for R rows of floats that begin
/// `stride` after each other. Sums run from the first to the last input.
template <int R>
inline void subtract_tile(const float* matrix, int64_t stride, const Row* errors, int count,
                          Row* target) {
  for (int o = 0; o < kLanes; o += kTileLanes) {
    Lanes sums[R][2];
    TS_UNROLL for (int r = 0; r < R; ++r) {
      sums[r][0] = load_lanes(target[r].v + o);
      sums[r][1] = load_lanes(target[r].v + o + 16);
    }
    for (int i = 0; i < count; ++i) {
      const Lanes left = load_lanes(errors[i].v + o), right = load_lanes(errors[i].v + o + 16);
      TS_UNROLL for (int r = 0; r < R; ++r) {
        const Lanes factor = broadcast(-matrix[r * stride + i]);
        sums[r][0] = multiply_add(left, factor, sums[r][0]);
        sums[r][1] = multiply_add(right, factor, sums[r][1]);
      }
    }
    TS_UNROLL for (int r = 0; r < R; ++r) {
      store_lanes(target[r].v + o, sums[r][0]);
      store_lanes(target[r].v + o + 16, sums[r][1]);
    }
  }
}

/// The same for rows from `from` until `until`; `matrix` begins with row 0.
inline void subtract(const float* matrix, int64_t stride, const Row* errors, int count,
                     int64_t from, int64_t until, Row* target) {
  int64_t r = from;
  for (; r + kTileRows <= until; r += kTileRows)
    subtract_tile<kTileRows>(matrix + r * stride, stride, errors, count, target + r);
  for (; r < until; ++r) subtract_tile<1>(matrix + r * stride, stride, errors, count, target + r);
}

}  // namespace ts::rounding
