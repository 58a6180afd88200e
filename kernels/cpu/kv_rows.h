// Rows of keys and values as pools keep them; `kernels/kv_rows.py` describes them and rounds to the same bits.
#pragma once

#include <algorithm>

#include "simd.h"

namespace moeserve {

enum class Kind : int64_t { kFloat32, kBfloat16, kInt8 };

typedef uint16_t Brain;  // A bfloat16.

constexpr float kLargestCode = 127.0f;

static inline int64_t row_bytes(Kind kind, int64_t dim) {
  return kind == Kind::kFloat32 ? dim * 4 : kind == Kind::kBfloat16 ? dim * 2 : dim + 4;
}

// The scale behind the `dim` integers of a row.
static inline float scale_of(const uint8_t* row, int64_t dim) {
  float scale;
  std::memcpy(&scale, row + dim, sizeof(scale));
  return scale;
}

// Rounds to the nearest, ties to even.
static inline Brain to_brain(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return x != x ? Brain(0x7fc0) : Brain((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The largest absolute value of x; not a number where x is not finite.
static inline float reach(const float* x, int64_t dim) {
  Floats tops{}, zeros{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Floats value = load(x + i);
    tops = max(tops, (Floats)((Words)value & 0x7fffffffu));
    zeros += value * 0.0f;
  }
  float top = largest(tops), zero = sum(zeros);
  for (; i < dim; ++i) {
    top = std::max(top, std::fabs(x[i]));
    zero += x[i] * 0.0f;
  }
  return top + zero;
}

static inline void store_row(Kind kind, const float* x, int64_t dim, uint8_t* row) {
  if (kind == Kind::kFloat32) {
    std::memcpy(row, x, dim * sizeof(float));
  } else if (kind == Kind::kBfloat16) {
    for (int64_t i = 0; i < dim; ++i) {
      const Brain value = to_brain(x[i]);
      std::memcpy(row + 2 * i, &value, sizeof(value));
    }
  } else {
    const float scale = reach(x, dim) / kLargestCode, divisor = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < dim; ++i) row[i] = uint8_t(int32_t(std::nearbyint(x[i] / divisor)));
    std::memcpy(row + dim, &scale, sizeof(scale));
  }
}

}  // namespace moeserve
