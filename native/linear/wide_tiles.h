// Many generated rows on AMX: unpacked groups meet eight rows at a time in tiles of bytes.
//
// A sub-block's integer sums are those of VNNI, so its scales make the same bits of them: one tile
// of sums for each plane of the activations, joined outside. Eight rows are a panel, whose bytes a
// tile reads where they lie; the quads of an unpacked group are a tile's rows already.
#pragma once

#include "linear/wide_block.h"

#if TS_LEVEL == 3

#include "linear/tile.h"

namespace ts {

/// Tiles 0 to 3: sums of eight rows x 16 outputs. 4 and 5: the high and the low plane of eight rows
/// of a sub-block (coarse rows have the one in 4). 6 and 7: its codes of 16 outputs.
inline TileConfig byte_tiles(int num_subs) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    const bool is_plane = tile == 4 || tile == 5;
    const bool is_codes = tile >= 6;
    config.row_bytes[tile] = static_cast<uint16_t>(is_plane ? kBlockSize / num_subs : 64);
    config.num_rows[tile] = static_cast<uint8_t>(is_codes ? kQuads / num_subs : kPanelRows);
  }
  return config;
}

/// Integer sums of one sub-block, eight rows and one group, for each plane; the only one is high.
struct alignas(64) PlaneSums {
  int32_t high[kPanelRows][kGroupSize];
  int32_t low[kPanelRows][kGroupSize];
};

/// Tiles 4 and 5 x `quads`, which are `stride` bytes apart. Groups take turns with the other tiles,
/// so that one's products need not wait for the other's sums to be stored.
template <bool IsOdd, int Planes>
TS_INLINE void dot_tiles(const uint8_t* quads, int64_t stride, PlaneSums* sums) {
  if constexpr (IsOdd) {
    TS_TILE_LOAD(7, quads, stride);
    TS_TILE_ZERO(2);
    TS_TILE_DOT_BYTES(2, 4, 7);
    if constexpr (Planes == 2) {
      TS_TILE_ZERO(3);
      TS_TILE_DOT_BYTES(3, 5, 7);
      TS_TILE_STORE(3, sums->low, 64);
    }
    TS_TILE_STORE(2, sums->high, 64);
  } else {
    TS_TILE_LOAD(6, quads, stride);
    TS_TILE_ZERO(0);
    TS_TILE_DOT_BYTES(0, 4, 6);
    if constexpr (Planes == 2) {
      TS_TILE_ZERO(1);
      TS_TILE_DOT_BYTES(1, 5, 6);
      TS_TILE_STORE(1, sums->low, 64);
    }
    TS_TILE_STORE(0, sums->high, 64);
  }
}

/// The shift by 7 makes the 128 of signed weights of what is taken from the high sums.
template <bool HasMinimum, int Planes>
TS_INLINE Lanes join_planes(const PlaneSums& sums, int row, int32_t minus_sum) {
  if constexpr (Planes == 1) minus_sum *= 128;
  __m512i high = _mm512_load_si512(sums.high[row]);
  if constexpr (!HasMinimum) high = _mm512_add_epi32(high, _mm512_set1_epi32(minus_sum));
  if constexpr (Planes == 1) return to_lanes({high});
  const __m512i low = _mm512_load_si512(sums.low[row]);
  return to_lanes({_mm512_add_epi32(_mm512_slli_epi32(high, 7), low)});
}

/// Adds one sub-block's part to the sums of a panel's rows, from the first on, and G groups.
template <int NumSubs, bool HasMinimum, int G, int Planes>
TS_INLINE void add_wide_sub(const WideBlock<NumSubs, G>& block, const PanelBlock<Planes>& panel,
                            int, int sub, Lanes sums[kWideRows][G]) {
  constexpr int quads_per_sub = kQuads / NumSubs;
  const uint8_t* planes = panel.rows[0] + sub * kBlockSize / NumSubs;
  PlaneSums dots[G];
  TS_TILE_LOAD(4, planes, panel.kRowBytes);
  if constexpr (Planes == 2) TS_TILE_LOAD(5, planes + kBlockSize, panel.kRowBytes);
  dot_tiles<false, Planes>(block.lines[sub * quads_per_sub][0], G * 64, &dots[0]);
  if constexpr (G > 1)
    dot_tiles<true, Planes>(block.lines[sub * quads_per_sub][1], G * 64, &dots[1]);
  if constexpr (G > 2)
    dot_tiles<false, Planes>(block.lines[sub * quads_per_sub][2], G * 64, &dots[2]);
  const int part = sum_index(NumSubs, sub);
  TS_UNROLL
  for (int g = 0; g < G; ++g) {
    const Lanes scale = load_lanes(block.scale[sub][g]);
    TS_UNROLL
    for (int r = 0; r < kWideRows; ++r) {
      const Lanes dot = join_planes<HasMinimum, Planes>(dots[g], r, panel.minus_sum[part][r]);
      sums[r][g] = multiply_add(dot, multiply(scale, broadcast(panel.scale[r])), sums[r][g]);
      if constexpr (HasMinimum) {
        const Lanes minimum = load_lanes(block.minimum[sub][g]);
        sums[r][g] = multiply_add(minimum, broadcast(panel.scaled_sum[part][r]), sums[r][g]);
      }
    }
  }
}

}  // namespace ts

#endif
