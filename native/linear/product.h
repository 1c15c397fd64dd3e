// A matrix product in progress, and where its sums go.
#pragma once

#include <cstdint>

#include "linear/lanes.h"
#include "linear/layout.h"
#include "linear/linear.h"

namespace ts {

/// Adds one group's sums of one row to the result, or writes them.
inline void store_group(const Lanes& sums, float* out, int64_t num_columns, bool accumulate) {
  if (num_columns >= kGroupSize) {
    store_lanes(out, accumulate ? add(load_lanes(out), sums) : sums);
    return;
  }
  float values[kGroupSize];
  store_lanes(values, sums);
  for (int64_t i = 0; i < num_columns; ++i) {
    out[i] = accumulate ? out[i] + values[i] : values[i];
  }
}

/// A product in progress: everything but the group and the rows. `Planes` are those of prepared
/// blocks.
template <int Planes>
struct Product {
  const PackedWeight& weight;
  const uint8_t* prepared;
  float* out;
  int64_t out_stride;
  bool accumulate;
  bool is_mixed = false;
  const PanelBlock<2>* pairs = nullptr;  // the rows as pairs, for few rows on AVX2

  int64_t num_blocks() const { return round_up(weight.num_inputs, kBlockSize) / kBlockSize; }

  /// From a panel to the next one, in blocks.
  int64_t panel_step() const {
    return is_mixed ? mixed_panel_blocks<Planes>(num_blocks()) : num_blocks();
  }

  /// Blocks of rows from `row` on, the first of a panel.
  const PanelBlock<Planes>* panels_from(int64_t row) const {
    return reinterpret_cast<const PanelBlock<Planes>*>(prepared) + row / kPanelRows * panel_step();
  }
};

/// Multiply the first `num_rows` rows with groups [group_begin, group_end) if the weights are of
/// these kinds, else return false. Each compiles in a source of its own, beside the others.
template <int Planes>
bool multiply_plain(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                    int64_t group_end);
template <int Planes>
bool multiply_super(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                    int64_t group_end);
template <int Planes>
bool multiply_published(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                        int64_t group_end);
template <int Planes>
bool multiply_codebook(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                       int64_t group_end);

/// Keeps the first `count` of R rows' sums.
template <int R, int Planes>
void store_rows(const Product<Planes>& product, int64_t group, int64_t panel, int row, int count,
                const Lanes sums[R]) {
  const int64_t first = group * kGroupSize;
  const int64_t num_columns = product.weight.num_outputs - first;
  float* out = product.out + (panel * kPanelRows + row) * product.out_stride + first;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    if (r < count) {
      store_group(sums[r], out + r * product.out_stride, num_columns, product.accumulate);
    }
  }
}

}  // namespace ts
