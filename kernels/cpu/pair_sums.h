// Sums of products of pairs of bfloat16 as tiles compute them (tiles.h), on machines without tiles.
//
// Of each 32 numbers of the depth, a step, the products at even places are one chain of fused multiply-adds from zero, and
// those at odd places another one. Their sum is added to that of the steps before. Subnormal numbers count as zeros: callers
// hold a PairMode and compute in a function that is not inlined.
//
// Machines go along a chain number by number, widened in registers or in one half of each word. `vdpbf16ps` adds both
// numbers of a pair to one chain, the upper one first: there a pair is of a chain, two neighbouring pairs of both. Without
// MOESERVE_SUMS_AS_TILES it computes an order of its own, one chain of all pairs, which takes less time.
#pragma once

#include "tiles.h"

namespace moeserve {

constexpr int kStepDepth = 32;
constexpr int kStepPairs = kStepDepth / 2;

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int kPartsOfSums = 24;  // Of the 32 registers: the other ones hold weights and a row's number.
#else
constexpr int kPartsOfSums = 12;  // Of 16.
#endif

#if !defined(MOESERVE_HAS_TILES)
#if defined(__AVX512BF16__)
#define MOESERVE_MULTIPLIES_PAIRS
#if !defined(MOESERVE_SUMS_AS_TILES)
#define MOESERVE_HAS_ONE_CHAIN
#endif
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MOESERVE_MULTIPLIES_HALVES
#endif
#endif

// Two numbers of a row, rounded to bfloat16. Zeros follow a row whose depth is no multiple of a step's.
#if defined(MOESERVE_HAS_TILES) || defined(MOESERVE_MULTIPLIES_PAIRS)
#define MOESERVE_PACKS_PAIRS
struct Pair {
  int32_t bits;
};
#else
struct Pair {
  float even, odd;  // Of the chains. With MOESERVE_MULTIPLIES_HALVES a number is in both halves of its word.
};
#endif

#if defined(MOESERVE_HAS_ONE_CHAIN)
constexpr bool kSumsAsTiles = false;
struct PairMode {};  // `vdpbf16ps` takes subnormal numbers for zeros by itself.
#else
constexpr bool kSumsAsTiles = true;
using PairMode = WithoutSubnormals;
#endif

// The places of the numbers of a pair, in its lower and its upper half.
#if defined(MOESERVE_MULTIPLIES_PAIRS) && !defined(MOESERVE_HAS_ONE_CHAIN)
constexpr int64_t lower_place(int64_t pair) { return 2 * pair + 2 - pair % 2; }
constexpr int64_t upper_place(int64_t pair) { return 2 * pair - pair % 2; }
#else
constexpr int64_t lower_place(int64_t pair) { return 2 * pair; }
constexpr int64_t upper_place(int64_t pair) { return 2 * pair + 1; }
#endif

#if !defined(MOESERVE_HAS_TILES)

// What is multiplied: pairs as they are, or the numbers of one chain.
#if defined(MOESERVE_PACKS_PAIRS)
typedef PartWords Factors;

template <int Chain>
MOESERVE_INLINE Factors factor_of(PartWords pairs) { return pairs; }

template <int Chain>
MOESERVE_INLINE Factors splat_factor(const Pair& pair) { return PartWords{} + uint32_t(pair.bits); }
#else
typedef Part Factors;

template <int Chain>
MOESERVE_INLINE Factors factor_of(PartWords pairs) {
#if defined(MOESERVE_MULTIPLIES_HALVES)
  return (Part)pairs;
#else
  return (Part)(Chain ? pairs & 0xffff0000u : pairs << 16);
#endif
}

template <int Chain>
MOESERVE_INLINE Factors splat_factor(const Pair& pair) { return splat_part(Chain ? pair.odd : pair.even); }
#endif

// upper: which halves of words are multiplied, where numbers are not widened.
MOESERVE_INLINE Part add_products(Part sums, Factors a, Factors b, [[maybe_unused]] bool upper) {
#if defined(MOESERVE_MULTIPLIES_PAIRS)
  return (Part)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#elif defined(MOESERVE_MULTIPLIES_HALVES)
  const auto x = (bfloat16x8_t)a, y = (bfloat16x8_t)b;
  return (Part)(upper ? vbfmlaltq_f32((float32x4_t)sums, x, y) : vbfmlalbq_f32((float32x4_t)sums, x, y));
#else
  return fma_part(a, b, sums);
#endif
}

// The pairs of a step that a chain goes along, and the pair of its turn i.
#if defined(MOESERVE_MULTIPLIES_PAIRS)
constexpr int kTurns = kStepPairs / 2;
template <int Chain>
constexpr int64_t pair_of_turn(int64_t i) { return 2 * i + Chain; }
#else
constexpr int kTurns = kStepPairs;
template <int Chain>
constexpr int64_t pair_of_turn(int64_t i) { return i; }
#endif

// Words [depth / 2, stride], each a pair of a column.
struct PairColumns {
  const uint32_t* words;
  int64_t stride;

  static constexpr bool is_upper(int chain, int) { return chain; }

  template <int Chain, int Parts>
  MOESERVE_INLINE void load(int64_t pair, Factors (&parts)[Parts]) const {
#pragma GCC unroll 16
    for (int p = 0; p < Parts; ++p) {
      PartWords both;
      std::memcpy(&both, words + pair * stride + p * kPartLanes, sizeof(both));
      parts[p] = factor_of<Chain>(both);
    }
  }
};

// Adds the products of a chain at one of its turns.
template <int Chain, int Rows, int Parts, typename Weights>
MOESERVE_INLINE void take_turn(const Pair* const (&rows)[Rows], const Weights& weights, int64_t pair,
                               Part (&sums)[Rows][Parts]) {
  Factors weight[Parts];
  weights.template load<Chain>(pair, weight);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const Factors x = splat_factor<Chain>(rows[r][pair]);
#pragma GCC unroll 16
    for (int p = 0; p < Parts; ++p) sums[r][p] = add_products(sums[r][p], x, weight[p], Weights::is_upper(Chain, p));
  }
}

// Adds the products of rows with the weights of `num_steps` steps.
template <int Rows, int Parts, typename Weights>
MOESERVE_INLINE void add_steps(const Pair* const (&rows)[Rows], const Weights& weights, int64_t num_steps,
                               Part (&sums)[Rows][Parts]) {
#if defined(MOESERVE_HAS_ONE_CHAIN)
#pragma GCC unroll 4
  for (int64_t pair = 0; pair < num_steps * kStepPairs; ++pair) take_turn<0>(rows, weights, pair, sums);
#else
  for (int64_t first = 0; first < num_steps * kStepPairs; first += kStepPairs) {
    Part even[Rows][Parts] = {}, odd[Rows][Parts] = {};
    if constexpr (2 * Rows * Parts <= kPartsOfSums) {
      // Side by side: few chains would wait for their own results.
#pragma GCC unroll 4
      for (int i = 0; i < kTurns; ++i) {
        take_turn<0>(rows, weights, first + pair_of_turn<0>(i), even);
        take_turn<1>(rows, weights, first + pair_of_turn<1>(i), odd);
      }
    } else {
#pragma GCC unroll 4
      for (int i = 0; i < kTurns; ++i) take_turn<0>(rows, weights, first + pair_of_turn<0>(i), even);
#pragma GCC unroll 4
      for (int i = 0; i < kTurns; ++i) take_turn<1>(rows, weights, first + pair_of_turn<1>(i), odd);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int p = 0; p < Parts; ++p) sums[r][p] += even[r][p] + odd[r][p];
    }
  }
#endif
}
#endif

}  // namespace moeserve
