// Kernels on single rows of values; a row's sums have one fixed order.
#include "kernels/rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/activation.h"

namespace ts {

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

namespace {

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

void gate_activation(Activation activation, const float* gate, const float* up, int64_t width,
                     float* out) {
  for_lanes(width, [&](int64_t i, int count) {
    const Lanes activated = activate(activation, load_some(gate + i, count));
    const Lanes factors = gated_by(activation, load_some(up + i, count));
    store_some(out + i, multiply(activated, factors), count);
  });
}

void add_rows(const float* a, const float* b, int64_t width, float* out) {
  for_lanes(width, [&](int64_t i, int count) {
    store_some(out + i, add(load_some(a + i, count), load_some(b + i, count)), count);
  });
}

void scale_row(const float* x, float factor, int64_t width, float* out) {
  const Lanes factors = broadcast(factor);
  for_lanes(width, [&](int64_t i, int count) {
    store_some(out + i, multiply(load_some(x + i, count), factors), count);
  });
}

void gate_row(const float* x, const float* gate, int64_t width, float* out) {
  const Lanes factor = sigmoid(broadcast(gate[0]));
  for_lanes(width, [&](int64_t i, int count) {
    store_some(out + i, multiply(load_some(x + i, count), factor), count);
  });
}

void gather_row(const float* x, const int32_t* order, int64_t width, float* out) {
  for (int64_t i = 0; i < width; ++i) out[i] = x[order[i]];
}

void soft_cap_row(float* x, float cap, int64_t width) {
  const Lanes caps = broadcast(cap);
  for_lanes(width, [&](int64_t i, int count) {
    store_some(x + i, multiply(caps, tanh(divide(load_some(x + i, count), caps))), count);
  });
}

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

float key_of(float score) { return score == score ? score : kLowest; }

/// The places of the largest scores, largest first, of equal ones the first.
void choose_largest(const float* scores, int64_t count, int64_t num_used, int32_t* chosen) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t rank = std::min(i, num_used);
    for (; rank > 0 && key_of(scores[i]) > key_of(scores[chosen[rank - 1]]); --rank) {
      if (rank < num_used) chosen[rank] = chosen[rank - 1];
    }
    if (rank < num_used) chosen[rank] = static_cast<int32_t>(i);
  }
}

/// out = 1 / (1 + e^-x), or the softmax of x.
void score_row(const float* x, int64_t count, bool is_sigmoid, float* out) {
  const Lanes log2_e = broadcast(1.44269504088896341F);
  const Lanes one = broadcast(1.0F);
  if (is_sigmoid) {
    for_lanes(count, [&](int64_t i, int n) {
      const Lanes power = exp2(multiply(subtract(zero_lanes(), load_some(x + i, n)), log2_e));
      store_some(out + i, divide(one, add(one, power)), n);
    });
    return;
  }
  float peak = kLowest;
  for (int64_t i = 0; i < count; ++i) peak = std::max(peak, key_of(x[i]));
  Lanes sums = zero_lanes();
  for_lanes(count, [&](int64_t i, int n) {
    const Lanes near =
        subtract(choose_first(n, load_some(x + i, n), broadcast(kLowest)), broadcast(peak));
    const Lanes power = exp2(multiply(near, log2_e));
    sums = add(sums, power);
    store_some(out + i, power, n);
  });
  const Lanes total = broadcast(sum_across(sums));
  for_lanes(count, [&](int64_t i, int n) {
    store_some(out + i, divide(load_some(out + i, n), total), n);
  });
}

}  // namespace

void route_row(const float* x, const Routing& routing, int32_t* chosen, float* scratch,
               float* out) {
  const int64_t count = routing.num_experts;
  const int64_t size = count / routing.num_groups;
  float* scores = scratch;
  float* wanted = scratch + count;
  float* sums = scratch + 2 * count;
  score_row(x, count, routing.is_sigmoid, scores);
  std::copy_n(scores, count, wanted);
  if (routing.bias != nullptr) add_rows(wanted, routing.bias, count, wanted);
  if (routing.num_used_groups < routing.num_groups) {
    for (int64_t group = 0; group < routing.num_groups; ++group) {
      const float* own = wanted + group * size;
      choose_largest(own, size, routing.group_best, chosen);
      sums[group] = 0;
      for (int64_t i = 0; i < routing.group_best; ++i) sums[group] += own[chosen[i]];
    }
    choose_largest(sums, routing.num_groups, routing.num_used_groups, chosen);
    for (int64_t group = 0; group < routing.num_groups; ++group) {
      const int32_t* end = chosen + routing.num_used_groups;
      if (std::find(static_cast<const int32_t*>(chosen), end, group) != end) continue;
      std::fill_n(wanted + group * size, size, kLowest);
    }
  }
  choose_largest(wanted, count, routing.num_used, chosen);
  float total = 1;
  if (routing.normalize) {
    total = 1e-20F;
    for (int64_t i = 0; i < routing.num_used; ++i) total += scores[chosen[i]];
  }
  std::fill_n(out, count, -1.0F);
  for (int64_t i = 0; i < routing.num_used; ++i) {
    const float factor = routing.factors == nullptr ? 1.0F : routing.factors[chosen[i]];
    out[chosen[i]] = scores[chosen[i]] / total * routing.scale * factor;
  }
}

void choose_experts(const float* scores, int64_t num_experts, int64_t num_used, Shares kind,
                    int32_t* chosen, float* shares) {
  choose_largest(scores, num_experts, num_used, chosen);
  for (int64_t i = 0; i < num_used; ++i) shares[i] = scores[chosen[i]];
  if (kind == Shares::Given) return;
  if (kind == Shares::OfInputs) {
    for_lanes(num_used, [&](int64_t i, int n) {
      store_some(shares + i, sigmoid(load_some(shares + i, n)), n);
    });
    return;
  }
  const Lanes peak = broadcast(key_of(scores[chosen[0]]));
  const Lanes log2_e = broadcast(1.44269504088896341F);
  const auto weigh = [&](Lanes x) { return exp2(multiply(subtract(x, peak), log2_e)); };
  Lanes sums = zero_lanes();
  const auto add_up = [&](const float* x, int64_t count) {
    for_lanes(count, [&](int64_t i, int n) {
      sums = add(sums, weigh(choose_first(n, load_some(x + i, n), broadcast(kLowest))));
    });
  };
  if (kind == Shares::Chosen) {
    add_up(shares, num_used);
  } else {
    add_up(scores, num_experts);
  }
  const Lanes total = broadcast(sum_across(sums));
  for_lanes(num_used, [&](int64_t i, int n) {
    store_some(shares + i, divide(weigh(load_some(shares + i, n)), total), n);
  });
}

void weighted_sum(const float* x, int64_t stride, const int32_t* rows, const float* factors,
                  int64_t count, int64_t width, bool accumulate, float* out) {
  for_lanes(width, [&](int64_t i, int n) {
    Lanes sum = zero_lanes();
    for (int64_t k = 0; k < count; ++k) {
      sum = multiply_add(broadcast(factors[k]), load_some(x + rows[k] * stride + i, n), sum);
    }
    store_some(out + i, accumulate ? add(load_some(out + i, n), sum) : sum, n);
  });
}

}  // namespace ts
