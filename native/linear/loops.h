// The loops of a matrix product: which group meets which rows, in an order kind to the caches. For
// the sources that compile them, some formats each, side by side.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear/few_pairs.h"
#include "linear/kernels.h"
#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/product.h"
#include "linear/scratch.h"
#include "linear/tiles.h"
#include "linear/tuning.h"
#include "linear/wide.h"

#if defined(__aarch64__)
#include "linear/blocks_neon.h"
#endif

namespace ts {

/// Packed groups that are kept in the second-level cache while the rows pass by.
constexpr int64_t kCachedGroupBytes = TS_LEVEL >= 2 ? 512 * 1024 : 128 * 1024;

/// Rows [row, row + R) of a panel against one group; the first `count` of them are kept.
template <WeightType T, int R, int Planes>
void multiply_rows(const Product<Planes>& product, int64_t group, int64_t panel, int row,
                   int count) {
  const int64_t size = group_bytes(T, product.weight.num_inputs);
  const int64_t num_blocks = product.num_blocks();
  const uint8_t* data = product.weight.data + group * size;
  Lanes sums[R];
  if constexpr (is_block_format(T)) {
    const PanelBlock<Planes>* blocks = product.panels_from(panel * kPanelRows);
    multiply_blocks<T, R>(data, blocks, row, num_blocks, EveryBlock(), sums);
  } else {
    const auto* lines = reinterpret_cast<const FloatBlock*>(product.prepared);
    multiply_floats<T, R>(data, lines + panel * num_blocks * 2, row, num_blocks * 2, sums);
  }
  store_rows<R>(product, group, panel, row, count, sums);
}

/// Adds to rows [row, row_end) of a panel what their fine blocks lack against one group.
template <WeightType T, int Planes>
__attribute__((noinline)) void add_fine_blocks(const Product<Planes>& product, int64_t group,
                                               int64_t panel, int row, int row_end) {
  if constexpr (is_mixed_format(T)) {
    const uint8_t* data = product.weight.data + group * group_bytes(T, product.weight.num_inputs);
    const int64_t num_blocks = product.num_blocks();
    const int64_t num_fine = num_fine_blocks(num_blocks);
    const auto* low = product.panels_from(panel * kPanelRows) + num_blocks;
    const auto* places = reinterpret_cast<const FinePlaces*>(low + num_fine);
    const int64_t first = group * kGroupSize;
    for (; row < row_end; ++row) {
      Lanes sums;
      multiply_blocks<T, 1>(data, low, row, num_fine, FineBlocks{places, row}, &sums);
      store_group(sums, product.out + (panel * kPanelRows + row) * product.out_stride + first,
                  product.weight.num_outputs - first, true);
    }
  }
}

#if TS_LEVEL == 1

/// Rows [row, row + R) of a panel of pairs against one group.
template <WeightType T, int R>
void multiply_rows_as_pairs(const Product<2>& product, int64_t group, int64_t panel, int row) {
  const int64_t num_blocks = product.num_blocks();
  const uint8_t* data = product.weight.data + group * group_bytes(T, product.weight.num_inputs);
  Lanes sums[R];
  multiply_few<T, R>(data, product.pairs + panel * num_blocks, row, num_blocks, sums);
  store_rows<R>(product, group, panel, row, R, sums);
}

/// Rows [row, num_rows) of a panel, those that are best met as pairs. Returns what is left.
template <WeightType T>
int multiply_panel_as_pairs(const Product<2>& product, int64_t group, int64_t panel, int row,
                            int num_rows) {
  for (; num_rows - row >= 4; row += 4) multiply_rows_as_pairs<T, 4>(product, group, panel, row);
  const int left = num_rows - row;
  if (left < fewest_pair_rows<T>()) return row;
  if (left == 3) multiply_rows_as_pairs<T, 3>(product, group, panel, row);
  if constexpr (fewest_pair_rows<T>() <= 2) {
    if (left == 2) multiply_rows_as_pairs<T, 2>(product, group, panel, row);
  }
  if constexpr (fewest_pair_rows<T>() == 1) {
    if (left == 1) multiply_rows_as_pairs<T, 1>(product, group, panel, row);
  }
  return num_rows;
}

#endif

/// Rows [row, num_rows) of a panel, R at a time while there are more than half as many: one kernel
/// that computes a row for nothing is faster than two that unpack the weights, if it is no larger
/// than that for codes of 4 bits. Returns what is left.
template <WeightType T, int R, int Planes>
int multiply_runs(const Product<Planes>& product, int64_t group, int64_t panel, int row,
                  int num_rows) {
  if constexpr (has_kernel<T, R, Planes>()) {
    constexpr bool may_pad = R <= max_kernel_rows<WeightType::Q4_0>();
    constexpr int fewest = has_kernel<T, R - 1, Planes>() || !may_pad ? R : R / 2 + 1;
    for (; num_rows - row >= fewest && row + R <= kPanelRows; row += R) {
      multiply_rows<T, R>(product, group, panel, row, std::min(R, num_rows - row));
    }
  }
  return row;
}

/// Rows [row, num_rows) of a panel against one group.
template <WeightType T, int Planes>
void multiply_panel(const Product<Planes>& product, int64_t group, int64_t panel, int row,
                    int num_rows) {
#if TS_LEVEL == 1
  if constexpr (Planes == 2 && is_block_format(T) && !kHasByteDots) {
    if (product.pairs != nullptr) {
      row = multiply_panel_as_pairs<T>(product, group, panel, row, num_rows);
    }
  }
#endif
  row = multiply_runs<T, 8>(product, group, panel, row, num_rows);
  row = multiply_runs<T, 4>(product, group, panel, row, num_rows);
  row = multiply_runs<T, 3>(product, group, panel, row, num_rows);
  row = multiply_runs<T, 2>(product, group, panel, row, num_rows);
  multiply_runs<T, 1>(product, group, panel, row, num_rows);
}

/// Rows [row_begin, row_end) against groups few at a time: read from the packed form each time.
template <WeightType T, int Planes>
void multiply_packed(const Product<Planes>& product, int64_t row_begin, int64_t row_end,
                     int64_t group_begin, int64_t group_end) {
  const int64_t size = group_bytes(T, product.weight.num_inputs);
  const int64_t step = std::max(int64_t{1}, kCachedGroupBytes / size);
  for (int64_t first = group_begin; first < group_end; first += step) {
    const int64_t last = std::min(first + step, group_end);
    for (int64_t panel = row_begin / kPanelRows; panel * kPanelRows < row_end; ++panel) {
      const int64_t first_row = panel * kPanelRows;
      const auto begin = static_cast<int>(std::max(row_begin - first_row, int64_t{0}));
      const auto end = static_cast<int>(std::min(row_end - first_row, kPanelRows));
      for (int64_t group = first; group < last; ++group) {
        multiply_panel<T>(product, group, panel, begin, end);
        if (product.is_mixed) add_fine_blocks<T>(product, group, panel, begin, end);
      }
    }
  }
}

#if TS_LEVEL >= 1

/// G groups against rows [row_begin, row_end), a few blocks of inputs at a time.
template <WeightType T, int G, int Planes>
class WideProduct {
 public:
  /// `panels` are those of the rows, from the first of a panel on.
  WideProduct(const Product<Planes>& product, const PanelBlock<Planes>* panels, int64_t row_begin,
              int64_t row_end)
      : product_(product), panels_(panels), row_begin_(row_begin), row_end_(row_end) {
    static thread_local Scratch blocks;
    static thread_local Scratch sums;
    static thread_local Scratch fine;
    const auto block_bytes = static_cast<int64_t>(sizeof(Block));
    blocks_ = reinterpret_cast<Block*>(blocks.reserve(tuning().wide_blocks * block_bytes));
    sums_ = reinterpret_cast<Sums*>(sums.reserve(num_parts() * static_cast<int64_t>(sizeof(Sums))));
    if (!product.is_mixed) return;
    const auto fine_bytes = static_cast<int64_t>(sizeof(FineRow));
    fine_ = reinterpret_cast<FineRow*>(fine.reserve((row_end - row_begin) * fine_bytes));
  }

  /// Groups [group, group + G); `more` says that as many follow.
  void multiply(int64_t group, bool more) {
    const int64_t num_inputs = product_.weight.num_inputs;
    const int64_t num_blocks = product_.num_blocks();
    const int64_t size = group_bytes(T, num_inputs);
    const uint8_t* packed = product_.weight.data + group * size;
    // Chunks of nearly the same size: reading and writing the sums would cost a small one too much.
    const int64_t num_chunks = round_up(num_blocks, tuning().wide_blocks) / tuning().wide_blocks;
    const int64_t step =
        round_up(round_up(num_blocks, num_chunks) / num_chunks, kFormat.blocks_per_unit());
    if (product_.is_mixed) clear_fine();
    for (int64_t begin = 0; begin < num_blocks; begin += step) {
      const int64_t end = std::min(begin + step, num_blocks);
      unpack_wide<T, G>(packed, num_inputs, begin, end, blocks_);
      NextBlocks next = {packed + end * kFormat.block_bytes(), size, kFormat.block_bytes()};
      if (end == num_blocks) next.data = packed + G * size;
      if (end == num_blocks && !more) next.block_bytes = 0;
      add(begin, end, next);
      if (product_.is_mixed) add_fine(begin, end);
    }
    for (int64_t part = 0; part < num_parts(); ++part) store(group, part);
    if (product_.is_mixed) store_fine(group);
  }

 private:
  using Shape = WideShape<T>;
  using Block = typename WideBlockOf<T, G, meets_bytes<Planes>()>::Block;
  static constexpr BlockFormat kFormat = block_format(T);

  struct Sums {
    Lanes lanes[kWideRows][G];
  };

  /// What a row's fine blocks add to the sums.
  struct FineRow {
    Lanes sums[1][G];
    int64_t next;  // of the fine blocks
  };

  int64_t num_parts() const { return (row_end_ - row_begin_) / kWideRows; }

  void add(int64_t begin, int64_t end, NextBlocks next) {
    for (int64_t part = 0; part < num_parts(); ++part) {
      const int64_t row = part * kWideRows;
      const PanelBlock<Planes>* panel = panels_ + row / kPanelRows * product_.panel_step() + begin;
      multiply_wide<Shape::num_subs, Shape::has_minimum, G>(
          blocks_, panel, static_cast<int>(row % kPanelRows), end - begin, next, begin == 0,
          sums_[part].lanes);
      next.block_bytes = 0;  // they are fetched once
    }
  }

  void store(int64_t group, int64_t part) {
    for (int r = 0; r < kWideRows; ++r) {
      float* out = product_.out + (row_begin_ + part * kWideRows + r) * product_.out_stride;
      for (int g = 0; g < G; ++g) {
        const int64_t first = (group + g) * kGroupSize;
        store_group(sums_[part].lanes[r][g], out + first, product_.weight.num_outputs - first,
                    product_.accumulate);
      }
    }
  }

  void clear_fine() {
    for (int64_t row = 0; row < row_end_ - row_begin_; ++row) {
      for (Lanes& sum : fine_[row].sums[0]) sum = zero_lanes();
      fine_[row].next = 0;
    }
  }

  /// Goes on with the fine blocks that meet blocks [begin, end) of the weights, which are unpacked.
  void add_fine([[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) {
    if constexpr (is_mixed_format(T) && (TS_LEVEL >= 2 || meets_bytes<Planes>())) {
      const int64_t num_blocks = product_.num_blocks();
      const int64_t num_fine = num_fine_blocks(num_blocks);
      for (int64_t index = 0; index < row_end_ - row_begin_; ++index) {
        const int64_t panel = index / kPanelRows;
        const auto row = static_cast<int>(index % kPanelRows);
        const auto* low = panels_ + panel * product_.panel_step() + num_blocks;
        const auto* places = reinterpret_cast<const FinePlaces*>(low + num_fine);
        FineRow& fine = fine_[index];
        Lanes sums[1][G];
        for (int g = 0; g < G; ++g) sums[0][g] = fine.sums[0][g];
        for (; fine.next < num_fine && places[fine.next][row] < end; ++fine.next) {
          const Block& block = blocks_[places[fine.next][row] - begin];
          add_wide_sub<1, Shape::num_subs, Shape::has_minimum, G>(block, low[fine.next], row, 0,
                                                                  sums);
        }
        for (int g = 0; g < G; ++g) fine.sums[0][g] = sums[0][g];
      }
    }
  }

  void store_fine(int64_t group) {
    for (int64_t row = row_begin_; row < row_end_; ++row) {
      float* out = product_.out + row * product_.out_stride;
      for (int g = 0; g < G; ++g) {
        const int64_t first = (group + g) * kGroupSize;
        store_group(fine_[row - row_begin_].sums[0][g], out + first,
                    product_.weight.num_outputs - first, true);
      }
    }
  }

  const Product<Planes>& product_;
  const PanelBlock<Planes>* panels_;
  int64_t row_begin_;
  int64_t row_end_;
  Block* blocks_;
  Sums* sums_;
  FineRow* fine_ = nullptr;  // of mixed products
};

/// Panels of rows [row_begin, row_end), `row_begin` the first of one: where they are met as pairs
/// of int16 as such, elsewhere as they are.
template <WeightType T, int Planes>
const PanelBlock<Planes>* pair_panels(const Product<Planes>& product, int64_t row_begin,
                                      [[maybe_unused]] int64_t row_end) {
  const PanelBlock<Planes>* panels = product.panels_from(row_begin);
#if TS_LEVEL == 1
  if constexpr (has_planes(T) && !meets_bytes<Planes>()) {
    static thread_local Scratch pairs;
    const int64_t num_blocks = product.num_blocks();
    const int64_t num_panels = round_up(row_end - row_begin, kPanelRows) / kPanelRows;
    auto* copy = reinterpret_cast<PanelBlock<2>*>(
        pairs.reserve(num_panels * num_blocks * static_cast<int64_t>(sizeof(PanelBlock<2>))));
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const int64_t left = row_end - row_begin - panel * kPanelRows;
      copy_as_pairs(panels + panel * num_blocks, num_blocks,
                    static_cast<int>(std::min(left, kPanelRows)), copy + panel * num_blocks);
    }
    return copy;
  }
#endif
  return panels;
}

/// Rows in fours, groups in threes and twos (on AVX2 one by one); on AMX in eights and twos.
template <WeightType T, int Planes>
void multiply_unpacked(const Product<Planes>& product, int64_t row_begin, int64_t row_end,
                       int64_t group_begin, int64_t group_end) {
  const PanelBlock<Planes>* panels = pair_panels<T>(product, row_begin, row_end);
#if TS_LEVEL == 1
  WideProduct<T, 1, Planes> ones(product, panels, row_begin, row_end);
  for (int64_t group = group_begin; group < group_end; ++group) {
    ones.multiply(group, group + 1 < group_end);
  }
#else
#if TS_LEVEL == 3
  const TileSession session(byte_tiles(WideShape<T>::num_subs, Planes));
#endif
  int64_t group = group_begin;
  if constexpr (kGroupsTogether == 3) {
    WideProduct<T, 3, Planes> threes(product, panels, row_begin, row_end);
    for (; wide_groups(group_end - group) == 3; group += 3) {
      threes.multiply(group, group + 6 <= group_end);
    }
  }
  WideProduct<T, 2, Planes> twos(product, panels, row_begin, row_end);
  for (; wide_groups(group_end - group) == 2; group += 2) {
    twos.multiply(group, group + 4 <= group_end);
  }
  multiply_packed<T>(product, row_begin, row_end, group, group_end);
#endif
}

#endif

/// Chooses by the numbers of rows and groups how weights are read; every way gives the same bits.
template <WeightType T, int Planes>
void multiply_groups(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                     int64_t group_end) {
  int64_t row = 0;
#if TS_LEVEL >= 1
  if constexpr (is_block_format(T)) {
    const int64_t row_bytes =
        product.num_blocks() * static_cast<int64_t>(sizeof(PanelBlock<Planes>)) / kPanelRows;
    const int64_t step =
        std::max(kPanelRows, tuning().cached_row_bytes / row_bytes / kPanelRows * kPanelRows);
    const bool is_wide = num_rows >= fewest_wide_rows<T, Planes>(tuning()) &&
                         group_end - group_begin >= fewest_wide_groups<T, Planes>();
    const int64_t num_wide_rows = is_wide ? num_rows / kWideRows * kWideRows : 0;
    for (; row < num_wide_rows; row += step) {
      const int64_t end = std::min(row + step, num_wide_rows);
      multiply_unpacked<T>(product, row, end, group_begin, group_end);
    }
    row = num_wide_rows;
  }
#endif
  if (row == num_rows) return;
#if TS_LEVEL == 1
  if constexpr (Planes == 2 && is_block_format(T) && !kHasByteDots) {
    if (num_rows - row >= fewest_pair_rows<T>() &&
        group_end - group_begin >= fewest_pair_groups<T>()) {
      const int64_t first = row / kPanelRows * kPanelRows;
      Product<Planes> few = product;
      few.prepared = reinterpret_cast<const uint8_t*>(product.panels_from(first));
      few.out += first * product.out_stride;
      few.pairs = pair_panels<T>(few, 0, num_rows - first);
      multiply_packed<T>(few, row - first, num_rows - first, group_begin, group_end);
      return;
    }
  }
#endif
  multiply_packed<T>(product, row, num_rows, group_begin, group_end);
}

/// A visitor of the weights' type that multiplies.
template <int Planes>
auto multiply_with(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                   int64_t group_end) {
  return [=, &product](auto type) {
    if constexpr (Planes == 2 || has_planes(type())) {
      multiply_groups<type()>(product, num_rows, group_begin, group_end);
    }
  };
}

}  // namespace ts
