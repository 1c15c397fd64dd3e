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

void unpack_group(const PackedWeight& weight, int64_t group, uint8_t* tiles, int64_t stride) {
  const uint8_t* data = weight.data + group * group_bytes(weight.type, weight.num_inputs);
  const int64_t num_tiles = round_up(weight.num_inputs, kBlockSize) / kBlockSize;
  with_type(weight.type, [&](auto type) {
    if constexpr (type() != WeightType::F32) {  // never prepared as tiles
      unpack_group_tiles<type()>(data, num_tiles, tiles, stride);
    }
  });
}

/// Operands of one run over the depth: tile t of each lies at its pointer + t * its stride.
struct TileRun {
  const uint8_t* a;  // 16 rows
  int64_t next_a;    // from there to the next 16 rows
  const uint8_t* b;  // 16 outputs; the next 16 follow each tile
  int64_t b_stride;
  int64_t num_tiles;
};

using TileSums = float[4][256];

/// 32 rows x 32 outputs into sums[2 * row tile + output tile].
void run_2x2(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  TS_TILE_ZERO(1);
  TS_TILE_ZERO(2);
  TS_TILE_ZERO(3);
  for (int64_t tile = 0; tile < run.num_tiles; ++tile) {
    const uint8_t* a = run.a + tile * kTileBytes;
    const uint8_t* b = run.b + tile * run.b_stride;
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_LOAD(7, b + kTileBytes, 64);
    TS_TILE_DOT(1, 4, 7);
    TS_TILE_LOAD(5, a + run.next_a, 64);
    TS_TILE_DOT(2, 5, 6);
    TS_TILE_DOT(3, 5, 7);
  }
  TS_TILE_STORE(0, sums[0], 64);
  TS_TILE_STORE(1, sums[1], 64);
  TS_TILE_STORE(2, sums[2], 64);
  TS_TILE_STORE(3, sums[3], 64);
}

/// 16 rows x 32 outputs into sums[0] and sums[1].
void run_1x2(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  TS_TILE_ZERO(1);
  for (int64_t tile = 0; tile < run.num_tiles; ++tile) {
    const uint8_t* b = run.b + tile * run.b_stride;
    TS_TILE_LOAD(4, run.a + tile * kTileBytes, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_LOAD(7, b + kTileBytes, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_DOT(1, 4, 7);
  }
  TS_TILE_STORE(0, sums[0], 64);
  TS_TILE_STORE(1, sums[1], 64);
}

/// 16 rows x 16 outputs into sums[0].
void run_1x1(const TileRun& run, TileSums sums) {
  TS_TILE_ZERO(0);
  for (int64_t tile = 0; tile < run.num_tiles; ++tile) {
    TS_TILE_LOAD(4, run.a + tile * kTileBytes, 64);
    TS_TILE_LOAD(6, run.b + tile * run.b_stride, 64);
    TS_TILE_DOT(0, 4, 6);
  }
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

/// All rows against an unpacked panel of one or two groups.
void multiply_tile_panel(const TileProduct& product, const uint8_t* panel, int64_t group,
                         int64_t num_panel_groups) {
  const int64_t num_tiles = round_up(product.weight.num_inputs, kBlockSize) / kBlockSize;
  const int64_t row_tile_bytes = num_tiles * kTileBytes;
  alignas(64) TileSums sums;
  for (int64_t row = 0; row < product.num_rows; row += kTileRows) {
    const TileRun run = {product.prepared + row / kTileRows * row_tile_bytes, row_tile_bytes, panel,
                         num_panel_groups * kTileBytes, num_tiles};
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
  uint8_t* panel = buffer.reserve(2 * num_tiles * kTileBytes);
  const TileSession session;
  for (int64_t group = group_begin; group < group_end; group += 2) {
    const int64_t num_panel_groups = std::min(int64_t{2}, group_end - group);
    for (int64_t g = 0; g < num_panel_groups; ++g) {
      unpack_group(product.weight, group + g, panel + g * kTileBytes,
                   num_panel_groups * kTileBytes);
    }
    multiply_tile_panel(product, panel, group, num_panel_groups);
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
