// A tile of 64 keys in attention over rows of bfloat16, where the machine has dot products of its pairs: queries and
// weights are rounded to bfloat16, too, and products are summed in float32.
#pragma once

#include <vector>

#include "attention_tile.h"
#include "panels.h"

namespace moeserve {

// Keys as [dim / 2][64] pairs of channels, values as [32][dim] pairs of keys.
struct PairTile {
  std::vector<uint32_t> keys, values;

  void reserve(int64_t key_dim, int64_t value_dim) {
    keys.resize(key_dim / 2 * kTileKeys);
    values.resize(kTileKeys / 2 * value_dim);
  }

  void take(const uint8_t* const* key_rows, const uint8_t* const* value_rows, int64_t count, int64_t key_dim,
            int64_t value_dim) {
    transpose_words(key_rows, count, key_dim / 2, 0, keys.data());
    typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
    for (int64_t pair = 0; 2 * pair < count; ++pair) {
      const uint8_t *first = value_rows[2 * pair], *second = value_rows[std::min(2 * pair + 1, count - 1)];
      for (int64_t d = 0; d < value_dim; d += kLanes) {
        Shorts low, high;
        std::memcpy(&low, first + 2 * d, sizeof(low));
        std::memcpy(&high, second + 2 * d, sizeof(high));
        const Words both = __builtin_convertvector(low, Words) | (__builtin_convertvector(high, Words) << 16);
        std::memcpy(values.data() + pair * value_dim + d, &both, sizeof(both));
      }
    }
  }
};

#if defined(__AVX512BF16__)
static inline __m512bh splat_pair(const Pair& pair) { return (__m512bh)_mm512_set1_epi32(pair.bits); }
static inline __m512bh load_pairs(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

// scores[r] = queries[r] . keys. queries: rows of num_pairs(dim) pairs.
template <int Rows>
void score_pairs(const Pair* queries, int64_t dim, const uint32_t* keys, float* scores) {
  __m512 sums[Rows][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
  }
  const int64_t stride = num_pairs(dim);
  for (int64_t d = 0; d < dim / 2; ++d) {
    __m512bh key[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) key[v] = load_pairs(keys + d * kTileKeys + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const __m512bh q = splat_pair(queries[r * stride + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], key[v], q);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(scores + r * kTileKeys + v * kLanes, sums[r][v]);
  }
}

// sums[r] = shares[r] * sums[r] + weights[r] . values over `Parts` parts of channels. weights: rows of 32 pairs.
template <int Rows, int Parts>
void add_pairs(const Pair* weights, const float* shares, const uint32_t* values, int64_t count, int64_t value_dim,
               float* sums) {
  __m512 local[Rows][Parts];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p)
      local[r][p] = _mm512_mul_ps(_mm512_loadu_ps(sums + r * value_dim + p * kLanes), _mm512_set1_ps(shares[r]));
  }
  for (int64_t pair = 0; 2 * pair < count; ++pair) {
    __m512bh value[Parts];
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) value[p] = load_pairs(values + pair * value_dim + p * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const __m512bh weight = splat_pair(weights[r * (kTileKeys / 2) + pair]);
#pragma GCC unroll 4
      for (int p = 0; p < Parts; ++p) local[r][p] = _mm512_dpbf16_ps(local[r][p], value[p], weight);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < Parts; ++p) _mm512_storeu_ps(sums + r * value_dim + p * kLanes, local[r][p]);
  }
}
#else
template <int Rows>
void score_pairs(const Pair*, int64_t, const uint32_t*, float*) {}

template <int Rows, int Parts>
void add_pairs(const Pair*, const float*, const uint32_t*, int64_t, int64_t, float*) {}
#endif

}  // namespace moeserve
