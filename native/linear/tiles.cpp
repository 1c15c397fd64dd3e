// Prompt rows on AMX: a panel of 32 outputs is unpacked once, then meets all rows in 2 x 2 tiles.
#include "linear/layout.h"
#include "linear/linear.h"

#if TS_LEVEL == 3 && !defined(TS_EMULATE_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if TS_LEVEL == 3

#include <algorithm>

#include "linear/scratch.h"
#include "linear/tile.h"
#include "linear/tiles.h"
#include "linear/unpack_tiles.h"

namespace ts {
namespace {

void unpack_group(const PackedWeight& weight, int64_t group, const UnpackedTiles& tiles) {
  const uint8_t* data = weight.data + group * group_bytes(weight.type, weight.num_inputs);
  const int64_t num_tiles = round_up(weight.num_inputs, kBlockSize) / kBlockSize;
  with_type(weight.type, [&](auto type) {
    if constexpr (type() == WeightType::BF16) {
      copy_group_tiles(data, num_tiles, tiles);
    } else if constexpr (type() != WeightType::F32) {  // never prepared as tiles
      if (tiles.low == 0) {
        unpack_group_tiles<type(), false>(data, num_tiles, tiles);
      } else {
        unpack_group_tiles<type(), true>(data, num_tiles, tiles);
      }
    }
  });
}

/// Operands of one run over the depth. Terms of a tile: itself, what rounding took away of it.
struct TileRun {
  const uint8_t* a;  // 16 rows: the terms of a tile, then those of the next
  int64_t next_a;    // from there to the next 16 rows
  const uint8_t* b;  // 16 outputs; the next 16 follow each tile
  int64_t b_stride;  // from one term to the next
  int64_t num_tiles;
  int64_t a_terms;
  int64_t b_terms;
};

/// Calls body(a, b) for each pair of tiles whose product is to be summed.
template <class Body>
TS_INLINE void for_products(const TileRun& run, Body body) {
  for (int64_t tile = 0; tile < run.num_tiles; ++tile) {
    const uint8_t* a = run.a + tile * run.a_terms * kTileBytes;
    const uint8_t* b = run.b + tile * run.b_terms * run.b_stride;
    body(a, b);
    if (run.a_terms == 2) body(a + kTileBytes, b);
    if (run.b_terms == 2) body(a, b + run.b_stride);
  }
}

using TileSums = float[4][256];

/// 32 rows x 32 outputs into sums[2 * row tile + output tile].
void run_2x2(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  TS_TILE_ZERO(1);
  TS_TILE_ZERO(2);
  TS_TILE_ZERO(3);
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_LOAD(7, b + kTileBytes, 64);
    TS_TILE_DOT(1, 4, 7);
    TS_TILE_LOAD(5, a + run.next_a, 64);
    TS_TILE_DOT(2, 5, 6);
    TS_TILE_DOT(3, 5, 7);
  });
  TS_TILE_STORE(0, sums[0], 64);
  TS_TILE_STORE(1, sums[1], 64);
  TS_TILE_STORE(2, sums[2], 64);
  TS_TILE_STORE(3, sums[3], 64);
}

/// 16 rows x 32 outputs into sums[0] and sums[1].
void run_1x2(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  TS_TILE_ZERO(1);
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_LOAD(7, b + kTileBytes, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_DOT(1, 4, 7);
  });
  TS_TILE_STORE(0, sums[0], 64);
  TS_TILE_STORE(1, sums[1], 64);
}

/// 16 rows x 16 outputs into sums[0].
void run_1x1(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_DOT(0, 4, 6);
  });
  TS_TILE_STORE(0, sums[0], 64);
}

/// Copies one tile of sums to its place in the result, as far as rows and outputs exist.
void store_tile(const TileProduct& product, const float* sums, int64_t row, int64_t group) {
  const int64_t num_rows = std::min(kTileRows, product.num_rows - row);
  const int64_t first = group * kGroupSize;
  const int64_t num_columns = std::min(kGroupSize, product.weight.num_outputs - first);
  const auto mask = static_cast<__mmask16>((1U << num_columns) - 1);
  float* out = product.out + row * product.out_stride + first;
  for (int64_t r = 0; r < num_rows; ++r, out += product.out_stride) {
    __m512 values = _mm512_loadu_ps(sums + 16 * r);
    if (product.accumulate) values = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), values);
    _mm512_mask_storeu_ps(out, mask, values);
  }
}

/// An unpacked panel of one or two groups.
struct TilePanel {
  const uint8_t* tiles;
  int64_t group;
  int64_t num_groups;
  int64_t num_terms;
};

/// All rows against a panel.
void multiply_tile_panel(const TileProduct& product, const TilePanel& panel) {
  const int64_t num_tiles = round_up(product.weight.num_inputs, kBlockSize) / kBlockSize;
  const int64_t row_terms = product.is_split ? 2 : 1;
  const int64_t row_tile_bytes = num_tiles * row_terms * kTileBytes;
  const int64_t group = panel.group;
  const int64_t num_panel_groups = panel.num_groups;
  alignas(64) TileSums sums;
  for (int64_t row = 0; row < product.num_rows; row += kTileRows) {
    const TileRun run = {product.prepared + row / kTileRows * row_tile_bytes,
                         row_tile_bytes,
                         panel.tiles,
                         num_panel_groups * kTileBytes,
                         num_tiles,
                         row_terms,
                         panel.num_terms};
    const bool two_row_tiles = num_panel_groups == 2 && row + kTileRows < product.num_rows;
    if (num_panel_groups == 1) {
      run_1x1(run, sums);
    } else if (two_row_tiles) {
      run_2x2(run, sums);
    } else {
      run_1x2(run, sums);
    }
    for (int64_t g = 0; g < num_panel_groups; ++g) store_tile(product, sums[g], row, group + g);
    if (two_row_tiles) {
      row += kTileRows;
      for (int64_t g = 0; g < 2; ++g) store_tile(product, sums[2 + g], row, group + g);
    }
  }
}

}  // namespace

void multiply_tiles(const TileProduct& product, int64_t group_begin, int64_t group_end) {
  static thread_local Scratch buffer;
  const int64_t num_tiles = round_up(product.weight.num_inputs, kBlockSize) / kBlockSize;
  // Nothing is taken away of bfloat16.
  const int64_t num_terms = product.is_split && product.weight.type != WeightType::BF16 ? 2 : 1;
  uint8_t* tiles = buffer.reserve(2 * num_terms * num_tiles * kTileBytes);
  const TileSession session(full_tiles());
  for (int64_t group = group_begin; group < group_end; group += 2) {
    const int64_t num_panel_groups = std::min(int64_t{2}, group_end - group);
    const int64_t term_bytes = num_panel_groups * kTileBytes;
    for (int64_t g = 0; g < num_panel_groups; ++g) {
      unpack_group(
          product.weight, group + g,
          {tiles + g * kTileBytes, num_terms * term_bytes, num_terms == 2 ? term_bytes : 0});
    }
    multiply_tile_panel(product, {tiles, group, num_panel_groups, num_terms});
  }
}

}  // namespace ts

#endif

namespace ts {

bool request_tiles() {
#if TS_LEVEL == 3 && !defined(TS_EMULATE_TILES)
  constexpr long request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return true;
#endif
}

}  // namespace ts
