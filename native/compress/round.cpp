// Rounds columns one after another, each for what the ones before it left to make up for (GPTQ,
// arXiv:2210.17323), then codes each group again for what all others leave (block coordinate
// descent, as QuantEase, arXiv:2309.01885). Outputs do not depend on each other: a thread takes a
// few of them through all columns, and sums have a fixed order.
#include "compress/round.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

#include "compress/grid.h"
#include "compress/subtract.h"

namespace ts {

namespace rounding {

namespace {

constexpr float kLeastGain = 1e-5f;  // of a group's loss, to code it anew

/// Codes of a group (group rows), their errors as later columns see them, and their loss.
struct Coding {
  Row levels[kMaxGroup];
  Row errors[kMaxGroup];
  Line line;
  Row loss;
};

/// Some outputs of a matrix on their way from values to codes.
class Chunk {
 public:
  Chunk(const Grid& grid, const RoundRecord& matrix)
      : grid_(grid),
        matrix_(matrix),
        group_(grid.record().group),
        right_(matrix.num_inputs),
        left_(matrix.num_inputs),
        levels_(matrix.num_inputs),
        lines_(matrix.num_inputs / group_),
        tops_(lines_.size() / grid.record().num_groups),
        bottoms_(tops_.size()),
        weights_(matrix.num_inputs),
        errors_(matrix.num_inputs) {
    for (int64_t i = 0; i < matrix.num_inputs; ++i) {
      const float pivot = matrix.factor[i * (matrix.num_inputs + 1)];
      weights_[i] = 1 / (pivot * pivot);
    }
  }

  void round(int64_t first) {
    first_ = first;
    count_ = static_cast<int>(std::min<int64_t>(kLanes, matrix_.num_outputs - first));
    read();
    compensate();
    sweep();
    write();
  }

 private:
  void read();
  void compensate();
  void sweep();
  void write() const;
  void fit_super_block(int64_t group);
  template <typename Step>
  void each_group(const float* matrix, Row* target, Step step);
  void keep_better(int64_t group, const Row* wanted, const Row* held, Row* changes);
  Line refit(const Row* wanted, const Row* levels, int64_t start) const;
  void code(const Row* wanted, const float* factor, int64_t stride, const Line& line,
            Coding* coding) const;

  const Row& top(int64_t group) const { return tops_[group / grid_.record().num_groups]; }
  const Row& bottom(int64_t group) const { return bottoms_[group / grid_.record().num_groups]; }

  const Grid& grid_;
  const RoundRecord& matrix_;
  int group_;
  int64_t first_ = 0;
  int count_ = 0;
  std::vector<Row> right_;   // the values
  std::vector<Row> left_;    // the values that columns should have, then those that they have
  std::vector<Row> levels_;  // of each input
  std::vector<Line> lines_;  // of each group
  std::vector<Row> tops_;    // of each super-block
  std::vector<Row> bottoms_;
  std::vector<float> weights_;  // of errors of each input, once the later ones have made up for it
  std::vector<Row> errors_;     // of values, or by how much they change
  std::vector<Row> slopes_;
  Coding tried_, best_;
};

void Chunk::read() {
  for (int64_t i = 0; i < matrix_.num_inputs; ++i) right_[i] = Row{};
  for (int o = 0; o < count_; ++o) {
    const float* row = matrix_.weight + (first_ + o) * matrix_.num_inputs;
    for (int64_t i = 0; i < matrix_.num_inputs; ++i) right_[i].v[o] = row[i];
  }
}

/// Calls step(group), which sets errors_ of a group, for one after another, and subtracts from
/// `target` of later inputs what they see of these through `matrix`: panel by panel.
template <typename Step>
void Chunk::each_group(const float* matrix, Row* target, Step step) {
  const int64_t width = matrix_.num_inputs;
  for (int64_t panel = 0; panel < width; panel += kPanel) {
    const int64_t end = std::min(panel + kPanel, width);
    for (int64_t start = panel; start < end; start += group_) {
      step(start / group_);
      subtract(matrix + start, width, &errors_[start], group_, start + group_, end, target);
    }
    subtract(matrix + panel, width, &errors_[panel], static_cast<int>(end - panel), end, width,
             target);
  }
}

/// Codes a group of values with one line; each column makes up for the errors of those before it.
void Chunk::code(const Row* wanted, const float* factor, int64_t stride, const Line& line,
                 Coding* coding) const {
  Row inverse, value;
  coding->line = line;
  each_lane([&](int o) {
    inverse.v[o] = inverse_or_zero(line.scale.v[o]);
    coding->loss.v[o] = 0;
  });
  for (int i = 0; i < group_; ++i) {
    each_lane([&](int o) { value.v[o] = wanted[i].v[o] - line.smallest.v[o]; });
    for (int j = 0; j < i; ++j) {
      const float share = factor[i * stride + j];
      each_lane([&](int o) { value.v[o] -= share * coding->errors[j].v[o]; });
    }
    Row scaled;
    each_lane([&](int o) { scaled.v[o] = value.v[o] * inverse.v[o]; });
    grid_.nearest(scaled, &coding->levels[i]);
    const float pivot = 1 / factor[i * stride + i];
    each_lane([&](int o) {
      const float error = (value.v[o] - coding->levels[i].v[o] * line.scale.v[o]) * pivot;
      coding->errors[i].v[o] = error;
      coding->loss.v[o] += error * error;
    });
  }
}

void Chunk::fit_super_block(int64_t group) {
  const int count = grid_.record().num_groups;
  for (int64_t i = group; i < group + count; ++i)
    lines_[i] = grid_.fitted(&left_[i * group_], &weights_[i * group_]);
  grid_.units(&lines_[group], &tops_[group / count], &bottoms_[group / count]);
}

void Chunk::compensate() {
  const int64_t width = matrix_.num_inputs;
  left_ = right_;
  each_group(matrix_.factor, left_.data(), [&](int64_t group) {
    const int64_t start = group * group_;
    if (grid_.has_shares() && group % grid_.record().num_groups == 0) fit_super_block(group);
    const Line fitted = grid_.fitted(&left_[start], &weights_[start]);
    lines_[group] = grid_.stored(fitted, 0, top(group), bottom(group));
    code(&left_[start], matrix_.factor + start * (width + 1), width, lines_[group], &tried_);
    std::copy_n(tried_.levels, group_, &levels_[start]);
    std::copy_n(tried_.errors, group_, &errors_[start]);
  });
}

void Chunk::sweep() {
  const int64_t width = matrix_.num_inputs;
  slopes_.assign(width, Row{});
  for (int64_t i = 0; i < width; ++i) {
    const Line& line = lines_[i / group_];
    each_lane([&](int o) {
      left_[i].v[o] = levels_[i].v[o] * line.scale.v[o] + line.smallest.v[o];
      errors_[i].v[o] = left_[i].v[o] - right_[i].v[o];
    });
  }
  for (int64_t panel = 0; panel < width; panel += kPanel) {
    const int count = static_cast<int>(std::min<int64_t>(kPanel, width - panel));
    subtract(matrix_.moments + panel, width, &errors_[panel], count, 0, width, slopes_.data());
  }
  Row wanted[kMaxGroup], held[kMaxGroup];
  each_group(matrix_.moments, slopes_.data(), [&](int64_t group) {
    const int64_t start = group * group_;
    const float* inverse = matrix_.own_inverses + start * group_;
    for (int i = 0; i < group_; ++i) {
      held[i] = wanted[i] = left_[start + i];
      for (int j = 0; j < group_; ++j) {
        const float share = inverse[i * group_ + j];
        each_lane([&](int o) { wanted[i].v[o] += share * slopes_[start + j].v[o]; });
      }
    }
    keep_better(group, wanted, held, &errors_[start]);
  });
}

/// Codes a group for what it should be, and keeps the new codes of outputs that they are better
/// for; `changes` is by how much its values change.
void Chunk::keep_better(int64_t group, const Row* wanted, const Row* held, Row* changes) {
  const int64_t start = group * group_, width = matrix_.num_inputs;
  const float* factor = matrix_.own_factors + group * group_ * group_;
  const Line refitted = refit(wanted, &levels_[start], start);
  Row before{};
  for (int i = 0; i < group_; ++i) {
    const float* own = matrix_.moments + (start + i) * width + start;
    Row seen{};
    for (int j = 0; j < group_; ++j)
      each_lane([&](int o) { seen.v[o] += own[j] * (wanted[j].v[o] - held[j].v[o]); });
    each_lane([&](int o) { before.v[o] += (wanted[i].v[o] - held[i].v[o]) * seen.v[o]; });
  }
  each_lane([&](int o) { best_.loss.v[o] = before.v[o] * (1 - kLeastGain); });
  for (int i = 0; i < group_; ++i) best_.levels[i] = levels_[start + i];
  best_.line = lines_[group];
  for (int trial = -1; trial <= 1; ++trial) {
    code(wanted, factor, group_, grid_.stored(refitted, trial, top(group), bottom(group)), &tried_);
    Row is_better;
    each_lane([&](int o) { is_better.v[o] = tried_.loss.v[o] < best_.loss.v[o] ? 1.0f : 0.0f; });
    const auto take = [&](const Row& from, Row* to) {
      each_lane([&](int o) { to->v[o] = is_better.v[o] != 0 ? from.v[o] : to->v[o]; });
    };
    for (int i = 0; i < group_; ++i) take(tried_.levels[i], &best_.levels[i]);
    take(tried_.line.scale, &best_.line.scale);
    take(tried_.line.smallest, &best_.line.smallest);
    take(tried_.loss, &best_.loss);
  }
  lines_[group] = best_.line;
  for (int i = 0; i < group_; ++i) {
    levels_[start + i] = best_.levels[i];
    each_lane([&](int o) {
      const float made = best_.levels[i].v[o] * best_.line.scale.v[o] + best_.line.smallest.v[o];
      changes[i].v[o] = made - held[i].v[o];
    });
  }
}

/// Returns the line that is best for given levels.
Line Chunk::refit(const Row* wanted, const Row* levels, int64_t start) const {
  const int64_t width = matrix_.num_inputs;
  Row along{}, size{}, mean{}, shift{};
  float total = 0;
  for (int i = 0; i < group_; ++i) {
    const float* own = matrix_.moments + (start + i) * width + start;
    Row seen{};
    float sum = 0;
    for (int j = 0; j < group_; ++j) {
      sum += own[j];
      each_lane([&](int o) { seen.v[o] += own[j] * levels[j].v[o]; });
    }
    total += sum;
    each_lane([&](int o) {
      along.v[o] += seen.v[o] * wanted[i].v[o];
      size.v[o] += seen.v[o] * levels[i].v[o];
      mean.v[o] += seen.v[o];
      shift.v[o] += sum * wanted[i].v[o];
    });
  }
  Line line{};
  if (!grid_.has_smallest()) {
    each_lane([&](int o) { line.scale.v[o] = along.v[o] * inverse_or_zero(size.v[o]); });
    return line;
  }
  each_lane([&](int o) {
    const float spread = size.v[o] * total - mean.v[o] * mean.v[o];
    const bool is_clear = spread > 1e-5f * size.v[o] * total;
    line.scale.v[o] =
        is_clear ? (along.v[o] * total - shift.v[o] * mean.v[o]) / (is_clear ? spread : 1) : 0;
    line.smallest.v[o] = (shift.v[o] - line.scale.v[o] * mean.v[o]) / total;
  });
  return line;
}

void Chunk::write() const {
  const int64_t width = matrix_.num_inputs;
  const auto num_groups = static_cast<int64_t>(lines_.size());
  const auto num_super = static_cast<int64_t>(tops_.size());
  for (int o = 0; o < count_; ++o) {
    const int64_t row = first_ + o;
    for (int64_t i = 0; i < width; ++i)
      matrix_.levels[row * width + i] = grid_.code(levels_[i].v[o]);
    for (int64_t i = 0; i < num_groups; ++i) {
      matrix_.scales[row * num_groups + i] = lines_[i].scale.v[o];
      matrix_.smallest[row * num_groups + i] = lines_[i].smallest.v[o];
    }
    for (int64_t i = 0; i < num_super; ++i) {
      matrix_.tops[row * num_super + i] = tops_[i].v[o];
      matrix_.bottoms[row * num_super + i] = bottoms_[i].v[o];
    }
  }
}

}  // namespace

}  // namespace rounding

void round_matrix(const GridRecord& record, const RoundRecord& matrix, int num_threads) {
  const rounding::Grid grid(record);
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    const auto chunk = std::make_unique<rounding::Chunk>(grid, matrix);
    int64_t first;
    while ((first = next.fetch_add(rounding::kLanes)) < matrix.num_outputs) chunk->round(first);
  };
  std::vector<std::thread> threads;
  try {
    while (static_cast<int>(threads.size()) < num_threads - 1) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Fewer threads do the same.
  }
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace ts

extern "C" __attribute__((visibility("default"))) void ts_round(const ts::GridRecord* grid,
                                                                const ts::RoundRecord* matrix,
                                                                int32_t num_threads) {
  ts::round_matrix(*grid, *matrix, num_threads);
}
