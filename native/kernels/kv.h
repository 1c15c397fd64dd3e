// Key-value pages: where a token's keys and values lie, and how they are written.
#pragma once

#include <cstdint>

namespace ts {

constexpr int64_t kBlockTokens = 16;  // tokens that lie together

/// Pages of one layer. A page holds, for each layer, for each key-value head, blocks of 16 tokens:
/// keys as [head_dim][16 tokens], then values as [16 tokens][head_dim], float16. Nothing is ever
/// cleared: a row reads only the positions up to its own, all of them written by its request.
struct LayerPages {
  uint16_t* data;       // this layer's part of page 0
  int64_t page_stride;  // halves from a page to the next
  int64_t page_size;    // tokens, a multiple of 16
  int64_t num_kv_heads;
  int64_t head_dim;  // a multiple of 16

  /// Keys of the 16 tokens from `position` (a multiple of 16); their values lie right behind.
  uint16_t* block(const int32_t* page_table, int64_t head, int64_t position) const {
    const int64_t page = page_table[position / page_size];
    const int64_t blocks_per_page = page_size / kBlockTokens;
    const int64_t block = head * blocks_per_page + position % page_size / kBlockTokens;
    return data + page * page_stride + block * 2 * kBlockTokens * head_dim;
  }
};

/// Stores values [begin, end), multiples of 16, of a row of keys (heads x head_dim).
void store_keys(const LayerPages& pages, const int32_t* page_table, int64_t position,
                const float* row, int64_t begin, int64_t end);

/// The same for a row of values.
void store_values(const LayerPages& pages, const int32_t* page_table, int64_t position,
                  const float* row, int64_t begin, int64_t end);

}  // namespace ts
