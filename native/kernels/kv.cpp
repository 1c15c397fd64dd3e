// Writes keys and values to their pages. What a page cannot hold becomes its largest number, NaN
// too: stored for a later position, it would turn a masked product, times 0, into NaN.
#include "kernels/kv.h"

#include "kernels/attention_tile.h"
#include "kernels/codes.h"
#include "kernels/lane_math.h"
#include "kernels/spread.h"
#include "linear/number.h"

namespace ts {

namespace {

constexpr float kLargestHalf = 65504.0F;
constexpr float kLargestByte = 127.0F;

/// Sixteen numbers in a format of two bytes.
void store_sixteen(CacheFormat format, Lanes x, uint16_t* out) {
  if (format == CacheFormat::Half) return store_halves(out, saturate(x, kLargestHalf));
  float values[kLanes];
  store_lanes(values, saturate(x, kLargestBFloat16));
  for (int i = 0; i < kLanes; ++i) out[i] = bfloat16_from_float(values[i]);
}

float largest_of(const float* x, int64_t count) {
  Lanes most = zero_lanes();
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes values = load_lanes(x + i);
    most = larger(most, larger(values, subtract(zero_lanes(), values)));
  }
  return largest_across(most);
}

/// Writes a head as bytes, `stride` apart, and returns their scale.
uint16_t store_bytes(const float* head, int64_t head_dim, int8_t* out, int64_t stride) {
  uint16_t scales[kLanes];
  store_halves(scales, broadcast(largest_of(head, head_dim) / kLargestByte));
  const float scale = float_from_half(scales[0]);
  const Lanes factor = broadcast(scale == 0 ? 0 : 1.0F / scale);
  const Lanes magic = broadcast(12582912.0F);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Lanes scaled = saturate(multiply(load_lanes(head + i), factor), kLargestByte);
    float rounded[kLanes];
    store_lanes(rounded, subtract(add(scaled, magic), magic));
    for (int lane = 0; lane < kLanes; ++lane) {
      out[(i + lane) * stride] = static_cast<int8_t>(static_cast<int32_t>(rounded[lane]));
    }
  }
  return scales[0];
}

/// One head of a row, in separate memory.
struct Head {
  alignas(64) float values[kMostHeadDim];

  Head(const float* source, int64_t head_dim) {
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      store_lanes(values + i, saturate(load_lanes(source + i), kLargestHalf));
    }
  }
};

/// `first` is the head's first value in a row.
void store_key_bytes(const LayerPages& pages, uint8_t* block, int64_t token, const float* source,
                     int64_t first) {
  Head head(source, pages.head_dim);
  for (int64_t i = 0; pages.balance && i < pages.head_dim; i += kLanes) {
    const Lanes near =
        subtract(load_lanes(head.values + i), load_lanes(pages.key_means(first + i)));
    store_lanes(head.values + i, multiply(near, load_lanes(pages.key_factors(first + i))));
  }
  spread(head.values, pages.head_dim);
  const Lanes factor = broadcast(1.0F / static_cast<float>(spread_width(pages.head_dim)));
  for (int64_t i = 0; i < pages.head_dim; i += kLanes) {
    store_lanes(head.values + i, multiply(load_lanes(head.values + i), factor));
  }
  auto* keys = reinterpret_cast<int8_t*>(block);
  pages.scales(block)[token] = store_bytes(head.values, pages.head_dim, keys + token, kBlockTokens);
}

void store_value_bytes(const LayerPages& pages, uint8_t* block, int64_t token,
                       const float* source) {
  const Head head(source, pages.head_dim);
  auto* values = reinterpret_cast<int8_t*>(block + pages.key_bytes());
  pages.scales(block)[kBlockTokens + token] =
      store_bytes(head.values, pages.head_dim, values + token * pages.head_dim, 1);
}

/// `first` is the head's first value in a row.
void store_key_codes(const LayerPages& pages, uint8_t* block, int64_t token, const float* source,
                     int64_t first) {
  int16_t codes[kMostHeadDim];
  alignas(64) float values[kMostHeadDim];
  if (pages.has_factors()) {
    for (int64_t i = 0; i < pages.head_dim; i += kLanes) {
      const Lanes factors = load_lanes(pages.key_factors(first + i));
      store_lanes(values + i, multiply(load_lanes(source + i), factors));
    }
    source = values;
  }
  pages.scales(block)[token] = head_codes(source, pages.head_dim, codes);
  auto* keys = reinterpret_cast<int16_t*>(block) + 2 * token;
  for (int64_t d = 0; d < pages.head_dim; ++d) keys[d / 2 * 2 * kBlockTokens + d % 2] = codes[d];
}

void store_value_codes(const LayerPages& pages, uint8_t* block, int64_t token,
                       const float* source) {
  int16_t codes[kMostHeadDim];
  pages.scales(block)[kBlockTokens + token] = head_codes(source, pages.head_dim, codes);
  auto* values = reinterpret_cast<int16_t*>(block + pages.key_bytes());
  values += token / 2 * 2 * pages.head_dim + token % 2;
  for (int64_t d = 0; d < pages.head_dim; ++d) values[2 * d] = codes[d];
}

template <class T>
void unpack(const uint8_t* numbers, int64_t count, float* out) {
  const auto* source = reinterpret_cast<const T*>(numbers);
  for (int64_t i = 0; i < count; i += kLanes) store_lanes(out + i, load_sixteen(source + i));
}

}  // namespace

void store_keys(const LayerPages& pages, const int32_t* page_table, int64_t position,
                const float* row, int64_t begin, int64_t end) {
  const int64_t token = position % kBlockTokens;
  for (int64_t i = begin; i < end; i += pages.unit()) {
    uint8_t* block = pages.block(page_table, i / pages.head_dim, position - token);
    if (pages.format == CacheFormat::Int8) {
      store_key_bytes(pages, block, token, row + i, i);
      continue;
    }
    if (pages.format == CacheFormat::Int16) {
      store_key_codes(pages, block, token, row + i, i);
      continue;
    }
    uint16_t stored[kLanes];
    store_sixteen(pages.format, load_lanes(row + i), stored);
    uint16_t* column =
        reinterpret_cast<uint16_t*>(block) + i % pages.head_dim * kBlockTokens + token;
    for (int lane = 0; lane < kLanes; ++lane) column[lane * kBlockTokens] = stored[lane];
  }
}

void store_values(const LayerPages& pages, const int32_t* page_table, int64_t position,
                  const float* row, int64_t begin, int64_t end) {
  if (pages.values_are_keys) return;
  const int64_t token = position % kBlockTokens;
  for (int64_t i = begin; i < end; i += pages.unit()) {
    uint8_t* block = pages.block(page_table, i / pages.head_dim, position - token);
    if (pages.format == CacheFormat::Int8) {
      store_value_bytes(pages, block, token, row + i);
      continue;
    }
    if (pages.format == CacheFormat::Int16) {
      store_value_codes(pages, block, token, row + i);
      continue;
    }
    auto* values = reinterpret_cast<uint16_t*>(block + pages.key_bytes());
    store_sixteen(pages.format, load_lanes(row + i),
                  values + token * pages.head_dim + i % pages.head_dim);
  }
}

void unpack_numbers(CacheFormat format, const uint8_t* numbers, int64_t count, float* out) {
  switch (format) {
    case CacheFormat::Half:
      return unpack<Half>(numbers, count, out);
    case CacheFormat::BFloat16:
      return unpack<BFloat16>(numbers, count, out);
    case CacheFormat::Int8:
      return unpack<int8_t>(numbers, count, out);
    case CacheFormat::Int16:
      return;
  }
}

}  // namespace ts
