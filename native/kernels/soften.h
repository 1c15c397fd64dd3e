// Softmax within a piece of 64 keys: scores become shares, as numbers or as codes; and the merging
// of what pieces bring.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/codes.h"
#include "kernels/kv.h"
#include "kernels/lane_math.h"

namespace ts {

constexpr int64_t kBlocksPerPiece = kPieceTokens / kBlockTokens;
constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kLog2E = 1.44269504088896341F;

/// What the numbers of a piece must be multiplied with, for each block and token.
struct PieceScales {
  bool are_there;
  float keys[kPieceTokens];
  float values[kPieceTokens];
};

/// Keys [begin, end) of a piece, or blocks of 16 of them.
struct Range {
  int64_t begin;
  int64_t end;
};

inline int first_lanes(int64_t count) {
  return static_cast<int>(std::clamp<int64_t>(count, 0, kLanes));
}

/// Turns a row of scores into shares 2^(score - peak), which are summed; keys that are not seen
/// get 0, which changes no sum. The shares are multiplied with the scales of their values. Whole
/// numbers of the query are `query_scale` each.
inline void soften(float soft_cap, const PieceScales& scales, float query_scale, const Range& seen,
                   const Range& blocks, float* scores, float* peak, float* sum) {
  const Lanes unseen = broadcast(kMinusInfinity);
  Lanes largest = unseen;
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    Lanes score = load_lanes(scores + b * kLanes);
    if (scales.are_there) {
      const Lanes key_scales = load_lanes(scales.keys + b * kLanes);
      score = multiply(score, multiply(key_scales, broadcast(query_scale)));
    }
    if (soft_cap != 0) score = multiply(tanh(score), broadcast(soft_cap * kLog2E));
    score = choose_first(first_lanes(seen.end - b * kLanes), score, unseen);
    score = choose_first(first_lanes(seen.begin - b * kLanes), unseen, score);
    store_lanes(scores + b * kLanes, score);
    largest = larger(largest, score);
  }
  *peak = largest_across(largest);
  Lanes total = zero_lanes();
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    Lanes share = exp2(subtract(load_lanes(scores + b * kLanes), broadcast(*peak)));
    total = add(total, share);
    if (scales.are_there) share = multiply(share, load_lanes(scales.values + b * kLanes));
    share = choose_first(first_lanes(seen.end - b * kLanes), share, zero_lanes());
    store_lanes(scores + b * kLanes, share);
  }
  *sum = sum_across(total);
}

/// Turns shares of some blocks into whole numbers; returns their scale.
inline float make_codes(const Range& blocks, const float* shares, int16_t* codes) {
  Lanes largest = zero_lanes();
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    largest = larger(load_lanes(shares + b * kLanes), largest);
  }
  const ShareScale scale(largest_across(largest));
  for (int64_t b = blocks.begin; b < blocks.end; ++b) {
    const Lanes share = load_lanes(shares + b * kLanes);
    store_codes(codes + b * kLanes, multiply(share, broadcast(scale.factor)));
  }
  return scale.scale;
}

/// Both at once for some queries that see every key of the piece, where no cap bends the scores.
/// Each step is done for all of them: what crosses the lanes is late, and others go on meanwhile.
template <int Q>
void soften_whole_codes(const PieceScales& scales, const float* query_scales, float* scores,
                        float* peaks, float* sums, int16_t* codes, float* share_scales) {
  float most[Q];
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    float* row = scores + i * kPieceTokens;
    Lanes largest = broadcast(kMinusInfinity);
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      const Lanes score = load_lanes(row + b * kLanes);
      const Lanes scaled = multiply(score, load_lanes(scales.keys + b * kLanes));
      store_lanes(row + b * kLanes, scaled);
      largest = larger(largest, scaled);
    }
    peaks[i] = largest_across(largest) * query_scales[i];
  }
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    float* row = scores + i * kPieceTokens;
    const Lanes scale = broadcast(query_scales[i]);
    const Lanes minus_peak = broadcast(-peaks[i]);
    Lanes total = zero_lanes();
    Lanes largest = zero_lanes();
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      const Lanes part = exp2(multiply_add(load_lanes(row + b * kLanes), scale, minus_peak));
      total = add(total, part);
      const Lanes weighted = multiply(part, load_lanes(scales.values + b * kLanes));
      store_lanes(row + b * kLanes, weighted);
      largest = larger(weighted, largest);
    }
    sums[i] = sum_across(total);
    most[i] = largest_across(largest);
  }
  TS_UNROLL for (int i = 0; i < Q; ++i) {
    const ShareScale scale(most[i]);
    share_scales[i] = scale.scale;
    TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
      const int64_t place = i * kPieceTokens + b * kLanes;
      store_codes(codes + place, multiply(load_lanes(scores + place), broadcast(scale.factor)));
    }
  }
}

/// The same where every key of the piece is seen and its scores are what they were computed as.
inline void soften_whole(float* scores, float* peak, float* sum) {
  Lanes values[kBlocksPerPiece];
  TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) values[b] = load_lanes(scores + b * kLanes);
  Lanes largest = broadcast(kMinusInfinity);
  TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) largest = larger(largest, values[b]);
  *peak = largest_across(largest);
  const Lanes most = broadcast(*peak);
  Lanes total = zero_lanes();
  TS_UNROLL for (int b = 0; b < kBlocksPerPiece; ++b) {
    const Lanes share = exp2(subtract(values[b], most));
    total = add(total, share);
    store_lanes(scores + b * kLanes, share);
  }
  *sum = sum_across(total);
}

/// How a share of some queries is merged with what was merged before.
struct MergeFactors {
  float keep[kLanes];  // of each query: what was merged before is multiplied with it
  float take[kLanes];  // the share is
};

/// Merges the peaks and sums of `count` queries; a peak of minus infinity says that nothing was
/// merged before.
inline void merge_sums(const float* share_peak, const float* share_sum, int64_t count, float* peak,
                       float* sum, MergeFactors* factors) {
  const int n = static_cast<int>(count);
  const Lanes before = load_first(peak, n);
  const Lanes piece = load_first(share_peak, n);
  const Lanes both = larger(before, piece);
  const Lanes keep = exp2(subtract(before, both));
  const Lanes take = exp2(subtract(piece, both));
  store_lanes(factors->keep, keep);
  store_lanes(factors->take, take);
  const Lanes taken = multiply(load_first(share_sum, n), take);
  store_first(sum, multiply_add(load_first(sum, n), keep, taken), n);
  store_first(peak, both, n);
}

/// Merges sixteen values of query `i`.
inline void merge_values(const MergeFactors& factors, int64_t i, Lanes share, float* merged) {
  const Lanes added = multiply(share, broadcast(factors.take[i]));
  store_lanes(merged, multiply_add(load_lanes(merged), broadcast(factors.keep[i]), added));
}

/// Merges a share with what was merged before.
inline void merge(const float* share_peak, const float* share_sum, const float* share_out,
                  int64_t count, int64_t head_dim, float* peak, float* sum, float* out) {
  MergeFactors factors;
  merge_sums(share_peak, share_sum, count, peak, sum, &factors);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = i * head_dim; d < (i + 1) * head_dim; d += kLanes) {
      merge_values(factors, i, load_lanes(share_out + d), out + d);
    }
  }
}

}  // namespace ts
