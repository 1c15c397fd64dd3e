// Rotary positions: cosines and sines computed once in double, kept a row a position.
#pragma once

#include <cstdint>
#include <vector>

namespace ts {

/// The attention temperature of queries: their factor is 1 + scale * ln(1 + periods), where the
/// number of periods is (position + offset) / length, rounded down.
struct Temperature {
  double scale = 0;  // 0: none
  int64_t length = 1;
  int64_t offset = 0;

  double at(int64_t position) const;
};

/// The angles of one kind of rotation. Growing is for one thread; reading is for all.
class RopeTable {
 public:
  /// Pair i is (2i, 2i + 1) when `interleaved`, else (i, i + num_pairs). `head_dim` is a
  /// multiple of 16 and at least 2 * num_pairs; values beyond the pairs pass through.
  RopeTable(const double* inverse_frequencies, int num_pairs, bool interleaved, double magnitude,
            const Temperature& temperature, int head_dim);

  /// Makes rows for positions 0 to `num_positions` - 1.
  void cover(int64_t num_positions);

  /// How many neighbouring values of a head must be rotated together: 16 or a whole head.
  int64_t unit() const { return interleaved_ ? 16 : head_dim_; }

  /// Rotates values [begin, end) of a row of heads, in place; both are multiples of `unit()`.
  void rotate(int64_t position, float* row, int64_t begin, int64_t end) const;

 private:
  void rotate_neighbours(const float* cosines, float* values, int64_t offset) const;
  void rotate_halves(const float* cosines, float* head) const;

  std::vector<double> inverse_frequencies_;
  bool interleaved_;
  double magnitude_;
  Temperature temperature_;
  int64_t head_dim_;
  int64_t width_;  // of the cosines of one position, and of the sines after them
  int64_t num_positions_ = 0;
  std::vector<float> rows_;
};

}  // namespace ts
