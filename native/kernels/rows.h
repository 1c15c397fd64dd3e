// Kernels on single rows of values: RMSNorm, gated activation, addition.
#pragma once

#include <cstdint>

namespace ts {

/// out = x / sqrt(mean(x^2) + epsilon) * weight over `width` values; `out` may be `x`.
void rms_norm(const float* x, const float* weight, int64_t width, float epsilon, float* out);

/// out = silu(gate) * up; `out` may be either.
void gate_activation(const float* gate, const float* up, int64_t width, float* out);

/// out = a + b; `out` may be either.
void add_rows(const float* a, const float* b, int64_t width, float* out);

}  // namespace ts
