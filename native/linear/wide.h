// Many rows on AVX2 and AVX-512: groups of outputs are unpacked once, a few blocks of inputs at a
// time, and then meet four rows at a time (eight on AMX). The bits are those of the kernels for few
// rows.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL >= 1

#include <cstdint>
#include <limits>

#include "linear/tuning.h"
#if TS_LEVEL == 3
#include "linear/wide_tiles.h"
#endif
#if TS_LEVEL >= 2
#include "linear/wide_vnni.h"
#else
#include "linear/wide_bytes.h"
#include "linear/wide_pairs.h"
#endif

namespace ts {

/// How many of the groups that are left go together: threes (not on AMX), then twos, never one
/// alone unless it is the last.
constexpr int wide_groups(int64_t left) {
  if (kGroupsTogether == 3 && left >= 3 && left != 4) return 3;
  return static_cast<int>(left < 2 ? left : 2);
}

/// Fewer rows do not repay the unpacking, of which whole bytes need least on AVX-512. On AMX, rows
/// of one plane repay it late where codes have 8 bits or blocks two scales (all measured). On AVX2
/// it is repaid soonest where kernels for few rows are slow: with two scales a block. With half
/// ports it is repaid only there, and where codes in two planes meet one.
template <WeightType T, int Planes>
constexpr int64_t fewest_wide_rows(const Tuning& tuning) {
  constexpr BlockFormat format = block_format(T);
  if (TS_LEVEL == 3) {
    const bool gains_less = Planes == 1 && (format.num_subs == 2 || format.num_bits() == 8);
    return gains_less ? 32 : kWideRows;
  }
  if (TS_LEVEL == 1) return format.num_subs == 1 ? 16 : 8;
  if (tuning.has_half_ports && format.num_subs == 1) {
    const bool is_slow = Planes == 1 && format.high_bits != 0;
    return is_slow ? 32 : std::numeric_limits<int64_t>::max();
  }
  return format.num_bits() == 8 ? 32 : 16;
}

/// Nor do fewer groups repay that planes are made into pairs first, on AVX2 (measured).
template <WeightType T>
constexpr int64_t fewest_pair_groups() {
  return TS_LEVEL == 1 && has_planes(T) ? 3 : 1;
}

/// Whether many rows meet bytes of codes on level 1: rows of one plane, and all on AVX-VNNI.
template <int Planes>
constexpr bool meets_bytes() {
  return TS_LEVEL == 1 && (Planes == 1 || kHasByteDots);
}

/// With two scales a block any number of groups repays it, and bytes are met as they are.
template <WeightType T, int Planes>
constexpr int64_t fewest_wide_groups() {
  return block_format(T).num_subs == 1 && !meets_bytes<Planes>() ? fewest_pair_groups<T>() : 1;
}

/// What G groups are unpacked into.
template <WeightType T, int G, bool MeetsBytes>
struct WideBlockOf {
  using Block = WideBlock<WideShape<T>::num_subs, G>;
};

#if TS_LEVEL == 1
template <WeightType T, int G>
struct WideBlockOf<T, G, true> {
  using Block = ByteBlock<T>;
};
#endif

#if TS_LEVEL != 3

/// Adds unpacked blocks of G groups to the sums of a panel's rows from `row` on, or writes them
/// if these are the first blocks. Meanwhile the next ones are fetched into the second-level cache.
template <int NumSubs, bool HasMinimum, int G, int Planes>
void multiply_wide(const WideBlock<NumSubs, G>* blocks, const PanelBlock<Planes>* panel, int row,
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
      add_wide_sub<kWideRows, NumSubs, HasMinimum, G>(blocks[index], panel[index], row, sub, sums);
    }
  }
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) in_out[r][g] = sums[r][g];
  }
}

#endif

}  // namespace ts

#endif
