// The sampler's passes over a whole row: block peaks, weights, and the weight above a threshold.
//
// A weight is exp((logit - top) / temperature) * 2^40 rounded to an integer, computed in float32
// by a fixed sequence of IEEE operations and held as float32 (exact: 24 bits, or below 2^24).
// Sums of weights are integers, so they do not depend on order, lanes or threads; that is what
// makes every instruction set, and the NumPy twin, draw the same token.
#pragma once

#include <cstdint>

namespace ts::sampling {

constexpr int64_t kBlock = 64;
constexpr double kUnit = 1099511627776.0;  // 2^40, the weight of the likeliest token

inline int64_t num_blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// Write the largest logit of each block (NaN passed over) and return the first block that holds
// the largest of all, or -1 if nothing is above minus infinity.
int64_t find_peaks(const float* logits, int64_t count, float* peaks);

// Write the logits of tokens whose bit is set, and minus infinity for the others.
void apply_mask(const float* logits, const uint32_t* mask, int64_t count, float* out);

// The factor that turns a difference of logits into a power of 2.
float scale_of(double temperature);

// Write weights and their sum per block; weights below `least` count as 0, and so do NaN and
// minus infinity. `top` is finite. Returns the sum of all.
uint64_t weigh(const float* logits, int64_t count, float top, float scale, float least,
               float* weights, uint64_t* masses);

// Sum the weights whose logit is at least `threshold`, per block if `masses` is given.
uint64_t mass_from(const float* logits, const float* weights, const float* peaks, int64_t count,
                   float threshold, uint64_t* masses);

}  // namespace ts::sampling
