// Sixteen floats at a time, through the compiler's vector extensions: AVX-512 where the machine has it, else whatever
// the compiler splits them into.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// Counts parts of work that are done, so that a long call is told from a call that hangs. It never goes back.
extern "C" int64_t moeserve_progress;

namespace moeserve {

// Called about once per millisecond or less often; more often, threads would wait for each other.
static inline void count_progress() { __atomic_fetch_add(&moeserve_progress, 1, __ATOMIC_RELAXED); }

constexpr int kLanes = 16;

// The compiler would call some of these functions for the formats with more code, with sums in memory.
#define MOESERVE_INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

static inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

static inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

// Written out, because adding to zero would be an addition: it turns -0 into +0.
static inline Floats splat(float v) { return Floats{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }

// The floats of one register. Loops that sum in registers are written with it: the compiler keeps wider vectors in memory.
#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__ARM_NEON)
constexpr int kPartLanes = 4;
#else
constexpr int kPartLanes = 8;
#endif
typedef float Part __attribute__((vector_size(kPartLanes * sizeof(float))));
typedef uint32_t PartWords __attribute__((vector_size(kPartLanes * sizeof(float))));

static inline Part load_part(const float* from) {
  Part value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

static inline void store_part(float* to, Part value) { std::memcpy(to, &value, sizeof(value)); }

static inline Part splat_part(float v) {
#if defined(__AVX512F__)
  return splat(v);
#elif defined(__ARM_NEON)
  return Part{v, v, v, v};
#else
  return Part{v, v, v, v, v, v, v, v};
#endif
}

// a * b + c, rounded once. Written out, because for some machines the compiler rounds twice in short chains.
static inline Part fma_part(Part a, Part b, Part c) {
#if defined(__AVX512F__)
  return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < kPartLanes; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

// The same for whole vectors.
static inline Floats fma(Floats a, Floats b, Floats c) {
  union {
    Floats whole;
    Part parts[kLanes / kPartLanes];
  } x = {a}, y = {b}, z = {c};
  for (int p = 0; p < kLanes / kPartLanes; ++p) z.parts[p] = fma_part(x.parts[p], y.parts[p], z.parts[p]);
  return z.whole;
}

// Zeros stand for subnormal numbers that are read or computed while it lives, as in dot products of bfloat16. What is
// computed meanwhile must be a function that is not inlined: the compiler knows nothing of this.
class WithoutSubnormals {
 public:
#if defined(__x86_64__)
  WithoutSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~WithoutSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  WithoutSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | 1 << 24) : "memory");
  }
  ~WithoutSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

 private:
  uint64_t before_;
#endif
};

// As an expression of the language, so that the compiler finds the instructions for blends and maxima.
static inline Floats select(Ints condition, Floats yes, Floats no) { return condition ? yes : no; }

// The second number where either is none. Written out, because against constants the compiler compares and blends.
static inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select((Ints)(a > b), a, b);
#endif
}

static inline Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return select((Ints)(a < b), a, b);
#endif
}

// Folds halves onto each other until one lane is left; always the same order.
template <typename Fold>
static inline float fold(Floats v, Fold with) {
  v = with(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = with(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = with(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = with(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

static inline float sum(Floats value) {
  return fold(value, [](Floats a, Floats b) { return a + b; });
}

// Folds up to eight vectors at once, each with the bits of `fold`: lane r of the result is that of vectors[r].
template <int Count, typename Fold>
static inline Floats fold_each(const Floats (&vectors)[Count], Fold with) {
  const auto vector = [&](int i) { return vectors[i < Count ? i : Count - 1]; };
  Floats halves[4], quarters[2];  // Each has the lanes of two vectors, of four.
  for (int i = 0; i < (Count + 1) / 2; ++i) {
    const Floats a = vector(2 * i), b = vector(2 * i + 1);
    halves[i] = with(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                     __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  }
  for (int i = 0; i < (Count + 3) / 4; ++i) {
    const Floats a = halves[2 * i], b = 2 * i + 1 < (Count + 1) / 2 ? halves[2 * i + 1] : a;
    quarters[i] = with(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                       __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  }
  const Floats a = quarters[0], b = Count > 4 ? quarters[1] : a;
  const Floats pairs = with(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                            __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
  const Floats all =
      with(pairs, __builtin_shufflevector(pairs, pairs, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return __builtin_shufflevector(all, all, 0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
}

static inline float largest(Floats value) {
  return fold(value, [](Floats a, Floats b) { return max(a, b); });
}

template <int Count>
static inline Floats sum_each(const Floats (&vectors)[Count]) {
  return fold_each(vectors, [](Floats a, Floats b) { return a + b; });
}

template <int Count>
static inline Floats largest_each(const Floats (&vectors)[Count]) {
  return fold_each(vectors, [](Floats a, Floats b) { return max(a, b); });
}

// The first numbers of a vector in memory. Written out, because the compiler goes through memory, where it waits.
template <int Count>
static inline Floats load_first(const float* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps((1 << Count) - 1, from);
#else
  Floats value{};
  std::memcpy(&value, from, Count * sizeof(float));
  return value;
#endif
}

template <int Count>
static inline void store_first(float* to, Floats value) { std::memcpy(to, &value, Count * sizeof(float)); }

constexpr float kLeastExponent = -87.33654f;  // e to this is the smallest normal number.

// e^x is `mantissa` times 2^n. shifted: n in its low bits, for the constant that was added to round it.
struct PartsOfExp {
  Floats mantissa, shifted, n;
};

// x: within the exponents of normal results.
static inline PartsOfExp parts_of_exp(Floats x) {
  const Floats magic = splat(12582912.0f);  // Adding it rounds to an integer in the low bits.
  const Floats shifted = fma(x, splat(1.44269504f), magic), n = shifted - magic;
  const Floats r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return {fma(p, r * r, r) + 1.0f, shifted, n};
}

// e^x to about two units in the last place; exactly 0 below kLeastExponent and for -infinity.
static inline Floats exp(Floats x) {
  const PartsOfExp parts = parts_of_exp(min(max(x, splat(kLeastExponent)), splat(88.72283f)));
  // 2^n in two steps, because at n = 128 the exponent would not fit.
  const Ints whole = __builtin_convertvector(parts.n, Ints), half = whole >> 1;
  const Floats first = (Floats)((half + 127) << 23), second = (Floats)((whole - half + 127) << 23);
  return select((Ints)(x < kLeastExponent), Floats{}, parts.mantissa * first * second);
}

static inline float exp(float x) { return exp(splat(x))[0]; }

// The same bits for x from kLeastExponent to 88.37 in fewer steps: n is added to the exponent.
static inline Floats exp_of_moderate(Floats x) {
  const PartsOfExp parts = parts_of_exp(x);
  return (Floats)((Ints)parts.mantissa + ((Ints)parts.shifted << 23));
}

// The same bits for x <= 0.
static inline Floats exp_of_negative(Floats x) {
  return select((Ints)(x < kLeastExponent), Floats{}, exp_of_moderate(max(x, splat(kLeastExponent))));
}

// log(1 + x) for x >= 0, by the series of the inverse hyperbolic tangent. The C library's differs between machines.
static inline double log_of_next(double x) {
  const double next = 1.0 + x;
  if (next == 1.0) return x;
  int power;
  double part = std::frexp(next, &power);
  if (part < 0.70710678118654752) part *= 2.0, --power;
  const double ratio = (part - 1.0) / (part + 1.0), square = ratio * ratio;
  double series = 0.0;
  for (int k = 17; k > 0; k -= 2) series = series * square + 1.0 / k;
  // The last factor makes up for the digits of x that the sum has not.
  return (2.0 * ratio * series + power * 0.69314718055994531) * (x / (next - 1.0));
}

// rows[i] becomes column i of a 16 x 16 matrix.
static inline void transpose(Floats (&rows)[kLanes]) {
  Floats next[kLanes];
  for (int i = 0; i < 8; ++i) {
    next[2 * i] = __builtin_shufflevector(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    next[2 * i + 1] =
        __builtin_shufflevector(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
}

// Four interleaving passes of `transpose` make a whole transposition.
static inline void transpose_16x16(Floats (&rows)[kLanes]) {
  transpose(rows);
  transpose(rows);
  transpose(rows);
  transpose(rows);
}

}  // namespace moeserve
