// A piece of the context as rows meet it: where its keys and values lie, and what it brings them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/soften.h"

namespace ts {

/// A piece's share of a few queries.
struct TileShare {
  float peak[kLanes];
  float sum[kLanes];
  float* out;  // (queries, head_dim)
};

/// The keys and values of one piece, as stored in the pages or as float32 in the scratch.
template <class T>
struct Piece {
  int64_t begin;  // position of its first key
  const T* keys[kBlocksPerPiece];
  const T* values[kBlocksPerPiece];
  const T* next_keys[kBlocksPerPiece];  // of the next piece, to be fetched meanwhile
  const T* next_values[kBlocksPerPiece];
  PieceScales scales;
};

/// The keys that a query sees.
inline Range seen_by(const AttentionRows& rows, int64_t piece_begin, int64_t query) {
  const int64_t position = rows.position + query / rows.group;
  return {std::max<int64_t>(first_seen(position, rows.window) - piece_begin, 0),
          std::min(position + 1 - piece_begin, kPieceTokens)};
}

/// The blocks of which some row sees a key. Pages of others may not exist.
inline Range seen_blocks(const AttentionRows& rows, int64_t piece_begin) {
  const int64_t begin = first_seen(rows.position, rows.window) - piece_begin;
  const int64_t end = rows.position + rows.num_rows - piece_begin;
  return {std::max<int64_t>(begin, 0) / kBlockTokens,
          round_up(std::min(end, kPieceTokens), kBlockTokens) / kBlockTokens};
}

inline Lanes load_half_scales(const uint16_t* p) { return load_halves(p); }

template <class T>
Piece<T> find_piece(const AttentionRows& rows, const LayerPages& pages, int64_t index,
                    AttentionScratch& scratch) {
  Piece<T> piece;
  piece.begin = index * kPieceTokens;
  piece.scales.are_there = pages.has_scales();
  const Range blocks = seen_blocks(rows, piece.begin);
  const int64_t end = rows.position + rows.num_rows;
  const int64_t block_values = kBlockTokens * pages.head_dim;
  const auto stored = [](const uint8_t* numbers) { return reinterpret_cast<const T*>(numbers); };
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    const int64_t position = piece.begin + b * kBlockTokens;
    uint8_t* block = pages.block(rows.page_table, rows.head, position);
    if (piece.scales.are_there) {
      const uint16_t* scales = pages.scales(block);
      const auto load = std::is_same_v<T, Short> ? load_bfloat16s : load_half_scales;
      store_lanes(piece.scales.keys + b * kLanes, load(scales));
      store_lanes(piece.scales.values + b * kLanes, load(scales + kBlockTokens));
    }
    if constexpr (std::is_same_v<T, float>) {
      float* keys = scratch.keys.data() + b * block_values;
      float* values = scratch.values.data() + b * block_values;
      unpack_numbers(pages.format, block, block_values, keys);
      unpack_numbers(pages.format, block + pages.key_bytes(), block_values, values);
      piece.keys[b] = keys;
      piece.values[b] = values;
    } else {
      const int64_t next = position + kPieceTokens * pages.num_places;
      const uint8_t* ahead = next < end ? pages.block(rows.page_table, rows.head, next) : block;
      piece.keys[b] = stored(block);
      piece.values[b] = stored(block + pages.key_bytes());
      piece.next_keys[b] = stored(ahead);
      piece.next_values[b] = stored(ahead + pages.key_bytes());
    }
  }
  return piece;
}

}  // namespace ts
