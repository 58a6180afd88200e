// Products with weights in panels: 32 output columns, depth after depth. A panel of 16-bit weights keeps the columns
// (j, 16 + j) as the two halves of one 32-bit word, so that widening to float32 takes a shift and a mask.
//
// Every result is one chain of fused multiply-adds over the depth, or of pairs of bfloat16 the sums of pair_sums.h, whatever
// the number of rows: a row has the same bits in any batch.
#pragma once

#include <algorithm>
#include <iterator>

#include "pair_sums.h"

namespace moeserve {

constexpr int kPanelColumns = 2 * kLanes;
#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // 24 accumulators of the 32 registers.
#else
constexpr int kTileRows = 3;
#endif

constexpr int64_t kRoundedAtOnce = 32768;  // Numbers that a thread rounds at once: fewer cost less than to share them.

struct Bf16 {
  uint16_t bits;
};

struct Columns {
  Floats low, high;
};

static inline Columns load_columns(const float* from) { return {load(from), load(from + kLanes)}; }

static inline Columns load_columns(const Bf16* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

constexpr int kColumnParts = kPanelColumns / kPartLanes;

static inline void load_parts(const float* from, Part (&parts)[kColumnParts]) {
#pragma GCC unroll 8
  for (int p = 0; p < kColumnParts; ++p) parts[p] = load_part(from + p * kPartLanes);
}

static inline void load_parts(const Bf16* from, Part (&parts)[kColumnParts]) {
#pragma GCC unroll 4
  for (int p = 0; p < kColumnParts / 2; ++p) {
    PartWords words;
    std::memcpy(&words, from + 2 * p * kPartLanes, sizeof(words));
    parts[p] = (Part)(words << 16);
    parts[p + kColumnParts / 2] = (Part)(words & 0xffff0000u);
  }
}

template <int Rows>
static inline void store_sums(const Part (&parts)[Rows][kColumnParts], Columns* sums) {
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kColumnParts; ++p)
      store_part(reinterpret_cast<float*>(sums + r) + p * kPartLanes, parts[r][p]);
  }
}

// Adds the products at depth k.
template <int Rows, typename Weight>
static inline void step(const float* const (&row)[Rows], const Weight* panel, int64_t k,
                        Part (&sums)[Rows][kColumnParts]) {
  __builtin_prefetch((const char*)(panel + k * kPanelColumns) + 2048);
  Part weight[kColumnParts];
  load_parts(panel + k * kPanelColumns, weight);
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const Part x = splat_part(row[r][k]);
#pragma GCC unroll 8
    for (int p = 0; p < kColumnParts; ++p) sums[r][p] = fma_part(x, weight[p], sums[r][p]);
  }
}

// sums[r] = rows[r] . panel, for rows of `depth` floats.
template <int Rows, typename Weight>
static inline void multiply(const float* const* rows, const Weight* panel, int64_t depth, Columns* sums) {
  Part local[Rows][kColumnParts];
  const float* row[Rows];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kColumnParts; ++p) local[r][p] = Part{};
    row[r] = rows[r];
  }
  int64_t k = 0;
  for (; k + 4 <= depth; k += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step<Rows>(row, panel, k + i, local);
  }
  for (; k < depth; ++k) step<Rows>(row, panel, k, local);
  store_sums(local, sums);
}

static inline int64_t num_pairs(int64_t depth) { return (depth + kPanelColumns - 1) / kPanelColumns * kLanes; }

// Numbers rounded to bfloat16, in the upper halves of words. Subnormal numbers become zeros.
static inline Words round_to_upper(Floats value) {
  const auto choose = [](Ints condition, Words yes, Words no) { return condition ? yes : no; };
  const Words bits = (Words)value, magnitude = bits & 0x7fffffffu;
  Words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  rounded = choose((Ints)(magnitude > 0x7f800000u), bits | 0x400000u, rounded);
  rounded = choose((Ints)(magnitude < 0x00800000u), bits & 0x80000000u, rounded);
  return rounded & 0xffff0000u;
}

// Rounds 32 numbers to 16 pairs.
static inline void store_pairs(Floats low, Floats high, Pair* out) {
#if defined(__AVX512BF16__)
  __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#if !defined(MOESERVE_HAS_TILES) && !defined(MOESERVE_HAS_ONE_CHAIN)  // Of four numbers the third and the first, the fourth and the second.
  pairs = _mm512_shuffle_epi8(pairs, _mm512_set4_epi32(0x0b0a0f0e, 0x09080d0c, 0x03020706, 0x01000504));
#endif
  _mm512_storeu_si512(out, pairs);
#elif defined(MOESERVE_PACKS_PAIRS)
  typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
  const Shorts shorts[2] = {__builtin_convertvector(round_to_upper(low) >> 16, Shorts),
                            __builtin_convertvector(round_to_upper(high) >> 16, Shorts)};
  std::memcpy(out, shorts, sizeof(shorts));
#else
  Words numbers[2] = {round_to_upper(low), round_to_upper(high)};
#if defined(MOESERVE_MULTIPLIES_HALVES)
  for (Words& both : numbers) both |= both >> 16;
#endif
  std::memcpy(out, numbers, sizeof(numbers));
#endif
}

// Rounds `depth` floats of a row to num_pairs(depth) pairs.
static inline void round_to_pairs(const float* x, int64_t depth, Pair* out) {
  int64_t k = 0;
  for (; k + kPanelColumns <= depth; k += kPanelColumns, out += kLanes)
    store_pairs(load(x + k), load(x + k + kLanes), out);
  if (k == depth) return;
  float left[kPanelColumns] = {};
  std::memcpy(left, x + k, (depth - k) * sizeof(float));
  store_pairs(load(left), load(left + kLanes), out);
}

#if !defined(MOESERVE_HAS_TILES)
struct PanelPairs {
  const Bf16* panel;

  static constexpr bool is_upper(int, int part) { return part >= kColumnParts / 2; }

  template <int Chain>
  MOESERVE_INLINE void load(int64_t pair, Factors (&parts)[kColumnParts]) const {
#if defined(MOESERVE_PACKS_PAIRS)
    const Bf16 *lower = panel + lower_place(pair) * kPanelColumns, *upper = panel + upper_place(pair) * kPanelColumns;
    __builtin_prefetch((const char*)lower + 2048);
    __builtin_prefetch((const char*)upper + 2048);
#pragma GCC unroll 4
    for (int p = 0; p < kColumnParts / 2; ++p) {
      PartWords low, high;
      std::memcpy(&low, lower + 2 * p * kPartLanes, sizeof(low));
      std::memcpy(&high, upper + 2 * p * kPartLanes, sizeof(high));
      parts[p] = (low & 0xffffu) | high << 16;
      parts[p + kColumnParts / 2] = low >> 16 | (high & 0xffff0000u);
    }
#else
    const Bf16* from = panel + (2 * pair + Chain) * kPanelColumns;
    __builtin_prefetch((const char*)from + 2048);
#if defined(MOESERVE_MULTIPLIES_HALVES)
#pragma GCC unroll 4
    for (int p = 0; p < kColumnParts / 2; ++p)
      parts[p] = parts[p + kColumnParts / 2] = load_part(reinterpret_cast<const float*>(from) + p * kPartLanes);
#else
    load_parts(from, parts);
#endif
#endif
  }
};

// Zeros lie behind the weights of a last step that is not whole.
template <int Rows>
[[gnu::noinline]] void multiply_steps(const Pair* const* rows, const Bf16* panel, int64_t depth, Columns* sums) {
  const Pair* pairs[Rows];
  for (int r = 0; r < Rows; ++r) pairs[r] = rows[r];
  Part local[Rows][kColumnParts] = {};
  Bf16 last[kStepDepth * kPanelColumns];
  for (int64_t first = 0, steps; first < depth; first += steps * kStepDepth) {
    const Bf16* from = panel + first * kPanelColumns;
    steps = (depth - first) / kStepDepth;
    if (!steps) {
      const int64_t left = (depth - first) * kPanelColumns;
      std::fill(std::copy_n(from, left, last), std::end(last), Bf16{});
      from = last, steps = 1;
    }
    add_steps(pairs, PanelPairs{from}, steps, local);
    for (int r = 0; r < Rows; ++r) pairs[r] += steps * kStepPairs;
  }
  store_sums(local, sums);
}

// sums[r] = rows[r] . panel.
template <int Rows>
static inline void multiply(const Pair* const* rows, const Bf16* panel, int64_t depth, Columns* sums) {
  [[maybe_unused]] const PairMode mode{};
  multiply_steps<Rows>(rows, panel, depth, sums);
}
#endif

// The same for a number of rows that is known at run time: 1 ... kTileRows.
template <typename Weight, int Rows = kTileRows, typename Number>
static inline void multiply_tile(int count, const Number* const* rows, const Weight* panel, int64_t depth,
                                 Columns* sums) {
  if constexpr (Rows > 1) {
    if (count < Rows) return multiply_tile<Weight, Rows - 1>(count, rows, panel, depth, sums);
  }
  multiply<Rows>(rows, panel, depth, sums);
}

// Calls use(first, count, sums) for tiles of rows, as equal as can be. `row_of(r)` is where row r begins, of floats or,
// with weights of bfloat16, of pairs.
template <typename Weight, typename RowOf, typename Use>
static inline void for_tiles(int64_t num_rows, const Weight* panel, int64_t depth, RowOf row_of, Use use) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  Columns sums[kTileRows];
  decltype(row_of(0)) rows[kTileRows];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_rows * tile / num_tiles, last = num_rows * (tile + 1) / num_tiles;
    const int count = int(last - first);
    for (int r = 0; r < count; ++r) rows[r] = row_of(first + r);
    multiply_tile(count, rows, panel, depth, sums);
    use(first, count, sums);
  }
}

static inline int64_t num_panels(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

// Writes the columns of a panel that exist.
static inline void store_columns(float* to, const Columns& values, int64_t count) {
  if (count >= kPanelColumns) {
    store(to, values.low);
    store(to + kLanes, values.high);
    return;
  }
  float lanes[kPanelColumns];
  store(lanes, values.low);
  store(lanes + kLanes, values.high);
  std::memcpy(to, lanes, count * sizeof(float));
}

static inline Columns load_existing(const float* from, int64_t count) {
  if (count >= kPanelColumns) return load_columns(from);
  float lanes[kPanelColumns] = {};
  std::memcpy(lanes, from, count * sizeof(float));
  return load_columns(lanes);
}

}  // namespace moeserve
