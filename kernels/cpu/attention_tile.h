// A tile of 64 keys in attention: scores, a running softmax (Milakov and Gimelshein, 2018), sums of values.
// Every sum is one chain of fused multiply-adds in a fixed order, so a row has the same bits beside any others.
#pragma once

#include <algorithm>
#include <vector>

#include "kv_rows.h"
#include "lines.h"

namespace moeserve {

constexpr int64_t kTileKeys = 64;
constexpr int kVectors = int(kTileKeys / kLanes);

// Return how many parts of columns have their sums of `rows` rows in the registers at a time.
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
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t count = std::min<int64_t>(kLanes, rows - first);
    alignas(64) float old_tops[kLanes] = {}, new_tops[kLanes] = {}, old_shares[kLanes], new_shares[kLanes];
    std::copy_n(whole.largest + first, count, old_tops);
    std::copy_n(part.largest + first, count, new_tops);
    const Floats tops = max(load(new_tops), load(old_tops));
    store(old_shares, exp(load(old_tops) - tops));
    store(new_shares, exp(load(new_tops) - tops));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = first + i;
      if (new_tops[i] == kNothing) continue;
      float* to = whole.sums + r * value_dim;
      const float* from = part.sums + r * value_dim;
      whole.largest[r] = tops[i];
      if (old_tops[i] == kNothing) {
        whole.total[r] = part.total[r];
        std::copy_n(from, value_dim, to);
        continue;
      }
      const float old_share = old_shares[i], new_share = new_shares[i];
      whole.total[r] = std::fma(part.total[r], new_share, whole.total[r] * old_share);
      for (int64_t c = 0; c < value_dim; ++c) to[c] = std::fma(from[c], new_share, to[c] * old_share);
    }
  }
}

// Transposes the 4 x 4 words that have the same place among the quarters of four vectors.
static inline void transpose_quarters(Words (&four)[4]) {
  Words half[4];
  for (int i = 0; i < 2; ++i) {
    half[i] = __builtin_shufflevector(four[2 * i], four[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    half[i + 2] =
        __builtin_shufflevector(four[2 * i], four[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 2; ++i) {
    const Words &a = half[2 * i], &b = half[2 * i + 1];
    four[2 * i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    four[2 * i + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
}

// Words [64][num_words], a multiple of 4 each row, to [num_words][64], four vectors of 16 keys' neighbouring words as
// `arrange` makes them. Columns from that of the last of `count` rows on to the next multiple of 16 are taken, too.
//
// Not inlined where a vector takes two registers: the compiler would keep the vectors of its caller in memory.
template <typename Arrange>
#if !defined(__AVX512F__)
[[gnu::noinline]]
#endif
static inline void transpose_words(const uint8_t* const* rows, int64_t count, int64_t num_words, Arrange arrange,
                                   uint32_t* out) {
  typedef uint32_t Quarter __attribute__((vector_size(16)));
  for (int64_t column = 0; column < count; column += kLanes) {
    for (int64_t w = 0; w < num_words; w += 4) {
      Words four[4];  // Of rows i, i + 4, i + 8 and i + 12.
      for (int i = 0; i < 4; ++i) {
        Quarter quarters[4];
        for (int q = 0; q < 4; ++q) std::memcpy(&quarters[q], rows[column + i + 4 * q] + 4 * w, sizeof(Quarter));
        const auto low = __builtin_shufflevector(quarters[0], quarters[1], 0, 1, 2, 3, 4, 5, 6, 7);
        const auto high = __builtin_shufflevector(quarters[2], quarters[3], 0, 1, 2, 3, 4, 5, 6, 7);
        four[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      }
      transpose_quarters(four);
      arrange(four);
      for (int i = 0; i < 4; ++i) std::memcpy(out + (w + i) * kTileKeys + column, &four[i], sizeof(Words));
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

// sums[r] = shares[r] * sums[r] + weights[r] . values over `Parts` parts of channels.
template <int Rows, int Parts>
void add_values(const float* weights, const float* shares, const uint8_t* const* values, int64_t count, int64_t channel,
                int64_t value_dim, float* sums) {
  Part local[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p)
      local[r][p] = load_part(sums + r * value_dim + channel + p * kPartLanes) * splat_part(shares[r]);
  }
  for (int64_t k = 0; k < count; ++k) {
    const float* row = (const float*)values[k] + channel;
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

template <int Rows>
void add_all_values(const float* weights, const float* shares, const uint8_t* const* values, int64_t count,
                    int64_t value_dim, float* sums) {
  constexpr int parts = parts_at_once(Rows);
  int64_t channel = 0;
  for (; channel + parts * kPartLanes <= value_dim; channel += parts * kPartLanes)
    add_values<Rows, parts>(weights, shares, values, count, channel, value_dim, sums);
  for (; channel < value_dim; channel += kPartLanes)
    add_values<Rows, 1>(weights, shares, values, count, channel, value_dim, sums);
}

// The keys of a tile that a row sees, from the first to before the last; either may lie outside the tile.
struct Seen {
  int64_t first, last;
};

// Which of 16 keys from `first_key` on a row sees.
static inline Ints sees_keys(const Seen& seen, int first_key) {
  const Ints key = Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first_key;
  return (Ints)(key >= int32_t(std::min(seen.first, kTileKeys))) & (Ints)(key < int32_t(std::max<int64_t>(seen.last, 0)));
}

// scores[r] times their scales, kNothing where the row does not see the key, and the largest of each row in its lane.
// seen: null where each row sees all keys. scale_of(r, v): of 16 scores.
template <int Rows, typename ScaleOf>
static inline Floats scale_scores(const Seen* seen, float* scores, ScaleOf scale_of) {
  Floats tops[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    tops[r] = splat(kNothing);
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + r * kTileKeys + v * kLanes;
      Floats scaled = load(at) * scale_of(r, v);
      if (seen) scaled = select(sees_keys(seen[r], v * kLanes), scaled, splat(kNothing));
      store(at, scaled);
      tops[r] = max(tops[r], scaled);
    }
  }
  return largest_each(tops);
}

// Folds the largest scores of rows in a tile, one in each lane, into the rows' state: writes the base of their weights,
// what multiplies the sums of earlier tiles, and totals times that. Whole vectors of bases and shares are written.
template <int Rows>
static inline void raise_tops(Floats tile_tops, float* largest_seen, float* total, float* bases, float* shares) {
  const Floats before = load_first<Rows>(largest_seen), tops = select((Ints)(before < tile_tops), tile_tops, before);
  // Rows that have seen nothing get weights of zero.
  const Floats base = select((Ints)(tops == kNothing), Floats{}, tops);
  const Floats share = exp_of_negative(before - base), old = load_first<Rows>(total);
  store_first<Rows>(largest_seen, tops);
  // Chosen and not multiplied at once, so that the product is rounded before the sum.
  store_first<Rows>(total, select((Ints)(share == 1.0f), old, old * share));
  store(bases, base);
  store(shares, share);
}

// Turns scores of rows in a tile, times their scale, into weights and adds these to totals; see raise_tops.
template <int Rows>
static inline void weigh(const float* bases, float* scores, float* total) {
  Floats sums[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const Floats base = splat(bases[r]);
    sums[r] = Floats{};
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + r * kTileKeys + v * kLanes;
      const Floats weight = exp_of_negative(load(at) - base);
      store(at, weight);
      sums[r] += weight;
    }
  }
  store_first<Rows>(total, load_first<Rows>(total) + sum_each(sums));
}

}  // namespace moeserve
