// A piece of the context as rows meet it: where its keys and values lie, and what it brings them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/soften.h"
#include "kernels/spread.h"

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

/// Lets values be the keys of a block, (head_dim, 16 tokens) turned into (16 tokens, head_dim).
inline void values_of_keys(const float* keys, int64_t head_dim, bool are_spread, float* values) {
  for (int64_t d = 0; d < head_dim; ++d) {
    for (int64_t token = 0; token < kBlockTokens; ++token) {
      values[token * head_dim + d] = keys[d * kBlockTokens + token];
    }
  }
  for (int64_t token = 0; are_spread && token < kBlockTokens; ++token) {
    spread(values + token * head_dim, head_dim);  // twice is not at all: keys have the factor
  }
}

/// The same of codes: pairs of neighbours of a token become pairs of tokens of a neighbour.
inline void values_of_keys(const Short* keys, int64_t head_dim, Short* values) {
  const auto* pairs = reinterpret_cast<const uint32_t*>(keys);
  auto* out = reinterpret_cast<uint32_t*>(values);
  for (int64_t d = 0; d < head_dim; d += 2, pairs += kBlockTokens) {
    for (int64_t token = 0; token < kBlockTokens; token += 2) {
      const uint32_t first = pairs[token];
      const uint32_t second = pairs[token + 1];
      uint32_t* place = out + token / 2 * head_dim + d;
      place[0] = (first & 0xffff) | (second << 16);
      place[1] = (first >> 16) | (second & 0xffff0000);
    }
  }
}

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
      store_lanes(piece.scales.values + b * kLanes, load(pages.value_scales(block)));
    }
    if constexpr (std::is_same_v<T, float>) {
      float* keys = scratch.keys.data() + b * block_values;
      float* values = scratch.values.data() + b * block_values;
      unpack_numbers(pages.format, block, block_values, keys);
      if (pages.values_are_keys) {
        values_of_keys(keys, pages.head_dim, pages.format == CacheFormat::Int8, values);
      } else {
        unpack_numbers(pages.format, block + pages.key_bytes(), block_values, values);
      }
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
    if constexpr (std::is_same_v<T, Short>) {
      if (pages.values_are_keys) {
        // Behind what tiles make of the values, in the other half of this memory.
        auto* values = reinterpret_cast<Short*>(scratch.values.data());
        values += kPieceTokens * pages.head_dim + b * block_values;
        values_of_keys(piece.keys[b], pages.head_dim, values);
        piece.values[b] = values;
        piece.next_values[b] = piece.next_keys[b];
      }
    }
  }
  return piece;
}

}  // namespace ts
