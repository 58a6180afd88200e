// Groups of weights in registers: codes, scales and shifts as the formats of quantised.h keep them.
#pragma once

#include "dot.h"
#include "halves.h"
#include "quantised.h"

namespace moeserve {

inline PartWords load_part_words(const uint8_t* from) {
  PartWords value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline Floats from_half(const uint8_t* from) { return from_halves(load_halves(from)); }

// A vector whose parts fit a register; the compiler would keep whole ones in memory on some machines.
template <typename PartOf>
MOESERVE_INLINE Words in_parts(PartOf part_of) {
  union {
    PartWords parts[kLanes / kPartLanes];
    Words whole;
  } out;
  for (int p = 0; p < kLanes / kPartLanes; ++p) out.parts[p] = part_of(p);
  return out.whole;
}

MOESERVE_INLINE Floats scaled(Floats value, float by) {
  union {
    Floats whole;
    Part parts[kLanes / kPartLanes];
  } out = {value};
  for (int p = 0; p < kLanes / kPartLanes; ++p) out.parts[p] *= splat_part(by);
  return out.whole;
}

inline Words from_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  // The compiler would convert byte after byte.
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return in_parts([&](int p) { return (PartWords)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * p))); });
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, Words);
#endif
}

inline Floats to_floats(Words w) { return __builtin_convertvector((Ints)w, Floats); }

inline Floats from_exponents(const uint8_t* from) {
  // Twice 2^(e - 127), because the codes of MXFP4 are doubled to be whole.
  const Words e = from_bytes(from);
  return (Floats)((Words)select((Ints)(e == 0u), (Floats)(Words{} + 0x00400000u), (Floats)(e << 23))) * 0.5f;
}

inline Floats from_bf16(const uint8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  return (Floats)in_parts([&](int p) {
    return (PartWords)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + 16 * p))) << 16;
  });
#else
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

constexpr float kE4m3Unit = 0x1p120f;

// 16 floats of 8 bits, with four of exponent and three of mantissa, in units of 2^-120: in float's fields they are too
// small by this factor, subnormal ones too.
inline Floats from_e4m3(const uint8_t* from) {
#if defined(__AVX512F__)
  const Words extended = (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  const Words extended =
      in_parts([&](int p) { return (PartWords)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(from + 8 * p))); });
#else
  typedef int8_t Bytes __attribute__((vector_size(16)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const Words extended = (Words)__builtin_convertvector(bytes, Ints);
#endif
  return (Floats)(extended << 20 & 0x87f00000u);
}

// Twice the values of e2m1 plus 12, and the values of ggml's IQ4_NL and IQ4_XS plus 127.
constexpr uint8_t kE2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kIq4[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};

inline PartWords look_up(PartWords codes, const uint8_t* values) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values));
  return (PartWords)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
  return (PartWords)_mm256_shuffle_epi8(table, (__m256i)codes);
#else
  uint8_t bytes[sizeof(codes)];
  std::memcpy(bytes, &codes, sizeof(codes));
  for (uint8_t& byte : bytes) byte = values[byte];
  std::memcpy(&codes, bytes, sizeof(codes));
  return codes;
#endif
}

// The scales of a superblock.
struct Super {
  Floats scale, min;
};

template <Format F>
MOESERVE_INLINE Super load_super(const uint8_t* from) {
  constexpr Traits format = traits_of(F);
  Super super{};
  if constexpr (format.scale == Scale::kSuperE4m3 || format.scale == Scale::kSuperF32) {
    super.scale = load(reinterpret_cast<const float*>(from));
    if constexpr (format.code == Code::kE4m3) super.scale *= kE4m3Unit;
  }
  if constexpr (format.scale == Scale::kSuper || format.scale == Scale::kSuperHalf) super.scale = from_half(from);
  if constexpr (format.shift == Shift::kSuperMin) super.min = from_half(from + 2 * kLanes);
  return super;
}

// Bits of the codes at `from`, whose vectors have those of 8 / Width vectors of codes in the bytes, as bits `First` and up
// of vector i of codes.
template <int Width, int First>
MOESERVE_INLINE PartWords part_of_bits(const uint8_t* from, int i) {
  constexpr int per_vector = 8 / Width;
  const PartWords bits = load_part_words(from + 64 * (i / per_vector));
  const int right = i % per_vector * Width - First;
  return (right < 0 ? bits << -right : bits >> right) & 0x01010101u * ((1u << Width) - 1 << First);
}

template <Format F>
struct Group {
  static constexpr Traits kFormat = traits_of(F);
  Words codes[8];
  const uint8_t* floats;  // Codes that are floats of 8 bits, in place.
  Floats scale[kFormat.parts];
  Floats shift[kFormat.parts];  // What Shift says, but for a constant.

  MOESERVE_INLINE Group(const uint8_t* from, const Super& super) {
    load_codes(from);
    for (int part = 0; part < kFormat.parts; ++part) {
      scale[part] = load_scale(from + kFormat.scale_at(part), super);
      shift[part] = load_shift(from + kFormat.shift_at(part), super);
    }
  }

  MOESERVE_INLINE void load_codes(const uint8_t* from) {
    if constexpr (kFormat.code == Code::kE4m3) {
      floats = from;
      return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) codes[i] = code(from, i);
  }

  static MOESERVE_INLINE Words code(const uint8_t* from, int i) {
    return in_parts([&](int p) { return part_of_code(from + p * sizeof(PartWords), i); });
  }

  static MOESERVE_INLINE PartWords part_of_code(const uint8_t* from, int i) {
    if constexpr (kFormat.bits == 8) return load_part_words(from + 64 * i);
    constexpr int low_bits = kFormat.bits < 4 ? 2 : 4, high_bits = kFormat.bits - low_bits;
    PartWords value = part_of_bits<low_bits, 0>(from, i);
    if constexpr (kFormat.code == Code::kE2m1) value = look_up(value, kE2m1);
    if constexpr (kFormat.code == Code::kIq4) value = look_up(value, kIq4);
    if constexpr (high_bits > 0) value |= part_of_bits<high_bits, low_bits>(from + 64 * low_bits, i);
    return value;
  }

  static MOESERVE_INLINE Floats load_shift(const uint8_t* from, const Super& super) {
    if constexpr (kFormat.shift == Shift::kMin) return from_half(from);
    if constexpr (kFormat.shift == Shift::kSuperMin)
      return super.min * to_floats(from_bytes(from) >> (kFormat.scale == Scale::kSuperHalf ? 4 : 0));
    if constexpr (kFormat.shift == Shift::kZero) return to_floats(from_bytes(from));
    return Floats{};
  }

  static MOESERVE_INLINE Floats load_scale(const uint8_t* from, const Super& super) {
    if constexpr (kFormat.scale == Scale::kF16) return from_half(from);
    if constexpr (kFormat.scale == Scale::kBf16) return from_bf16(from);
    if constexpr (kFormat.scale == Scale::kF32)
      return load(reinterpret_cast<const float*>(from)) * (kFormat.code == Code::kE4m3 ? kE4m3Unit : 1.0f);
    if constexpr (kFormat.scale == Scale::kSuperF32) return super.scale;
    if constexpr (kFormat.scale == Scale::kE8m0) return from_exponents(from);
    if constexpr (kFormat.scale == Scale::kSuperHalf) return super.scale * to_floats(from_bytes(from) & 15u);
    // Half, because codes of e2m1 are doubled to be whole.
    if constexpr (kFormat.scale == Scale::kSuperE4m3) return from_e4m3(from) * kE4m3Unit * super.scale * 0.5f;
    // Bytes of Q6_K, Q3_K and IQ4_XS are signed; those of the others are below 64.
    const Ints bytes = (Ints)(from_bytes(from) << 24) >> 24;
    return super.scale * __builtin_convertvector(bytes, Floats);
  }

  // The weights of 16 columns at depth 4 i + b. Every format but one with 32-bit scales is exact up to the minimum.
  MOESERVE_INLINE Floats weights(int i, int b) const {
    if constexpr (kFormat.code == Code::kE4m3) return from_e4m3(floats + kLanes * (4 * i + b)) * scale[0];
    const Words code = (codes[i] >> (8 * b)) & 255u;
    Floats value = to_floats(code);
    const int part = kFormat.parts * i / 8;
    if constexpr (kFormat.shift == Shift::kConstant) value -= float(kFormat.offset);
    if constexpr (kFormat.shift == Shift::kZero) value -= shift[part];
    value *= scale[part];
    if constexpr (kFormat.shift == Shift::kMin) value += shift[part];
    if constexpr (kFormat.shift == Shift::kSuperMin) value -= shift[part];
    return value;
  }
};

// Calls use(group number, group) for the groups of one half of a panel.
template <Format F, typename Use>
MOESERVE_INLINE void for_groups(const uint8_t* half, int64_t num_blocks, Use use) {
  constexpr Traits format = traits_of(F);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const Super super = load_super<F>(half);
    half += format.super_bytes();
    for (int g = 0; g < format.groups; ++g, half += format.group_bytes()) {
      for (int line = 0; line < format.group_bytes(); line += 64) __builtin_prefetch(half + line + kPrefetch);
      use(block * format.groups + g, Group<F>(half, super));
    }
  }
}

}  // namespace moeserve
