// Prompt rows on AMX: bfloat16 tiles over the full depth, weights unpacked once per panel.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace ts {

struct TileProduct {
  const PackedWeight& weight;
  const uint8_t* prepared;  // 16 rows x 32 inputs of bfloat16 each 1 KB; per 16 rows all inputs
  bool is_split;            // each tile is followed by one of its rounding errors
  int64_t num_rows;
  float* out;
  int64_t out_stride;
  bool accumulate;
};

/// Every type but F32. Rows beyond num_rows in the last tile are computed and thrown away.
void multiply_tiles(const TileProduct& product, int64_t group_begin, int64_t group_end);

}  // namespace ts
