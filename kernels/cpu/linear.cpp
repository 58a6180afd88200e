// y = x W^T + bias over weights in panels.
#include <algorithm>

#include "panels.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int64_t kRowBlock = 192;  // Rows that stay in the second-level cache while all panels pass.

struct Product {
  const float* x;
  int64_t x_stride, num_rows, depth, width;
  const float* bias;
  float* y;
  int64_t y_stride;
};

template <typename Weight>
void panel_product(const Product& p, const Weight* packed, int64_t panel, int64_t first_row, int64_t num_rows) {
  if (!panel) count_progress();
  const int64_t column = panel * kPanelColumns, count = std::min<int64_t>(kPanelColumns, p.width - column);
  const Columns bias = p.bias ? load_existing(p.bias + column, count) : Columns{};
  for_tiles(
      num_rows, packed + panel * kPanelColumns * p.depth, p.depth,
      [&](int64_t r) { return p.x + (first_row + r) * p.x_stride; },
      [&](int64_t first, int rows, const Columns* sums) {
        for (int r = 0; r < rows; ++r) {
          float* to = p.y + (first_row + first + r) * p.y_stride + column;
          store_columns(to, {sums[r].low + bias.low, sums[r].high + bias.high}, count);
        }
      });
}

template <typename Weight>
void product(const Product& p, const Weight* packed) {
  const int64_t panels = num_panels(p.width), row_blocks = (p.num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t grain = std::max<int64_t>(1, panels / 16);
  for_shared(row_blocks * panels, grain, [&](int64_t task) {
    const int64_t first = task / panels * kRowBlock, rows = std::min(kRowBlock, p.num_rows - first);
    panel_product(p, packed, task % panels, first, rows);
  });
}

}  // namespace
}  // namespace moeserve

// x [num_rows, depth], y [num_rows, width], rows `*_stride` floats apart; bias [width] or null.
extern "C" void moeserve_linear(const float* x, int64_t x_stride, int64_t num_rows, const void* packed, int64_t is_bf16,
                                int64_t depth, int64_t width, const float* bias, float* y, int64_t y_stride) {
  const moeserve::Product p = {x, x_stride, num_rows, depth, width, bias, y, y_stride};
  if (is_bf16)
    moeserve::product(p, static_cast<const moeserve::Bf16*>(packed));
  else
    moeserve::product(p, static_cast<const float*>(packed));
}
