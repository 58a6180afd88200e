// Numbers in float16: sixteen at a time, rounded to the nearest, ties to even.
#pragma once

#include "simd.h"

namespace moeserve {

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

static inline Halves load_halves(const uint8_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return halves;
}

#if defined(__AVX512F__)
static inline Floats from_halves(Halves halves) { return (Floats)_mm512_cvtph_ps((__m256i)halves); }

static inline Halves to_halves(Floats value) { return (Halves)_mm512_cvtps_ph((__m512)value, 0); }
#elif defined(__F16C__)
static inline Floats from_halves(Halves halves) {
  union {
    Halves whole;
    __m128i halves[2];
  } from = {halves};
  union {
    Floats whole;
    __m256 halves[2];
  } out;
  for (int i = 0; i < 2; ++i) out.halves[i] = _mm256_cvtph_ps(from.halves[i]);
  return out.whole;
}

static inline Halves to_halves(Floats value) {
  union {
    Floats whole;
    __m256 halves[2];
  } from = {value};
  union {
    Halves whole;
    __m128i halves[2];
  } out;
  for (int i = 0; i < 2; ++i) out.halves[i] = _mm256_cvtps_ph(from.halves[i], 0);
  return out.whole;
}
#else
static inline Floats from_halves(Halves halves) {
  // Shifted into float's fields, a half is 2^112 times too small; so are subnormal ones.
  const Words bits = __builtin_convertvector(halves, Words), magnitude = (bits & 0x7fffu) << 13;
  const Floats value = (Floats)magnitude * 0x1p112f;
  const Ints special = (Ints)(magnitude >= 0x0f800000u);
  return (Floats)((Words)select(special, (Floats)(magnitude | 0x7f800000u), value) | (bits & 0x8000u) << 16);
}

static inline Halves to_halves(Floats value) {
  const Words bits = (Words)value, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
  // The last bit of 0.5 is the smallest half: an addition rounds to multiples of it.
  const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
  const Words none = (magnitude >> 13 & 0x3ffu) | 0x7e00u;
  const auto choose = [](Ints condition, Words yes, Words no) { return condition ? yes : no; };
  Words half = choose((Ints)(magnitude < 0x38800000u), subnormal, normal);
  half = choose((Ints)(half >= 0x7c00u), Words{} + 0x7c00u, half);
  half = choose((Ints)(magnitude > 0x7f800000u), none, half);
  return __builtin_convertvector(half | (bits >> 16 & 0x8000u), Halves);
}
#endif

}  // namespace moeserve
