// Many generated rows on AMX: unpacked groups meet eight rows at a time in tiles of bytes.
//
// A sub-block's integer sums are those of VNNI, so its scales make the same bits of them. The
// planes of eight rows, a panel, are the rows of one tile, which reads them where they lie; the
// quads of an unpacked group are a tile's rows already. Sums pass through memory on their way to
// the scales, so those of the next sub-block are computed meanwhile.
#pragma once

#include "linear/wide_block.h"

#if TS_LEVEL == 3

#include <utility>

#include "linear/tile.h"

namespace ts {

/// Tiles 0 and 1: sums of eight rows, one line for each plane, x 16 outputs, of up to two groups.
/// 2: the planes of eight rows of a sub-block. 4 and 5: the codes of 16 outputs.
inline TileConfig byte_tiles(int num_subs, int num_planes) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_codes = tile >= 4;
    config.row_bytes[tile] = static_cast<uint16_t>(tile == 2 ? kBlockSize / num_subs : 64);
    config.num_rows[tile] =
        static_cast<uint8_t>(is_codes ? kQuads / num_subs : kPanelRows * num_planes);
  }
  return config;
}

/// Integer sums of one sub-block, eight rows and one group; the high plane is the first.
template <int Planes>
struct alignas(64) PlaneSums {
  int32_t rows[kPanelRows][Planes][kGroupSize];
};

/// Tiles 0 and 1 become sub-block `sub` of a panel x G groups.
template <int NumSubs, int G, int Planes>
TS_INLINE void dot_tiles(const WideBlock<NumSubs, G>& block, const PanelBlock<Planes>& panel,
                         int sub) {
  const auto* quads = block.lines[sub * kQuads / NumSubs];
  TS_TILE_LOAD(2, panel.rows[0] + sub * kBlockSize / NumSubs, kBlockSize);
  TS_TILE_LOAD(4, quads[0], G * 64);
  TS_TILE_ZERO(0);
  TS_TILE_DOT_BYTES(0, 2, 4);
  if constexpr (G > 1) {
    TS_TILE_LOAD(5, quads[1], G * 64);
    TS_TILE_ZERO(1);
    TS_TILE_DOT_BYTES(1, 2, 5);
  }
}

template <int G, int Planes>
TS_INLINE void store_tiles(PlaneSums<Planes> sums[G]) {
  TS_TILE_STORE(0, &sums[0], 64);
  if constexpr (G > 1) TS_TILE_STORE(1, &sums[1], 64);
}

/// The shift by 7 makes the 128 of signed weights of what is taken from the high sums.
template <bool HasMinimum, int Planes>
TS_INLINE Lanes join_planes(const PlaneSums<Planes>& sums, int row, int32_t minus_sum) {
  if constexpr (Planes == 1) minus_sum *= 128;
  __m512i high = _mm512_load_si512(sums.rows[row][0]);
  if constexpr (!HasMinimum) high = _mm512_add_epi32(high, _mm512_set1_epi32(minus_sum));
  if constexpr (Planes == 1) return to_lanes({high});
  const __m512i low = _mm512_load_si512(sums.rows[row][Planes - 1]);
  return to_lanes({_mm512_add_epi32(_mm512_slli_epi32(high, 7), low)});
}

/// Adds one sub-block's part to the sums of a panel's rows and G groups.
template <int NumSubs, bool HasMinimum, int G, int Planes>
TS_INLINE void add_scaled(const WideBlock<NumSubs, G>& block, const PanelBlock<Planes>& panel,
                          int sub, const PlaneSums<Planes> dots[G], Lanes sums[kWideRows][G]) {
  const int part = sum_index(NumSubs, sub);
  TS_UNROLL
  for (int g = 0; g < G; ++g) {
    const Lanes scale = load_lanes(block.scale[sub][g]);
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      const Lanes dot = join_planes<HasMinimum>(dots[g], r, panel.minus_sum[part][r]);
      sums[r][g] = multiply_add(dot, multiply(scale, broadcast(panel.scale[r])), sums[r][g]);
      if constexpr (HasMinimum) {
        const Lanes minimum = load_lanes(block.minimum[sub][g]);
        sums[r][g] = multiply_add(minimum, broadcast(panel.scaled_sum[part][r]), sums[r][g]);
      }
    }
  }
}

/// Adds unpacked blocks of G groups to the sums of a panel's rows, or writes them if these are the
/// first blocks. Meanwhile the next ones are fetched into the second-level cache.
template <int NumSubs, bool HasMinimum, int G, int Planes>
void multiply_wide(const WideBlock<NumSubs, G>* blocks, const PanelBlock<Planes>* panel, int,
                   int64_t num_blocks, const NextBlocks& next, bool is_first,
                   Lanes in_out[kWideRows][G]) {
  Lanes sums[kWideRows][G];
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) {
    TS_UNROLL
    for (int g = 0; g < G; ++g) sums[r][g] = is_first ? zero_lanes() : in_out[r][g];
  }
  // Three sub-blocks are under way: one in tiles, one in memory, one meets its scales.
  PlaneSums<Planes> memory[2][G];
  PlaneSums<Planes>* dots = memory[0];
  PlaneSums<Planes>* next_dots = memory[1];
  const auto dot = [&](int64_t step) {
    const int64_t index = step / NumSubs;
    if (index < num_blocks)
      dot_tiles(blocks[index], panel[index], static_cast<int>(step % NumSubs));
  };
  dot(0);
  store_tiles<G>(dots);
  dot(1);
  for (int64_t index = 0; index < num_blocks; ++index) {
    next.fetch<G>(index);
    TS_UNROLL
    for (int sub = 0; sub < NumSubs; ++sub) {
      store_tiles<G>(next_dots);  // after the last sub-block, what nobody reads
      dot(index * NumSubs + sub + 2);
      add_scaled<NumSubs, HasMinimum, G>(blocks[index], panel[index], sub, dots, sums);
      std::swap(dots, next_dots);
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
