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
  const T* next_keys[kBlocksPerPiece];  // of a whole piece: what is fetched meanwhile
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

/// The same of codes: pairs of neighbours of two tokens, four codes, become the pairs of tokens of
/// two neighbours. Then fours of (head_dim / 2, 8 pairs of tokens) become (8, head_dim / 2).
inline void values_of_keys(const Short* keys, int64_t head_dim, Short* values) {
  constexpr int64_t kFours = kBlockTokens / 2;
#if TS_LEVEL >= 1
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const auto* in = reinterpret_cast<const __m256i*>(keys);
  const int64_t stride = head_dim / 8;  // fours of a pair of tokens, four at a time
  auto* out = reinterpret_cast<__m256i*>(values);
  for (int64_t i = 0; i < stride; ++i, in += kFours) {
    for (int64_t half = 0; half < 2; ++half) {
      __m256i rows[4];
      TS_UNROLL for (int r = 0; r < 4; ++r) {
        rows[r] = _mm256_shuffle_epi8(_mm256_loadu_si256(in + 2 * r + half), order);
      }
      const __m256i even01 = _mm256_unpacklo_epi64(rows[0], rows[1]);
      const __m256i odd01 = _mm256_unpackhi_epi64(rows[0], rows[1]);
      const __m256i even23 = _mm256_unpacklo_epi64(rows[2], rows[3]);
      const __m256i odd23 = _mm256_unpackhi_epi64(rows[2], rows[3]);
      __m256i* place = out + 4 * half * stride + i;
      _mm256_storeu_si256(place, _mm256_permute2x128_si256(even01, even23, 0x20));
      _mm256_storeu_si256(place + stride, _mm256_permute2x128_si256(odd01, odd23, 0x20));
      _mm256_storeu_si256(place + 2 * stride, _mm256_permute2x128_si256(even01, even23, 0x31));
      _mm256_storeu_si256(place + 3 * stride, _mm256_permute2x128_si256(odd01, odd23, 0x31));
    }
  }
#else
  const int16_t* in = &keys->code;
  int16_t* out = &values->code;
  for (int64_t d = 0; d < head_dim; d += 2) {
    for (int64_t pair = 0; pair < kFours; ++pair, in += 4) {
      int16_t* place = out + 2 * (pair * head_dim + d);
      place[0] = in[0];
      place[1] = in[2];
      place[2] = in[1];
      place[3] = in[3];
    }
  }
#endif
}

template <class T>
Piece<T> find_piece(const AttentionRows& rows, const LayerPages& pages, int64_t index,
                    AttentionScratch& scratch) {
  Piece<T> piece;
  piece.begin = index * kPieceTokens;
  piece.scales.are_there = pages.has_scales();
  const Range blocks = seen_blocks(rows, piece.begin);
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
      piece.keys[b] = stored(block);
      piece.values[b] = stored(block + pages.key_bytes());
    }
    if constexpr (std::is_same_v<T, Short>) {
      if (pages.values_are_keys) {
        // Behind what tiles make of the values, in the other half of this memory.
        auto* values = reinterpret_cast<Short*>(scratch.values.data());
        values += kPieceTokens * pages.head_dim + b * block_values;
        values_of_keys(piece.keys[b], pages.head_dim, values);
        piece.values[b] = values;
      }
    }
  }
  return piece;
}

}  // namespace ts
