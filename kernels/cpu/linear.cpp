// y = x W^T + bias over weights in panels.
#include <algorithm>
#include <vector>

#include "panels.h"
#include "tape.h"
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

// `row_of(r)` is where row r of x begins, in the form that multiplies `Weight`.
template <typename Weight, typename RowOf>
void panel_product(const Product& p, const Weight* packed, RowOf row_of, int64_t panel, int64_t first_row,
                   int64_t num_rows) {
  if (!panel) count_progress();
  const int64_t column = panel * kPanelColumns, count = std::min<int64_t>(kPanelColumns, p.width - column);
  const Columns bias = p.bias ? load_existing(p.bias + column, count) : Columns{};
  for_tiles(
      num_rows, packed + panel * kPanelColumns * p.depth, p.depth, [&](int64_t r) { return row_of(first_row + r); },
      [&](int64_t first, int rows, const Columns* sums) {
        for (int r = 0; r < rows; ++r) {
          float* to = p.y + (first_row + first + r) * p.y_stride + column;
          store_columns(to, {sums[r].low + bias.low, sums[r].high + bias.high}, count);
        }
      });
}

template <typename Weight, typename RowOf>
void product(const Product& p, const Weight* packed, RowOf row_of) {
  const int64_t panels = num_panels(p.width), row_blocks = (p.num_rows + kRowBlock - 1) / kRowBlock;
  const int64_t grain = std::max<int64_t>(1, panels / 16);
  for_shared(row_blocks * panels, grain, [&](int64_t task) {
    const int64_t first = task / panels * kRowBlock, rows = std::min(kRowBlock, p.num_rows - first);
    panel_product(p, packed, row_of, task % panels, first, rows);
  });
}

void product_of_pairs(const Product& p, const Bf16* packed) {
  static thread_local std::vector<Pair> kept;
  const int64_t pairs = num_pairs(p.depth);
  if (int64_t(kept.size()) < p.num_rows * pairs) kept.resize(p.num_rows * pairs);
  Pair* rounded = kept.data();
  for_shared(p.num_rows, kRoundedAtOnce / p.depth,
             [&](int64_t row) { round_to_pairs(p.x + row * p.x_stride, p.depth, rounded + row * pairs); });
  product(p, packed, [&](int64_t row) -> const Pair* { return rounded + row * pairs; });
}

}  // namespace
}  // namespace moeserve

// x [num_rows, depth], y [num_rows, width], rows `*_stride` floats apart; bias [width] or null. kind 0: weights of
// float32; 1: of bfloat16; 2: of bfloat16, for which rows are rounded to bfloat16 if the machine multiplies pairs.
extern "C" void moeserve_linear(const float* x, int64_t x_stride, int64_t num_rows, const void* packed, int64_t kind,
                                int64_t depth, int64_t width, const float* bias, float* y, int64_t y_stride) {
  using namespace moeserve;
  perform([=] {
    const Product p = {x, x_stride, num_rows, depth, width, bias, y, y_stride};
    const auto row_of = [&](int64_t row) { return x + row * x_stride; };
    if (kind == 0) return product(p, static_cast<const float*>(packed), row_of);
    const Bf16* weights = static_cast<const Bf16*>(packed);
    if (kind == 2 && kMultipliesPairs) return product_of_pairs(p, weights);
    product(p, weights, row_of);
  });
}

// 1 if rows of bfloat16 are multiplied by dot products of pairs.
extern "C" const int64_t moeserve_multiplies_pairs = moeserve::kMultipliesPairs;
