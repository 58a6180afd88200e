// Products of integers of 8 bits: exact, so their sums have the same bits in any order and on any machine.
#pragma once

#include "simd.h"

namespace moeserve {

static inline Ints splat(int32_t v) { return Ints{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }

// Four codes of a row, read in place so that the compiler broadcasts them from memory.
typedef int32_t Four __attribute__((may_alias));

// Adds the products of four unsigned bytes of each lane with the four signed bytes of `four`. Narrow: codes < 128.
template <bool Narrow>
static inline Ints dot(Ints sums, Words codes, int32_t four) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(four));
#elif defined(__AVX2__)
  union {
    Words whole;
    __m256i halves[2];
  } code = {codes};
  union {
    Ints whole;
    __m256i halves[2];
  } sum = {sums};
  const __m256i x = _mm256_set1_epi32(four);
  for (int half = 0; half < 2; ++half) {
#if defined(__AVXVNNI__)
    sum.halves[half] = _mm256_dpbusd_avx_epi32(sum.halves[half], code.halves[half], x);
#else
    // Sums of two products must fit 16 bits, so that codes of 8 bits are multiplied in two parts of 4.
    const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
    const auto products = [&](__m256i c) { return _mm256_madd_epi16(_mm256_maddubs_epi16(c, x), ones); };
    __m256i product;
    if (Narrow) {
      product = products(code.halves[half]);
    } else {
      const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(code.halves[half], 4), low);
      product = _mm256_add_epi32(products(_mm256_and_si256(code.halves[half], low)),
                                 _mm256_slli_epi32(products(upper), 4));
    }
    sum.halves[half] = _mm256_add_epi32(sum.halves[half], product);
#endif
  }
  return sum.whole;
#elif defined(__ARM_FEATURE_DOTPROD)
  union {
    Words whole;
    uint8x16_t parts[4];
  } code = {codes};
  union {
    Ints whole;
    int32x4_t parts[4];
  } sum = {sums};
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int p = 0; p < 4; ++p) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    sum.parts[p] = vusdotq_s32(sum.parts[p], code.parts[p], x);
#else
    // Codes of 8 bits less 128 are signed; twice 64 makes up for it.
    const uint8x16_t turned = Narrow ? code.parts[p] : veorq_u8(code.parts[p], vdupq_n_u8(128));
    sum.parts[p] = vdotq_s32(sum.parts[p], vreinterpretq_s8_u8(turned), x);
    if (!Narrow) {
      const int8x16_t half = vdupq_n_s8(64);
      sum.parts[p] = vdotq_s32(vdotq_s32(sum.parts[p], half, x), half, x);
    }
#endif
  }
  return sum.whole;
#else
  for (int b = 0; b < 4; ++b)
    sums += (Ints)((codes >> (8 * b)) & 255u) * splat(int32_t(int8_t(uint32_t(four) >> (8 * b))));
  return sums;
#endif
}

}  // namespace moeserve
