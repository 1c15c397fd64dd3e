// Prompt rows on AMX: bfloat16 tiles, of weights that are unpacked once for all rows.
#pragma once

#include <cstdint>

#include "linear/layout.h"
#include "linear/linear.h"

namespace ts {

struct TileProduct {
  const PackedWeight& weight;
  const uint8_t* prepared;  // tiles of 16 rows x 32 inputs, 1 KB; `row_tile_bytes` for 16 rows
  bool is_split;            // each tile is followed by one of its rounding errors
  int64_t num_rows;
  float* out;
  int64_t out_stride;
  bool accumulate;
};

/// Bytes from 16 prepared rows to the next: an odd number of tiles, so that rows of 4,096 inputs
/// do not all compete for the same places of a cache.
constexpr int64_t row_tile_bytes(int64_t num_inputs, bool is_split) {
  const int64_t num_tiles = round_up(num_inputs, kBlockSize) / kBlockSize * (is_split ? 2 : 1);
  return (num_tiles | 1) * kTileBytes;
}

/// Every type but F32. Rows beyond num_rows in the last tile are computed and thrown away.
void multiply_tiles(const TileProduct& product, int64_t group_begin, int64_t group_end);

}  // namespace ts
