// Products of rows that lie in tiles with weights in panels, where there are tiles (tiles.h).
#pragma once

#include "quantised.h"
#include "tiles.h"

namespace moeserve {

constexpr int kTiledRows = kTileHeight;  // Rows of a tile.

// 32 numbers of each row of a tile; see Rounded.
struct alignas(64) TiledGroup {
  int8_t codes[kTiledRows][kGroup];
  float scales[kTiledRows];
  float sums[2][kTiledRows];  // `sum`, `scaled_sum` or those of the halves; unused for Shift::kConstant.
};

// Puts rows that were rounded into a tile. num_blocks: of each row, remainders too.
void put_into_tile(const Rounded* const* rows, int64_t num_blocks, Format format, TiledGroup* out);

// A panel of quantised weights as tiles multiply it, for as long as this lives. twice: rows were rounded twice.
//
// The sums of a group are exact integers and are scaled like those of rows that lie in no tile, so their bits are the same.
class TiledPanel {
 public:
  TiledPanel(const Quantised& weights, const uint8_t* panel, bool twice);
  ~TiledPanel();
  TiledPanel(const TiledPanel&) = delete;

  // sums[r] = row r of the tile . panel.
  void multiply(const TiledGroup* tile, Columns* sums) const;

 private:
  Quantised weights_;
  const uint8_t* groups_;
  bool twice_;
};

// Puts up to 16 rows of pairs into a tile for each 16 pairs.
void put_into_tile(const Pair* const* rows, int count, int64_t pairs, Pair* out);

// A panel of bfloat16, or of floats of 8 bits, as tiles multiply it, until its thread makes another one.
//
// The sums have the order of `add_pair_products` (tiles.h) for each 32 numbers of the depth, one after another: for floats of 8
// bits within each block, whose scale multiplies its sum.
class TiledPairs {
 public:
  TiledPairs(const Bf16* panel, int64_t depth);
  TiledPairs(const Quantised& weights, const uint8_t* panel);

  // sums[r] = row r . panel for up to 32 rows, in two tiles that lie side by side.
  void multiply(const Pair* tiles, int num_rows, Columns* sums) const;

 private:
  const uint8_t* pairs_;        // [depth / 2][32 columns] of pairs.
  const uint8_t* scales_ = nullptr;  // Of the first block.
  int64_t depth_, block_depth_, block_bytes_ = 0, half_bytes_ = 0;
};

}  // namespace moeserve
