// Spreads the values of a head over each other, so that none sticks out.
#pragma once

#include <cstdint>

namespace ts {

constexpr int64_t kMostHeadDim = 576;

/// How many neighbours are spread over each other: the largest power of two that divides
/// `head_dim`, a multiple of 16.
constexpr int64_t spread_width(int64_t head_dim) { return head_dim & -head_dim; }

/// Multiplies each `spread_width` neighbours with the Hadamard matrix of ones and minus ones, in
/// place. The product of two heads, both spread, is `spread_width` times what it was.
void spread(float* head, int64_t head_dim);

}  // namespace ts
