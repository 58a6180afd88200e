// y = x W^T + bias over weights in panels.
#include <algorithm>
#include <vector>

#include "lines.h"
#include "matrix.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int64_t kRowBlock = 192;     // Rows that stay in the second-level cache while all panels pass.
constexpr int64_t kFewRowBlock = 48;  // Rows of a task where panels are too few to be shared by threads.
constexpr int64_t kFewPanels = 8;

// A matrix of a product, the rows as it multiplies them, in tiles too, and where its panels and its columns of y begin.
struct Factor {
  const Matrix* matrix;
  const uint8_t *rounded, *tiles;
  int64_t first_panel, first_column;
};

struct Product {
  const float* x;
  int64_t x_stride, num_rows;
  std::vector<Factor> factors;
  float* y;
  int64_t y_stride;
};

void panel_product(const Product& p, const Factor& factor, int64_t panel, int64_t first_row, int64_t num_rows) {
  if (!panel) count_progress();
  const Matrix& m = *factor.matrix;
  const int64_t column = panel * kPanelColumns, count = std::min<int64_t>(kPanelColumns, m.width - column);
  const Columns bias = m.bias ? load_existing(m.bias + column, count) : Columns{};
  float* y = p.y + factor.first_column + column;
  for_any_tiles(
      m.packing, m.times, num_rows, m.panels + panel * m.packing.panel_bytes(m.depth), m.depth,
      [&](int64_t r) { return p.x + (first_row + r) * p.x_stride; },
      [&](int64_t r) { return factor.rounded + (first_row + r) * m.rounded_bytes(); },
      factor.tiles + first_row / kTiledRows * m.tile_bytes(),
      [&](int64_t first, int rows, const Columns* sums) {
        for (int r = 0; r < rows; ++r)
          store_columns(y + (first_row + first + r) * p.y_stride, {sums[r].low + bias.low, sums[r].high + bias.high},
                        count);
      });
}

// Rounds the rows once for neighbours that multiply them in the same form.
void round_rows(Product& p) {
  static thread_local std::vector<uint8_t> kept;
  static thread_local Lines<uint8_t> kept_tiles;
  const auto bytes = [&](const Matrix& m) { return m.rounds() ? p.num_rows * m.rounded_bytes() : 0; };
  const auto tiled_bytes = [&](const Matrix& m) { return m.num_tiles(p.num_rows) * m.tile_bytes(); };
  int64_t needed = 0, needed_tiled = 0;
  for (const Factor& factor : p.factors)
    needed += bytes(*factor.matrix), needed_tiled += tiled_bytes(*factor.matrix);
  if (int64_t(kept.size()) < needed) kept.resize(needed);
  kept_tiles.reserve(needed_tiled);
  uint8_t *next = kept.data(), *next_tile = kept_tiles.data();
  const Factor* before = nullptr;
  for (Factor& factor : p.factors) {
    const Matrix& m = *factor.matrix;
    const bool is_alike =
        before && before->matrix->packing.number == m.packing.number && before->matrix->times == m.times;
    factor.rounded = is_alike ? before->rounded : next;
    factor.tiles = is_alike ? before->tiles : next_tile;
    before = &factor;
    if (is_alike || !m.rounds()) continue;
    for_shared(p.num_rows, kRoundedAtOnce / m.depth, [&](int64_t row) {
      m.packing.round(p.x + row * p.x_stride, m.depth, next + row * m.rounded_bytes(), m.times);
    });
    for_shared(m.num_tiles(p.num_rows), kRoundedAtOnce / (kTiledRows * m.depth), [&](int64_t tile) {
      const uint8_t* rows[kTiledRows];
      const int64_t first = tile * kTiledRows, count = std::min<int64_t>(kTiledRows, p.num_rows - first);
      for (int64_t r = 0; r < count; ++r) rows[r] = next + (first + r) * m.rounded_bytes();
      m.packing.tile(rows, int(count), m.depth, m.times, next_tile + tile * m.tile_bytes());
    });
    next += bytes(m), next_tile += tiled_bytes(m);
  }
}

}  // namespace

void multiply_rows(const Matrix* matrices, int64_t count, const float* x, int64_t x_stride, int64_t num_rows, float* y,
                   int64_t y_stride) {
  Product p = {x, x_stride, num_rows, {}, y, y_stride};
  int64_t panels = 0, columns = 0;
  for (const Matrix* m = matrices; m < matrices + count; ++m) {
    p.factors.push_back({m, nullptr, nullptr, panels, columns});
    panels += num_panels(m->width);
    columns += m->width;
  }
  round_rows(p);
  const int64_t row_block = panels < kFewPanels ? kFewRowBlock : kRowBlock;
  const int64_t row_blocks = (num_rows + row_block - 1) / row_block;
  for_shared(row_blocks * panels, std::max<int64_t>(1, panels / 64), [&](int64_t task) {
    const int64_t first = task / panels * row_block, panel = task % panels;
    const Factor* factor = &p.factors.back();
    while (factor->first_panel > panel) --factor;
    panel_product(p, *factor, panel - factor->first_panel, first, std::min(row_block, num_rows - first));
  });
}

}  // namespace moeserve

// See multiply_rows.
extern "C" void moeserve_linear(const moeserve::Matrix* matrices, int64_t count, const float* x, int64_t x_stride,
                                int64_t num_rows, float* y, int64_t y_stride) {
  moeserve::multiply_rows(matrices, count, x, x_stride, num_rows, y, y_stride);
}
