// Kernels on single rows of values: RMSNorm, gated activation, addition, scale, gather, soft cap.
#pragma once

#include <cstdint>

namespace ts {

/// out = x / sqrt(mean(x^2) + epsilon) * weight over `width` values; `out` may be `x`.
void rms_norm(const float* x, const float* weight, int64_t width, float epsilon, float* out);

/// The sum of x^2 over `width` values.
float sum_of_squares(const float* x, int64_t width);

/// The function of a gate: x; x * sigmoid(x); x / 2 * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)));
/// sigmoid(x); min(x, 7) * sigmoid(1.702 min(x, 7)); or max(x, 0).
enum class Activation : int32_t {
  None = -1,
  Silu = 0,
  GeluTanh = 1,
  Sigmoid = 2,
  SwigluOai = 3,
  Relu = 4
};

/// out = activation(gate) * up; `out` may be either. SwigluOai takes up, clamped to -7 to 7,
/// plus 1.
void gate_activation(Activation activation, const float* gate, const float* up, int64_t width,
                     float* out);

/// out = a + b; `out` may be either.
void add_rows(const float* a, const float* b, int64_t width, float* out);

/// out = x * factor; `out` may be `x`.
void scale_row(const float* x, float factor, int64_t width, float* out);

/// out = x * sigmoid(gate[0]); `out` may be `x`.
void gate_row(const float* x, const float* gate, int64_t width, float* out);

/// out[i] = x[order[i]]; `out` is not `x`.
void gather_row(const float* x, const int32_t* order, int64_t width, float* out);

/// The shares of chosen experts: the softmax of all scores; the same divided by their sum; the
/// scores as they are; or the sigmoid of the scores, which multiplies what experts read.
enum class Shares : int32_t { All = 0, Chosen = 1, Given = 2, OfInputs = 3 };

/// The `num_used` experts with the largest scores, largest first, of equal ones the first, and
/// their shares. A NaN is the smallest score, and makes NaN of the shares.
void choose_experts(const float* scores, int64_t num_experts, int64_t num_used, Shares kind,
                    int32_t* chosen, float* shares);

/// How experts are chosen where shares are not a softmax: see model/program/experts.py (`Route`).
struct Routing {
  int64_t num_experts;
  int64_t num_used;
  int64_t num_groups;
  int64_t num_used_groups;
  int64_t group_best;
  bool is_sigmoid;
  bool normalize;
  float scale;
  const float* bias;     // or null
  const float* factors;  // of shares, or null
};

/// Writes the shares of the chosen experts, and -1 for the others. `scratch` has room for
/// `3 * num_experts` values, `chosen` for `num_experts`.
void route_row(const float* x, const Routing& routing, int32_t* chosen, float* scratch, float* out);

/// out = sum over i of factors[i] * x[rows[i]], in that order; `accumulate` adds it to `out`.
void weighted_sum(const float* x, int64_t stride, const int32_t* rows, const float* factors,
                  int64_t count, int64_t width, bool accumulate, float* out);

/// x = cap * tanh(x / cap), in place.
void soft_cap_row(float* x, float cap, int64_t width);

}  // namespace ts
