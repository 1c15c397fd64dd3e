// Fits scales: least squares over a few trial codings, as src/twostroke/model/quant/fit.py does.
#include "compress/grid.h"

#include <algorithm>

namespace ts::rounding {

namespace {

constexpr float kTrialStep = 0.04f;  // of a scale
constexpr Row kZero{};

}  // namespace

Grid::Grid(const GridRecord& record) : record_(record) {
  if (!record_.table) return;
  for (int i = 0; i < 15; ++i) {
    middles_[i] = (record_.table[i] + record_.table[i + 1]) / 2;
    steps_[i] = record_.table[i + 1] - record_.table[i];
  }
  for (int i = 0; i < 16; ++i)
    places_[static_cast<int>(record_.table[i]) + 128] = static_cast<int8_t>(i);
}

void Grid::nearest(const Row& value, Row* level) const {
  if (!record_.table) {
    const float low = record_.low, high = record_.high;
    each_lane([&](int o) { level->v[o] = whole(clipped(value.v[o], low, high)); });
    return;
  }
  Row sum;
  const float first = record_.table[0];
  each_lane([&](int o) { sum.v[o] = first; });
  for (int i = 0; i < 15; ++i) {
    const float middle = middles_[i], step = steps_[i];
    each_lane([&](int o) { sum.v[o] += value.v[o] >= middle ? step : 0.0f; });
  }
  *level = sum;
}

Line Grid::fitted(const Row* values, const float* weights) const {
  return has_smallest() ? fitted_line(values, weights) : fitted_around_zero(values, weights);
}

Line Grid::fitted_around_zero(const Row* values, const float* weights) const {
  Row extreme{}, inverse, best_gain{}, level;
  Line best{};
  for (int i = 0; i < record_.group; ++i) {
    each_lane([&](int o) {
      const bool is_farther = std::fabs(values[i].v[o]) > std::fabs(extreme.v[o]);
      extreme.v[o] = is_farther ? values[i].v[o] : extreme.v[o];
    });
  }
  each_lane([&](int o) { inverse.v[o] = inverse_or_zero(extreme.v[o]); });
  for (int trial = 0; trial < record_.num_peaks; ++trial) {
    Row along{}, size{}, factor, scaled;
    const float peak = record_.peaks[trial];
    each_lane([&](int o) { factor.v[o] = peak * inverse.v[o]; });
    for (int i = 0; i < record_.group; ++i) {
      const float weight = weights[i];
      each_lane([&](int o) { scaled.v[o] = values[i].v[o] * factor.v[o]; });
      nearest(scaled, &level);
      each_lane([&](int o) {
        const float weighed = weight * level.v[o];
        along.v[o] += weighed * values[i].v[o];
        size.v[o] += weighed * level.v[o];
      });
    }
    each_lane([&](int o) {
      const float scale = along.v[o] * inverse_or_zero(size.v[o]);
      const float gain = along.v[o] * scale;
      const bool is_better = gain > best_gain.v[o];
      best_gain.v[o] = is_better ? gain : best_gain.v[o];
      best.scale.v[o] = is_better ? scale : best.scale.v[o];
    });
  }
  return best;
}

/// Tries spans of the levels about that from the smallest to the largest value.
Line Grid::fitted_line(const Row* values, const float* weights) const {
  Line span{kZero, values[0]};
  Row top = values[0], center{}, best_error;
  float total = 0;
  for (int i = 0; i < record_.group; ++i) {
    total += weights[i];
    each_lane([&](int o) {
      const float value = values[i].v[o];
      span.smallest.v[o] = value < span.smallest.v[o] ? value : span.smallest.v[o];
      top.v[o] = value > top.v[o] ? value : top.v[o];
    });
  }
  float shares[kMaxGroup];
  for (int i = 0; i < record_.group; ++i) {
    shares[i] = weights[i] / total;
    each_lane([&](int o) { center.v[o] += shares[i] * values[i].v[o]; });
  }
  Line best;
  each_lane([&](int o) {
    float& low = span.smallest.v[o];
    // Shares of a bottom are never above zero, and zero points are among the levels.
    if (has_shares() || record_.whole_zeros) low = low > 0 ? 0 : low;
    if (record_.whole_zeros) top.v[o] = top.v[o] < 0 ? 0 : top.v[o];
    span.scale.v[o] = top.v[o] - low;
    best.scale.v[o] = 0;
    best.smallest.v[o] = low;
    best_error.v[o] = HUGE_VALF;
  });
  for (int i = 0; i < kStretches; ++i) {
    const float stretch = kLeastStretch + i * (kMostStretch - kLeastStretch) / (kStretches - 1);
    try_stretch(values, shares, span, center, stretch, &best, &best_error);
  }
  return best;
}

void Grid::try_stretch(const Row* values, const float* shares, const Line& span, const Row& center,
                       float stretch, Line* best, Row* best_error) const {
  Row codes[kMaxGroup], inverse, middle, mean{}, along{}, spread{}, error{};
  Line line;
  const float high = record_.high;
  each_lane([&](int o) {
    inverse.v[o] = inverse_or_zero(span.scale.v[o] * stretch / high);
    middle.v[o] = span.smallest.v[o] + span.scale.v[o] / 2;
  });
  for (int i = 0; i < record_.group; ++i) {
    each_lane([&](int o) {
      const float code = (values[i].v[o] - middle.v[o]) * inverse.v[o] + high / 2;
      codes[i].v[o] = whole(clipped(code, 0, high));
      mean.v[o] += shares[i] * codes[i].v[o];
    });
  }
  for (int i = 0; i < record_.group; ++i) {
    each_lane([&](int o) {
      const float code = codes[i].v[o] - mean.v[o];
      along.v[o] += shares[i] * code * (values[i].v[o] - center.v[o]);
      spread.v[o] += shares[i] * code * code;
    });
  }
  const bool from_zero = has_shares() || record_.whole_zeros;
  const bool to_zero = record_.whole_zeros;
  each_lane([&](int o) {
    line.scale.v[o] = spread.v[o] > 1e-12f ? along.v[o] / spread.v[o] : 0;
    line.smallest.v[o] = center.v[o] - line.scale.v[o] * mean.v[o];
    // Without a smallest value the line goes through zero.
    const float squares = spread.v[o] + mean.v[o] * mean.v[o];
    const float through_zero =
        (along.v[o] + mean.v[o] * center.v[o]) / (squares > 1e-12f ? squares : 1.0f);
    const bool is_above = from_zero && line.smallest.v[o] > 0;
    line.scale.v[o] = is_above ? through_zero : line.scale.v[o];
    line.smallest.v[o] = is_above ? 0 : line.smallest.v[o];
    // The same where the highest level is zero, counted from it.
    const float below = mean.v[o] - high;
    const float squares_below = spread.v[o] + below * below;
    const float down_from_zero =
        (along.v[o] + below * center.v[o]) / (squares_below > 1e-12f ? squares_below : 1.0f);
    const bool is_below = to_zero && line.smallest.v[o] + high * line.scale.v[o] < 0;
    line.scale.v[o] = is_below ? down_from_zero : line.scale.v[o];
    line.smallest.v[o] = is_below ? -high * down_from_zero : line.smallest.v[o];
  });
  for (int i = 0; i < record_.group; ++i) {
    each_lane([&](int o) {
      const float off = values[i].v[o] - line.scale.v[o] * codes[i].v[o] - line.smallest.v[o];
      error.v[o] += shares[i] * off * off;
    });
  }
  each_lane([&](int o) {
    const bool is_better = error.v[o] < best_error->v[o];
    best_error->v[o] = is_better ? error.v[o] : best_error->v[o];
    best->scale.v[o] = is_better ? line.scale.v[o] : best->scale.v[o];
    best->smallest.v[o] = is_better ? line.smallest.v[o] : best->smallest.v[o];
  });
}

void Grid::units(const Line* lines, Row* top, Row* bottom) const {
  Row farthest{}, lowest{};
  for (int i = 0; i < record_.num_groups; ++i) {
    each_lane([&](int o) {
      const float scale = lines[i].scale.v[o], smallest = lines[i].smallest.v[o];
      farthest.v[o] = std::fabs(scale) > std::fabs(farthest.v[o]) ? scale : farthest.v[o];
      lowest.v[o] = smallest < lowest.v[o] ? smallest : lowest.v[o];
    });
  }
  const auto least = static_cast<float>(record_.least_share);
  const auto most = static_cast<float>(record_.most_share);
  const float end = -least > most ? least : most;
  each_lane([&](int o) {
    top->v[o] = as_half(farthest.v[o] / end);
    bottom->v[o] = as_half(-lowest.v[o] / most);
  });
}

Line Grid::stored(const Line& line, int trial, const Row& top, const Row& bottom) const {
  Line found;
  const auto least = static_cast<float>(record_.least_share);
  const auto most = static_cast<float>(record_.most_share);
  const float half = has_smallest() ? record_.high / 2 : 0, step = static_cast<float>(trial);
  if (has_shares()) {
    each_lane([&](int o) {
      const float share = clipped(line.scale.v[o] * inverse_or_zero(top.v[o]), least, most);
      found.scale.v[o] = top.v[o] * clipped(whole(share) + step, least, most);
      const float wanted = line.smallest.v[o] + half * (line.scale.v[o] - found.scale.v[o]);
      const float depth = clipped(-wanted * inverse_or_zero(bottom.v[o]), 0, most);
      found.smallest.v[o] = -(bottom.v[o] * whole(depth));
    });
  } else {
    each_lane([&](int o) {
      found.scale.v[o] = as_scale(line.scale.v[o] * (1 + kTrialStep * step));
      found.smallest.v[o] = line.smallest.v[o] + half * (line.scale.v[o] - found.scale.v[o]);
    });
    const float high = record_.high;
    each_lane([&](int o) {
      const float wanted = found.smallest.v[o], scale = found.scale.v[o];
      const float zero = whole(clipped(-wanted * inverse_or_zero(scale), 0, high));
      found.smallest.v[o] = record_.whole_zeros ? -(zero * scale) : as_half(wanted);
    });
  }
  if (!has_smallest()) found.smallest = kZero;
  return found;
}

}  // namespace ts::rounding
