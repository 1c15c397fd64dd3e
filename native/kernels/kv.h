// Key-value pages: where a token's keys and values lie, in which format, and how they are written.
#pragma once

#include <cstdint>

namespace ts {

constexpr int64_t kBlockTokens = 16;  // tokens that lie together
constexpr int64_t kPieceTokens = 64;  // tokens of a request, from its first on, that stay together

/// How the numbers in pages are stored. Int8 has a float16 scale for each token's keys, and one for
/// its values, of each head; its keys are balanced and spread first (kernels/spread.h). Int16 has
/// such scales in bfloat16, and meets queries and shares that are whole numbers, too.
enum class CacheFormat : int32_t { Half = 0, BFloat16 = 1, Int8 = 2, Int16 = 3 };

/// Stored numbers, as types of their own.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Short {
  int16_t code;
};

/// Pages of one layer. A page holds, for each layer of its group, for each key-value head, blocks
/// of 16 tokens: keys as [head_dim][16 tokens], then values as [16 tokens][head_dim]; with int16
/// [head_dim / 2][16 tokens][2] and [8 tokens][head_dim][2]. With int8 and int16 follow scales of
/// keys [16 tokens] and of values [16 tokens]. Nothing is ever cleared: a row reads only the
/// positions up to its own, all of them written by its request.
///
/// Ranks may divide keys and values by places: of every `num_places` pieces of a request, this one
/// stores piece `place`. A page has all of them, and `page_size` counts those that are stored here.
struct LayerPages {
  uint8_t* data;        // this layer's part of page 0
  int64_t page_stride;  // bytes from a page to the next
  int64_t page_size;    // tokens, a multiple of 16
  int64_t num_kv_heads;
  int64_t head_dim;  // a multiple of 16
  CacheFormat format;
  int64_t num_places = 1;
  int64_t place = 0;
  // Null, or for each value of all heads what keys lose, by what they are then multiplied, and by
  // what queries are, which is one over that: scores stay, but for a constant of each row. Int16 of
  // separate values has the means alone, which tiles of bfloat16 lose; that of values that are keys
  // the factors alone.
  const float* balance = nullptr;
  // A token's values are its keys, which are stored once, without values and their scales.
  bool values_are_keys = false;

  bool has_factors() const {
    return balance != nullptr && (format == CacheFormat::Int8 || values_are_keys);
  }
  const float* key_means(int64_t first) const { return balance + first; }
  const float* key_factors(int64_t first) const {
    return key_means(num_kv_heads * head_dim + first);
  }
  const float* query_factors(int64_t first) const {
    return key_factors(num_kv_heads * head_dim + first);
  }

  /// Whether this rank stores the token at a position.
  bool has(int64_t position) const { return position / kPieceTokens % num_places == place; }
  /// The first piece from `piece` on that this rank stores.
  int64_t first_stored(int64_t piece) const {
    return piece + (place + num_places - piece % num_places) % num_places;
  }

  bool has_scales() const { return format == CacheFormat::Int8 || format == CacheFormat::Int16; }
  /// Of the keys of a block; its values take as many.
  int64_t key_bytes() const {
    return kBlockTokens * head_dim * (format == CacheFormat::Int8 ? 1 : 2);
  }
  int64_t block_bytes() const {
    return num_parts() * (key_bytes() + (has_scales() ? kBlockTokens * 2 : 0));
  }
  /// Of a block: keys, and values if they are stored.
  int64_t num_parts() const { return values_are_keys ? 1 : 2; }
  /// Of this layer's part of a page.
  int64_t page_bytes() const { return num_kv_heads * page_size / kBlockTokens * block_bytes(); }

  /// The block of the 16 tokens from `position` (a multiple of 16), which are stored here. Without
  /// a table, pages follow one another.
  uint8_t* block(const int32_t* page_table, int64_t head, int64_t position) const {
    if (num_places > 1) {
      position = position / (num_places * kPieceTokens) * kPieceTokens + position % kPieceTokens;
    }
    const int64_t index = position / page_size;
    const int64_t page = page_table == nullptr ? index : page_table[index];
    const int64_t blocks_per_page = page_size / kBlockTokens;
    const int64_t block = head * blocks_per_page + position % page_size / kBlockTokens;
    return data + page * page_stride + block * block_bytes();
  }
  uint16_t* scales(uint8_t* block) const {
    return reinterpret_cast<uint16_t*>(block + num_parts() * key_bytes());
  }
  const uint16_t* value_scales(uint8_t* block) const {
    return scales(block) + (values_are_keys ? 0 : kBlockTokens);
  }

  /// Into how many neighbouring values a row of keys or values may be cut for storing.
  int64_t unit() const { return has_scales() ? head_dim : kBlockTokens; }
};

/// Stores values [begin, end), multiples of `unit()`, of a row of keys (heads x head_dim).
void store_keys(const LayerPages& pages, const int32_t* page_table, int64_t position,
                const float* row, int64_t begin, int64_t end);

/// The same for a row of values; nothing where they are keys.
void store_values(const LayerPages& pages, const int32_t* page_table, int64_t position,
                  const float* row, int64_t begin, int64_t end);

/// Numbers of a block as float32, exactly, without their scales; not int16. `count` is a multiple
/// of 16.
void unpack_numbers(CacheFormat format, const uint8_t* numbers, int64_t count, float* out);

}  // namespace ts
