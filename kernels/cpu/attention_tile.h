// A tile of 64 keys in attention: scores, a running softmax (Milakov and Gimelshein, 2018), sums of values.
// Every sum is one chain of fused multiply-adds in a fixed order, so a row has the same bits beside any others.
#pragma once

#include <algorithm>

#include "simd.h"

namespace moeserve {

constexpr int64_t kTileKeys = 64;
constexpr int kVectors = int(kTileKeys / kLanes);
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Running softmax of some rows: the largest score, the sum of weights and the weighted sum of values.
struct State {
  float *largest, *total, *sums;
};

static inline void clear(State state, int64_t rows, int64_t value_dim) {
  std::fill_n(state.largest, rows, kNothing);
  std::fill_n(state.total, rows, 0.0f);
  std::fill_n(state.sums, rows * value_dim, 0.0f);
}

// Merges `part` into `whole`. Where one of them is empty the other's bits remain.
static inline void merge(State whole, State part, int64_t rows, int64_t value_dim) {
  for (int64_t r = 0; r < rows; ++r) {
    if (part.largest[r] == kNothing) continue;
    float* to = whole.sums + r * value_dim;
    const float* from = part.sums + r * value_dim;
    if (whole.largest[r] == kNothing) {
      whole.largest[r] = part.largest[r], whole.total[r] = part.total[r];
      std::copy_n(from, value_dim, to);
      continue;
    }
    const float top = std::max(whole.largest[r], part.largest[r]);
    const float old_share = exp(whole.largest[r] - top), new_share = exp(part.largest[r] - top);
    whole.largest[r] = top;
    whole.total[r] = std::fma(part.total[r], new_share, whole.total[r] * old_share);
    for (int64_t i = 0; i < value_dim; ++i) to[i] = std::fma(from[i], new_share, to[i] * old_share);
  }
}

// Keys [count][dim] to [dim][64]; columns from `count` on hold anything finite.
static inline void transpose_keys(const float* const* rows, int64_t count, int64_t dim, float* out) {
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load(rows[std::min(column + i, count - 1)] + d);
      transpose_16x16(square);
      for (int i = 0; i < kLanes; ++i) store(out + (d + i) * kTileKeys + column, square[i]);
    }
  }
}

template <int Rows>
void score(const float* queries, int64_t dim, const float* keys, float* scores) {
  Floats sums[Rows][kVectors] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Floats key[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) key[v] = load(keys + d * kTileKeys + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Floats q = splat(queries[r * dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] += q * key[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(scores + r * kTileKeys + v * kLanes, sums[r][v]);
  }
}

// sums[r] += weights[r] . values over `Vectors` vectors of channels.
template <int Rows, int Vectors>
void add_values(const float* weights, const float* const* values, int64_t count, int64_t channel, int64_t value_dim,
                float* sums) {
  Floats local[Rows][Vectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) local[r][v] = load(sums + r * value_dim + channel + v * kLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    const float* row = values[k] + channel;
    Floats value[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) value[v] = load(row + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Floats weight = splat(weights[r * kTileKeys + k]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) local[r][v] += weight * value[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) store(sums + r * value_dim + channel + v * kLanes, local[r][v]);
  }
}

template <int Rows>
void add_all_values(const float* weights, const float* const* values, int64_t count, int64_t value_dim, float* sums) {
  int64_t channel = 0;
  for (; channel + kVectors * kLanes <= value_dim; channel += kVectors * kLanes)
    add_values<Rows, kVectors>(weights, values, count, channel, value_dim, sums);
  for (; channel < value_dim; channel += kLanes)
    add_values<Rows, 1>(weights, values, count, channel, value_dim, sums);
}

// Turns a row's scores of a tile into weights and folds them into its state. The row sees the tile's keys from `first`
// to before `last`; either may lie outside the tile.
static inline void weigh(float scale, int64_t first, int64_t last, int64_t value_dim, float* scores,
                         float* largest_seen, float* total, float* sums) {
  const bool sees_all = first == 0 && last == kTileKeys;
  Floats top = splat(kNothing), scaled[kVectors];
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int v = 0; v < kVectors; ++v) {
    scaled[v] = load(scores + v * kLanes) * scale;
    if (!sees_all) {
      const Ints key = lane + v * kLanes;
      const Ints seen =
          (Ints)(key >= int32_t(std::min(first, kTileKeys))) & (Ints)(key < int32_t(std::max<int64_t>(last, 0)));
      scaled[v] = select(seen, scaled[v], splat(kNothing));
    }
    top = max(top, scaled[v]);
  }
  const float tile_top = largest(top);
  if (tile_top == kNothing) {
    std::fill_n(scores, kTileKeys, 0.0f);
    return;
  }
  const float new_top = std::max(*largest_seen, tile_top);
  Floats weight_sum{};
  for (int v = 0; v < kVectors; ++v) {
    const Floats weight = exp(scaled[v] - new_top);
    store(scores + v * kLanes, weight);
    weight_sum += weight;
  }
  if (new_top != *largest_seen && *largest_seen != kNothing) {
    const float share = exp(*largest_seen - new_top);
    *total *= share;
    for (int64_t i = 0; i < value_dim; ++i) sums[i] *= share;
  }
  *largest_seen = new_top;
  *total += sum(weight_sum);
}

}  // namespace moeserve
