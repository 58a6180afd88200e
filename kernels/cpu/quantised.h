// Products with quantised weights in panels of 32 output columns, two halves of 16 columns, each half one block of
// weights after another along the depth. `kernels/weight_formats.py` describes the formats, in the order of `Format`.
//
// A block of 32 weights of 16 columns is a `Group`: eight vectors of codes, lane c of vector i holding the codes
// 4 i ... 4 i + 3 of column c in its bytes, and for every column a scale and a subtrahend. Floats of 8 bits
// lie depth after depth, a byte for each column.
#pragma once

#include "panels.h"

namespace moeserve {

constexpr int kGroup = 32;

enum class Format : int64_t {
  kQ8_0, kQ4_0, kQ4_1, kQ4_K, kQ5_K, kQ6_K, kMxfp4, kInt4F16, kInt4Bf16, kInt8F32, kInt8Zero, kFp8, kNvfp4, kQ5_0,
  kQ5_1, kFp8Block, kIq4Nl, kIq4Xs, kQ3_K, kQ2_K, kCount
};
// kE2m1, kIq4: codes of 4 bits that a table turns into bytes. kE4m3 takes no products of integers: rows stay floats.
enum class Code { kWhole, kE2m1, kE4m3, kIq4 };
// kSuper: a byte times the float16 of a superblock; kSuperE4m3: a float of 8 bits times the float32 of a superblock;
// kSuperF32: the float32 of a superblock; kSuperHalf: the low half of a byte times the float16 of a superblock.
enum class Scale { kF16, kBf16, kF32, kE8m0, kSuper, kSuperE4m3, kSuperF32, kSuperHalf };
// kMin: added; kSuperMin: a byte, or the high half of that of a scale, times a float16, subtracted.
enum class Shift { kConstant, kMin, kSuperMin, kZero };

// weight = scale * (code - offset) or scale * (code - zero), plus or minus a minimum.
struct Traits {
  int bits;    // Of a code.
  int groups;  // Of a block.
  int parts;   // Scales of a group, and its minima: 1, or 2 with one for each 16 weights.
  Scale scale;
  Shift shift;
  int offset;
  int row_bytes;  // Of a block of a row.
  Code code = Code::kWhole;

  constexpr int code_bytes() const { return kLanes * kGroup * bits / 8; }
  constexpr int scale_bytes() const {
    if (scale == Scale::kSuperF32) return 0;
    return scale == Scale::kF32 ? 4 * kLanes : scale == Scale::kF16 || scale == Scale::kBf16 ? 2 * kLanes : kLanes;
  }
  constexpr int shift_bytes() const {
    if (shift == Shift::kConstant || scale == Scale::kSuperHalf) return 0;
    return shift == Shift::kMin ? 2 * kLanes : kLanes;
  }
  constexpr int super_bytes() const {
    if (scale == Scale::kSuperE4m3 || scale == Scale::kSuperF32) return 4 * kLanes;
    if (scale != Scale::kSuper && scale != Scale::kSuperHalf) return 0;
    return shift == Shift::kSuperMin ? 4 * kLanes : 2 * kLanes;
  }
  // Where a group has the scale of a part, and its shift.
  constexpr int scale_at(int part) const { return code_bytes() + part * scale_bytes(); }
  constexpr int shift_at(int part) const {
    return scale == Scale::kSuperHalf ? scale_at(part) : scale_at(parts) + part * shift_bytes();
  }
  constexpr int group_bytes() const { return code_bytes() + parts * (scale_bytes() + shift_bytes()); }
  constexpr int block_bytes() const { return super_bytes() + groups * group_bytes(); }
  constexpr int depth() const { return groups * kGroup; }
};

constexpr Traits kTraits[] = {
    {8, 1, 1, Scale::kF16, Shift::kConstant, 128, 34},
    {4, 1, 1, Scale::kF16, Shift::kConstant, 8, 18},
    {4, 1, 1, Scale::kF16, Shift::kMin, 0, 20},
    {4, 8, 1, Scale::kSuper, Shift::kSuperMin, 0, 144},
    {5, 8, 1, Scale::kSuper, Shift::kSuperMin, 0, 176},
    {6, 8, 2, Scale::kSuper, Shift::kConstant, 32, 210},
    {4, 1, 1, Scale::kE8m0, Shift::kConstant, 12, 17, Code::kE2m1},
    {4, 1, 1, Scale::kF16, Shift::kZero, 0, 19},
    {4, 1, 1, Scale::kBf16, Shift::kZero, 0, 19},
    {8, 1, 1, Scale::kF32, Shift::kConstant, 128, 36},
    {8, 1, 1, Scale::kF32, Shift::kZero, 0, 37},
    {8, 1, 1, Scale::kF32, Shift::kConstant, 0, 36, Code::kE4m3},
    {4, 2, 2, Scale::kSuperE4m3, Shift::kConstant, 12, 40, Code::kE2m1},
    {5, 1, 1, Scale::kF16, Shift::kConstant, 16, 22},
    {5, 1, 1, Scale::kF16, Shift::kMin, 0, 24},
    {8, 4, 1, Scale::kSuperF32, Shift::kConstant, 0, 132, Code::kE4m3},
    {4, 1, 1, Scale::kF16, Shift::kConstant, 127, 18, Code::kIq4},
    {4, 8, 1, Scale::kSuper, Shift::kConstant, 127, 136, Code::kIq4},
    {3, 8, 2, Scale::kSuper, Shift::kConstant, 4, 110},
    {2, 8, 2, Scale::kSuperHalf, Shift::kSuperMin, 0, 84},
};

constexpr const Traits& traits_of(Format format) { return kTraits[int(format)]; }

// Whether rows can be rounded for products with weights of a format.
constexpr bool takes_rounded(Format format) { return traits_of(format).code != Code::kE4m3; }

// Whether rows can be rounded to bfloat16 for products with weights of a format, which are bfloat16 times a scale.
constexpr bool takes_pairs(Format format) { return traits_of(format).code == Code::kE4m3; }

#if defined(__AVX512BF16__)
constexpr bool kHasPairProducts = true;  // Instructions that multiply pairs.
#else
constexpr bool kHasPairProducts = false;
#endif

constexpr float kRestUnits = 256.0f;

// 32 numbers of a row, rounded to 8 bits: number i is about scale * codes[i].
struct Rounded {
  int8_t codes[kGroup];
  float scale;
  union {
    int32_t shift;    // Shift::kConstant: minus the offset times the sum of the codes.
    float scaled_sum; // Shift::kMin and kSuperMin: scale times the sum of the codes.
    float sum;        // Shift::kZero: the sum of the codes.
  };
  union {  // The same for each 16 numbers, for formats with two scales of a group.
    int32_t shift_of_half[2];
    float scaled_sum_of_half[2];
  };
};

// Rounds `depth` floats of a row, a multiple of 32, for products with weights of `format`.
void round_row(const float* x, int64_t depth, Format format, Rounded* out);
// Rounds a row, and its remainder: to about 16 bits in all. Number i is about scale * (256 * codes[i] + the codes[i]
// of the second row), which follows the first.
void round_row_twice(const float* x, int64_t depth, Format format, Rounded* out);

// A packed matrix: `depth` is a multiple of the format's.
struct Quantised {
  Format format;
  int64_t depth;
  bool exact;  // Rows are floats.

  int64_t half_bytes() const { return depth / traits_of(format).depth() * traits_of(format).block_bytes(); }
  int64_t panel_bytes() const { return 2 * half_bytes(); }
  int64_t groups() const { return depth / kGroup; }
};

#if defined(__AVX512F__)
constexpr int kRoundedRows = 6;  // 12 sums of integers and 12 of floats, of the 32 registers.
#else
constexpr int kRoundedRows = 3;
#endif

// Up to this number of rows wait for the memory, and one stream of bytes is read faster than two by turns: they are multiplied
// with one half of a panel after the other, more with both at once.
constexpr int kFewRows = 3;
constexpr int kPrefetch = 4608;  // Bytes: the time of a miss at the speed of the memory.

// Memory that is read into the caches while a tile is computed.
struct Ahead {
  const uint8_t* from;
  int64_t bytes;
};

// Computes products of up to kRoundedRows rows with a panel. rest: the blocks from one of a row to the block of
// its remainder, for rows that were rounded twice: only for formats of 8 bits.
using RoundedTile = void (*)(const Rounded* const* rows, int64_t rest, const uint8_t* panel, int64_t num_blocks,
                             const Ahead& ahead, Columns* sums);
// The same for up to kTileRows rows. pairs: its weights as `Expand` writes them, or null if kHasPairProducts.
using PairTile = void (*)(const Pair* const* rows, const uint8_t* panel, const uint8_t* pairs, int64_t num_blocks,
                          Columns* sums);
using WideTile = void (*)(const float* const* rows, const uint8_t* half, int64_t num_blocks, Floats* sums);
// Writes the weights of one half of a panel, [depth, 16] of [depth, 32].
using Widen = void (*)(const uint8_t* half, int64_t num_blocks, float* out);
// Writes the weights of a panel as pairs of bfloat16, without their scales.
using Expand = void (*)(const uint8_t* panel, int64_t num_blocks, uint8_t* out);

constexpr int kWideRows = 4;  // Up to this number of rows multiply weights that are widened in registers.

RoundedTile rounded_tile(Format format, int num_rows, bool twice);
PairTile pair_tile(Format format, int num_rows);
WideTile wide_tile(Format format, int num_rows);
Widen widen(Format format);
float* widened_panel(const Quantised& weights, const uint8_t* panel);
const uint8_t* expanded_panel(const Quantised& weights, const uint8_t* panel);

// See for_tiles of panels.h: for rows that were rounded, `row_of(r)` is a row's first block of 32 numbers. times: 2 for
// rows that were rounded twice, whose second blocks follow the first.
template <typename RowOf, typename Use>
static inline void for_rounded_tiles(int64_t num_rows, const Quantised& weights, const uint8_t* panel, int64_t times,
                                     RowOf row_of, Use use) {
  const int64_t num_tiles = (num_rows + kRoundedRows - 1) / kRoundedRows, rest = times == 2 ? weights.groups() : 0;
  const int64_t num_blocks = weights.depth / traits_of(weights.format).depth(), bytes = weights.panel_bytes();
  Columns sums[kRoundedRows];
  const Rounded* rows[kRoundedRows];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_rows * tile / num_tiles, last = num_rows * (tile + 1) / num_tiles;
    const int count = int(last - first);
    for (int r = 0; r < count; ++r) rows[r] = row_of(first + r);
    // Few rows keep pace with the memory; while more are computed, it gives the next panel.
    const Ahead ahead = num_rows <= kFewRows ? Ahead{panel + kPrefetch, bytes}
                                                  : Ahead{panel + bytes + bytes * tile / num_tiles, bytes / num_tiles};
    rounded_tile(weights.format, count, times == 2)(rows, rest, panel, num_blocks, ahead, sums);
    use(first, count, sums);
  }
}

// The same for rows of pairs.
template <typename RowOf, typename Use>
static inline void for_pair_tiles(int64_t num_rows, const Quantised& weights, const uint8_t* panel, RowOf row_of,
                                  Use use) {
  const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  const int64_t num_blocks = weights.depth / traits_of(weights.format).depth();
  const uint8_t* pairs = num_tiles > 1 || !kHasPairProducts ? expanded_panel(weights, panel) : nullptr;
  Columns sums[kTileRows + 1];
  const Pair* rows[kTileRows + 1];
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t first = num_rows * tile / num_tiles, last = num_rows * (tile + 1) / num_tiles;
    const int count = int(last - first);
    for (int r = 0; r < count; ++r) rows[r] = row_of(first + r);
    rows[count] = rows[count - 1];  // A tile of odd size is computed as the next even one.
    pair_tile(weights.format, count)(rows, panel, pairs, num_blocks, sums);
    use(first, count, sums);
  }
}

// The same for rows of floats: a row's bits are those of a product with the widened weights in panels of floats.
template <typename RowOf, typename Use>
static inline void for_wide_tiles(int64_t num_rows, const Quantised& weights, const uint8_t* panel, RowOf row_of,
                                  Use use) {
  if (num_rows > kWideRows)
    return for_tiles(num_rows, widened_panel(weights, panel), weights.depth, row_of, use);
  const int64_t num_blocks = weights.depth / traits_of(weights.format).depth();
  const WideTile multiply = wide_tile(weights.format, int(num_rows));
  const float* rows[kWideRows];
  Floats low[kWideRows], high[kWideRows];
  Columns sums[kWideRows];
  for (int r = 0; r < num_rows; ++r) rows[r] = row_of(r);
  if (num_rows == 3) rows[3] = rows[2];  // Three rows are computed as four.
  multiply(rows, panel, num_blocks, low);
  multiply(rows, panel + weights.half_bytes(), num_blocks, high);
  for (int r = 0; r < num_rows; ++r) sums[r] = {low[r], high[r]};
  use(0, int(num_rows), sums);
}

}  // namespace moeserve
