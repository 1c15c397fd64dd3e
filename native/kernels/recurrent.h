// Kernels with a recurrent state: rows run in order, so that results do not depend on the cut.
#pragma once

#include <cstdint>

#include "kernels/rows.h"

namespace ts {

/// Where the states after the rows of a slice go. Drafts may be refused, so each row of a slice
/// with drafts has a slot for the state after it. Kernels ask `after` for each row.
struct StateTarget {
  float* write;  // the state after the last row, if `slots` is null
  /// The slot of each row, or kNoSlot; the last row has one. Null: only its state is needed.
  const int32_t* slots = nullptr;
  float* first = nullptr;  // the state in slot 0
  int64_t stride = 0;      // numbers between two slots

  /// Returns where the state after a row is stored, or null if it is needed only for the next row.
  float* after(int64_t row, int64_t num_rows) const {
    if (slots == nullptr) return row + 1 == num_rows ? write : nullptr;
    return slots[row] == kNoSlot ? nullptr : first + slots[row] * stride;
  }

  static constexpr int32_t kNoSlot = -1;
};

/// A causal convolution of each column over the last `kernel` rows; see model/program/recurrent.py
/// (`ShortConvolution`).
struct Convolution {
  int64_t width;
  int64_t kernel;
  const float* taps;  // (kernel, width)
  const float* bias;  // (width), or null
  Activation activation;
};

/// Consecutive rows of one request for a convolution.
struct ConvolutionRows {
  const float* x;
  int64_t x_stride;
  float* out;  // not x
  int64_t out_stride;
  int64_t num_rows;
  const float* read;   // state before the first row, (kernel - 1, width); null: zeros
  StateTarget target;  // a state after a row may be `read`
};

/// Computes columns [begin, end) of the rows and of the state.
void convolve(const Convolution& op, const ConvolutionRows& rows, int64_t begin, int64_t end);

/// A head of the gated delta rule or of Mamba-2; see model/program/recurrent.py. With
/// `channel_biases` the delta rule has a decay for each channel of the keys.
struct StateHead {
  int64_t key_dim;    // Mamba-2: the state size
  int64_t value_dim;  // Mamba-2: the width of a head
  float epsilon;      // of the delta rule
  float decay_rate;
  float decay_bias;             // Mamba-2: bias of the time step
  const float* channel_biases;  // (key_dim), in place of `decay_bias`; null: one decay for the head
  // Of Mamba-2:
  float skip;
  float min_step;
  float max_step;
};

/// Consecutive rows of one request for a head.
struct StateHeadRows {
  const float* queries;
  const float* keys;
  const float* values;
  int64_t x_stride;    // of queries, keys and values
  const float* decay;  // one number, or (key_dim); Mamba-2: the time step
  int64_t decay_stride;
  const float* strength;  // of the delta rule
  int64_t strength_stride;
  float* out;
  int64_t out_stride;
  int64_t num_rows;
  const float* read;   // state before the first row, (key_dim, value_dim); null: zeros
  StateTarget target;  // a state after a row may be `read`
};

/// Columns of a head that are computed together, with the state of several rows in the cache.
constexpr int64_t kStateColumns = 64;

/// Numbers of working memory that a head needs.
int64_t state_scratch_floats(int64_t key_dim);

/// Computes columns [begin, end) of the values and of the state; `begin` is a multiple of
/// kStateColumns. `scratch` is aligned to 64 bytes.
void delta_rule(const StateHead& head, const StateHeadRows& rows, int64_t begin, int64_t end,
                float* scratch);
void mamba2(const StateHead& head, const StateHeadRows& rows, int64_t begin, int64_t end,
            float* scratch);

}  // namespace ts
