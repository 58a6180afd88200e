// Rounds matrices of floats to rows of blocks of few bits.
//
// Sixteen groups of weights are rounded at a time, each in a lane of its own. Several ranges are tried for the codes of
// a group. The weights are rounded in each, the scale and minimum of least squares are found for these codes, and the
// best are kept.
#include <algorithm>

#include "halves.h"
#include "quantised.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int kRanges = 10;  // Ranges that are tried for a group.

inline Floats to_half_and_back(Floats value) { return from_halves(to_halves(value)); }

constexpr float kMagic = 12582912.0f;  // Adding it rounds to an integer in the low bits.

inline Floats rounded(Floats x) { return (x + kMagic) - kMagic; }

inline Floats rounded_product(Floats a, Floats b) { return fma(a, b, splat(kMagic)) - kMagic; }

inline Floats clamped(Floats x, float least, float most) { return min(splat(most), max(splat(least), x)); }

// 1 / x, and 0 for 0.
inline Floats inverse(Floats x) {
  const Ints is_zero = (Ints)(x == Floats{});
  return select(is_zero, Floats{}, 1.0f / select(is_zero, splat(1.0f), x));
}

// Weights of sixteen groups: x[i] holds weight i of each.
struct Groups {
  Floats x[kGroup];
};

struct Affine {
  Floats scale, min;  // A weight is about scale * code + min.
};

// Sums over the weights of a group, of its codes and numbers.
struct Sums {
  Floats codes{}, squares{}, products{}, numbers{};
};

inline Sums sums_of(const Groups& groups, Affine range, float most) {
  const Floats by = inverse(range.scale), offset = -range.min * by;
  Sums sums;
  for (int i = 0; i < kGroup; ++i) {
    const Floats code = clamped(rounded(fma(groups.x[i], by, offset)), 0.0f, most);
    sums.codes += code;
    sums.squares = fma(code, code, sums.squares);
    sums.products = fma(code, groups.x[i], sums.products);
    sums.numbers += groups.x[i];
  }
  return sums;
}

// The scale and minimum with the least squared error for given codes. Minima above 0 are left out with `below_zero`.
inline Affine least_squares(const Sums& s, bool below_zero) {
  const float count = kGroup;
  const Floats of_squares = count * s.squares - s.codes * s.codes;  // Exact.
  Floats scale = fma(splat(count), s.products, -(s.codes * s.numbers)) * inverse(of_squares);
  Floats least = fma(-scale, s.codes, s.numbers) * (1.0f / count);
  if (below_zero) {
    const Ints above = (Ints)(least > Floats{});
    scale = select(above, s.products * inverse(s.squares), scale);
    least = select(above, Floats{}, least);
  }
  return {scale, least};
}

// The squared error but for the sum of squared numbers.
inline Floats error_of(const Sums& s, Affine a) {
  const Floats of_scale = fma(a.scale, s.squares, 2.0f * fma(a.min, s.codes, -s.products));
  return fma(a.scale, of_scale, a.min * fma(splat(float(kGroup)), a.min, -2.0f * s.numbers));
}

Affine best_affine(const Groups& groups, float most, bool below_zero) {
  Floats low = groups.x[0], high = low;
  for (int i = 1; i < kGroup; ++i) low = min(low, groups.x[i]), high = max(high, groups.x[i]);
  if (below_zero) low = min(low, Floats{}), high = max(high, Floats{});
  const Floats middle = 0.5f * (low + high), reach = high - low;
  Affine best{};
  Floats least = splat(std::numeric_limits<float>::infinity());
  for (int r = 0; r < kRanges; ++r) {
    const float part = 1.04f - 0.04f * float(r);
    const Affine range = {part / most * reach, fma(splat(-0.5f * part), reach, middle)};
    const Sums sums = sums_of(groups, range, most);
    const Affine found = least_squares(sums, below_zero);
    const Affine kept = {to_half_and_back(found.scale), to_half_and_back(found.min)};
    const Floats error = error_of(sums, kept);
    const Ints better = (Ints)(error < least);
    least = select(better, error, least);
    best.scale = select(better, kept.scale, best.scale);
    best.min = select(better, kept.min, best.min);
  }
  return best;
}

// Writes the codes of weights from `first` on, `count` of them, of each group: a byte each.
inline void codes_of(const Groups& groups, Affine a, float most, uint8_t (*codes)[kGroup]) {
  const Floats by = inverse(a.scale), offset = -a.min * by;
  for (int i = 0; i < kGroup; ++i) {
    const Ints code = __builtin_convertvector(clamped(rounded(fma(groups.x[i], by, offset)), 0.0f, most), Ints);
    for (int c = 0; c < kLanes; ++c) codes[c][i] = uint8_t(code[c]);
  }
}

inline void write_pairs(const uint8_t* low, const uint8_t* high, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) out[i] = uint8_t((low[i] & 15) | (high[i] & 15) << 4);
}

void round_q8_0(const Groups& groups, uint8_t* const* out) {
  Floats most{};
  for (int i = 0; i < kGroup; ++i) most = max(most, max(groups.x[i], -groups.x[i]));
  Floats scale{}, least = splat(std::numeric_limits<float>::infinity());
  for (int r = 0; r < kRanges; ++r) {
    const Floats tried = to_half_and_back(most * (1.0f / float(127 - r))), by = inverse(tried);
    Floats error{};
    for (int i = 0; i < kGroup; ++i) {
      const Floats rest = fma(-tried, clamped(rounded_product(groups.x[i], by), -127.0f, 127.0f), groups.x[i]);
      error = fma(rest, rest, error);
    }
    const Ints better = (Ints)(error < least);
    least = select(better, error, least);
    scale = select(better, tried, scale);
  }
  const Halves scales = to_halves(scale);
  const Floats by = inverse(scale);
  for (int c = 0; c < kLanes; ++c) {
    const uint16_t bits = scales[c];
    std::memcpy(out[c], &bits, 2);
  }
  for (int i = 0; i < kGroup; ++i) {
    const Ints code = __builtin_convertvector(clamped(rounded_product(groups.x[i], by), -127.0f, 127.0f), Ints);
    for (int c = 0; c < kLanes; ++c) out[c][2 + i] = uint8_t(int8_t(code[c]));
  }
}

// Q4_1 and Q5_1.
void round_affine(const Groups& groups, bool fifth_bit, uint8_t* const* out) {
  const float top = fifth_bit ? 31.0f : 15.0f;
  const Affine best = best_affine(groups, top, false);
  const Halves scales = to_halves(best.scale), mins = to_halves(best.min);
  uint8_t codes[kLanes][kGroup];
  codes_of(groups, best, top, codes);
  for (int c = 0; c < kLanes; ++c) {
    const uint16_t both[] = {scales[c], mins[c]};
    std::memcpy(out[c], both, 4);
    if (fifth_bit) {
      uint32_t high = 0;
      for (int i = 0; i < kGroup; ++i) high |= uint32_t(codes[c][i] >> 4) << i;
      std::memcpy(out[c] + 4, &high, 4);
    }
    write_pairs(codes[c], codes[c] + 16, 16, out[c] + (fifth_bit ? 8 : 4));
  }
}

// The scales of 6 bits of the eight groups of a superblock, and the float16 that they multiply.
struct Scales {
  uint16_t super;
  uint8_t bytes[8];
  float unit;
};

Scales six_bits(const float* numbers) {
  float most = 0.0f;
  for (int g = 0; g < 8; ++g) most = std::max(most, numbers[g]);
  const Halves super = to_halves(splat(most / 63.0f));
  Scales out;
  out.super = super[0];
  out.unit = from_halves(super)[0];
  for (int g = 0; g < 8; ++g)
    out.bytes[g] = out.unit > 0.0f ? uint8_t(std::min(63.0f, std::max(0.0f, std::nearbyint(numbers[g] / out.unit)))) : 0;
  return out;
}

// The twelve bytes of ggml's Q4_K and Q5_K.
void write_scales(const Scales& scales, const Scales& mins, uint8_t* out) {
  for (int g = 0; g < 4; ++g) {
    out[g] = uint8_t(scales.bytes[g] | (scales.bytes[g + 4] >> 4) << 6);
    out[g + 4] = uint8_t(mins.bytes[g] | (mins.bytes[g + 4] >> 4) << 6);
    out[g + 8] = uint8_t((scales.bytes[g + 4] & 15) | (mins.bytes[g + 4] & 15) << 4);
  }
}

// Two superblocks, whose groups are the lanes 0 ... 7 and 8 ... 15; out: of each lane's group.
void round_k(const Groups& groups, bool fifth_bit, uint8_t* const* out) {
  const float top = fifth_bit ? 31.0f : 15.0f;
  const Affine best = best_affine(groups, top, true);
  float scales[kLanes], mins[kLanes];
  store(scales, best.scale);
  store(mins, -best.min);
  Scales of_scales[2], of_mins[2];
  Affine kept;
  for (int s = 0; s < 2; ++s) {
    of_scales[s] = six_bits(scales + 8 * s);
    of_mins[s] = six_bits(mins + 8 * s);
    for (int g = 0; g < 8; ++g) {
      kept.scale[8 * s + g] = of_scales[s].unit * of_scales[s].bytes[g];
      kept.min[8 * s + g] = -of_mins[s].unit * of_mins[s].bytes[g];
    }
  }
  uint8_t codes[kLanes][kGroup];
  codes_of(groups, kept, top, codes);
  for (int s = 0; s < 2; ++s) {
    uint8_t* to = out[8 * s];
    const uint16_t supers[] = {of_scales[s].super, of_mins[s].super};
    std::memcpy(to, supers, 4);
    write_scales(of_scales[s], of_mins[s], to + 4);
    to += 16;
    if (fifth_bit) {
      for (int i = 0; i < kGroup; ++i) {
        to[i] = 0;
        for (int g = 0; g < 8; ++g) to[i] |= uint8_t((codes[8 * s + g][i] >> 4) << g);
      }
      to += kGroup;
    }
    for (int pair = 0; pair < 4; ++pair)
      write_pairs(codes[8 * s + 2 * pair], codes[8 * s + 2 * pair + 1], kGroup, to + pair * kGroup);
  }
}

// The scale of codes -32 ... 31 for half of the weights of each group.
Floats best_scale(const Floats* x) {
  Floats high{}, low{};
  for (int i = 0; i < 16; ++i) high = max(high, x[i]), low = min(low, x[i]);
  const Floats extreme = select((Ints)(high > -low), high, low), by = inverse(extreme);
  Floats best{}, least = splat(std::numeric_limits<float>::infinity());
  for (int r = -3; r <= 3; ++r) {
    const Floats inverse_scale = by * (-32.0f + 0.5f * float(r));
    Floats squares{}, products{};
    for (int i = 0; i < 16; ++i) {
      const Floats code = clamped(rounded_product(x[i], inverse_scale), -32.0f, 31.0f);
      squares = fma(code, code, squares);
      products = fma(code, x[i], products);
    }
    const Floats scale = products * inverse(squares), error = -scale * products;
    const Ints better = (Ints)(error < least);
    least = select(better, error, least);
    best = select(better, scale, best);
  }
  return best;
}

// As round_k, for ggml's Q6_K.
void round_q6_k(const Groups& groups, uint8_t* const* out) {
  float scales[2][kLanes];
  for (int half = 0; half < 2; ++half) store(scales[half], best_scale(groups.x + 16 * half));
  uint8_t codes[kLanes][kGroup];
  Floats kept[2];
  for (int s = 0; s < 2; ++s) {
    float most = 0.0f;
    for (int half = 0; half < 2; ++half)
      for (int g = 8 * s; g < 8 * s + 8; ++g) most = std::max(most, std::abs(scales[half][g]));
    const Halves super = to_halves(splat(most / 127.0f));
    const float unit = from_halves(super)[0];
    const uint16_t bits = super[0];
    std::memcpy(out[8 * s] + 208, &bits, 2);
    for (int half = 0; half < 2; ++half)
      for (int g = 8 * s; g < 8 * s + 8; ++g) {
        const float whole = unit > 0.0f ? std::nearbyint(scales[half][g] / unit) : 0.0f;
        const int8_t byte = int8_t(std::min(127.0f, std::max(-127.0f, whole)));
        kept[half][g] = unit * byte;
        out[8 * s][192 + 2 * (g - 8 * s) + half] = uint8_t(byte);
      }
  }
  const Floats by[] = {inverse(kept[0]), inverse(kept[1])};
  for (int i = 0; i < kGroup; ++i) {
    const Ints code =
        __builtin_convertvector(clamped(rounded_product(groups.x[i], by[i / 16]), -32.0f, 31.0f) + 32.0f, Ints);
    for (int c = 0; c < kLanes; ++c) codes[c][i] = uint8_t(code[c]);
  }
  // Byte i of a half's low codes has groups q and q + 2 of the half; of its high codes, two bits of all four.
  for (int lane = 0; lane < kLanes; lane += 4) {
    uint8_t* to = out[lane & 8];
    const int half = lane / 4 % 2;
    for (int i = 0; i < kGroup; ++i) {
      const uint8_t q[] = {codes[lane][i], codes[lane + 1][i], codes[lane + 2][i], codes[lane + 3][i]};
      for (int part = 0; part < 2; ++part)
        to[64 * half + 32 * part + i] = uint8_t((q[part] & 15) | (q[part + 2] & 15) << 4);
      to[128 + 32 * half + i] = uint8_t(q[0] >> 4 | (q[1] >> 4) << 2 | (q[2] >> 4) << 4 | (q[3] >> 4) << 6);
    }
  }
}

inline Floats load_sixteen(const float* from) { return load(from); }

inline Floats load_sixteen(const Bf16* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

template <typename Number>
struct Matrix {
  const Number* x;
  int64_t stride, depth;
  Format format;
  uint8_t* out;

  // Rounds sixteen groups from a number on, counted over all rows. Groups beyond `num_groups` are those before once more.
  void round(int64_t first, int64_t num_groups) const {
    const Traits& traits = traits_of(format);
    const int64_t of_row = depth / kGroup, last = num_groups - traits.groups;
    const Number* from[kLanes];
    uint8_t* to[kLanes];
    for (int c = 0; c < kLanes; ++c) {
      const int64_t wanted = first + c, begin = std::min(wanted / traits.groups * traits.groups, last);
      const int64_t group = begin + wanted % traits.groups;
      from[c] = x + group / of_row * stride + group % of_row * kGroup;
      to[c] = out + group / traits.groups * traits.row_bytes;
    }
    Groups groups;
    for (int part = 0; part < 2; ++part) {
      Floats square[kLanes];
      for (int c = 0; c < kLanes; ++c) square[c] = load_sixteen(from[c] + part * kLanes);
      transpose_16x16(square);
      for (int i = 0; i < kLanes; ++i) groups.x[part * kLanes + i] = square[i];
    }
    round_groups(groups, to);
  }

 private:
  void round_groups(const Groups& groups, uint8_t* const* to) const {
    switch (format) {
      case Format::kQ4_1:
      case Format::kQ5_1:
        return round_affine(groups, format == Format::kQ5_1, to);
      case Format::kQ4_K:
      case Format::kQ5_K:
        return round_k(groups, format == Format::kQ5_K, to);
      case Format::kQ6_K:
        return round_q6_k(groups, to);
      default:
        return round_q8_0(groups, to);
    }
  }
};

template <typename Number>
void round_matrix(const Matrix<Number>& matrix, int64_t num_rows) {
  const int64_t num_groups = num_rows * (matrix.depth / kGroup);
  for_shared((num_groups + kLanes - 1) / kLanes, 64, [&](int64_t chunk) { matrix.round(chunk * kLanes, num_groups); });
}

}  // namespace
}  // namespace moeserve

// Rounds x [num_rows, depth], float32 or bfloat16, rows `x_stride` numbers apart, to rows of blocks of Q8_0, Q4_1, Q5_1,
// Q4_K, Q5_K or Q6_K.
extern "C" void moeserve_quantise(const void* x, int64_t is_bf16, int64_t x_stride, int64_t num_rows, int64_t depth,
                                  int64_t format, uint8_t* out) {
  using namespace moeserve;
  const Format to = static_cast<Format>(format);
  if (is_bf16)
    round_matrix(Matrix<Bf16>{static_cast<const Bf16*>(x), x_stride, depth, to, out}, num_rows);
  else
    round_matrix(Matrix<float>{static_cast<const float*>(x), x_stride, depth, to, out}, num_rows);
}
