// The two products of attention for a few queries at once, blocked for the level's registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/kv.h"
#include "kernels/lane_math.h"
#include "kernels/pairs.h"
#include "linear/tuning.h"

namespace ts {

#if TS_LEVEL >= 1
constexpr int kTileQueries = 6;
constexpr int kTileVectors = 4;
#elif defined(__aarch64__)
constexpr int kTileQueries = 5;
constexpr int kTileVectors = 1;
#else
constexpr int kTileQueries = 2;
constexpr int kTileVectors = 1;
#endif

// Of queries that read pages as they are: with more, each key would be read once more.
constexpr int kMostTileQueries = TS_LEVEL >= 2 ? 8 : kTileQueries;

/// How many sixteens meet a number of queries together, at most kTileVectors. On AVX2, where each
/// takes two registers of 16, sums have eight to twelve: fewer would wait for each other, and more
/// would leave none for what they are made of. With seven or eight queries, AVX-512 has registers
/// for two sixteens.
constexpr int tile_vectors(int num_queries) {
  if (TS_LEVEL != 1) return num_queries <= kTileQueries ? kTileVectors : kTileVectors / 2;
  return num_queries == 1 ? 4 : num_queries <= 3 ? 2 : 1;
}

inline Lanes load_sixteen(const float* p) { return load_lanes(p); }
inline Lanes load_sixteen(const Half* p) { return load_halves(&p->bits); }
inline Lanes load_sixteen(const BFloat16* p) { return load_bfloat16s(&p->bits); }
inline Lanes load_sixteen(const int8_t* p) { return load_bytes(p); }

/// Sixteens of stored numbers in a line of cache; float32 lies in scratch, which is there already.
template <class T>
constexpr int kSixteensPerLine = 64 / (kLanes * static_cast<int>(sizeof(T)));

/// What stored numbers are multiplied with and added up as, and how many neighbours in a lane.
template <class T>
struct Arithmetic {
  using Factor = float;
  using Sum = Lanes;
  static constexpr int kTogether = 1;
};
template <>
struct Arithmetic<Short> {
  using Factor = int16_t;
  using Sum = Integers;
  static constexpr int kTogether = 2;
};

inline Integers load_sixteen(const Short* p) { return load_pairs(&p->code); }
inline Lanes load_factor(const float* p) { return broadcast(*p); }
inline Integers load_factor(const int16_t* p) { return broadcast_pair(p); }
inline Lanes add_product(Lanes a, Lanes b, Lanes sum) { return multiply_add(a, b, sum); }
inline Integers add_product(Integers a, Integers b, Integers sum) { return add_pairs(sum, a, b); }
inline Lanes to_lanes(Lanes a) { return a; }

template <int Q, int B, class Sum>
TS_INLINE void clear(Sum sums[Q][B]) {
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    TS_UNROLL for (int b = 0; b < B; ++b) {
      if constexpr (std::is_same_v<Sum, Integers>) {
        sums[i][b] = zero_integers();
      } else {
        sums[i][b] = zero_lanes();
      }
    }
  }
}

/// sums[i][b] += factors[i * stride] * sixteens[b].
template <int Q, int B, class T, class Factor, class Sum>
TS_INLINE void add_products(const Factor* factors, int64_t stride, const T* const* sixteens,
                            Sum sums[Q][B]) {
  if constexpr (TS_LEVEL == 1 && B > 1) {  // one at a time: there is no register for another
    TS_UNROLL for (int b = 0; b < B; ++b) {
      const Sum numbers = load_sixteen(sixteens[b]);
      TS_UNROLL for (int i = 0; i < Q; ++i) {
        sums[i][b] = add_product(load_factor(factors + i * stride), numbers, sums[i][b]);
      }
      asm("" : : : "memory");
    }
    return;
  }
  Sum numbers[B];
  TS_UNROLL for (int b = 0; b < B; ++b) numbers[b] = load_sixteen(sixteens[b]);
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    const Sum factor = load_factor(factors + i * stride);
    TS_UNROLL for (int b = 0; b < B; ++b) {
      sums[i][b] = add_product(factor, numbers[b], sums[i][b]);
    }
  }
}

/// scores[query][block * 16 + token] = q[query] . key; sums run over the dimensions in order.
/// `T` is as in the pages, or float; converting is exact, so both agree.
/// With `Fetches`, pages are fetched `ahead`: blocks of the same size that will be read next.
template <int Q, int B, bool Fetches, class T>
void score_tile(const typename Arithmetic<T>::Factor* q, const T* const* blocks,
                const T* const* ahead, int64_t head_dim, float* scores, int64_t score_stride) {
  [[maybe_unused]] const bool is_far = fetches_far();
  typename Arithmetic<T>::Sum sums[Q][B];
  clear<Q, B>(sums);
  for (int64_t d = 0; d < head_dim; d += Arithmetic<T>::kTogether) {
    const T* sixteens[B];
    TS_UNROLL for (int b = 0; b < B; ++b) sixteens[b] = blocks[b] + d * kLanes;
    if constexpr (Fetches) {
      if (d % kSixteensPerLine<T> == 0) {
        TS_UNROLL for (int b = 0; b < B; ++b) fetch(ahead[b] + d * kLanes, is_far);
      }
    }
    add_products<Q, B>(q + d, head_dim, sixteens, sums);
  }
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    TS_UNROLL for (int b = 0; b < B; ++b) {
      store_lanes(scores + i * score_stride + b * kLanes, to_lanes(sums[i][b]));
    }
  }
}

/// Calls `put(query, b, sum of share[query][token] * value[token][b])` for tokens [begin, end), in
/// order. `begin` is even. Whole numbers are multiplied with `scales[query]` at last.
template <int Q, int B, bool Fetches, class T, class Put>
void value_tile(const typename Arithmetic<T>::Factor* shares, int64_t share_stride,
                const float* scales, const T* const* blocks, const T* const* ahead,
                int64_t head_dim, int64_t begin, int64_t end, Put put) {
  [[maybe_unused]] const bool is_far = fetches_far();
  constexpr int kTogether = Arithmetic<T>::kTogether;
  typename Arithmetic<T>::Sum sums[Q][B];
  clear<Q, B>(sums);
  for (int64_t token = begin; token < end; token += kTogether) {
    const T* row = blocks[token / kBlockTokens] + token % kBlockTokens * head_dim;
    const T* sixteens[B];
    TS_UNROLL for (int b = 0; b < B; ++b) sixteens[b] = row + b * kLanes * kTogether;
    if constexpr (Fetches) {
      const T* next = ahead[token / kBlockTokens] + token % kBlockTokens * head_dim;
      TS_UNROLL for (int b = 0; b < kTogether * B; b += kSixteensPerLine<T>) {
        fetch(next + b * kLanes, is_far);
      }
    }
    add_products<Q, B>(shares + token, share_stride, sixteens, sums);
  }
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    TS_UNROLL for (int b = 0; b < B; ++b) {
      Lanes sum = to_lanes(sums[i][b]);
      if constexpr (kTogether > 1) sum = multiply(sum, broadcast(scales[i]));
      put(i, b, sum);
    }
  }
}

/// Calls `body` with the integral constant from 1 to Max that equals `n` (Max if `n` is larger).
template <int Max, class Body>
void with_constant(int64_t n, Body body) {
  if constexpr (Max > 1) {
    if (n < Max) return with_constant<Max - 1>(n, body);
  }
  body(std::integral_constant<int, Max>());
}

}  // namespace ts
