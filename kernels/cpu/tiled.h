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

}  // namespace moeserve
