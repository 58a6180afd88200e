// The products of quantised.h with tiles of rows, and the rounding of rows to 8 bits.
#include "groups.h"
#include "lines.h"
#include "tiles.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace moeserve {
namespace {

// Adds a group's products of integers. x: a block of each row, or the block of its remainder.
template <Format F, int Rows, int Halves>
MOESERVE_INLINE void add_products(const uint8_t* const* half, int part, const Rounded* const* x,
                                  Ints (&products)[Rows][Halves]) {
  constexpr Traits format = traits_of(F);
  constexpr int per_part = 8 / format.parts;
#pragma GCC unroll 8
  for (int i = 0; i < per_part; ++i) {
    Words codes[Halves];
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) codes[h] = Group<F>::code(half[h], part * per_part + i);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      const int32_t four = reinterpret_cast<const Four*>(x[r]->codes)[part * per_part + i];
#pragma GCC unroll 2
      for (int h = 0; h < Halves; ++h)
        products[r][h] = dot<(format.bits < 8 && format.code != Code::kIq4)>(products[r][h], codes[h], four);
    }
  }
}

// What a row's products of integers begin with.
template <Format F>
MOESERVE_INLINE Ints shift_of(const Rounded* block, int part) {
  constexpr Traits format = traits_of(F);
  if constexpr (format.shift != Shift::kConstant) return Ints{};
  return splat(format.parts == 1 ? block->shift : block->shift_of_half[part]);
}

// Adds the products of a group of weights, or of the half of one that has two scales. x: the block of each row; where
// rows were rounded twice, its remainder is `rest` blocks further on.
template <Format F, bool Twice, int Part, int Rows, int Halves>
MOESERVE_INLINE void add_part(const uint8_t* const* half, const Super* super, const Rounded* const* x, int64_t rest,
                              Floats (&sums)[Rows][Halves]) {
  constexpr Traits format = traits_of(F);
  Ints products[Rows][Halves];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) products[r][h] = shift_of<F>(x[r], Part);
  add_products<F>(half, Part, x, products);
  if constexpr (Twice) {
    const Rounded* left[Rows];
    const uint8_t* again[Halves];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      left[r] = x[r] + rest;
#pragma GCC unroll 2
      for (int h = 0; h < Halves; ++h) products[r][h] = (products[r][h] << 8) + shift_of<F>(left[r], Part);
    }
    // The compiler would keep codes in registers that the sums need.
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) {
      again[h] = half[h];
      asm("" : "+r"(again[h]));
    }
    add_products<F>(again, Part, left, products);
  }
#pragma GCC unroll 2
  for (int h = 0; h < Halves; ++h) {
    const Floats scale = Group<F>::load_scale(half[h] + format.scale_at(Part), super[h]);
    const Floats shift = Group<F>::load_shift(half[h] + format.shift_at(Part), super[h]);
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
      Floats whole = __builtin_convertvector(products[r][h], Floats);
      if constexpr (format.shift == Shift::kZero) whole = moeserve::fma(-shift, moeserve::splat(x[r]->sum), whole);
      Floats& sum = sums[r][h];
      sum = moeserve::fma(whole, scaled(scale, x[r]->scale), sum);
      const float scaled_sum = format.parts == 1 ? x[r]->scaled_sum : x[r]->scaled_sum_of_half[Part];
      if constexpr (format.shift == Shift::kMin) sum = moeserve::fma(shift, moeserve::splat(scaled_sum), sum);
      if constexpr (format.shift == Shift::kSuperMin) sum = moeserve::fma(-shift, moeserve::splat(scaled_sum), sum);
    }
  }
}

// The products of rows with one half of a panel, or with both at once: a code of a row is read once for both.
template <Format F, bool Twice, int Rows, int Halves>
MOESERVE_INLINE void multiply_halves(const Rounded* const* rows, int64_t rest, const uint8_t* panel, int64_t half_bytes,
                                     int64_t num_blocks, const Ahead& ahead, Floats (&sums)[Rows][Halves]) {
  constexpr Traits format = traits_of(F);
  const Rounded* x[Rows];
  const uint8_t* half[Halves];
#pragma GCC unroll 6
  for (int r = 0; r < Rows; ++r) {
    x[r] = rows[r];
#pragma GCC unroll 2
    for (int h = 0; h < Halves; ++h) sums[r][h] = Floats{};
  }
  for (int h = 0; h < Halves; ++h) half[h] = panel + h * half_bytes;
  const uint8_t* fetched = ahead.from;
  const int64_t step = ahead.bytes / (num_blocks * format.groups);
  for (int64_t block = 0; block < num_blocks; ++block) {
    Super super[Halves];
    for (int h = 0; h < Halves; ++h) super[h] = load_super<F>(half[h]), half[h] += format.super_bytes();
    for (int g = 0; g < format.groups; ++g) {
      for (int64_t line = 0; line < step; line += 64) __builtin_prefetch(fetched + line);
      fetched += step;
      add_part<F, Twice, 0>(half, super, x, rest, sums);
      if constexpr (format.parts == 2) add_part<F, Twice, 1>(half, super, x, rest, sums);
      for (int h = 0; h < Halves; ++h) half[h] += format.group_bytes();
      for (int r = 0; r < Rows; ++r) ++x[r];
    }
  }
}

template <Format F, bool Twice, int Rows>
void multiply_rounded(const Rounded* const* rows, int64_t rest, const uint8_t* panel, int64_t num_blocks,
                      const Ahead& ahead, Columns* out) {
  constexpr int at_once = Rows > kFewRows ? 2 : 1;
  const int64_t half_bytes = num_blocks * traits_of(F).block_bytes(), share = ahead.bytes * at_once / 2;
  for (int first = 0; first < 2; first += at_once) {
    Floats sums[Rows][at_once];
    multiply_halves<F, Twice>(rows, rest, panel + first * half_bytes, half_bytes, num_blocks,
                              {ahead.from + first * share, share}, sums);
    for (int r = 0; r < Rows; ++r)
      for (int h = 0; h < at_once; ++h) (first + h ? out[r].high : out[r].low) = sums[r][h];
  }
}

template <Format F, int Rows>
void multiply_pairs(const Pair* const* rows, const uint8_t* panel, const uint8_t* pairs, int64_t num_blocks,
                    Columns* sums);

// The weights of 16 columns at two depths, floats of 8 bits, as pairs.
#if defined(__AVX512BF16__)
// bfloat16 holds each of them, but a product would take its subnormal numbers for zero: they are looked up.
inline Words pairs_of_e4m3(const uint8_t* lower, const uint8_t* upper) {
  typedef int16_t Halves __attribute__((vector_size(64)));
  const Halves side_by_side = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                               8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const Halves small = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // 0 ... 7 times 2^-9.
  const __m256i codes = _mm256_set_m128i(_mm_loadu_si128((const __m128i*)upper), _mm_loadu_si128((const __m128i*)lower));
  const Halves bits = (Halves)_mm512_permutexvar_epi16((__m512i)side_by_side, _mm512_cvtepu8_epi16(codes));
  const Halves magnitude = bits & 0x7f, normal = (magnitude << 4) + (120 << 7);
  const __mmask32 is_small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(8));
  const __m512i value =
      _mm512_mask_permutexvar_epi16((__m512i)normal, is_small, (__m512i)magnitude, (__m512i)small);
  return (Words)((Halves)value | ((bits << 8) & int16_t(0x8000)));
}
#else
inline Words pairs_of_e4m3(const uint8_t* lower, const uint8_t* upper) {
  const Words low = (Words)(from_e4m3(lower) * kE4m3Unit), high = (Words)(from_e4m3(upper) * kE4m3Unit);
  return low >> 16 | (high & 0xffff0000u);
}
#endif

MOESERVE_INLINE Words pairs_of_codes(const uint8_t* codes, int64_t pair) {
  return pairs_of_e4m3(codes + lower_place(pair) * kLanes, codes + upper_place(pair) * kLanes);
}

#if !defined(MOESERVE_HAS_TILES)
// A block of floats of 8 bits of both halves of a panel.
struct CodePairs {
  const uint8_t *low, *high;

  static constexpr bool is_upper(int chain, int) { return chain; }

  template <int Chain>
  MOESERVE_INLINE void load(int64_t pair, Factors (&parts)[kColumnParts]) const {
    __builtin_prefetch(low + 2 * pair * kLanes + kPrefetch / 2);
    __builtin_prefetch(high + 2 * pair * kLanes + kPrefetch / 2);
    union {
      Words halves[2];
      PartWords parts[kColumnParts];
    } both = {{pairs_of_codes(low, pair), pairs_of_codes(high, pair)}};
    for (int p = 0; p < kColumnParts; ++p) parts[p] = factor_of<Chain>(both.parts[p]);
  }
};

// The products of a block.
template <int Rows, int Steps, typename Weights>
[[gnu::noinline]] void multiply_block(const Pair* const (&row)[Rows], const Weights& weights, Columns* products) {
  Part sums[Rows][kColumnParts] = {};
  add_steps(row, weights, Steps, sums);
  store_sums(sums, products);
}

// Each block's products are summed from zero, and its scale multiplies the sum.
template <Format F, int Rows>
void multiply_pairs(const Pair* const* rows, const uint8_t* panel, const uint8_t* pairs, int64_t num_blocks,
                    Columns* sums) {
  constexpr Traits format = traits_of(F);
  constexpr int num_pairs = format.depth() / 2, steps = format.depth() / kStepDepth;
  const int64_t half_bytes = num_blocks * format.block_bytes();
  const Pair* row[Rows];
  for (int r = 0; r < Rows; ++r) row[r] = rows[r], sums[r] = Columns{};
  for (int64_t block = 0; block < num_blocks; ++block, panel += format.block_bytes()) {
    Columns products[Rows];
    {
      [[maybe_unused]] const PairMode mode{};
      if (const uint8_t* codes = panel + format.super_bytes(); kHasPairProducts && !pairs) {
        multiply_block<Rows, steps>(row, CodePairs{codes, codes + half_bytes}, products);
      } else {
        const auto* words = reinterpret_cast<const uint32_t*>(pairs) + block * num_pairs * kPanelColumns;
        multiply_block<Rows, steps>(row, PairColumns{words, kPanelColumns}, products);
      }
    }
    const uint8_t* scales = panel + (format.super_bytes() ? 0 : format.code_bytes());
    const Floats low = load(reinterpret_cast<const float*>(scales));
    const Floats high = load(reinterpret_cast<const float*>(scales + half_bytes));
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      sums[r].low = moeserve::fma(products[r].low, low, sums[r].low);
      sums[r].high = moeserve::fma(products[r].high, high, sums[r].high);
      row[r] += num_pairs;
    }
  }
}
#endif

template <Format F>
void expand_panel(const uint8_t* panel, int64_t num_blocks, uint8_t* out) {
  constexpr Traits format = traits_of(F);
  const int64_t half_bytes = num_blocks * format.block_bytes();
  for (int64_t block = 0; block < num_blocks; ++block, panel += format.block_bytes())
    for (int pair = 0; pair < format.depth() / 2; ++pair, out += 2 * sizeof(Words)) {
      const uint8_t* codes = panel + format.super_bytes();
      const Words both[] = {pairs_of_codes(codes, pair), pairs_of_codes(codes + half_bytes, pair)};
      std::memcpy(out, both, sizeof(both));
    }
}

template <Format F, int Rows>
void multiply_wide(const float* const* rows, const uint8_t* half, int64_t num_blocks, Floats* out) {
  Floats sums[Rows];
  for (int r = 0; r < Rows; ++r) sums[r] = Floats{};
  for_groups<F>(half, num_blocks, [&](int64_t g, const Group<F>& group) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
      for (int b = 0; b < 4; ++b) {
        const Floats weights = group.weights(i, b);
        for (int r = 0; r < Rows; ++r) sums[r] = moeserve::fma(moeserve::splat(rows[r][g * kGroup + 4 * i + b]), weights, sums[r]);
      }
    }
  });
  for (int r = 0; r < Rows; ++r) out[r] = sums[r];
}

template <Format F>
void widen_half(const uint8_t* half, int64_t num_blocks, float* out) {
  for_groups<F>(half, num_blocks, [&](int64_t g, const Group<F>& group) __attribute__((always_inline)) {
    for (int k = 0; k < kGroup; ++k) store(out + (g * kGroup + k) * kPanelColumns, group.weights(k / 4, k % 4));
  });
}

constexpr int kTileSizes[] = {1, 2, 3, 4, 6, 8, 10, 12};
constexpr int kNumTileSizes = kTileRows == 12 ? 8 : 3;

template <Format F, bool Twice, size_t... Rows>
constexpr std::array<RoundedTile, kRoundedRows> rounded_tiles(std::index_sequence<Rows...>) {
  if constexpr (takes_rounded(F) && (!Twice || traits_of(F).bits == 8)) return {&multiply_rounded<F, Twice, Rows + 1>...};
  return {};
}

template <Format F, size_t... Size>
constexpr std::array<PairTile, kNumTileSizes> pair_tiles(std::index_sequence<Size...>) {
  if constexpr (takes_pairs(F) && !kHasTiles) return {&multiply_pairs<F, kTileSizes[Size]>...};
  return {};
}

struct Kernels {
  std::array<RoundedTile, kRoundedRows> rounded, rounded_twice;
  std::array<PairTile, kNumTileSizes> of_pairs;
  Expand expand;
  std::array<WideTile, 3> wide;
  Widen widen;
};

template <size_t... F>
constexpr std::array<Kernels, sizeof...(F)> all_kernels(std::index_sequence<F...>) {
  return {Kernels{rounded_tiles<Format(F), false>(std::make_index_sequence<kRoundedRows>()),
                  rounded_tiles<Format(F), true>(std::make_index_sequence<kRoundedRows>()),
                  pair_tiles<Format(F)>(std::make_index_sequence<kNumTileSizes>()),
                  &expand_panel<Format(F)>,
                  {&multiply_wide<Format(F), 1>, &multiply_wide<Format(F), 2>, &multiply_wide<Format(F), 4>},
                  &widen_half<Format(F)>}...};
}

constexpr auto kKernels = all_kernels(std::make_index_sequence<size_t(Format::kCount)>());

}  // namespace

RoundedTile rounded_tile(Format format, int num_rows, bool twice) {
  const Kernels& kernels = kKernels[int(format)];
  return (twice ? kernels.rounded_twice : kernels.rounded)[num_rows - 1];
}

PairTile pair_tile(Format format, int num_rows) {
  return kKernels[int(format)].of_pairs[num_rows <= 4 ? num_rows - 1 : (num_rows + 1) / 2 + 1];
}

WideTile wide_tile(Format format, int num_rows) { return kKernels[int(format)].wide[std::min(num_rows, 3) - 1]; }

float* widened_panel(const Quantised& weights, const uint8_t* panel) {
  static thread_local std::vector<float> wide;
  const int64_t needed = weights.depth * kPanelColumns, num_blocks = weights.depth / traits_of(weights.format).depth();
  if (int64_t(wide.size()) < needed) wide.resize(needed);
  const Widen widen = kKernels[int(weights.format)].widen;
  widen(panel, num_blocks, wide.data());
  widen(panel + weights.half_bytes(), num_blocks, wide.data() + kLanes);
  return wide.data();
}

const uint8_t* expanded_panel(const Quantised& weights, const uint8_t* panel) {
  static thread_local Lines<uint8_t> pairs;
  pairs.reserve(2 * weights.depth * kPanelColumns);
  kKernels[int(weights.format)].expand(panel, weights.depth / traits_of(weights.format).depth(), pairs.data());
  return pairs.data();
}

// 32 numbers, or their codes.
struct Block {
  Floats halves[2];
};

// Numbers times `inverse`, rounded to codes. What is not finite has an inverse of 0.
static Block round_block(const Block& numbers, float inverse, int8_t* codes) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  const Floats magic = moeserve::splat(12582912.0f);  // Adding it rounds to an integer in the low bits.
  Block whole;
  for (int half = 0; half < 2; ++half) {
    whole.halves[half] = min(moeserve::splat(127.0f), moeserve::fma(numbers.halves[half], moeserve::splat(inverse), magic) - magic);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole.halves[half], Ints), Bytes);
    std::memcpy(codes + half * kLanes, &bytes, sizeof(bytes));
  }
  return whole;
}

// Writes the sums of the codes of blocks, which are exact: whole numbers below 2^24.
template <int Count>
static void take_sums(const Traits& traits, const Block (&codes)[Count], Rounded* out) {
  Floats vectors[Count];
  if (traits.parts == 2) {
    for (int half = 0; half < 2; ++half) {
      for (int g = 0; g < Count; ++g) vectors[g] = codes[g].halves[half];
      const Floats sums = sum_each(vectors);
      for (int g = 0; g < Count; ++g) {
        if (traits.shift == Shift::kConstant)
          out[g].shift_of_half[half] = -traits.offset * int32_t(sums[g]);
        else
          out[g].scaled_sum_of_half[half] = out[g].scale * sums[g];
      }
    }
    return;
  }
  for (int g = 0; g < Count; ++g) vectors[g] = codes[g].halves[0] + codes[g].halves[1];
  const Floats sums = sum_each(vectors);
  for (int g = 0; g < Count; ++g) {
    if (traits.shift == Shift::kConstant)
      out[g].shift = -traits.offset * int32_t(sums[g]);
    else if (traits.shift == Shift::kZero)
      out[g].sum = sums[g];
    else
      out[g].scaled_sum = out[g].scale * sums[g];
  }
}

// rest: null, or the blocks of the numbers' remainders.
template <int Count>
static void round_blocks(const float* x, const Traits& traits, Rounded* out, Rounded* rest) {
  Block numbers[Count], codes[Count];
  Floats most[Count];
  for (int g = 0; g < Count; ++g) {
    for (int half = 0; half < 2; ++half) numbers[g].halves[half] = load(x + g * kGroup + half * kLanes);
    // As integers, so that infinities and NaN are larger than any number.
    const Ints low = (Ints)numbers[g].halves[0] & 0x7fffffff, high = (Ints)numbers[g].halves[1] & 0x7fffffff;
    most[g] = (Floats)(low > high ? low : high);
  }
  const Floats tops = fold_each(most, [](Floats a, Floats b) {
    return (Floats)((Ints)a > (Ints)b ? (Ints)a : (Ints)b);
  });
  const Ints is_finite = (Ints)((Ints)tops < 0x7f800000);
  // What is not finite becomes NaN here, and so do all sums with its block.
  const Floats scales = select(is_finite, tops / 127.0f, moeserve::splat(std::numeric_limits<float>::quiet_NaN()));
  const Floats inverses = select(is_finite & (Ints)(tops > 0.0f), 127.0f / tops, Floats{});
  for (int g = 0; g < Count; ++g) {
    out[g].scale = scales[g];
    codes[g] = round_block(numbers[g], inverses[g], out[g].codes);
  }
  if (rest) {
    Block left_codes[Count];
    for (int g = 0; g < Count; ++g) {
      Block left;
      for (int half = 0; half < 2; ++half)
        left.halves[half] = moeserve::fma(moeserve::splat(-out[g].scale), codes[g].halves[half], numbers[g].halves[half]);
      left_codes[g] = round_block(left, inverses[g] * kRestUnits, rest[g].codes);
      out[g].scale *= 1.0f / kRestUnits;
    }
    if (traits.shift == Shift::kConstant) {
      take_sums(traits, left_codes, rest);
    } else {
      for (int g = 0; g < Count; ++g)
        for (int half = 0; half < 2; ++half)
          codes[g].halves[half] = codes[g].halves[half] * kRestUnits + left_codes[g].halves[half];
    }
  }
  take_sums(traits, codes, out);
}

static void round_row(const float* x, int64_t depth, const Traits& traits, Rounded* out, Rounded* rest) {
  const auto advance = [&](int64_t blocks) { x += blocks * kGroup, out += blocks, rest += rest ? blocks : 0; };
  int64_t left = depth / kGroup;
  for (; left >= 8; left -= 8, advance(8)) round_blocks<8>(x, traits, out, rest);
  for (; left >= 2; left -= 2, advance(2)) round_blocks<2>(x, traits, out, rest);
  if (left) round_blocks<1>(x, traits, out, rest);
}

void round_row(const float* x, int64_t depth, Format format, Rounded* out) {
  round_row(x, depth, traits_of(format), out, nullptr);
}

void round_row_twice(const float* x, int64_t depth, Format format, Rounded* out) {
  round_row(x, depth, traits_of(format), out, out + depth / kGroup);
}

}  // namespace moeserve
