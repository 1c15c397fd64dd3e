// Attention over pieces of 64 keys: scores, softmax within the piece, weighted values, merge.
#include "kernels/attention.h"

#include <algorithm>
#include <type_traits>

#include "kernels/attention_tile.h"
#include "kernels/attention_tiles.h"
#include "kernels/attention_whole.h"
#include "kernels/piece.h"
#include "kernels/soften.h"
#include "kernels/spread.h"

namespace ts {

namespace {

/// The queries of a tile, as their product with stored numbers takes them.
template <class T>
struct TileQueries {
  const typename Arithmetic<T>::Factor* q;
  const float* scales;  // of whole numbers
  int64_t first;        // index of the first one
  int64_t count;        // at most kTileQueries
};

/// Turns scores into shares as whole numbers. A row's bits do not depend on those beside it.
template <int Q>
void soften_codes(const AttentionRows& rows, const Piece<Short>& piece,
                  const TileQueries<Short>& queries, const Range& blocks, float* scores,
                  TileShare& share, int16_t* codes, float* scales) {
  const auto is_whole = [&](const Range& seen) {
    return rows.soft_cap == 0 && seen.begin == 0 && seen.end == kPieceTokens;
  };
  Range seen[Q];
  bool are_whole = true;
  for (int i = 0; i < Q; ++i) {
    seen[i] = seen_by(rows, piece.begin, queries.first + i);
    are_whole = are_whole && is_whole(seen[i]);
  }
  if (are_whole) {
    soften_whole_codes<Q>(piece.scales, queries.scales, scores, share.peak, share.sum, codes,
                          scales);
    return;
  }
  for (int i = 0; i < Q; ++i) {
    float* row = scores + i * kPieceTokens;
    int16_t* own = codes + i * kPieceTokens;
    const float* scale = queries.scales + i;
    float* peak = &share.peak[i];
    float* sum = &share.sum[i];
    if (is_whole(seen[i])) {
      soften_whole_codes<1>(piece.scales, scale, row, peak, sum, own, scales + i);
    } else {
      soften(rows.soft_cap, piece.scales, *scale, seen[i], blocks, row, peak, sum);
      scales[i] = make_codes(blocks, row, own);
    }
  }
}

/// Computes the shares of some queries, each of which sees a key of the piece.
template <class T>
void attend_tile(const AttentionRows& rows, int64_t head_dim, const Piece<T>& piece,
                 const TileQueries<T>& queries, TileShare& share) {
  constexpr bool kIsWhole = std::is_same_v<T, Short>;
  constexpr int kTogether = Arithmetic<T>::kTogether;
  alignas(64) float scores[kTileQueries * kPieceTokens];
  alignas(64) int16_t codes[kIsWhole ? kTileQueries * kPieceTokens : 1];
  float scales[kTileQueries];
  const int64_t first = queries.first;
  const int64_t num_queries = queries.count;
  const int64_t num_tokens = seen_by(rows, piece.begin, first + num_queries - 1).end;
  const Range blocks{seen_by(rows, piece.begin, first).begin / kLanes,
                     round_up(num_tokens, kLanes) / kLanes};
  with_constant<kTileQueries>(num_queries, [&](auto constant_q) {
    constexpr int Q = decltype(constant_q)::value;
    constexpr int kVectors = tile_vectors(Q);
    for (int64_t b = blocks.begin; b < blocks.end; b += kVectors) {
      with_constant<kVectors>(blocks.end - b, [&](auto constant_b) {
        constexpr int B = decltype(constant_b)::value;
        score_tile<Q, B, false>(queries.q, piece.keys + b, piece.keys + b, head_dim,
                                scores + b * kLanes, kPieceTokens);
      });
    }
    if constexpr (kIsWhole) {
      soften_codes<Q>(rows, piece, queries, blocks, scores, share, codes, scales);
    } else {
      const bool is_plain = !piece.scales.are_there && rows.soft_cap == 0;
      for (int i = 0; i < Q; ++i) {
        const Range seen = seen_by(rows, piece.begin, first + i);
        float* row = scores + i * kPieceTokens;
        if (is_plain && seen.begin == 0 && seen.end == kPieceTokens) {
          soften_whole(row, &share.peak[i], &share.sum[i]);
        } else {
          soften(rows.soft_cap, piece.scales, 1.0F, seen, blocks, row, &share.peak[i],
                 &share.sum[i]);
        }
      }
    }
    for (int64_t d = 0; d < head_dim; d += kVectors * kLanes) {
      with_constant<kVectors>((head_dim - d) / kLanes, [&](auto constant_b) {
        constexpr int B = decltype(constant_b)::value;
        const T* values[kBlocksPerPiece];
        for (int64_t b = blocks.begin; b < blocks.end; ++b) {
          values[b] = piece.values[b] + d * kTogether;
        }
        const typename Arithmetic<T>::Factor* factors;
        if constexpr (kIsWhole) {
          factors = codes;
        } else {
          factors = scores;
        }
        const auto put = [&](int i, int b, Lanes sum) {
          store_lanes(share.out + i * head_dim + d + b * kLanes, sum);
        };
        value_tile<Q, B, false>(factors, kPieceTokens, scales, values, values, head_dim,
                                blocks.begin * kBlockTokens, num_tokens, put);
      });
    }
  });
}

void make_query_codes(int64_t num_queries, int64_t head_dim, AttentionScratch& scratch) {
  for (int64_t i = 0; i < num_queries; ++i) {
    const int64_t first = i * head_dim;
    const float* query = scratch.q.data() + first;
    scratch.scales.data()[i] = query_codes(query, head_dim, scratch.codes() + first);
  }
}

void gather_queries(const AttentionRows& rows, const LayerPages& pages, AttentionScratch& scratch) {
  const int64_t head_dim = pages.head_dim;
  scratch.fit(rows.num_queries(), head_dim);
  // Shares are powers of two, so log2(e) joins the scale; a cap takes it in later.
  const bool is_capped = rows.soft_cap != 0;
  const Lanes factor = broadcast(is_capped ? rows.scale / rows.soft_cap : rows.scale * kLog2E);
  float* q = scratch.q.data();
  for (int64_t row = 0; row < rows.num_rows; ++row) {
    const float* source = rows.q + row * rows.q_stride;
    for (int64_t i = 0; i < rows.group * head_dim; i += kLanes, q += kLanes) {
      store_lanes(q, multiply(load_lanes(source + i), factor));
    }
  }
  for (int64_t i = 0; pages.has_factors() && i < rows.num_queries(); ++i) {
    const float* factors = pages.query_factors(rows.head * head_dim);
    float* query = scratch.q.data() + i * head_dim;
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_lanes(query + d, multiply(load_lanes(query + d), load_lanes(factors + d)));
    }
  }
#if TS_LEVEL == 3
  if (is_tiled(rows, pages)) return make_tile_queries(rows.num_queries(), head_dim, scratch);
#endif
  if (pages.format == CacheFormat::Int16)
    return make_query_codes(rows.num_queries(), head_dim, scratch);
  if (pages.format != CacheFormat::Int8) return;
  for (int64_t i = 0; i < rows.num_queries(); ++i) {
    spread(scratch.q.data() + i * head_dim, head_dim);
  }
}

/// Calls `body(its part of the row, place of its peak and sum in Merged)` for each query.
template <class Body>
void for_queries(const AttentionRows& rows, int64_t head_dim, const Merged& merged, Body body) {
  for (int64_t query = 0; query < rows.num_queries(); ++query) {
    const int64_t row = query / rows.group;
    const int64_t head = query % rows.group;
    body(query, rows.out + row * rows.out_stride + head * head_dim, row * merged.stride + head);
  }
}

/// Begins with nothing but the sinks, or with what earlier calls have merged.
void start_merging(const AttentionRows& rows, int64_t head_dim, const Pieces& pieces,
                   AttentionScratch& scratch, const Merged& merged) {
  if (pieces.begin <= rows.piece_begin()) {
    std::fill_n(scratch.out.data(), rows.num_queries() * head_dim, 0.0F);
    std::fill_n(scratch.peak.data(), rows.num_queries(), kMinusInfinity);
    std::fill_n(scratch.sum.data(), rows.num_queries(), 0.0F);
    for (int64_t i = 0; rows.sinks != nullptr && i < rows.num_queries(); ++i) {
      scratch.peak.data()[i] = rows.sinks[i % rows.group] * kLog2E;
      scratch.sum.data()[i] = 1.0F;
    }
    return;
  }
  for_queries(rows, head_dim, merged, [&](int64_t query, const float* out, int64_t place) {
    std::copy_n(out, head_dim, scratch.out.data() + query * head_dim);
    scratch.peak.data()[query] = merged.peak[place];
    scratch.sum.data()[query] = merged.sum[place];
  });
}

/// Writes the rows, or leaves what is merged so far to later calls.
void end_merging(const AttentionRows& rows, int64_t head_dim, const Pieces& pieces,
                 const AttentionScratch& scratch, const Merged& merged) {
  const bool is_whole = pieces.end >= rows.piece_end();
  for_queries(rows, head_dim, merged, [&](int64_t query, float* out, int64_t place) {
    const float* source = scratch.out.data() + query * head_dim;
    if (!is_whole) {
      std::copy_n(source, head_dim, out);
      merged.peak[place] = scratch.peak.data()[query];
      merged.sum[place] = scratch.sum.data()[query];
      return;
    }
    const Lanes factor = broadcast(1.0F / scratch.sum.data()[query]);
    for (int64_t d = 0; d < head_dim; d += kLanes) {
      store_lanes(out + d, multiply(load_lanes(source + d), factor));
    }
  });
}

/// Takes the shares of pieces: merges them with what was merged before, or stores them.
class Shares {
 public:
  Shares(const AttentionRows& rows, int64_t head_dim, AttentionScratch& scratch,
         const PieceShares* stored)
      : rows_(rows), head_dim_(head_dim), scratch_(scratch), stored_(stored) {}

  /// Takes the share of queries [first, first + count) of a piece.
  void take(int64_t piece, const TileShare& share, int64_t first, int64_t count) {
    take_sums(piece, share.peak, share.sum, first, count);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        take_values(i, d, load_lanes(share.out + i * head_dim_ + d));
      }
    }
  }

  /// The same in parts: first the sums, then sixteen values of the tile's query `i` at a time.
  void take_sums(int64_t piece, const float* peak, const float* sum, int64_t first, int64_t count) {
    first_ = first;
    if (stored_ == nullptr) {
      out_ = scratch_.out.data() + first * head_dim_;
      merge_sums(peak, sum, count, scratch_.peak.data() + first, scratch_.sum.data() + first,
                 &factors_);
      return;
    }
    out_ = stored_->of_piece(piece, head_dim_);
    float* peaks = out_ + stored_->num_queries() * head_dim_;
    for (int64_t i = 0; i < count; ++i) {
      peaks[stored_query(i)] = peak[i];
      peaks[stored_->num_queries() + stored_query(i)] = sum[i];
    }
  }
  void take_values(int64_t i, int64_t d, Lanes values) const {
    if (stored_ == nullptr) return merge_values(factors_, i, values, out_ + i * head_dim_ + d);
    store_lanes(out_ + stored_query(i) * head_dim_ + d, values);
  }

 private:
  /// The place of a query of the tile among all.
  int64_t stored_query(int64_t i) const {
    const int64_t row = stored_->first_row + (first_ + i) / rows_.group;
    return row * stored_->num_heads + stored_->first_head + (first_ + i) % rows_.group;
  }

  const AttentionRows& rows_;
  int64_t head_dim_;
  AttentionScratch& scratch_;
  const PieceShares* stored_;  // null: shares are merged
  int64_t first_ = 0;
  float* out_ = nullptr;
  MergeFactors factors_;
};

template <class T>
TileQueries<T> tile_queries(const AttentionScratch& scratch, int64_t head_dim, int64_t first,
                            int64_t count) {
  const float* scales = scratch.scales.data() + first;
  if constexpr (std::is_same_v<T, Short>) {
    return {scratch.codes() + first * head_dim, scales, first, count};
  } else {
    return {scratch.q.data() + first * head_dim, scales, first, count};
  }
}

/// Computes the shares of a piece.
template <class T>
void attend_piece(const AttentionRows& rows, const LayerPages& pages, int64_t index,
                  AttentionScratch& scratch, Shares& shares) {
  const int64_t head_dim = pages.head_dim;
  alignas(64) float out[kTileQueries * kMostHeadDim];
  const Piece<T> piece = find_piece<T>(rows, pages, index, scratch);
  const int64_t query_end = rows.row_end(index) * rows.group;
  for (int64_t i = rows.row_begin(index) * rows.group; i < query_end; i += kTileQueries) {
    const int64_t count = std::min<int64_t>(kTileQueries, query_end - i);
    TileShare share;
    share.out = out;
    attend_tile(rows, head_dim, piece, tile_queries<T>(scratch, head_dim, i, count), share);
    shares.take(index, share, i, count);
  }
}

/// Computes the shares of each piece that is stored here.
template <class T>
void attend_many(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
                 AttentionScratch& scratch, Shares& shares) {
  int64_t index = pages.first_stored(pieces.begin);
  for (; index < pieces.end; index += pages.num_places) {
    attend_piece<T>(rows, pages, index, scratch, shares);
  }
}

/// The pieces of which all rows see every key, and scores are what they were computed as.
Pieces whole_pieces(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces) {
  if (rows.soft_cap != 0 || pages.values_are_keys) return {pieces.end, pieces.end};
  const int64_t seen = first_seen(rows.position + rows.num_rows - 1, rows.window);
  const int64_t begin = std::clamp(num_pieces(seen), pieces.begin, pieces.end);
  return {begin, std::clamp((rows.position + 1) / kPieceTokens, begin, pieces.end)};
}

/// Computes the shares of a whole piece.
template <class T>
void attend_whole(const AttentionRows& rows, int64_t head_dim, int64_t index, const Piece<T>& piece,
                  AttentionScratch& scratch, Shares& shares) {
  const int64_t num_queries = rows.num_queries();
  const int64_t num_tiles = (num_queries + kMostTileQueries - 1) / kMostTileQueries;
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_queries * tile / num_tiles;
    const int64_t count = num_queries * (tile + 1) / num_tiles - first;
    const TileQueries<T> queries = tile_queries<T>(scratch, head_dim, first, count);
    with_constant<kMostTileQueries>(count, [&](auto constant_q) {
      attend_whole_tile<decltype(constant_q)::value>(
          head_dim, piece, queries.q, queries.scales,
          [&](const float* peak, const float* sum) {
            shares.take_sums(index, peak, sum, first, count);
          },
          [&](int64_t i, int64_t d, Lanes values) { shares.take_values(i, d, values); });
    });
  }
}

/// The same as `attend_many` for few queries, which read keys and values as they are stored.
template <class T>
void attend_few(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
                AttentionScratch& scratch, Shares& shares) {
  const Pieces whole = whole_pieces(rows, pages, pieces);
  int64_t index = pages.first_stored(pieces.begin);
  for (; index < whole.begin; index += pages.num_places) {
    attend_piece<T>(rows, pages, index, scratch, shares);
  }
  if (index < whole.end) {
    BlockWalk walk(rows, pages, index);
    uint8_t* blocks[2][kBlocksPerPiece];  // of a piece, and of the next
    std::generate_n(blocks[0], kBlocksPerPiece, [&] { return walk.next(); });
    for (int turn = 0; index < whole.end; index += pages.num_places, turn = 1 - turn) {
      const bool is_last = index + pages.num_places >= whole.end;
      uint8_t** ahead = blocks[is_last ? turn : 1 - turn];
      if (!is_last) std::generate_n(ahead, kBlocksPerPiece, [&] { return walk.next(); });
      Piece<T> piece;
      find_whole_piece(pages, blocks[turn], ahead, piece);
      attend_whole(rows, pages.head_dim, index, piece, scratch, shares);
    }
  }
  for (; index < pieces.end; index += pages.num_places) {
    attend_piece<T>(rows, pages, index, scratch, shares);
  }
}

/// Computes the shares of each tile of queries and each piece that is stored here.
void compute_shares(const AttentionRows& rows, const LayerPages& pages, const Pieces& wanted,
                    AttentionScratch& scratch, Shares& shares) {
#if TS_LEVEL == 3
  if (is_tiled(rows, pages)) return for_tiled_shares(rows, pages, wanted, scratch, shares);
#endif
  const Pieces pieces{std::max(wanted.begin, rows.piece_begin()),
                      std::min(wanted.end, rows.piece_end())};
  // Few queries read each key once or twice: converting it first would cost more than it saves.
  const bool are_many = rows.num_queries() > 2 * kMostTileQueries;
  if (pages.format == CacheFormat::Int16) {
    if (are_many) return attend_many<Short>(rows, pages, pieces, scratch, shares);
    return attend_few<Short>(rows, pages, pieces, scratch, shares);
  }
  if (are_many || pages.values_are_keys) {
    return attend_many<float>(rows, pages, pieces, scratch, shares);
  }
  switch (pages.format) {
    case CacheFormat::Half:
      return attend_few<Half>(rows, pages, pieces, scratch, shares);
    case CacheFormat::BFloat16:
      return attend_few<BFloat16>(rows, pages, pieces, scratch, shares);
    case CacheFormat::Int8:
      return attend_few<int8_t>(rows, pages, pieces, scratch, shares);
    case CacheFormat::Int16:
      return;
  }
}

}  // namespace

void AttentionScratch::fit(int64_t num_queries, int64_t head_dim) {
  q.fit(num_queries * head_dim);
  half_floats.fit((num_queries + kLanes) * round_up(head_dim, 2 * kLanes) / 2);
  scales.fit(num_queries);
  out.fit(num_queries * head_dim);
  peak.fit(num_queries);
  sum.fit(num_queries);
  keys.fit(kPieceTokens * head_dim);
  values.fit(kPieceTokens * head_dim);
}

void attend(const AttentionRows& rows, const LayerPages& pages, AttentionScratch& scratch) {
  attend(rows, pages, rows.pieces(), scratch, {});
}

void attend(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
            AttentionScratch& scratch, const Merged& merged) {
  const int64_t head_dim = pages.head_dim;
  if (pieces.begin >= rows.piece_end() || pieces.end <= rows.piece_begin()) return;
  gather_queries(rows, pages, scratch);
  start_merging(rows, head_dim, pieces, scratch, merged);
  Shares shares(rows, head_dim, scratch, nullptr);
  compute_shares(rows, pages, pieces, scratch, shares);
  end_merging(rows, head_dim, pieces, scratch, merged);
}

void attend_pieces(const AttentionRows& rows, const LayerPages& pages, const Pieces& pieces,
                   AttentionScratch& scratch, const PieceShares& shares) {
  gather_queries(rows, pages, scratch);
  Shares stored(rows, pages.head_dim, scratch, &shares);
  compute_shares(rows, pages, pieces, scratch, stored);
}

void merge_pieces(const AttentionRows& rows, int64_t head_dim, const Pieces& pieces,
                  AttentionScratch& scratch, const PieceShares& shares, const Merged& merged) {
  const int64_t num_queries = shares.num_queries();
  const int64_t end = std::min(pieces.end, rows.piece_end());
  if (pieces.begin >= end || pieces.end <= rows.piece_begin()) return;  // rows see none of them
  // Queries that lie together: of all rows, or of one.
  const int64_t rows_together = shares.num_heads == rows.group ? rows.num_rows : 1;
  scratch.fit(rows.num_queries(), head_dim);
  start_merging(rows, head_dim, pieces, scratch, merged);
  for (int64_t piece = std::max(pieces.begin, rows.piece_begin()); piece < end; ++piece) {
    const float* out = shares.of_piece(piece, head_dim);
    const float* peak = out + num_queries * head_dim;
    const int64_t row_end = rows.row_end(piece);
    for (int64_t row = rows.row_begin(piece); row < row_end; row += rows_together) {
      const int64_t num_together = std::min(rows_together, row_end - row) * rows.group;
      for (int64_t i = 0; i < num_together; i += kTileQueries) {
        const int64_t count = std::min<int64_t>(kTileQueries, num_together - i);
        const int64_t first = (shares.first_row + row) * shares.num_heads + shares.first_head;
        const int64_t query = first + i;
        const int64_t own = row * rows.group + i;
        merge(peak + query, peak + num_queries + query, out + query * head_dim, count, head_dim,
              scratch.peak.data() + own, scratch.sum.data() + own,
              scratch.out.data() + own * head_dim);
      }
    }
  }
  end_merging(rows, head_dim, pieces, scratch, merged);
}

}  // namespace ts
