// Operations made of matrix products, and the products of parts of rows that others build upon.
#pragma once

#include <cstdint>

#include "executor/worker.h"

namespace ts {

/// How rows are prepared for the products of an operation.
RowKind row_kind(Precision precision, bool is_prompt);

/// `index` is the operation's place in the plan.
void run_linear(Worker& worker, size_t index);
void run_gated(Worker& worker, size_t index);
void run_logits(Worker& worker, size_t index);

/// Logits of sampled rows [begin, end), as far as this rank computes them; `out` points at the
/// first of them, rows are `stride` apart.
void multiply_logits(Worker& worker, size_t index, int64_t begin, int64_t end, float* out,
                     int64_t stride);

/// Makes room for what these, and norms, need in a step; throws std::bad_alloc.
void make_room_for_products(Plan& plan, const StepRecord& step);

/// Rows of one kind, prepared for the weight that they are multiplied with.
struct Factor {
  const PackedWeight& weight;
  RowKind kind;
  const void* prepared;
  int64_t num_rows;
};

/// `multiply` of groups [group_begin, group_end) of outputs; `out` points at row 0, output 0.
void multiply(const Factor& factor, int64_t group_begin, int64_t group_end, float* out,
              int64_t stride, bool accumulate);

/// Bytes of a thread's `gated` memory that the next function needs.
constexpr int64_t kGatedBytes = 256 << 10;

/// What becomes of the products before they are gated: each row is multiplied by its scale, then
/// biases are added. Null: nothing.
struct GatedChanges {
  const float* scales = nullptr;
  const float* gate_bias = nullptr;
  const float* up_bias = nullptr;
};

/// The same of two factors at once, of up to `panel_rows` rows: activation(gate) * up. Both may
/// have the same weight, whose products are then computed once.
void multiply_gated(Worker& worker, Activation activation, const Factor& gate, const Factor& up,
                    const GatedChanges& changes, int64_t group_begin, int64_t group_end, float* out,
                    int64_t stride);

/// Adds a bias to rows of products, each `width` values: the outputs from `first` on. Null:
/// nothing.
void add_bias(const float* bias, int64_t first, int64_t num_rows, int64_t width, float* products);

constexpr int64_t kFewestPanelRows = 32;

/// Most rows of a width that are multiplied at once: as many as stay in a cache. Of tiles only a
/// part of the width needs to.
int64_t panel_rows(WeightType type, RowKind kind, int64_t width);

}  // namespace ts
