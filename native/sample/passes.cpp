// Whole-row passes, written in the compiler's own vectors so that every level shares one source.
//
// The build must not fuse multiplications and additions (-ffp-contract=off): a fused pair rounds
// once where the definition rounds twice. tests/native/test_sample.py compares weights exactly.
#include "sample/passes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#ifdef __FAST_MATH__
#error "The sampler's weights are defined by IEEE arithmetic: compile without -ffast-math."
#endif
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors never cross a library's border
#endif

namespace ts::sampling {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// One register of this level; results do not depend on it.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline Floats larger(const Floats& a, const Floats& b) {
  return a > b ? a : b;
}  // b where a is NaN

float largest_lane(const Floats& values) {
  typedef float Quad __attribute__((vector_size(16)));
  Quad quads[kLanes / 4];
  std::memcpy(quads, &values, sizeof(values));
  Quad most = quads[0];
  for (int i = 1; i < kLanes / 4; ++i) most = most > quads[i] ? most : quads[i];
  const float left = most[0] > most[1] ? most[0] : most[1];
  const float right = most[2] > most[3] ? most[2] : most[3];
  return left > right ? left : right;
}

float block_peak(const float* logits) {
  Floats peak = larger(load(logits), Floats{} - kInfinity);
  for (int64_t i = kLanes; i < kBlock; i += kLanes) peak = larger(load(logits + i), peak);
  return largest_lane(peak);
}

// 2^power * 2^40 as an integer, for power <= 0. Horner's rule for (2^f - 1) / f on [-1/2, 1/2];
// relative error below 1e-7, and 2^0 is exactly 1.
inline Floats weight_of(const Floats& exact_power) {
  const Floats magic = Floats{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats low = Floats{} - 64.0f;
  const Floats power = exact_power > low ? exact_power : low;  // low, too, where it is NaN
  const Floats shifted = power + magic;
  const Floats f = power - (shifted - magic);
  Floats p = Floats{} + 0x1.444004p-13f;
  p = p * f + 0x1.5f0896p-10f;
  p = p * f + 0x1.3b2a1cp-7f;
  p = p * f + 0x1.c6af6cp-5f;
  p = p * f + 0x1.ebfbe0p-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.0f;
  const Ints exponent = (Ints)shifted - (0x4B400000 - 40);
  const Floats weight = (Floats)((Ints)p + (exponent << 23));
  const Floats whole = Floats{} + 8388608.0f;  // from 2^23 on a float is an integer
  return weight < whole ? (weight + whole) - whole : weight;
}

// Sums of at most 64 integers up to 2^40: exact in double, in any order.
uint64_t block_mass(const float* weights) {
  double sums[8] = {};
  for (int64_t i = 0; i < kBlock; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += weights[i + lane];
  double sum = 0;
  for (double lane : sums) sum += lane;
  return static_cast<uint64_t>(sum);
}

uint64_t block_mass_from(const float* logits, const float* weights, float threshold) {
  float kept[kBlock];
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Ints above = load(logits + i) >= Floats{} + threshold;
    const Floats weight = (Floats)((Ints)load(weights + i) & above);
    std::memcpy(kept + i, &weight, sizeof(weight));
  }
  return block_mass(kept);
}

void weigh_block(const float* logits, float top, float scale, float least, float* weights) {
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Floats weight = weight_of((load(logits + i) - top) * scale);
    const Ints enough = weight >= Floats{} + least;
    const Floats kept = (Floats)((Ints)weight & enough);
    std::memcpy(weights + i, &kept, sizeof(kept));
  }
}

// Call `pass(block, logits)` for every block; the last one is filled up with minus infinity.
template <typename Pass>
void for_blocks(const float* logits, int64_t count, Pass pass) {
  const int64_t whole = count / kBlock;
  for (int64_t block = 0; block < whole; ++block) pass(block, logits + block * kBlock);
  if (whole * kBlock == count) return;
  float rest[kBlock];
  for (float& value : rest) value = -kInfinity;
  std::memcpy(rest, logits + whole * kBlock, sizeof(float) * (count - whole * kBlock));
  pass(whole, rest);
}

}  // namespace

int64_t find_peaks(const float* logits, int64_t count, float* peaks) {
  float top = -kInfinity;
  int64_t first = -1;
  for_blocks(logits, count, [&](int64_t block, const float* values) {
    const float peak = block_peak(values);
    peaks[block] = peak;
    if (peak > top) {
      top = peak;
      first = block;
    }
  });
  return first;
}

void apply_mask(const float* logits, const uint32_t* mask, int64_t count, float* out) {
  const float nothing = -kInfinity;
  for (int64_t first = 0; first < count; first += 32) {
    const int64_t end = std::min<int64_t>(32, count - first);
    const uint32_t word = mask[first / 32];
    float* target = out + first;
    if (word == 0) {  // most words, where little is allowed
      std::fill_n(target, end, nothing);
    } else if (word == ~uint32_t{0}) {
      std::memcpy(target, logits + first, sizeof(float) * end);
    } else {
      for (int64_t i = 0; i < end; ++i) target[i] = word >> i & 1 ? logits[first + i] : nothing;
    }
  }
}

float scale_of(double temperature) {
  const double scale = 1.4426950408889634 / temperature;
  return static_cast<float>(scale < 1e30 ? scale : 1e30);
}

uint64_t weigh(const float* logits, int64_t count, float top, float scale, float least,
               float* weights, uint64_t* masses) {
  uint64_t total = 0;
  for_blocks(logits, count, [&](int64_t block, const float* values) {
    float* target = weights + block * kBlock;
    weigh_block(values, top, scale, least, target);
    total += masses[block] = block_mass(target);
  });
  return total;
}

uint64_t mass_from(const float* logits, const float* weights, const float* peaks, int64_t count,
                   float threshold, uint64_t* masses) {
  uint64_t total = 0;
  for_blocks(logits, count, [&](int64_t block, const float* values) {
    uint64_t mass = 0;
    if (peaks[block] >= threshold)
      mass = block_mass_from(values, weights + block * kBlock, threshold);
    if (masses) masses[block] = mass;
    total += mass;
  });
  return total;
}

}  // namespace ts::sampling
