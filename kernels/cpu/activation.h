// Gated activations, sixteen channels at a time.
#pragma once

#include "simd.h"

namespace moeserve {

enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kSwigluOai };

static inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

static inline Floats gelu(Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  for (float& value : lanes) value = 0.5f * value * (1.0f + std::erf(value * 0.70710678f));
  return load(lanes);
}

// tanh(z) = 2 sigmoid(2z) - 1, so that half of 1 + tanh(z) is sigmoid(2z).
static inline Floats gelu_tanh(Floats x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }

static inline Floats gated(Floats gate, Floats up, Activation kind, float alpha, float limit) {
  switch (kind) {
    case Activation::kSilu:
      return gate * sigmoid(gate) * up;
    case Activation::kGelu:
      return gelu(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kRelu:
      return max(gate, Floats{}) * up;
    case Activation::kSwigluOai:
      gate = min(gate, splat(limit));
      up = min(max(up, splat(-limit)), splat(limit));
      return gate * sigmoid(alpha * gate) * (up + 1.0f);
  }
  __builtin_unreachable();
}

}  // namespace moeserve
