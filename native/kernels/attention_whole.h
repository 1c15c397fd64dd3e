// Attention of a few queries over whole pieces: those of which all rows see every key.
//
// Up to eight queries of AVX-512 read a piece once, and merge it as soon as it is multiplied.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/attention_tile.h"
#include "kernels/piece.h"
#include "kernels/soften.h"

namespace ts {

/// Walks through the stored blocks of a key-value head in order of position, without divisions.
class BlockWalk {
 public:
  /// Starts at a piece that is stored here.
  BlockWalk(const AttentionRows& rows, const LayerPages& pages, int64_t piece)
      : table_(rows.page_table),
        page_stride_(pages.page_stride),
        blocks_per_page_(pages.page_size / kBlockTokens),
        block_bytes_(pages.block_bytes()),
        data_(pages.data + rows.head * blocks_per_page_ * block_bytes_) {
    const int64_t position = piece / pages.num_places * kPieceTokens;
    page_ = position / pages.page_size;
    block_ = position % pages.page_size / kBlockTokens;
  }

  uint8_t* next() {
    const int64_t page = table_ == nullptr ? page_ : table_[page_];
    uint8_t* block = data_ + page * page_stride_ + block_ * block_bytes_;
    if (++block_ == blocks_per_page_) {
      block_ = 0;
      ++page_;
    }
    return block;
  }

 private:
  const int32_t* table_;
  int64_t page_stride_;
  int64_t blocks_per_page_;
  int64_t block_bytes_;
  uint8_t* data_;  // the head's part of page 0
  int64_t page_;
  int64_t block_;  // within the page
};

/// Finds the blocks of a whole piece and loads its scales. `ahead` are the blocks of the piece that
/// is read next; those of `own` if there is none.
template <class T>
void find_whole_piece(const LayerPages& pages, uint8_t* const* own, uint8_t* const* ahead,
                      Piece<T>& piece) {
  const int64_t key_bytes = pages.key_bytes();
  const auto stored = [](const uint8_t* numbers) { return reinterpret_cast<const T*>(numbers); };
  piece.scales.are_there = pages.has_scales();
  for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
    piece.keys[b] = stored(own[b]);
    piece.values[b] = stored(own[b] + key_bytes);
    piece.next_keys[b] = stored(ahead[b]);
    piece.next_values[b] = stored(ahead[b] + key_bytes);
    if (!piece.scales.are_there) continue;
    constexpr auto load = std::is_same_v<T, Short> ? load_bfloat16s : load_half_scales;
    store_lanes(piece.scales.keys + b * kLanes, load(pages.scales(own[b])));
    store_lanes(piece.scales.values + b * kLanes, load(pages.value_scales(own[b])));
    fetch(pages.scales(ahead[b]), fetches_far());
  }
}

/// Computes the share of `Q` queries of a whole piece: calls `begin(peaks, sums)`, then
/// `put(query, d, sixteen values)`.
template <int Q, class T, class Begin, class Put>
void attend_whole_tile(int64_t head_dim, const Piece<T>& piece,
                       const typename Arithmetic<T>::Factor* q, const float* query_scales,
                       Begin begin, Put put) {
  constexpr bool kIsWhole = std::is_same_v<T, Short>;
  constexpr int kTogether = Arithmetic<T>::kTogether;
  constexpr int kVectors = tile_vectors(Q);
  alignas(64) float scores[Q * kPieceTokens];
  alignas(64) int16_t codes[kIsWhole ? Q * kPieceTokens : 1];
  float scales[kLanes];
  float peak[kLanes];
  float sum[kLanes];
  for (int64_t b = 0; b < kBlocksPerPiece; b += kVectors) {
    score_tile<Q, kVectors, true>(q, piece.keys + b, piece.next_keys + b, head_dim,
                                  scores + b * kLanes, kPieceTokens);
  }
  const typename Arithmetic<T>::Factor* factors;
  if constexpr (kIsWhole) {
    soften_whole_codes<Q>(piece.scales, query_scales, scores, peak, sum, codes, scales);
    factors = codes;
  } else {
    for (int i = 0; i < Q; ++i) {
      float* row = scores + i * kPieceTokens;
      if (piece.scales.are_there) {
        soften(0, piece.scales, 1.0F, {0, kPieceTokens}, {0, kBlocksPerPiece}, row, &peak[i],
               &sum[i]);
      } else {
        soften_whole(row, &peak[i], &sum[i]);
      }
    }
    factors = scores;
  }
  begin(peak, sum);
  for (int64_t d = 0; d < head_dim; d += kVectors * kLanes) {
    with_constant<kVectors>((head_dim - d) / kLanes, [&](auto constant_b) {
      constexpr int B = decltype(constant_b)::value;
      const T* values[kBlocksPerPiece];
      const T* next[kBlocksPerPiece];
      for (int64_t b = 0; b < kBlocksPerPiece; ++b) {
        values[b] = piece.values[b] + d * kTogether;
        next[b] = piece.next_values[b] + d * kTogether;
      }
      value_tile<Q, B, true>(factors, kPieceTokens, scales, values, next, head_dim, 0, kPieceTokens,
                             [&](int i, int b, Lanes share) { put(i, d + b * kLanes, share); });
    });
  }
}

}  // namespace ts
