// Attention of prompt rows on AMX: bfloat16 tiles of 16 queries.
//
// The codes of a piece become bfloat16 once for all queries. They lie in pairs, as tiles take them.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/piece.h"
#include "linear/tile.h"

namespace ts {

#if TS_LEVEL == 3

constexpr int64_t kTileDepth = 32;        // numbers of a query, or shares of it, in a tile
constexpr int64_t kTogetherQueries = 16;  // in a tile

/// Numbers of a query or a key in whole tiles.
inline int64_t tiled_dim(int64_t head_dim) { return round_up(head_dim, kTileDepth); }

inline void store_bfloat16s(Lanes first, Lanes second, uint16_t* out) {
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  _mm512_storeu_si512(out, both);
}

/// Makes the queries bfloat16: (queries, tiled_dim).
inline void make_tile_queries(int64_t num_queries, int64_t head_dim, AttentionScratch& scratch) {
  const float* queries = scratch.q.data();
  auto* out = reinterpret_cast<uint16_t*>(scratch.codes());
  for (int64_t i = 0; i < num_queries; ++i, queries += head_dim) {
    for (int64_t d = 0; d < head_dim; d += kTileDepth, out += kTileDepth) {
      const bool is_whole = d + kLanes < head_dim;
      const Lanes second = is_whole ? load_lanes(queries + d + kLanes) : zero_lanes();
      store_bfloat16s(load_lanes(queries + d), second, out);
    }
  }
}

/// Codes as bfloat16; `count` is a multiple of 32.
inline void tile_codes(const Short* codes, int64_t count, uint16_t* out) {
  const auto* sixteens = reinterpret_cast<const __m256i*>(codes);
  for (int64_t i = 0; i < count; i += 2 * kLanes, sixteens += 2) {
    const Lanes first = {_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(sixteens)))};
    const Lanes second = {
        _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(sixteens + 1)))};
    store_bfloat16s(first, second, out + i);
  }
}

/// A piece as bfloat16: keys as (blocks, tiled_dim / 2, 16 tokens, 2), values as
/// (32 pairs of tokens, head_dim, 2). Blocks that no row sees are zeros.
struct TiledPiece {
  int64_t head_dim;
  uint16_t* keys;
  uint16_t* values;

  int64_t key_block() const { return tiled_dim(head_dim) * kBlockTokens; }

  void fill(const Piece<Short>& piece, const Range& blocks) const {
    const int64_t count = head_dim * kBlockTokens;
    for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
      uint16_t* block_keys = keys + b * key_block();
      uint16_t* block_values = values + b * count;
      std::fill(block_keys + count, block_keys + key_block(), uint16_t{0});
      if (b >= blocks.begin && b < blocks.end) {
        tile_codes(piece.keys[b], count, block_keys);
        tile_codes(piece.values[b], count, block_values);
      } else {
        std::fill_n(block_keys, count, uint16_t{0});
        std::fill_n(block_values, count, uint16_t{0});
      }
    }
  }
};

/// scores (16, 64) of 16 queries and all keys.
inline void score_tiles(const uint16_t* queries, const TiledPiece& piece, float* scores) {
  const int64_t dim = tiled_dim(piece.head_dim);
  const int64_t next = piece.key_block();
  TS_TILE_ZERO(0);
  TS_TILE_ZERO(1);
  TS_TILE_ZERO(2);
  TS_TILE_ZERO(3);
  const uint16_t* keys = piece.keys;
  for (int64_t d = 0; d < dim; d += kTileDepth, keys += kTileDepth * kBlockTokens) {
    TS_TILE_LOAD(4, queries + d, dim * 2);
    TS_TILE_LOAD(5, keys, 64);
    TS_TILE_DOT(0, 4, 5);
    TS_TILE_LOAD(6, keys + next, 64);
    TS_TILE_DOT(1, 4, 6);
    TS_TILE_LOAD(7, keys + 2 * next, 64);
    TS_TILE_DOT(2, 4, 7);
    TS_TILE_LOAD(5, keys + 3 * next, 64);
    TS_TILE_DOT(3, 4, 5);
  }
  constexpr int64_t kStride = kPieceTokens * 4;
  TS_TILE_STORE(0, scores, kStride);
  TS_TILE_STORE(1, scores + kLanes, kStride);
  TS_TILE_STORE(2, scores + 2 * kLanes, kStride);
  TS_TILE_STORE(3, scores + 3 * kLanes, kStride);
}

/// out (16, head_dim) = shares (16, 64) * values.
inline void value_tiles(const uint16_t* shares, const TiledPiece& piece, float* out) {
  const int64_t stride = piece.head_dim * 4;
  const uint16_t* values = piece.values;
  const uint16_t* later = values + kTileDepth * piece.head_dim;
  TS_TILE_LOAD(4, shares, kPieceTokens * 2);
  TS_TILE_LOAD(5, shares + kTileDepth, kPieceTokens * 2);
  for (int64_t d = 0; d < piece.head_dim; d += 2 * kLanes) {
    const bool are_two = d + kLanes < piece.head_dim;
    TS_TILE_ZERO(0);
    TS_TILE_LOAD(6, values + 2 * d, stride);
    TS_TILE_DOT(0, 4, 6);
    TS_TILE_LOAD(7, later + 2 * d, stride);
    TS_TILE_DOT(0, 5, 7);
    TS_TILE_STORE(0, out + d, stride);
    if (!are_two) break;
    TS_TILE_ZERO(1);
    TS_TILE_LOAD(6, values + 2 * d + 2 * kLanes, stride);
    TS_TILE_DOT(1, 4, 6);
    TS_TILE_LOAD(7, later + 2 * d + 2 * kLanes, stride);
    TS_TILE_DOT(1, 5, 7);
    TS_TILE_STORE(1, out + d + kLanes, stride);
  }
}

/// Turns the scores of queries into shares (16, 64) in bfloat16, which are multiplied with the
/// scales of their values, where every query sees every key and no cap bends the scores.
inline void soften_whole_tile(const PieceScales& scales, int64_t count, float* scores,
                              TileShare& share, uint16_t* shares) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = scores + i * kPieceTokens;
    Lanes largest = broadcast(kMinusInfinity);
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      const Lanes score =
          multiply(load_lanes(row + b * kLanes), load_lanes(scales.keys + b * kLanes));
      store_lanes(row + b * kLanes, score);
      largest = larger(largest, score);
    }
    share.peak[i] = largest_across(largest);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float* row = scores + i * kPieceTokens;
    const Lanes peak = broadcast(share.peak[i]);
    Lanes total = zero_lanes();
    Lanes weighted[kBlocksPerPiece];
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      const Lanes part = exp2(subtract(load_lanes(row + b * kLanes), peak));
      total = add(total, part);
      weighted[b] = multiply(part, load_lanes(scales.values + b * kLanes));
    }
    store_bfloat16s(weighted[0], weighted[1], shares + i * kPieceTokens);
    store_bfloat16s(weighted[2], weighted[3], shares + i * kPieceTokens + kTileDepth);
    share.sum[i] = sum_across(total);
  }
}

/// The same for a query that sees some keys, those of `blocks` at most.
inline void soften_tile_row(float soft_cap, const PieceScales& scales, const Range& seen,
                            const Range& blocks, float* scores, float* peak, float* sum,
                            uint16_t* shares) {
  soften(soft_cap, scales, 1.0F, seen, blocks, scores, peak, sum);
  Lanes weighted[kBlocksPerPiece];
  for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
    const bool is_seen = b >= blocks.begin && b < blocks.end;
    weighted[b] = is_seen ? load_lanes(scores + b * kLanes) : zero_lanes();
  }
  store_bfloat16s(weighted[0], weighted[1], shares);
  store_bfloat16s(weighted[2], weighted[3], shares + kTileDepth);
}

/// Computes the shares of queries [first, first + count), each of which sees a key of the piece.
inline void attend_in_tiles(const AttentionRows& rows, const Piece<Short>& piece,
                            const TiledPiece& tiled, const uint16_t* queries, int64_t first,
                            int64_t count, TileShare& share) {
  alignas(64) float scores[kTogetherQueries * kPieceTokens];
  alignas(64) uint16_t shares[kTogetherQueries * kPieceTokens];
  score_tiles(queries + first * tiled_dim(tiled.head_dim), tiled, scores);
  const Range first_seen = seen_by(rows, piece.begin, first);
  const Range last_seen = seen_by(rows, piece.begin, first + count - 1);
  // Later queries see later keys: what the first one and the last one see, all see.
  if (rows.soft_cap == 0 && last_seen.begin == 0 && first_seen.end == kPieceTokens) {
    soften_whole_tile(piece.scales, count, scores, share, shares);
  } else {
    const Range blocks{first_seen.begin / kLanes, round_up(last_seen.end, kLanes) / kLanes};
    for (int64_t i = 0; i < count; ++i) {
      soften_tile_row(rows.soft_cap, piece.scales, seen_by(rows, piece.begin, first + i), blocks,
                      scores + i * kPieceTokens, &share.peak[i], &share.sum[i],
                      shares + i * kPieceTokens);
    }
  }
  value_tiles(shares, tiled, share.out);
}

#endif

}  // namespace ts
