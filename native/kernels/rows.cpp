// Kernels on single rows of values; a row's sums have one fixed order.
#include "kernels/rows.h"

#include <cmath>

#include "kernels/lane_math.h"

namespace ts {

namespace {

float sum_of_squares(const float* x, int64_t width) {
  Lanes sums[4] = {zero_lanes(), zero_lanes(), zero_lanes(), zero_lanes()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) {
      const Lanes values = load_lanes(x + i + k * kLanes);
      sums[k] = multiply_add(values, values, sums[k]);
    }
  }
  for (; i < width; i += kLanes) {
    const int count = static_cast<int>(width - i < kLanes ? width - i : kLanes);
    const Lanes values = load_first(x + i, count);
    sums[0] = multiply_add(values, values, sums[0]);
  }
  return sum_across(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

/// Calls `body(offset, count)` for each run of 16 values, the last one perhaps shorter.
template <class Body>
void for_lanes(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

Lanes load_some(const float* p, int count) {
  return count == kLanes ? load_lanes(p) : load_first(p, count);
}

void store_some(float* p, Lanes a, int count) {
  count == kLanes ? store_lanes(p, a) : store_first(p, a, count);
}

}  // namespace

void rms_norm(const float* x, const float* weight, int64_t width, float epsilon, float* out) {
  const float mean = sum_of_squares(x, width) / static_cast<float>(width);
  const Lanes factor = broadcast(1.0F / std::sqrt(mean + epsilon));
  for_lanes(width, [&](int64_t i, int count) {
    const Lanes scaled = multiply(load_some(x + i, count), factor);
    store_some(out + i, multiply(scaled, load_some(weight + i, count)), count);
  });
}

void gate_activation(const float* gate, const float* up, int64_t width, float* out) {
  const Lanes minus_log2_e = broadcast(-1.44269504088896341F);
  const Lanes one = broadcast(1.0F);
  for_lanes(width, [&](int64_t i, int count) {
    const Lanes x = load_some(gate + i, count);
    const Lanes silu = divide(x, add(one, exp2(multiply(x, minus_log2_e))));
    store_some(out + i, multiply(silu, load_some(up + i, count)), count);
  });
}

void add_rows(const float* a, const float* b, int64_t width, float* out) {
  for_lanes(width, [&](int64_t i, int count) {
    store_some(out + i, add(load_some(a + i, count), load_some(b + i, count)), count);
  });
}

}  // namespace ts
