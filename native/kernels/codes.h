// Numbers as codes, whole numbers of two bytes, with a scale: heads as int16 pages store them,
// the queries and the shares that meet these.
#pragma once

#include <cstdint>

#include "kernels/kv.h"
#include "kernels/lane_math.h"
#include "kernels/pairs.h"
#include "linear/number.h"

namespace ts {

/// The largest codes: sums of a head's or a piece's products stay below 2^31.
constexpr int64_t kMostSum = INT32_MAX;
constexpr int64_t kMostStored = 4095;
constexpr int64_t kMostShare = kMostSum / (kPieceTokens * kMostStored);
constexpr int64_t most_query(int64_t head_dim) {
  const int64_t most = kMostSum / (head_dim * kMostStored);
  return most < kMostShare ? most : kMostShare;
}

constexpr float kLeastLargest = 1e-30F;      // numbers below are zeros: they would have no scale
constexpr float kLargestBFloat16 = 0x1p64F;  // could be 2^127, but sums of products overflow

inline Lanes saturate(Lanes x, float largest) {
  return larger(smaller(x, broadcast(largest)), broadcast(-largest));
}

/// Turns a head into codes, and returns their scale in bfloat16, rounded up.
inline uint16_t head_codes(const float* source, int64_t head_dim, int16_t* codes) {
  constexpr auto kMost = static_cast<float>(kMostStored);
  Lanes most = zero_lanes();
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Lanes values = saturate(load_lanes(source + i), kLargestBFloat16);
    most = larger(most, larger(values, subtract(zero_lanes(), values)));
  }
  const float largest = largest_across(most);
  const bool is_zero = largest < kLeastLargest;
  const uint32_t bits = is_zero ? 0 : bits_from_float(largest / kMost) + 0xffff;
  const auto scale = static_cast<uint16_t>(bits >> 16);
  const Lanes factor = broadcast(is_zero ? 0 : 1.0F / float_from_bfloat16(scale));
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Lanes values = saturate(load_lanes(source + i), kLargestBFloat16);
    store_codes(codes + i, saturate(multiply(values, factor), kMost));
  }
  return scale;
}

/// Turns a query into codes, and returns their scale: NaN where a number is infinite or NaN.
inline float query_codes(const float* query, int64_t head_dim, int16_t* codes) {
  const auto most = static_cast<float>(most_query(head_dim));
  Lanes largest = zero_lanes();
  Lanes nothing = zero_lanes();  // NaN where a number is infinite or NaN
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Lanes x = load_lanes(query + d);
    largest = larger(largest, larger(x, subtract(zero_lanes(), x)));
    nothing = add(nothing, subtract(x, x));
  }
  const float peak = largest_across(largest);
  const float rest = sum_across(nothing);
  const bool is_zero = !(peak > kLeastLargest) || rest != 0;
  const Lanes factor = broadcast(is_zero ? 0 : most / peak);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const Lanes code = is_zero ? zero_lanes() : multiply(load_lanes(query + d), factor);
    store_codes(codes + d, code);
  }
  return is_zero ? rest : peak / most;
}

/// How shares become whole numbers.
struct ShareScale {
  float factor;  // that makes them such numbers
  float scale;   // that makes them shares again

  explicit ShareScale(float largest) {
    constexpr auto kMost = static_cast<float>(kMostShare);
    const bool is_zero = !(largest > kLeastLargest);
    factor = is_zero ? 0 : kMost / largest;
    scale = is_zero ? 0 : largest / kMost;
  }
};

}  // namespace ts
