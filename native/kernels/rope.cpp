// Rotary positions (arXiv:2104.09864) over a table of cosines and sines.
#include "kernels/rope.h"

#include <algorithm>
#include <cmath>

#include "kernels/lane_math.h"

namespace ts {

double Temperature::at(int64_t position) const {
  return 1 + scale * std::log1p(static_cast<double>((position + offset) / length));
}

RopeTable::RopeTable(const double* inverse_frequencies, int num_pairs, bool interleaved,
                     double magnitude, const Temperature& temperature, int head_dim)
    : inverse_frequencies_(inverse_frequencies, inverse_frequencies + num_pairs),
      interleaved_(interleaved),
      magnitude_(magnitude),
      temperature_(temperature),
      head_dim_(head_dim),
      width_(round_up(interleaved ? 2 * num_pairs : num_pairs, kLanes)) {}

void RopeTable::cover(int64_t num_positions) {
  if (num_positions <= num_positions_) return;
  const int64_t end = round_up(std::max(num_positions, num_positions_ + num_positions_ / 4), 64);
  rows_.resize(static_cast<size_t>(end * 2 * width_));
  for (int64_t position = num_positions_; position < end; ++position) {
    float* cosines = rows_.data() + position * 2 * width_;
    float* sines = cosines + width_;
    const double factor = magnitude_ * temperature_.at(position);
    // Lanes beyond the pairs turn by nothing, so that a whole vector can be rotated.
    std::fill(cosines, sines, 1.0F);
    std::fill(sines, sines + width_, 0.0F);
    for (size_t i = 0; i < inverse_frequencies_.size(); ++i) {
      const double angle = static_cast<double>(position) * inverse_frequencies_[i];
      const auto cosine = static_cast<float>(std::cos(angle) * factor);
      const auto sine = static_cast<float>(std::sin(angle) * factor);
      if (interleaved_) {
        cosines[2 * i] = cosines[2 * i + 1] = cosine;
        sines[2 * i] = -sine;
        sines[2 * i + 1] = sine;
      } else {
        cosines[i] = cosine;
        sines[i] = sine;
      }
    }
  }
  num_positions_ = end;
}

void RopeTable::rotate(int64_t position, float* row, int64_t begin, int64_t end) const {
  const float* cosines = rows_.data() + position * 2 * width_;
  for (int64_t i = begin; i < end; i += unit()) {
    if (interleaved_) {
      rotate_neighbours(cosines, row + i, i % head_dim_);
    } else {
      rotate_halves(cosines, row + i);
    }
  }
}

void RopeTable::rotate_neighbours(const float* cosines, float* values, int64_t offset) const {
  if (offset >= width_) return;
  const Lanes x = load_lanes(values);
  const Lanes turned = multiply(swap_lanes<1>(x), load_lanes(cosines + width_ + offset));
  store_lanes(values, multiply_add(x, load_lanes(cosines + offset), turned));
}

void RopeTable::rotate_halves(const float* cosines, float* head) const {
  const auto num_pairs = static_cast<int64_t>(inverse_frequencies_.size());
  for (int64_t i = 0; i < num_pairs; i += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, num_pairs - i));
    const Lanes low = load_first(head + i, count);
    const Lanes high = load_first(head + num_pairs + i, count);
    const Lanes cosine = load_lanes(cosines + i);
    const Lanes sine = load_lanes(cosines + width_ + i);
    const Lanes minus_high = subtract(zero_lanes(), high);
    store_first(head + i, multiply_add(low, cosine, multiply(minus_high, sine)), count);
    store_first(head + num_pairs + i, multiply_add(high, cosine, multiply(low, sine)), count);
  }
}

}  // namespace ts
