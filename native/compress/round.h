// Rounds a matrix to a block format so that its products change least: the interface.
#pragma once

#include <cstdint>

namespace ts {

/// A block format: a value is a scale times a level, plus a smallest value if the format has one.
/// src/twostroke/lab/compress/round.py mirrors both records; tests/support/plain_rounding.py
/// computes the same in NumPy.
struct GridRecord {
  const float* peaks;  // a trial makes the value farthest from zero as large as one of these
  const float* table;  // 16 whole levels, ascending, whose middles are the edges; null: all
  float low;           // the levels from the least ...
  float high;          // ... to the greatest
  int32_t num_peaks;   // 0: the format has a smallest value, and levels from 0
  int32_t group;       // inputs that share a scale, at most kMaxGroup
  int32_t num_groups;  // groups that share a top, of which scales are shares; 1: none is
  int32_t least_share;
  int32_t most_share;
  int32_t bfloat_scales;  // 1: scales are bfloat16, else float16
  int32_t whole_zeros;    // 1: smallest values are whole scales below zero, at most `high` of them
};

/// A matrix and what it becomes. `factor` is the lower triangle F with F F^T the inverse of the
/// moments; `own_factors` are those of each group's moments alone, `own_inverses` their inverses.
struct RoundRecord {
  const float* weight;        // (outputs, inputs)
  const float* moments;       // (inputs, inputs), symmetric, bit for bit
  const float* factor;        // (inputs, inputs)
  const float* own_factors;   // (groups, group, group)
  const float* own_inverses;  // (groups, group, group)
  int8_t* levels;             // (outputs, inputs); places in the table, if there is one
  float* scales;              // (outputs, groups)
  float* smallest;            // (outputs, groups)
  float* tops;                // (outputs, super-blocks): the unit of scales
  float* bottoms;             // (outputs, super-blocks): the unit of smallest values
  int64_t num_outputs;
  int64_t num_inputs;
};

constexpr int kMaxGroup = 128;

/// Rounds with up to `num_threads` threads, of which the result does not depend.
void round_matrix(const GridRecord& grid, const RoundRecord& matrix, int num_threads);

}  // namespace ts
