// Activation functions of sixteen lanes.
#pragma once

#include "kernels/lane_math.h"
#include "kernels/rows.h"

namespace ts {

constexpr float kLog2E = 1.44269504088896341F;
constexpr float kSwigluAlpha = 1.702F;
constexpr float kSwigluLimit = 7.0F;

// SiLU and GELU are x / (1 + 2^t), the sigmoid is 1 / (1 + 2^t).

inline Lanes silu_exponent(Lanes x) { return multiply(x, broadcast(-kLog2E)); }

/// (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Lanes gelu_exponent(Lanes x) {
  const Lanes inner = multiply_add(multiply(x, x), broadcast(0.044715F), broadcast(1.0F));
  return multiply(multiply(x, inner), broadcast(-2.302208198144325F));  // -2 sqrt(2 / pi) / ln 2
}

inline Lanes sigmoid(Lanes x) {
  const Lanes one = broadcast(1.0F);
  return divide(one, add(one, exp2(silu_exponent(x))));
}

inline Lanes activate(Activation activation, Lanes x) {
  const Lanes one = broadcast(1.0F);
  switch (activation) {
    case Activation::None:
      return x;
    case Activation::Silu:
      return divide(x, add(one, exp2(silu_exponent(x))));
    case Activation::GeluTanh:
      return divide(x, add(one, exp2(gelu_exponent(x))));
    case Activation::Sigmoid:
      return sigmoid(x);
    case Activation::Relu:
      return larger(zero_lanes(), x);
    case Activation::SwigluOai: {
      const Lanes clamped = smaller(broadcast(kSwigluLimit), x);
      const Lanes exponent = multiply(clamped, broadcast(-kSwigluAlpha * kLog2E));
      return divide(clamped, add(one, exp2(exponent)));
    }
  }
  return x;
}

/// What the activated gate is multiplied with.
inline Lanes gated_by(Activation activation, Lanes up) {
  if (activation != Activation::SwigluOai) return up;
  const Lanes clamped = larger(broadcast(-kSwigluLimit), smaller(broadcast(kSwigluLimit), up));
  return add(clamped, broadcast(1.0F));
}

}  // namespace ts
