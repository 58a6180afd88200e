// A tile of 64 keys in attention over rows of 8-bit integers.
//
// A query becomes integers of 16 bits with one scale, and a row's weights in a tile integers of 14 bits, each as two
// codes of 8 bits (as in SageAttention, with twice the bits; Zhang et al., 2024). Their products with keys and values
// are exact sums of integers, and scales multiply the sums. So a row has the same bits beside any others here too.
#pragma once

#include <vector>

#include "attention_tile.h"
#include "dot.h"
#include "kv_rows.h"
#include "tiles.h"

namespace moeserve {

constexpr float kQueryReach = 32639.0f;   // 127 * 256 + 127.
constexpr float kWeightReach = 16383.0f;  // 127 * 128 + 127.
constexpr int kColumnsAtOnce = 2;         // Parts of 16 keys or channels whose sums stay in the registers.

// Adds the products of the four bytes of `four`, each below 128, with the four signed bytes of each lane.
static inline Ints dot_signed(Ints sums, int32_t four, Words codes) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four), (__m512i)codes);
#elif defined(__AVX2__)
  union {
    Words whole;
    __m256i halves[2];
  } code = {codes};
  union {
    Ints whole;
    __m256i halves[2];
  } sum = {sums};
  const __m256i x = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  for (int half = 0; half < 2; ++half)
    sum.halves[half] =
        _mm256_add_epi32(sum.halves[half], _mm256_madd_epi16(_mm256_maddubs_epi16(x, code.halves[half]), ones));
  return sum.whole;
#elif defined(__ARM_FEATURE_DOTPROD)
  union {
    Words whole;
    int8x16_t parts[4];
  } code = {codes};
  union {
    Ints whole;
    int32x4_t parts[4];
  } sum = {sums};
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int p = 0; p < 4; ++p) sum.parts[p] = vdotq_s32(sum.parts[p], code.parts[p], x);
  return sum.whole;
#else
  for (int b = 0; b < 4; ++b) sums += ((Ints)(codes << (24 - 8 * b)) >> 24) * splat((four >> (8 * b)) & 255);
  return sums;
#endif
}

typedef int8_t Codes __attribute__((vector_size(kLanes)));

static inline void store_codes(int8_t* to, Ints values) {
  const Codes codes = __builtin_convertvector(values, Codes);
  std::memcpy(to, &codes, sizeof(codes));
}

static inline int32_t sum(Ints values) {
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += values[i];
  return total;
}

// Rounds numbers below 2^22 to the nearest integers, ties to even.
static inline Ints to_nearest(Floats x) {
  const Floats magic = splat(12582912.0f);
  return __builtin_convertvector((x + magic) - magic, Ints);
}

// Rounded queries: number i of a row is about factor * (256 * high[i] + low[i]).
struct RoundedQueries {
  Lines<int8_t> high, low;
  std::vector<float> factors;
  std::vector<int32_t> high_shifts, low_shifts;  // -128 times the sum of a row's codes: keys are stored plus 128.

  void reserve(int64_t rows, int64_t dim) {
    high.reserve(rows * dim), low.reserve(rows * dim);
    factors.resize(rows), high_shifts.resize(rows), low_shifts.resize(rows);
  }

  // `scale` multiplies all scores.
  void take(const float* queries, int64_t rows, int64_t dim, float scale) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = queries + r * dim;
      const float unit = reach(row, dim) / kQueryReach, divisor = unit == 0.0f ? 1.0f : unit;
      Ints high_sums{}, low_sums{};
      for (int64_t i = 0; i < dim; i += kLanes) {
        const Ints whole = to_nearest(load(row + i) / divisor), upper = (whole + 128) >> 8, rest = whole - upper * 256;
        store_codes(high.data() + r * dim + i, upper);
        store_codes(low.data() + r * dim + i, rest);
        high_sums += upper, low_sums += rest;
      }
      factors[r] = unit * scale;
      high_shifts[r] = -128 * sum(high_sums), low_shifts[r] = -128 * sum(low_sums);
    }
  }
};

// The tile itself: codes of keys plus 128 as [dim / 4][64][4], codes of values as [16][dim][4], and their scales.
struct IntegerTile {
  Lines<uint32_t> keys, values;
  alignas(64) float key_scales[kTileKeys], value_scales[kTileKeys];

  void reserve(int64_t key_dim, int64_t value_dim) {
    keys.reserve(key_dim / 4 * kTileKeys);
    values.reserve(kTileKeys / 4 * value_dim);
  }

  void take(const uint8_t* const* key_rows, const uint8_t* const* value_rows, int64_t count, int64_t key_dim,
            int64_t value_dim) {
    for (int64_t k = 0; k < count; ++k)
      key_scales[k] = scale_of(key_rows[k], key_dim), value_scales[k] = scale_of(value_rows[k], value_dim);
    std::fill(key_scales + count, key_scales + kTileKeys, key_scales[count - 1]);
    std::fill(value_scales + count, value_scales + kTileKeys, 0.0f);
    transpose_words(
        key_rows, count, key_dim / 4,
        [](Words (&four)[4]) {
          for (Words& words : four) words ^= 0x80808080u;
        },
        keys.data());
    for (int64_t k = 0; k < count; k += 4) interleave(value_rows + k, value_dim, values.data() + k / 4 * value_dim);
  }

 private:
#if defined(__AVX512BW__)
  // 64 bytes of each of four rows to [64][4].
  static void interleave_lines(const uint8_t* const* rows, int64_t d, uint32_t* out) {
    __m512i row[4];
    for (int i = 0; i < 4; ++i) row[i] = _mm512_loadu_si512(rows[i] + d);
    const __m512i low[2] = {_mm512_unpacklo_epi8(row[0], row[1]), _mm512_unpacklo_epi8(row[2], row[3])};
    const __m512i high[2] = {_mm512_unpackhi_epi8(row[0], row[1]), _mm512_unpackhi_epi8(row[2], row[3])};
    // Quarter q of vector i has four bytes of each row, from 16 q + 4 i on.
    const __m512i four[4] = {_mm512_unpacklo_epi16(low[0], low[1]), _mm512_unpackhi_epi16(low[0], low[1]),
                             _mm512_unpacklo_epi16(high[0], high[1]), _mm512_unpackhi_epi16(high[0], high[1])};
    for (int half = 0; half < 2; ++half) {
      const __m512i first = half ? _mm512_shuffle_i32x4(four[0], four[1], 0xee)
                                 : _mm512_shuffle_i32x4(four[0], four[1], 0x44);
      const __m512i second = half ? _mm512_shuffle_i32x4(four[2], four[3], 0xee)
                                  : _mm512_shuffle_i32x4(four[2], four[3], 0x44);
      _mm512_storeu_si512(out + 32 * half, _mm512_shuffle_i32x4(first, second, 0x88));
      _mm512_storeu_si512(out + 32 * half + 16, _mm512_shuffle_i32x4(first, second, 0xdd));
    }
  }
#endif

  // Four rows of bytes to [dim][4].
  static void interleave(const uint8_t* const* rows, int64_t dim, uint32_t* out) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    typedef uint16_t Pairs __attribute__((vector_size(16)));
    int64_t d = 0;
#if defined(__AVX512BW__)
    for (; d + 64 <= dim; d += 64) interleave_lines(rows, d, out + d);
#endif
    for (; d < dim; d += 16) {
      Bytes row[4], mixed[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&row[i], rows[i] + d, 16);
      for (int i = 0; i < 2; ++i) {
        const Bytes a = row[2 * i], b = row[2 * i + 1];
        mixed[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        mixed[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
      }
      for (int i = 0; i < 2; ++i) {
        const Pairs a = (Pairs)mixed[i], b = (Pairs)mixed[2 + i];
        const Pairs low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
        const Pairs high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
        std::memcpy(out + d + 8 * i, &low, 16);
        std::memcpy(out + d + 8 * i + 4, &high, 16);
      }
    }
  }
};

static inline Words load_words(const uint32_t* from) {
  Words value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// scores[r] = query . keys, without scales, for kColumnsAtOnce parts of keys.
template <int Rows>
void score_integers(const int8_t* high, const int8_t* low, const int32_t* high_shifts, const int32_t* low_shifts,
                    int64_t dim, const uint32_t* keys, float* scores) {
  Ints high_sums[Rows][kColumnsAtOnce], low_sums[Rows][kColumnsAtOnce];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kColumnsAtOnce; ++p)
      high_sums[r][p] = splat(high_shifts[r]), low_sums[r][p] = splat(low_shifts[r]);
  }
  for (int64_t d = 0; d < dim; d += 4) {
    Words key[kColumnsAtOnce];
#pragma GCC unroll 2
    for (int p = 0; p < kColumnsAtOnce; ++p) key[p] = load_words(keys + d / 4 * kTileKeys + p * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Four upper = *(const Four*)(high + r * dim + d), lower = *(const Four*)(low + r * dim + d);
#pragma GCC unroll 2
      for (int p = 0; p < kColumnsAtOnce; ++p) {
        high_sums[r][p] = dot<false>(high_sums[r][p], key[p], upper);
        low_sums[r][p] = dot<false>(low_sums[r][p], key[p], lower);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < kColumnsAtOnce; ++p)
      store(scores + r * kTileKeys + p * kLanes, __builtin_convertvector(high_sums[r][p], Floats) * 256.0f +
                                                     __builtin_convertvector(low_sums[r][p], Floats));
  }
}

// Of rows in a tile, for their weights; whole vectors are written.
struct WeightFactors {
  // The largest score; what the weights are multiplied by to be rounded; what multiplies the sums of earlier tiles, and
  // those of rounded weights.
  float *tops, *units, *shares, *factors;

  WeightFactors from(int64_t row) const { return {tops + row, units + row, shares + row, factors + row}; }
};

// Turns scaled scores of rows in a tile into weights, times the scales of their values, and folds them into the rows'
// state, but for the sums of values.
template <int Rows>
static inline void weigh_integers(const IntegerTile& tile, float* scores, float* largest_seen, float* total,
                                  const WeightFactors& of_rows) {
  Floats sums[Rows], most[Rows];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    const Floats base = splat(of_rows.tops[r] == kNothing ? 0.0f : of_rows.tops[r]);
    sums[r] = most[r] = Floats{};
    for (int v = 0; v < kVectors; ++v) {
      float* at = scores + r * kTileKeys + v * kLanes;
      const Floats weight = exp_of_negative(load(at) - base), of_value = weight * load(tile.value_scales + v * kLanes);
      store(at, of_value);
      most[r] = max(most[r], of_value);
      sums[r] += fma(of_value, Floats{}, weight);  // A value that is no number makes the sum none.
    }
  }
  const Floats reaches = largest_each(most), tile_tops = load(of_rows.tops);
  const Floats before = load_first<Rows>(largest_seen), tops = select((Ints)(before < tile_tops), tile_tops, before);
  const Floats bases = select((Ints)(tops == kNothing), Floats{}, tops);
  const Floats share = exp_of_negative(before - bases), share_here = exp_of_negative(tile_tops - bases);
  store(of_rows.units, select((Ints)(reaches > 0.0f), kWeightReach / reaches, Floats{}));
  store(of_rows.shares, share);
  store(of_rows.factors, share_here * (reaches / kWeightReach));
  store_first<Rows>(largest_seen, tops);
  store_first<Rows>(total, fma(sum_each(sums), share_here, load_first<Rows>(total) * share));
}

// Rounded weights of one row in a tile: weight k is about factor * (128 * high[k] + low[k]) of the running softmax.
struct alignas(64) RoundedWeights {
  int8_t high[kTileKeys], low[kTileKeys];
};

// weights: of one row in a tile, as weigh_integers leaves them.
static inline void round_weights(const float* weights, float unit, RoundedWeights& out) {
  for (int v = 0; v < kVectors; ++v) {
    const Floats scaled = fma(load(weights + v * kLanes), splat(unit), splat(0.5f));
    const Ints whole = __builtin_convertvector(scaled, Ints);
    store_codes(out.high + v * kLanes, whole >> 7);
    store_codes(out.low + v * kLanes, whole & 127);
  }
}

// sums[r] = share * sums[r] + factor * (weights[r] . values) over `Parts` parts of channels.
template <int Rows, int Parts>
void add_integers(const RoundedWeights* weights, const WeightFactors& of_rows, const uint32_t* values, int64_t count,
                  int64_t value_dim, float* sums) {
  Ints high[Rows][Parts] = {}, low[Rows][Parts] = {};
  for (int64_t quad = 0; 4 * quad < count; ++quad) {
    Words value[Parts];
#pragma GCC unroll 2
    for (int p = 0; p < Parts; ++p) value[p] = load_words(values + quad * value_dim + p * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const Four upper = *(const Four*)(weights[r].high + 4 * quad), lower = *(const Four*)(weights[r].low + 4 * quad);
#pragma GCC unroll 2
      for (int p = 0; p < Parts; ++p) {
        high[r][p] = dot_signed(high[r][p], upper, value[p]);
        low[r][p] = dot_signed(low[r][p], lower, value[p]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    if (of_rows.tops[r] == kNothing) continue;
#pragma GCC unroll 2
    for (int p = 0; p < Parts; ++p) {
      float* to = sums + r * value_dim + p * kLanes;
      const Floats whole = __builtin_convertvector((high[r][p] << 7) + low[r][p], Floats);
      store(to, fma(whole, splat(of_rows.factors[r]), load(to) * of_rows.shares[r]));
    }
  }
}

#if defined(MOESERVE_HAS_TILES)
// The products of 16 rows in tiles with 16 columns, by the upper and by the lower codes of the rows.
struct alignas(64) TiledIntegers {
  Ints high[kTileHeight], low[kTileHeight];
};

// Shapes for up to 16 rows of 64 codes: tiles 0 to 3 have products, 4 and 5 rows, 6 and 7 columns.
static inline void shape_integer_tiles(int num_rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 6; ++tile) shapes.set(tile, num_rows, kTileRowBytes);
  for (int tile = 6; tile < 8; ++tile) shapes.set(tile, kTileHeight, kTileRowBytes);
  shape_tiles(shapes);
}

// score_integers for any number of rows, 64 keys and whole tiles of channels. The sums are exact: the bits are the same.
static inline void score_integers_in_tiles(const RoundedQueries& queries, int64_t row, int64_t num_rows, int64_t dim,
                                           const uint32_t* keys, float* scores) {
  for (int64_t first = 0; first < num_rows; first += kTileHeight) {
    const int rows = int(std::min<int64_t>(kTileHeight, num_rows - first));
    const int64_t at = row + first;
    TiledIntegers products[kVectors];
    shape_integer_tiles(rows);
    const auto multiply = [&](auto tile, int v) __attribute__((always_inline)) {
      constexpr int high = tile(), low = high + 1;
      zero_tile<high>(), zero_tile<low>();
      for (int64_t d = 0; d < dim; d += kTileRowBytes) {
        load_tile<6>(keys + d / 4 * kTileKeys + v * kLanes, kTileKeys * sizeof(uint32_t));
        load_tile<4>(queries.high.data() + at * dim + d, dim);
        add_unsigned_products<high, 4, 6>();
        load_tile<5>(queries.low.data() + at * dim + d, dim);
        add_unsigned_products<low, 5, 6>();
      }
    };
    // Each pair is stored behind the products of the next one: the tile unit would wait for stores in a row.
    const auto keep = [&](auto tile, int v) __attribute__((always_inline)) {
      store_tile<tile()>(products[v].high, kTileRowBytes);
      store_tile<tile() + 1>(products[v].low, kTileRowBytes);
    };
    const std::integral_constant<int, 0> even;
    const std::integral_constant<int, 2> odd;
    multiply(even, 0), multiply(odd, 1), keep(even, 0);
    multiply(even, 2), keep(odd, 1);
    multiply(odd, 3), keep(even, 2), keep(odd, 3);
    for (int r = 0; r < rows; ++r)
      for (int v = 0; v < kVectors; ++v)
        store(scores + (first + r) * kTileKeys + v * kLanes,
              __builtin_convertvector(products[v].high[r] + splat(queries.high_shifts[at + r]), Floats) * 256.0f +
                  __builtin_convertvector(products[v].low[r] + splat(queries.low_shifts[at + r]), Floats));
  }
  release_tiles();
}

// add_integers for any number of rows and all channels. scores: weights as weigh_integers leaves them.
static inline void add_integers_in_tiles(const float* scores, const WeightFactors& of_rows, int64_t num_rows,
                                         const uint32_t* values, int64_t value_dim, float* sums) {
  for (int64_t first = 0; first < num_rows; first += kTileHeight) {
    const int rows = int(std::min<int64_t>(kTileHeight, num_rows - first));
    RoundedWeights weights[kTileHeight];
    for (int r = 0; r < rows; ++r)
      round_weights(scores + (first + r) * kTileKeys, of_rows.units[first + r], weights[r]);
    shape_integer_tiles(rows);
    load_tile<4>(weights->high, sizeof(RoundedWeights));
    load_tile<5>(weights->low, sizeof(RoundedWeights));
    for (int64_t d = 0; d < value_dim; d += kLanes) {
      TiledIntegers products;
      zero_tile<0>(), zero_tile<1>();
      load_tile<6>(values + d, value_dim * sizeof(uint32_t));
      add_signed_products<0, 4, 6>(), add_signed_products<1, 5, 6>();
      store_tile<0>(products.high, kTileRowBytes);
      store_tile<1>(products.low, kTileRowBytes);
      for (int r = 0; r < rows; ++r) {
        if (of_rows.tops[first + r] == kNothing) continue;
        float* to = sums + (first + r) * value_dim + d;
        const Floats whole = __builtin_convertvector((products.high[r] << 7) + products.low[r], Floats);
        store(to, fma(whole, splat(of_rows.factors[first + r]), load(to) * of_rows.shares[first + r]));
      }
    }
  }
  release_tiles();
}
#else
static inline void score_integers_in_tiles(const RoundedQueries&, int64_t, int64_t, int64_t, const uint32_t*, float*) {}
static inline void add_integers_in_tiles(const float*, const WeightFactors&, int64_t, const uint32_t*, int64_t, float*) {}
#endif

}  // namespace moeserve
