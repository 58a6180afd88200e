// A tile of 64 keys in attention over rows of bfloat16: queries and weights are rounded to bfloat16, too, and products
// are summed in float32.
#pragma once

#include "attention_tile.h"
#include "dot.h"
#include "panels.h"

namespace moeserve {

// Keys as [dim / 2][64] pairs of channels, values as [32][dim] pairs of keys.
struct PairTile {
  Lines<uint32_t> keys, values;

  void reserve(int64_t key_dim, int64_t value_dim) {
    keys.reserve(num_pairs(key_dim) * kTileKeys);
    values.reserve(kTileKeys / 2 * value_dim);
  }

  void take(const uint8_t* const* key_rows, const uint8_t* const* value_rows, int64_t count, int64_t key_dim,
            int64_t value_dim) {
    transpose_words(key_rows, count, key_dim / 2, arrange_pairs, keys.data());
    std::fill(keys.data() + key_dim / 2 * kTileKeys, keys.data() + num_pairs(key_dim) * kTileKeys, 0);
    typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
    uint32_t* to = values.data();
    for (int64_t pair = 0; pair < (count + 3) / 4 * 2; ++pair, to += value_dim) {
      const uint8_t *lower = value_rows[lower_place(pair)], *upper = value_rows[upper_place(pair)];
      for (int64_t d = 0; d < value_dim; d += kLanes) {
        Shorts low, high;
        std::memcpy(&low, lower + 2 * d, sizeof(low));
        std::memcpy(&high, upper + 2 * d, sizeof(high));
        const auto both = __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24,
                                                  9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        std::memcpy(to + d, &both, sizeof(both));
      }
    }
    std::fill(to, values.data() + kTileKeys / 2 * value_dim, 0);
  }

 private:
  // Of four words, each of two neighbouring channels, makes pairs as they are multiplied.
  static MOESERVE_INLINE void arrange_pairs(Words (&four)[4]) {
#if defined(MOESERVE_MULTIPLIES_PAIRS) && !defined(MOESERVE_HAS_ONE_CHAIN)
    for (int i = 0; i < 4; i += 2) {
      const Words first = four[i], second = four[i + 1];
      four[i] = (second & 0xffffu) | first << 16;
      four[i + 1] = second >> 16 | (first & 0xffff0000u);
    }
#else
    (void)four;
#endif
  }
};

// For rows that lie in no tiles.
template <int Rows>
void score_pairs(const Pair* queries, int64_t dim, const uint32_t* keys, float* scores);
template <int Rows, int Parts>
void add_pairs(const Pair* weights, const float* shares, const uint32_t* values, int64_t value_dim, float* sums);

#if defined(MOESERVE_HAS_TILES)
// scores[r] = queries[r] . keys. queries: rows of num_pairs(dim) pairs. The sums have the order of add_pair_products.
static inline void score_in_tiles(const Pair* queries, int64_t num_rows, int64_t dim, const uint32_t* keys,
                                  float* scores) {
  constexpr int64_t key_stride = kTileKeys * sizeof(uint32_t), score_stride = kTileKeys * sizeof(float);
  const int64_t pairs = num_pairs(dim);
  for (int64_t first = 0; first < num_rows; first += kTileHeight, queries += kTileHeight * pairs) {
    TileShapes shapes;
    for (int tile = 0; tile < 5; ++tile)
      shapes.set(tile, int(std::min<int64_t>(kTileHeight, num_rows - first)), kTileRowBytes);
    for (int tile = 5; tile < 8; ++tile) shapes.set(tile, kLanes, kTileRowBytes);
    shape_tiles(shapes);
    for (int64_t p = 0; p < pairs; p += kLanes) {
      const uint32_t* key = keys + p * kTileKeys;
      load_tile<4>(queries + p, pairs * sizeof(Pair));
      load_tile<5>(key, key_stride);
      add_pair_products<0, 4, 5>();
      load_tile<6>(key + kLanes, key_stride);
      add_pair_products<1, 4, 6>();
      load_tile<7>(key + 2 * kLanes, key_stride);
      add_pair_products<2, 4, 7>();
      load_tile<5>(key + 3 * kLanes, key_stride);
      add_pair_products<3, 4, 5>();
    }
    float* to = scores + first * kTileKeys;
    store_tile<0>(to, score_stride);
    store_tile<1>(to + kLanes, score_stride);
    store_tile<2>(to + 2 * kLanes, score_stride);
    store_tile<3>(to + 3 * kLanes, score_stride);
  }
  release_tiles();
}

// sums[r] = shares[r] * sums[r] + weights[r] . values. weights: rows of 32 pairs.
static inline void add_in_tiles(const Pair* weights, const float* shares, int64_t num_rows, const uint32_t* values,
                                int64_t value_dim, float* sums) {
  constexpr int64_t weight_stride = kTileKeys / 2 * sizeof(Pair);
  const int64_t stride = value_dim * sizeof(float);
  for (int64_t first = 0; first < num_rows; first += kTileHeight) {
    const int rows = int(std::min<int64_t>(kTileHeight, num_rows - first));
    TileShapes shapes;
    for (const int tile : {0, 1, 4, 5}) shapes.set(tile, rows, kTileRowBytes);
    for (const int tile : {6, 7}) shapes.set(tile, kLanes, kTileRowBytes);
    shape_tiles(shapes);
    load_tile<4>(weights + first * kTileKeys / 2, weight_stride);
    load_tile<5>(weights + first * kTileKeys / 2 + kLanes, weight_stride);
    float* of_rows = sums + first * value_dim;
    // The tile of the channels before is stored between products: the tile unit would wait for stores in a row.
    const auto turn = [&](auto tile, int64_t d) __attribute__((always_inline)) {
      constexpr int now = tile(), before = 1 - now;
      if (d < value_dim) {
        for (int r = 0; r < rows; ++r) {
          float* sum = of_rows + r * value_dim + d;
          store(sum, load(sum) * shares[first + r]);
        }
        load_tile<now>(of_rows + d, stride);
        load_tile<6>(values + d, stride);
        add_pair_products<now, 4, 6>();
        load_tile<7>(values + kLanes * value_dim + d, stride);
        add_pair_products<now, 5, 7>();
      }
      if (d >= kLanes && d <= value_dim) store_tile<before>(of_rows + d - kLanes, stride);
    };
    for (int64_t d = 0; d <= value_dim; d += 2 * kLanes) {
      turn(std::integral_constant<int, 0>(), d);
      turn(std::integral_constant<int, 1>(), d + kLanes);
    }
  }
  release_tiles();
}
#else
static inline void score_in_tiles(const Pair*, int64_t, int64_t, const uint32_t*, float*) {}
static inline void add_in_tiles(const Pair*, const float*, int64_t, const uint32_t*, int64_t, float*) {}
#endif

constexpr float kLogE = 1.44269504f;  // Of base 2.

// 2^x for x up to about 0, to 3 millionths. Exactly 0 from -127 down, where the exponent's bits become those of 0; not a
// number counts as less than that.
static inline Floats exp2_of_negative(Floats x) {
  const Floats magic = splat(12582912.0f);  // Adding it rounds to an integer in the low bits.
  const Floats bounded = max(x, splat(-127.0f)), shifted = bounded + magic, part = bounded - (shifted - magic);
  Floats value = fma(splat(0.009582852944731712f), part, splat(0.055906426161527634f));
  value = fma(value, part, splat(0.24024099111557007f));
  value = fma(value, part, splat(0.6931241750717163f));
  value = fma(value, part, splat(1.0f));
  return (Floats)((Ints)value + ((Ints)shifted << 23));
}

// The largest score of each row in its lane. Scores become kNothing where the row does not see the key; see
// scale_scores.
template <int Rows>
static inline Floats top_scores(const Seen* seen, float* scores) {
  Floats tops[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    float* row = scores + r * kTileKeys;
    if (seen)
      for (int v = 0; v < kVectors; ++v)
        store(row + v * kLanes, select(sees_keys(seen[r], v * kLanes), load(row + v * kLanes), splat(kNothing)));
    tops[r] = load(row);
    for (int v = 1; v < kVectors; ++v) tops[r] = max(tops[r], load(row + v * kLanes));
  }
  return largest_each(tops);
}

// Turns the scores of rows in a tile into weights, rows of 32 pairs, and adds these to totals before they are rounded;
// see `weigh`. scale: above 0.
template <int Rows>
static inline void weigh_pairs(float scale, const float* bases, const float* scores, float* total, Pair* weights) {
  Floats sums[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const Floats base = splat(-(bases[r] * kLogE));
    Floats weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      weight[v] = exp2_of_negative(fma(load(scores + r * kTileKeys + v * kLanes), splat(scale * kLogE), base));
    sums[r] = (weight[0] + weight[1]) + (weight[2] + weight[3]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v += 2)
      store_pairs(weight[v], weight[v + 1], weights + (r * kVectors + v) * kLanes / 2);
  }
  store_first<Rows>(total, load_first<Rows>(total) + sum_each(sums));
}

#if !defined(MOESERVE_HAS_TILES)
// scores[r] = queries[r] . keys for `Parts` parts of keys. queries: rows of num_pairs(dim) pairs.
template <int Rows, int Parts>
[[gnu::noinline]] void score_parts(const Pair* queries, int64_t dim, const uint32_t* keys, float* scores) {
  const int64_t pairs = num_pairs(dim);
  const Pair* rows[Rows];
  for (int r = 0; r < Rows; ++r) rows[r] = queries + r * pairs;
  Part sums[Rows][Parts] = {};
  add_steps(rows, PairColumns{keys, kTileKeys}, pairs / kStepPairs, sums);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) store_part(scores + r * kTileKeys + p * kPartLanes, sums[r][p]);
  }
}

template <int Rows>
void score_pairs(const Pair* queries, int64_t dim, const uint32_t* keys, float* scores) {
  constexpr int parts = parts_at_once(Rows);
  for (int first = 0; first < kTileKeys; first += parts * kPartLanes)
    score_parts<Rows, parts>(queries, dim, keys + first, scores + first);
}

// sums[r] = shares[r] * sums[r] + weights[r] . values for `Parts` parts of channels. weights: rows of 32 pairs.
template <int Rows, int Parts>
[[gnu::noinline]] void add_parts(const Pair* weights, const float* shares, const uint32_t* values, int64_t value_dim,
                                 float* sums) {
  const Pair* rows[Rows];
  Part local[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    rows[r] = weights + r * (kTileKeys / 2);
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p)
      local[r][p] = load_part(sums + r * value_dim + p * kPartLanes) * splat_part(shares[r]);
  }
  add_steps(rows, PairColumns{values, value_dim}, kTileKeys / kStepDepth, local);
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < Parts; ++p) store_part(sums + r * value_dim + p * kPartLanes, local[r][p]);
  }
}

// Parts: of 16 channels. Callers hold a PairMode, as for scores.
template <int Rows, int Parts>
void add_pairs(const Pair* weights, const float* shares, const uint32_t* values, int64_t value_dim, float* sums) {
  constexpr int parts = std::min(parts_at_once(Rows), Parts * kLanes / kPartLanes);
  for (int first = 0; first < Parts * kLanes; first += parts * kPartLanes)
    add_parts<Rows, parts>(weights, shares, values + first, value_dim, sums + first);
}
#endif

}  // namespace moeserve
