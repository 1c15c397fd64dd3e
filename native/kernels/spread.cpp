// The fast Walsh-Hadamard transform: sums and differences, in a fixed order.
#include "kernels/spread.h"

#include "kernels/lane_math.h"

namespace ts {

namespace {

/// In each pair of lanes that are `Distance` apart: their sum, then the first minus the second.
template <int Distance>
Lanes mix_lanes(Lanes a) {
  float signs[kLanes];
  for (int i = 0; i < kLanes; ++i) signs[i] = (i & Distance) == 0 ? 1.0F : -1.0F;
  return multiply_add(a, load_lanes(signs), swap_lanes<Distance>(a));
}

}  // namespace

void spread(float* head, int64_t head_dim) {
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Lanes near = mix_lanes<2>(mix_lanes<1>(load_lanes(head + i)));
    store_lanes(head + i, mix_lanes<8>(mix_lanes<4>(near)));
  }
  const int64_t width = spread_width(head_dim);
  for (int64_t distance = kLanes; distance < width; distance *= 2) {
    for (int64_t pair = 0; pair < head_dim; pair += 2 * distance) {
      for (int64_t i = pair; i < pair + distance; i += kLanes) {
        const Lanes a = load_lanes(head + i);
        const Lanes b = load_lanes(head + i + distance);
        store_lanes(head + i, add(a, b));
        store_lanes(head + i + distance, subtract(a, b));
      }
    }
  }
}

}  // namespace ts
