// Prompt rows on AMX: 32 outputs are unpacked, some of their inputs at a time, then meet all rows
// in 2 x 2 tiles.
//
// Sums of some groups stay in the cache from part to part of the inputs, and are copied or added to
// the result at last.
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

/// Most tiles of a group's depth that are multiplied at a time, all terms counted: those of two
/// groups stay in the first-level cache (measured, docs/development/kernels/amx.md).
constexpr int64_t kDepthTiles = 12;

/// So few rows read unpacked tiles once. They meet all of a group's depth before the next groups,
/// and more of it at a time: packed weights are then read in the order in which they lie.
constexpr int64_t kFewTileRows = 2 * kTileRows;
constexpr int64_t kMostDepthTiles = 32;

/// Bytes of sums that stay in the second-level cache while the depth passes by.
constexpr int64_t kSumBytes = 512 << 10;
constexpr int64_t kTileSums = 256;

/// Operands of one run over some of the depth. Terms of a tile: itself, and what rounding took from
/// it.
struct TileRun {
  const uint8_t* a;  // 16 rows: the terms of a tile, then those of the next
  int64_t next_a;    // from there to the next 16 rows
  const uint8_t* b;  // 16 outputs, likewise
  int64_t next_b;
  float* sums;        // 16 rows x 16 outputs; the next 16 outputs follow
  int64_t next_sums;  // from there to the next 16 rows
  int64_t num_tiles;
  int64_t a_terms;
  int64_t b_terms;
  bool is_first;  // else sums go on from what they hold
};

/// Calls body(a, b) for each pair of tiles whose product is to be summed.
template <class Body>
TS_INLINE void for_products(const TileRun& run, Body body) {
  const uint8_t* a = run.a;
  const uint8_t* b = run.b;
  for (int64_t tile = 0; tile < run.num_tiles; ++tile) {
    body(a, b);
    if (run.a_terms == 2) body(a + kTileBytes, b);
    if (run.b_terms == 2) body(a, b + kTileBytes);
    a += run.a_terms * kTileBytes;
    b += run.b_terms * kTileBytes;
  }
}

/// 32 rows x 32 outputs.
void run_2x2(const TileRun& run) {
  float* sums = run.sums;
  float* next = sums + run.next_sums;
  if (run.is_first) {
    TS_TILE_ZERO(0);
    TS_TILE_ZERO(1);
    TS_TILE_ZERO(2);
    TS_TILE_ZERO(3);
  } else {
    TS_TILE_LOAD(0, sums, 64);
    TS_TILE_LOAD(1, sums + kTileSums, 64);
    TS_TILE_LOAD(2, next, 64);
    TS_TILE_LOAD(3, next + kTileSums, 64);
  }
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(7, b + run.next_b, 64);
    TS_TILE_LOAD(5, a + run.next_a, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_DOT(1, 4, 7);
    TS_TILE_DOT(2, 5, 6);
    TS_TILE_DOT(3, 5, 7);
  });
  TS_TILE_STORE(0, sums, 64);
  TS_TILE_STORE(1, sums + kTileSums, 64);
  TS_TILE_STORE(2, next, 64);
  TS_TILE_STORE(3, next + kTileSums, 64);
}

/// 16 rows x 32 outputs.
void run_1x2(const TileRun& run) {
  if (run.is_first) {
    TS_TILE_ZERO(0);
    TS_TILE_ZERO(1);
  } else {
    TS_TILE_LOAD(0, run.sums, 64);
    TS_TILE_LOAD(1, run.sums + kTileSums, 64);
  }
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_LOAD(7, b + run.next_b, 64);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_DOT(1, 4, 7);
  });
  TS_TILE_STORE(0, run.sums, 64);
  TS_TILE_STORE(1, run.sums + kTileSums, 64);
}

/// 16 rows x 16 outputs.
void run_1x1(const TileRun& run) {
  if (run.is_first) {
    TS_TILE_ZERO(0);
  } else {
    TS_TILE_LOAD(0, run.sums, 64);
  }
  for_products(run, [&](const uint8_t* a, const uint8_t* b) {
    TS_TILE_LOAD(4, a, 64);
    TS_TILE_LOAD(6, b, 64);
    TS_TILE_DOT(0, 4, 6);
  });
  TS_TILE_STORE(0, run.sums, 64);
}

/// All rows against one or two groups. `run` has what the first rows need.
void multiply_rows(int64_t num_rows, int64_t num_groups, TileRun run) {
  for (int64_t row = 0; row < num_rows;) {
    const int64_t row_tiles = num_groups == 2 && row + kTileRows < num_rows ? 2 : 1;
    if (num_groups == 1) {
      run_1x1(run);
    } else if (row_tiles == 2) {
      run_2x2(run);
    } else {
      run_1x2(run);
    }
    row += row_tiles * kTileRows;
    run.a += row_tiles * run.next_a;
    run.sums += row_tiles * run.next_sums;
  }
}

/// Copies or adds one tile of sums to its place in the result, as far as rows and outputs exist.
void store_tile(const TileProduct& product, const float* sums, int64_t row, int64_t group) {
  const int64_t num_rows = std::min(kTileRows, product.num_rows - row);
  const int64_t first = group * kGroupSize;
  const int64_t num_columns = std::min(kGroupSize, product.weight.num_outputs - first);
  const auto mask = static_cast<__mmask16>((1U << num_columns) - 1);
  const int64_t stride = product.out_stride;
  const bool is_added = product.accumulate;
  float* out = product.out + row * stride + first;
  for (int64_t r = 0; r < num_rows; ++r, out += stride) {
    __m512 values = _mm512_loadu_ps(sums + kGroupSize * r);
    if (is_added) values = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), values);
    _mm512_mask_storeu_ps(out, mask, values);
  }
}

/// Unpacks tiles of a group, the terms of each together.
void unpack_group(const PackedWeight& weight, int64_t group, const UnpackedTiles& tiles) {
  const uint8_t* data = weight.data + group * group_bytes(weight.type, weight.num_inputs);
  with_type(weight.type, [&](auto type) {
    // F32 is never prepared as tiles; BF16 is stored as tiles.
    if constexpr (type() != WeightType::F32 && type() != WeightType::BF16) {
      if (tiles.low == 0) {
        unpack_group_tiles<type(), false>(data, tiles);
      } else {
        unpack_group_tiles<type(), true>(data, tiles);
      }
    }
  });
}

/// How a product is cut.
struct Cut {
  int64_t num_tiles;  // of the depth
  int64_t row_terms;
  int64_t weight_terms;
  int64_t part;        // of the depth, in tiles
  int64_t num_groups;  // whose sums stay in the cache

  explicit Cut(const TileProduct& product)
      : num_tiles(round_up(product.weight.num_inputs, kBlockSize) / kBlockSize),
        row_terms(product.is_split ? 2 : 1),
        weight_terms(product.weight.type == WeightType::BF16 ? 1 : row_terms) {
    const bool are_few = product.num_rows <= kFewTileRows;
    const int64_t most = are_few ? kMostDepthTiles : kDepthTiles;
    const int64_t num_parts = round_up(num_tiles * row_terms, most) / most;
    part = round_up(num_tiles, num_parts) / num_parts;
    num_groups =
        are_few ? 2 : std::max<int64_t>(2, kSumBytes / sum_bytes(product.num_rows) / 2 * 2);
  }

  /// Of one group.
  static int64_t sum_bytes(int64_t num_rows) {
    return round_up(num_rows, kTileRows) * kGroupSize * static_cast<int64_t>(sizeof(float));
  }
};

/// A thread's own memory for a product.
struct TileMemory {
  uint8_t* tiles;  // of one or two groups, unpacked
  float* sums;     // (row tiles, groups, 256)
};

/// Tiles [begin, end) of the depth against groups [group, group_end).
void multiply_part(const TileProduct& product, const Cut& cut, int64_t begin, int64_t end,
                   int64_t group, int64_t group_end, const TileMemory& memory) {
  const PackedWeight& weight = product.weight;
  const bool is_unpacked = weight.type == WeightType::BF16;
  const int64_t packed_bytes = group_bytes(weight.type, weight.num_inputs);
  const int64_t size = is_unpacked ? packed_bytes : cut.part * cut.weight_terms * kTileBytes;
  const int64_t first = group;
  TileRun run = {product.prepared + begin * cut.row_terms * kTileBytes,
                 row_tile_bytes(weight.num_inputs, product.is_split),
                 memory.tiles,
                 size,
                 memory.sums,
                 (group_end - group) * kTileSums,
                 end - begin,
                 cut.row_terms,
                 cut.weight_terms,
                 begin == 0};
  for (; group < group_end; group += 2) {
    const int64_t num_groups = std::min(int64_t{2}, group_end - group);
    if (is_unpacked) run.b = weight.data + group * size + begin * kTileBytes;
    // Packed weights to fetch: the next groups of this part, else the first groups of the next
    // part, else what follows.
    int64_t next_group = group + num_groups;
    int64_t next_begin = begin;
    if (next_group >= group_end) next_begin = end < cut.num_tiles ? end : 0;
    if (next_begin == end) next_group = first;
    const uint8_t* next =
        weight.data + next_group * packed_bytes + packed_bytes * next_begin / cut.num_tiles;
    for (int64_t g = 0; g < num_groups && !is_unpacked; ++g) {
      unpack_group(weight, group + g,
                   {begin, end, memory.tiles + g * size, cut.weight_terms * kTileBytes,
                    cut.weight_terms == 2 ? kTileBytes : 0, next + g * packed_bytes});
    }
    multiply_rows(product.num_rows, num_groups, run);
    run.sums += num_groups * kTileSums;
  }
}

}  // namespace

void multiply_tiles(const TileProduct& product, int64_t group_begin, int64_t group_end) {
  static thread_local Scratch tiles;
  static thread_local Scratch sums;
  const Cut cut(product);
  const int64_t most = std::min(cut.num_groups, group_end - group_begin);
  const TileMemory memory = {
      tiles.reserve(2 * cut.part * cut.weight_terms * kTileBytes),
      reinterpret_cast<float*>(sums.reserve(most * Cut::sum_bytes(product.num_rows)))};
  const TileSession session(full_tiles());
  for (int64_t group = group_begin; group < group_end; group += cut.num_groups) {
    const int64_t last = std::min(group + cut.num_groups, group_end);
    for (int64_t begin = 0; begin < cut.num_tiles; begin += cut.part) {
      const int64_t end = std::min(begin + cut.part, cut.num_tiles);
      multiply_part(product, cut, begin, end, group, last, memory);
    }
    const float* tile = memory.sums;
    for (int64_t row = 0; row < product.num_rows; row += kTileRows) {
      for (int64_t g = group; g < last; ++g, tile += kTileSums) store_tile(product, tile, row, g);
    }
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
