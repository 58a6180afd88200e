// A tile of 64 keys in attention: scores, a running softmax (Milakov and Gimelshein, 2018), sums of values.
// Every sum is one chain of fused multiply-adds in a fixed order, so a row has the same bits beside any others.
#pragma once

#include <algorithm>

#include "kv_rows.h"

namespace moeserve {

constexpr int64_t kTileKeys = 64;
constexpr int kVectors = int(kTileKeys / kLanes);

// Sums of `rows` rows over so many parts of columns at a time stay in the registers.
constexpr int parts_at_once(int rows) {
  constexpr int all = int(kTileKeys) / kPartLanes;
  return kPartLanes == kLanes || rows == 1 ? all : rows <= 3 ? 4 : 2;  // 12 of the 16 registers of 8 floats.
}
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

// Keys [count][dim], float or Brain, to [dim][64]; columns from `count` on hold anything finite.
template <typename Number>
void transpose_keys(const uint8_t* const* rows, int64_t count, int64_t dim, float* out) {
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = load((const Number*)rows[std::min(column + i, count - 1)] + d);
      transpose_16x16(square);
      for (int i = 0; i < kLanes; ++i) store(out + (d + i) * kTileKeys + column, square[i]);
    }
  }
}

// scores[r] = queries[r] . keys for `Parts` parts of keys.
template <int Rows, int Parts>
void score_columns(const float* queries, int64_t dim, const float* keys, float* scores) {
  Part sums[Rows][Parts] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Part key[Parts];
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) key[p] = load_part(keys + d * kTileKeys + p * kPartLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Part q = splat_part(queries[r * dim + d]);
#pragma GCC unroll 8
      for (int p = 0; p < Parts; ++p) sums[r][p] = fma_part(q, key[p], sums[r][p]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) store_part(scores + r * kTileKeys + p * kPartLanes, sums[r][p]);
  }
}

template <int Rows>
void score(const float* queries, int64_t dim, const float* keys, float* scores) {
  constexpr int parts = parts_at_once(Rows);
  for (int first = 0; first < kTileKeys; first += parts * kPartLanes)
    score_columns<Rows, parts>(queries, dim, keys + first, scores + first);
}

// sums[r] += weights[r] . values over `Parts` parts of channels.
template <int Rows, int Parts, typename Number>
void add_values(const float* weights, const uint8_t* const* values, int64_t count, int64_t channel, int64_t value_dim,
                float* sums) {
  Part local[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) local[r][p] = load_part(sums + r * value_dim + channel + p * kPartLanes);
  }
  for (int64_t k = 0; k < count; ++k) {
    const Number* row = (const Number*)values[k] + channel;
    Part value[Parts];
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) value[p] = load_part(row + p * kPartLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Part weight = splat_part(weights[r * kTileKeys + k]);
#pragma GCC unroll 8
      for (int p = 0; p < Parts; ++p) local[r][p] = fma_part(weight, value[p], local[r][p]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) store_part(sums + r * value_dim + channel + p * kPartLanes, local[r][p]);
  }
}

template <int Rows, typename Number>
void add_all_values(const float* weights, const uint8_t* const* values, int64_t count, int64_t value_dim, float* sums) {
  constexpr int parts = parts_at_once(Rows);
  int64_t channel = 0;
  for (; channel + parts * kPartLanes <= value_dim; channel += parts * kPartLanes)
    add_values<Rows, parts, Number>(weights, values, count, channel, value_dim, sums);
  for (; channel < value_dim; channel += kPartLanes)
    add_values<Rows, 1, Number>(weights, values, count, channel, value_dim, sums);
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
