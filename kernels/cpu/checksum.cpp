// The CRC-32 of zlib, of large runs of bytes.
//
// By carry-less multiplication 64 bytes are folded onto the next 64, which leaves the remainder as it is (Gopal et al.,
// "Fast CRC computation for generic polynomials using PCLMULQDQ instruction", Intel 2009). The last 16 are divided bit by
// bit, with what follows them.
#include <cstdint>
#include <cstring>

#if defined(__PCLMUL__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace moeserve {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // With its lowest power in the highest bit.

uint32_t divided(uint32_t rest, const uint8_t* data, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    rest ^= data[i];
    for (int bit = 0; bit < 8; ++bit) rest = (rest >> 1) ^ (rest & 1 ? kPolynomial : 0);
  }
  return rest;
}

#if defined(__PCLMUL__)
inline __m128i loaded(const uint8_t* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }

// factors: of the two halves, the remainders of the powers by which they move.
inline __m128i folded(__m128i value, __m128i factors, __m128i onto) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00), high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), onto);
}

uint32_t remainder(uint32_t rest, const uint8_t* data, int64_t size) {
  if (size < 64) return divided(rest, data, size);
  const __m128i by64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
  __m128i parts[4];
  for (int part = 0; part < 4; ++part) parts[part] = loaded(data + 16 * part);
  parts[0] = _mm_xor_si128(parts[0], _mm_cvtsi32_si128(static_cast<int>(rest)));
  int64_t at = 64;
  for (; at + 64 <= size; at += 64) {
    for (int part = 0; part < 4; ++part) parts[part] = folded(parts[part], by64, loaded(data + at + 16 * part));
  }
  __m128i value = parts[0];
  for (int part = 1; part < 4; ++part) value = folded(value, by16, parts[part]);
  uint8_t last[16];
  std::memcpy(last, &value, sizeof last);
  return divided(divided(0, last, sizeof last), data + at, size - at);
}
#elif defined(__ARM_FEATURE_CRC32)
uint32_t remainder(uint32_t rest, const uint8_t* data, int64_t size) {
  int64_t at = 0;
  for (; at + 8 <= size; at += 8) {
    uint64_t eight;
    std::memcpy(&eight, data + at, sizeof eight);
    rest = __crc32d(rest, eight);
  }
  return divided(rest, data + at, size - at);
}
#else
uint32_t remainder(uint32_t rest, const uint8_t* data, int64_t size) { return divided(rest, data, size); }
#endif

}  // namespace
}  // namespace moeserve

// Whether `moeserve_crc32` is fast here.
#if defined(__PCLMUL__) || defined(__ARM_FEATURE_CRC32)
extern "C" const int64_t moeserve_multiplies_bits = 1;
#else
extern "C" const int64_t moeserve_multiplies_bits = 0;
#endif

// Returns the CRC-32 of `size` bytes behind others whose CRC-32 is `start`, 0 for none.
extern "C" int64_t moeserve_crc32(const void* data, int64_t size, int64_t start) {
  const uint32_t rest = ~static_cast<uint32_t>(start);
  return static_cast<uint32_t>(~moeserve::remainder(rest, static_cast<const uint8_t*>(data), size));
}
