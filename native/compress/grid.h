// A block format at work: nearest levels, and the scales and smallest values that suit a group.
#pragma once

#include "compress/lanes.h"
#include "compress/round.h"

namespace ts::rounding {

constexpr float kStretches = 15;  // trials of a line's span ...
constexpr float kLeastStretch = 0.7f, kMostStretch = 1.05f;

/// Scale and smallest value of a group, for each output.
struct Line {
  Row scale;
  Row smallest;
};

class Grid {
 public:
  explicit Grid(const GridRecord& record);

  const GridRecord& record() const { return record_; }
  bool has_smallest() const { return record_.num_peaks == 0; }
  bool has_shares() const { return record_.num_groups > 1; }

  /// The levels nearest to values in units of the scale.
  void nearest(const Row& value, Row* level) const;

  /// Returns the line for a group of values (group rows), whose errors count as `weights`.
  Line fitted(const Row* values, const float* weights) const;

  /// Returns trial number -1, 0 or 1 about a line, as the format can store it. `top` and `bottom`
  /// are the units, where the format has them.
  Line stored(const Line& line, int trial, const Row& top, const Row& bottom) const;

  /// The units in which the lines of a super-block are stored.
  void units(const Line* lines, Row* top, Row* bottom) const;

  /// The place of a level, as its code in the table or itself.
  int8_t code(float level) const {
    const auto whole = static_cast<int8_t>(level);
    return record_.table ? places_[whole + 128] : whole;
  }

 private:
  Line fitted_around_zero(const Row* values, const float* weights) const;
  Line fitted_line(const Row* values, const float* weights) const;
  void try_stretch(const Row* values, const float* weights, const Line& span, const Row& center,
                   float stretch, Line* best, Row* best_error) const;
  float as_scale(float x) const { return record_.bfloat_scales ? as_bfloat(x) : as_half(x); }

  GridRecord record_;
  float middles_[15];
  float steps_[15];
  int8_t places_[256] = {};  // of levels from -128
};

}  // namespace ts::rounding
