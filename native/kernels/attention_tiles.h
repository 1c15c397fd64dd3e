// Attention of prompt rows on AMX: bfloat16 tiles of 16 queries.
//
// The codes of a piece become bfloat16 once for all queries, with their scales and without the mean
// of keys. They lie in pairs, as tiles take them.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/piece.h"
#include "kernels/spread.h"
#if TS_LEVEL == 3
#include "linear/tile.h"
#endif

namespace ts {

#if TS_LEVEL == 3

constexpr int64_t kTileDepth = 32;        // numbers of a query, or shares of it, in a tile
constexpr int64_t kTogetherQueries = 16;  // in a tile
static_assert(kTogetherQueries <= kLanes);

/// Whether rows meet keys and values in tiles.
inline bool is_tiled(const AttentionRows& rows, const LayerPages& pages) {
  return rows.is_prompt && pages.format == CacheFormat::Int16;
}

/// Numbers of a query or a key in whole tiles.
inline int64_t tiled_dim(int64_t head_dim) { return round_up(head_dim, kTileDepth); }

/// `out` is a line of the cache.
inline void store_bfloat16s(Lanes first, Lanes second, uint16_t* out) {
  const auto both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second.v, first.v));
  _mm512_store_si512(out, both);
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

/// Sixteen codes times `scales`, plus `more`.
inline Lanes scaled_codes(const Short* codes, Lanes scales, Lanes more) {
  const auto* sixteen = reinterpret_cast<const __m256i*>(codes);
  const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(sixteen));
  return multiply_add({_mm512_cvtepi32_ps(wide)}, scales, more);
}

inline Lanes broadcast_two(const float* pair) {
  double both;
  std::memcpy(&both, pair, sizeof both);
  return {_mm512_castpd_ps(_mm512_set1_pd(both))};
}

/// A piece as bfloat16: keys as (blocks, tiled_dim / 2, 16 tokens, 2), values as
/// (32 pairs of tokens, head_dim, 2). What no row sees is not in the pages yet, or no longer:
/// blocks are zeros, and so are later values, which meet shares of zero.
struct TiledPiece {
  int64_t head_dim;
  const float* key_means;  // that keys lose, which takes the same from all scores of a row; or null
  uint16_t* keys;
  uint16_t* values;

  int64_t key_block() const { return tiled_dim(head_dim) * kBlockTokens; }

  /// The first `num_tokens` are stored.
  void fill(const Piece<Short>& piece, const Range& blocks, int64_t num_tokens) const {
    const int64_t count = head_dim * kBlockTokens;
    for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
      uint16_t* block_keys = keys + b * key_block();
      uint16_t* block_values = values + b * count;
      std::fill(block_keys + count, block_keys + key_block(), uint16_t{0});
      if (b >= blocks.begin && b < blocks.end) {
        fill_keys(piece.keys[b], piece.scales.keys + b * kBlockTokens, block_keys);
        alignas(64) float scales[kBlockTokens];
        const Lanes stored = load_lanes(piece.scales.values + b * kLanes);
        const int num_lanes = first_lanes(num_tokens - b * kBlockTokens);
        store_lanes(scales, choose_first(num_lanes, stored, zero_lanes()));
        fill_values(piece.values[b], scales, block_values);
      } else {
        std::fill_n(block_keys, count, uint16_t{0});
        std::fill_n(block_values, count, uint16_t{0});
      }
    }
  }

 private:
  void fill_keys(const Short* codes, const float* scales, uint16_t* out) const {
    alignas(64) float twice[2 * kBlockTokens];  // each scale
    for (int64_t i = 0; i < 2 * kBlockTokens; ++i) twice[i] = scales[i / 2];
    const Lanes first = load_lanes(twice);
    const Lanes second = load_lanes(twice + kLanes);
    Lanes more = zero_lanes();
    for (int64_t d = 0; d < head_dim; d += 2, codes += 2 * kLanes, out += 2 * kLanes) {
      if (key_means) more = subtract(zero_lanes(), broadcast_two(key_means + d));
      store_bfloat16s(scaled_codes(codes, first, more), scaled_codes(codes + kLanes, second, more),
                      out);
    }
  }

  void fill_values(const Short* codes, const float* scales, uint16_t* out) const {
    const Lanes nothing = zero_lanes();
    for (int64_t token = 0; token < kBlockTokens; token += 2) {
      const Lanes two = broadcast_two(scales + token);
      for (int64_t d = 0; d < head_dim; d += kLanes, codes += 2 * kLanes, out += 2 * kLanes) {
        store_bfloat16s(scaled_codes(codes, two, nothing),
                        scaled_codes(codes + kLanes, two, nothing), out);
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

/// Turns the scores of queries into shares (16, 64) in bfloat16, where each query sees every key
/// and no cap bends the scores.
inline void soften_whole_tile(int64_t count, const float* scores, TileShare& share,
                              uint16_t* shares) {
  for (int64_t i = 0; i < count; ++i) {
    Lanes largest = broadcast(kMinusInfinity);
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      largest = larger(largest, load_lanes(scores + i * kPieceTokens + b * kLanes));
    }
    share.peak[i] = largest_across(largest);
  }
  for (int64_t i = 0; i < count; ++i) {
    const Lanes peak = broadcast(share.peak[i]);
    Lanes total = zero_lanes();
    Lanes parts[kBlocksPerPiece];
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      parts[b] = exp2(subtract(load_lanes(scores + i * kPieceTokens + b * kLanes), peak));
      total = add(total, parts[b]);
    }
    store_bfloat16s(parts[0], parts[1], shares + i * kPieceTokens);
    store_bfloat16s(parts[2], parts[3], shares + i * kPieceTokens + kTileDepth);
    share.sum[i] = sum_across(total);
  }
}

/// The same for a query that sees some keys, those of `blocks` at most.
inline void soften_tile_row(float soft_cap, const Range& seen, const Range& blocks, float* scores,
                            float* peak, float* sum, uint16_t* shares) {
  PieceScales none;
  none.are_there = false;
  soften(soft_cap, none, 1.0F, seen, blocks, scores, peak, sum);
  Lanes parts[kBlocksPerPiece];
  for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
    const bool is_seen = b >= blocks.begin && b < blocks.end;
    parts[b] = is_seen ? load_lanes(scores + b * kLanes) : zero_lanes();
  }
  store_bfloat16s(parts[0], parts[1], shares);
  store_bfloat16s(parts[2], parts[3], shares + kTileDepth);
}

/// Computes the shares of queries [first, first + count), each of which sees a key of the piece.
inline void attend_in_tiles(const AttentionRows& rows, int64_t piece_begin, const TiledPiece& piece,
                            const uint16_t* queries, int64_t first, int64_t count,
                            TileShare& share) {
  alignas(64) float scores[kTogetherQueries * kPieceTokens];
  alignas(64) uint16_t shares[kTogetherQueries * kPieceTokens];
  score_tiles(queries + first * tiled_dim(piece.head_dim), piece, scores);
  const Range begin = seen_by(rows, piece_begin, first);
  const Range end = seen_by(rows, piece_begin, first + count - 1);
  // Later queries see later keys: what the first one and the last one see, all see.
  if (rows.soft_cap == 0 && end.begin == 0 && begin.end == kPieceTokens) {
    soften_whole_tile(count, scores, share, shares);
  } else {
    const Range blocks{begin.begin / kLanes, round_up(end.end, kLanes) / kLanes};
    for (int64_t i = 0; i < count; ++i) {
      soften_tile_row(rows.soft_cap, seen_by(rows, piece_begin, first + i), blocks,
                      scores + i * kPieceTokens, &share.peak[i], &share.sum[i],
                      shares + i * kPieceTokens);
    }
  }
  value_tiles(shares, piece, share.out);
}

/// Computes the shares of each tile of queries and each piece stored here.
template <class Shares>
void for_tiled_shares(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
                      AttentionScratch& scratch, Shares& shares) {
  const TileSession session(full_tiles());
  alignas(64) float out[kTogetherQueries * kMostHeadDim];
  const float* means =
      pages.balance && rows.soft_cap == 0 ? pages.key_means(rows.head * pages.head_dim) : nullptr;
  const TiledPiece tiled{pages.head_dim, means, reinterpret_cast<uint16_t*>(scratch.keys.data()),
                         reinterpret_cast<uint16_t*>(scratch.values.data())};
  const auto* queries = reinterpret_cast<const uint16_t*>(scratch.codes());
  const int64_t end = std::min(pieces.end, rows.piece_end());
  int64_t index = pages.first_stored(std::max(pieces.begin, rows.piece_begin()));
  for (; index < end; index += pages.num_places) {
    const Piece<Short> piece = find_piece<Short>(rows, pages, index, scratch);
    tiled.fill(piece, seen_blocks(rows, piece.begin), rows.position + rows.num_rows - piece.begin);
    const int64_t query_end = rows.row_end(index) * rows.group;
    for (int64_t i = rows.row_begin(index) * rows.group; i < query_end; i += kTogetherQueries) {
      const int64_t count = std::min(kTogetherQueries, query_end - i);
      TileShare share;
      share.out = out;
      attend_in_tiles(rows, piece.begin, tiled, queries, i, count, share);
      shares.take(index, share, i, count);
    }
  }
}

#endif

}  // namespace ts
