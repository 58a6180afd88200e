// Softmax, in an order of sums that is the same on all machines.
#pragma once

#include <algorithm>

#include "simd.h"

namespace moeserve {

constexpr int64_t kSummedAtOnce = 1024;  // Numbers that are summed in float32.

// Numbers that exist, and behind them -infinity.
static inline Floats load_logits(const float* x, int64_t count) {
  if (count >= kLanes) return load(x);
  float lanes[kLanes];
  std::fill(std::copy_n(x, count, lanes), lanes + kLanes, -std::numeric_limits<float>::infinity());
  return load(lanes);
}

static inline void store_existing(float* to, Floats value, int64_t count) {
  std::memcpy(to, &value, std::min<int64_t>(kLanes, count) * sizeof(float));
}

// Calls use(i, e to x[i ...] less top) for sixteen of x [count] after the other, and returns the sum of these powers.
template <typename Use>
static inline double sum_of_powers(const float* x, int64_t count, float top, Use use) {
  double total = 0.0;
  for (int64_t first = 0; first < count; first += kSummedAtOnce) {
    Floats sums{};
    for (int64_t i = first; i < std::min(count, first + kSummedAtOnce); i += kLanes) {
      const Floats powers = exp_of_negative(load_logits(x + i, count - i) - top);
      use(i, powers);
      sums += powers;
    }
    total += sum(sums);
  }
  return total;
}

// Writes the softmax of x [count], whose largest is `top`, to out, which may be x: no numbers unless top is finite.
static inline void write_softmax(const float* x, int64_t count, float top, float* out) {
  const double total =
      sum_of_powers(x, count, top, [&](int64_t i, Floats powers) { store_existing(out + i, powers, count - i); });
  const float share = top - top == 0.0f ? float(1.0 / total) : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) out[i] *= share;
}

// The same of its logarithms.
static inline void write_log_softmax(const float* x, int64_t count, float top, float* out) {
  const float log_of_total = float(log_of_next(sum_of_powers(x, count, top, [](int64_t, Floats) {}) - 1.0));
  for (int64_t i = 0; i < count; i += kLanes)
    store_existing(out + i, load_logits(x + i, count - i) - top - log_of_total, count - i);
}

}  // namespace moeserve
