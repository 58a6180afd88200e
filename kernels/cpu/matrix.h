// Weights in panels of any kind: floats (panels.h), or quantised (quantised.h).
#pragma once

#include <algorithm>

#include "tiled.h"

namespace moeserve {

// How a matrix is packed and multiplied. 0: float32; 1: bfloat16; from 3 on: the formats of quantised.h. Rows are rounded
// to bfloat16 for 2: bfloat16, and from 64 + 3 on: the formats of floats of 8 bits.
struct Packing {
  int64_t number;

  bool is_quantised() const { return number >= 3; }
  bool is_of_pairs() const { return number == 2 || number >= 64; }
  Format format() const { return static_cast<Format>(number % 64 - 3); }
  int64_t panel_bytes(int64_t depth) const {
    if (is_quantised()) return Quantised{format(), depth, false}.panel_bytes();
    return depth * kPanelColumns * (number ? 2 : 4);
  }
  // Whether rows are rounded before they are multiplied. exact: quantised weights multiply rows of floats.
  bool rounds(bool exact) const { return is_of_pairs() || (is_quantised() && !exact && takes_rounded(format())); }
  // Whether rows can be rounded twice; see round_row_twice.
  bool takes_remainders() const { return is_quantised() && !is_of_pairs() && traits_of(format()).bits == 8; }
  // The bytes of a rounded row. times: 2 for a row that is rounded twice; see round_row_twice.
  int64_t rounded_bytes(int64_t depth, int64_t times = 1) const {
    return is_of_pairs() ? num_pairs(depth) * sizeof(Pair) : times * (depth / kGroup) * sizeof(Rounded);
  }
  // The tiles that are multiplied in place of rows that lie side by side. Rows of pairs are all in tiles, whose sums have
  // an order of their own. Of rows that were rounded to 8 bits those that fill no tile are multiplied by themselves.
  int64_t num_tiles(int64_t num_rows, int64_t times) const {
    if (!kHasTiles || !rounds(times == 0)) return 0;
    return is_of_pairs() ? (num_rows + kTiledRows - 1) / kTiledRows : num_rows / kTiledRows;
  }
  int64_t tile_bytes(int64_t depth, int64_t times) const {
    return is_of_pairs() ? kTiledRows * rounded_bytes(depth) : times * (depth / kGroup) * sizeof(TiledGroup);
  }
  // Puts rounded rows into a tile.
  void tile(const uint8_t* const* rows, int count, int64_t depth, int64_t times, uint8_t* out) const {
    if (is_of_pairs())
      return put_into_tile(reinterpret_cast<const Pair* const*>(rows), count, num_pairs(depth), reinterpret_cast<Pair*>(out));
    put_into_tile(reinterpret_cast<const Rounded* const*>(rows), times * (depth / kGroup), format(),
                  reinterpret_cast<TiledGroup*>(out));
  }
  void round(const float* row, int64_t depth, uint8_t* out, int64_t times = 1) const {
    if (is_of_pairs()) return round_to_pairs(row, depth, reinterpret_cast<Pair*>(out));
    (times == 2 ? round_row_twice : round_row)(row, depth, format(), reinterpret_cast<Rounded*>(out));
  }
};

// A weight [width, depth] in panels, and a bias [width] or null. times: how often rows are rounded for quantised weights; 0
// leaves them floats.
struct Matrix {
  const uint8_t* panels;
  Packing packing;
  int64_t times, depth, width;
  const float* bias;

  bool rounds() const { return packing.rounds(times == 0); }
  int64_t rounded_bytes() const { return packing.rounded_bytes(depth, times); }
  int64_t num_tiles(int64_t num_rows) const { return packing.num_tiles(num_rows, times); }
  int64_t tile_bytes() const { return packing.tile_bytes(depth, times); }
};

// y = x W^T + bias for matrices of the same depth, whose columns lie side by side in y. x [num_rows, depth], y
// [num_rows, sum of widths], rows `*_stride` floats apart.
void multiply_rows(const Matrix* matrices, int64_t count, const float* x, int64_t x_stride, int64_t num_rows, float* y,
                   int64_t y_stride);

// Multiplies rows with a panel: for_tiles for any kind of weights. `floats_of(r)` and `rounded_of(r)` are where row r
// begins; only one of them is called. times: how often rows are rounded for quantised weights; 0 leaves them floats.
// tiles: where the first of Packing::num_tiles begins.
template <typename FloatsOf, typename RoundedOf, typename Use>
void for_any_tiles(Packing packing, int64_t times, int64_t num_rows, const uint8_t* panel, int64_t depth,
                   FloatsOf floats_of, RoundedOf rounded_of, const uint8_t* tiles, Use use) {
  if (kHasTiles && packing.is_of_pairs()) {
    const TiledPairs unpacked =
        packing.is_quantised() ? TiledPairs(Quantised{packing.format(), depth, false}, panel)
                               : TiledPairs(reinterpret_cast<const Bf16*>(panel), depth);
    Columns sums[2 * kTiledRows];
    for (int64_t first = 0; first < num_rows; first += 2 * kTiledRows) {
      const int count = int(std::min<int64_t>(2 * kTiledRows, num_rows - first));
      unpacked.multiply(reinterpret_cast<const Pair*>(tiles + first / kTiledRows * packing.tile_bytes(depth, times)),
                        count, sums);
      use(first, count, sums);
    }
    return;
  }
  if (!packing.is_quantised()) {
    if constexpr (!kHasTiles) {
      if (packing.is_of_pairs())
        return for_tiles(
            num_rows, reinterpret_cast<const Bf16*>(panel), depth,
            [&](int64_t r) { return reinterpret_cast<const Pair*>(rounded_of(r)); }, use);
    }
    if (packing.number) return for_tiles(num_rows, reinterpret_cast<const Bf16*>(panel), depth, floats_of, use);
    return for_tiles(num_rows, reinterpret_cast<const float*>(panel), depth, floats_of, use);
  }
  if (packing.is_of_pairs())
    return for_pair_tiles(
        num_rows, {packing.format(), depth, false}, panel,
        [&](int64_t r) { return reinterpret_cast<const Pair*>(rounded_of(r)); }, use);
  const Quantised weights = {packing.format(), depth, times == 0 || !takes_rounded(packing.format())};
  if (weights.exact) return for_wide_tiles(num_rows, weights, panel, floats_of, use);
  const int64_t num_tiles = packing.num_tiles(num_rows, times), tiled = num_tiles * kTiledRows;
  if (num_tiles) {
    const TiledPanel unpacked(weights, panel, times == 2);
    Columns sums[kTiledRows];
    for (int64_t t = 0; t < num_tiles; ++t) {
      unpacked.multiply(reinterpret_cast<const TiledGroup*>(tiles + t * packing.tile_bytes(depth, times)), sums);
      use(t * kTiledRows, kTiledRows, sums);
    }
    if (tiled == num_rows) return;
  }
  for_rounded_tiles(
      num_rows - tiled, weights, panel, times,
      [&](int64_t r) { return reinterpret_cast<const Rounded*>(rounded_of(tiled + r)); },
      [&](int64_t first, int count, const Columns* sums) { use(tiled + first, count, sums); });
}

}  // namespace moeserve
