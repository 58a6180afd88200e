// The experts of a mixture-of-experts layer over the rows their gate chose: sorted by expert, two products with the
// activation between them, and each token's results summed in the order of its choice.
#include <algorithm>
#include <vector>

#include "lines.h"
#include "matrix.h"
#include "team.h"

namespace moeserve {
namespace {

// Activations, sixteen channels at a time. All but kRelu2 have a gate.
enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu, kSwigluOai, kRelu2, kClampedSilu };

// Beyond 88 the result is that for 88, some 1e-38 from 0 or from 1.
inline Floats sigmoid(Floats x) {
  return 1.0f / (1.0f + exp_of_moderate(min(max(-x, splat(kLeastExponent)), splat(88.0f))));
}

// x times the normal distribution up to x, whose tail is that of Abramowitz and Stegun, 7.1.26, to 1e-7.
inline Floats gelu(Floats x) {
  const Floats t = 1.0f / fma(max(x, -x), splat(0.2316419f), splat(1.0f));
  Floats tail = splat(0.5307027145f);
  tail = fma(tail, t, splat(-0.7265760135f));
  tail = fma(tail, t, splat(0.7107068705f));
  tail = fma(tail, t, splat(-0.142248368f));
  tail = fma(tail, t, splat(0.127414796f));
  tail = tail * t * exp_of_negative(-0.5f * x * x);
  return x * select((Ints)(x < 0.0f), tail, 1.0f - tail);
}

// tanh(z) = 2 sigmoid(2z) - 1, so that half of 1 + tanh(z) is sigmoid(2z).
inline Floats gelu_tanh(Floats x) { return x * sigmoid(1.5957691216f * fma(0.044715f * x * x, x, x)); }

inline Floats gated(Floats gate, Floats up, Activation kind, float alpha, float limit) {
  if (limit > 0.0f) {
    // In this order of arguments NaN stays NaN.
    if (kind != Activation::kClampedSilu) gate = min(splat(limit), gate);
    up = min(splat(limit), max(splat(-limit), up));
  }
  switch (kind) {
    case Activation::kSilu:
      return gate * sigmoid(gate) * up;
    case Activation::kGelu:
      return gelu(gate) * up;
    case Activation::kGeluTanh:
      return gelu_tanh(gate) * up;
    case Activation::kRelu:
      return max(gate, Floats{}) * up;
    case Activation::kSwigluOai:
      return gate * sigmoid(alpha * gate) * (up + 1.0f);
    case Activation::kClampedSilu:
      return min(splat(limit), gate * sigmoid(gate)) * up;
    case Activation::kRelu2:
      break;
  }
  __builtin_unreachable();
}

inline Floats relu2(Floats x) {
  const Floats positive = max(Floats{}, x);
  return positive * positive;
}

// A packed expert: panels of gate and up [intermediate / 16, hidden, 32] (16 gate columns beside their 16 up columns),
// panels of down [hidden / 32, intermediate, 32], then float32 biases in the same order of columns, where there are any.
// Without a gate the first are panels of up [intermediate / 32, hidden, 32]. Where the depth of gate and up is in an
// order of the expert's own, it is last: int32 [hidden], the channel of each weight of a column.
struct Shape {
  int64_t hidden, intermediate;
  Packing gate_up, down;
  int64_t times;  // How often rows are rounded for quantised weights; 0 leaves them floats.
  bool has_bias, has_order;
  Activation activation;
  float alpha, limit;

  bool is_gated() const { return activation != Activation::kRelu2; }
  int64_t channels_of_panel() const { return is_gated() ? kLanes : kPanelColumns; }
  int64_t gate_up_panels() const { return (intermediate + channels_of_panel() - 1) / channels_of_panel(); }
  int64_t padded_intermediate() const { return gate_up_panels() * channels_of_panel(); }
  int64_t gate_up_bytes() const { return gate_up_panels() * gate_up.panel_bytes(hidden); }
  int64_t down_bytes() const { return num_panels(hidden) * down.panel_bytes(intermediate); }
  bool rounds(Packing packing) const { return packing.rounds(times == 0); }
  // Rows are rounded twice for weights of 8 bits alone.
  int64_t times_of(Packing packing) const { return packing.takes_remainders() ? times : std::min<int64_t>(times, 1); }
  int64_t rounded_bytes(Packing packing, int64_t depth) const { return packing.rounded_bytes(depth, times_of(packing)); }
  int64_t tile_bytes(Packing packing, int64_t depth) const { return packing.tile_bytes(depth, times_of(packing)); }
};

struct Rows {
  std::vector<int64_t> places;  // Positions in [num_tokens * top_k], sorted by expert.
  std::vector<int64_t> experts, first;  // Experts with rows, and where theirs begin; one more bound at the end.

  int64_t group_of(int64_t row) const { return std::upper_bound(first.begin(), first.end(), row) - first.begin() - 1; }
};

Rows sort_by_expert(const int64_t* ids, int64_t count, int64_t num_experts) {
  std::vector<int64_t> next(num_experts + 1, 0);
  int64_t chosen = 0;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] >= 0) ++next[ids[i] + 1], ++chosen;
  Rows rows;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1]) {
      rows.experts.push_back(e);
      rows.first.push_back(next[e]);
    }
    next[e + 1] += next[e];
  }
  rows.first.push_back(chosen);
  rows.places.resize(chosen);
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] >= 0) rows.places[next[ids[i]]++] = i;
  return rows;
}

// Rows of a product in tiles: those of a group begin at tile `first`, with one more bound at the end.
struct Tiles {
  std::vector<int64_t> first;
  uint8_t* data = nullptr;

  int64_t count() const { return kHasTiles ? first.back() : 0; }
  const uint8_t* of(int64_t group, int64_t tile_bytes) const {
    return kHasTiles ? data + first[group] * tile_bytes : nullptr;
  }
};

struct Step {
  const float* x;
  int64_t x_stride, num_tokens, top_k;
  const void* const* experts;
  Rows rows;
  float* hidden;            // [chosen rows in sorted order, padded intermediate]
  float* ordered;           // [chosen rows in sorted order, hidden], if experts have an order of channels.
  uint8_t* rounded_x;       // [num_tokens] rows, if gate and up multiply rounded rows; or the rows of `ordered`.
  uint8_t* rounded_hidden;  // [chosen rows in sorted order] rows, if down does.
  Tiles tiles_x, tiles_hidden;
  float* results;           // [num_tokens * top_k, hidden]

  const uint8_t* expert(int64_t group) const { return static_cast<const uint8_t*>(experts[rows.experts[group]]); }
  int64_t num_rows(int64_t group) const { return rows.first[group + 1] - rows.first[group]; }
};

const float* biases(const Shape& shape, const uint8_t* expert) {
  return reinterpret_cast<const float*>(expert + shape.gate_up_bytes() + shape.down_bytes());
}

const int32_t* channel_order(const Shape& shape, const uint8_t* expert) {
  const int64_t num_biases = shape.has_bias ? shape.gate_up_panels() * kPanelColumns + shape.hidden : 0;
  return reinterpret_cast<const int32_t*>(biases(shape, expert) + num_biases);
}

// Orders the channels of a token's row as the expert has them.
void order_row(const Shape& shape, const Step& step, int64_t row) {
  const int32_t* order = channel_order(shape, step.expert(step.rows.group_of(row)));
  const float* x = step.x + step.rows.places[row] / step.top_k * step.x_stride;
  float* to = step.ordered + row * shape.hidden;
  for (int64_t k = 0; k < shape.hidden; ++k) to[k] = x[order[k]];
}

void gate_up_panel(const Shape& shape, const Step& step, int64_t group, int64_t panel) {
  if (!panel) count_progress();
  const uint8_t* expert = step.expert(group);
  const int64_t first_row = step.rows.first[group], width = shape.padded_intermediate();
  const Columns bias = shape.has_bias ? load_columns(biases(shape, expert) + panel * kPanelColumns) : Columns{};
  const auto token = [&](int64_t r) {
    return shape.has_order ? first_row + r : step.rows.places[first_row + r] / step.top_k;
  };
  const float* x = shape.has_order ? step.ordered : step.x;
  const int64_t x_stride = shape.has_order ? shape.hidden : step.x_stride;
  for_any_tiles(
      shape.gate_up, shape.times_of(shape.gate_up), step.num_rows(group),
      expert + panel * shape.gate_up.panel_bytes(shape.hidden), shape.hidden, [&](int64_t r) { return x + token(r) * x_stride; },
      [&](int64_t r) { return step.rounded_x + token(r) * shape.rounded_bytes(shape.gate_up, shape.hidden); },
      step.tiles_x.of(group, shape.tile_bytes(shape.gate_up, shape.hidden)),
      [&](int64_t first, int count, const Columns* sums) {
        for (int r = 0; r < count; ++r) {
          const Floats low = sums[r].low + bias.low, high = sums[r].high + bias.high;
          float* to = step.hidden + (first_row + first + r) * width + panel * shape.channels_of_panel();
          if (shape.is_gated()) {
            store(to, gated(low, high, shape.activation, shape.alpha, shape.limit));
          } else {
            store(to, relu2(low));
            store(to + kLanes, relu2(high));
          }
        }
      });
}

void down_panel(const Shape& shape, const Step& step, int64_t group, int64_t panel) {
  if (!panel) count_progress();
  const uint8_t* expert = step.expert(group);
  const int64_t first_row = step.rows.first[group];
  const int64_t width = shape.padded_intermediate(), column = panel * kPanelColumns;
  const int64_t columns = std::min<int64_t>(kPanelColumns, shape.hidden - column);
  const uint8_t* weights = expert + shape.gate_up_bytes() + panel * shape.down.panel_bytes(shape.intermediate);
  const Columns bias =
      shape.has_bias
          ? load_existing(biases(shape, expert) + shape.gate_up_panels() * kPanelColumns + column, columns)
          : Columns{};
  for_any_tiles(
      shape.down, shape.times_of(shape.down), step.num_rows(group), weights, shape.intermediate,
      [&](int64_t r) { return step.hidden + (first_row + r) * width; },
      [&](int64_t r) {
        return step.rounded_hidden + (first_row + r) * shape.rounded_bytes(shape.down, shape.intermediate);
      },
      step.tiles_hidden.of(group, shape.tile_bytes(shape.down, shape.intermediate)),
      [&](int64_t first, int count, const Columns* sums) {
        for (int r = 0; r < count; ++r) {
          const Columns value = {sums[r].low + bias.low, sums[r].high + bias.high};
          store_columns(step.results + step.rows.places[first_row + first + r] * shape.hidden + column, value, columns);
        }
      });
}

Tiles count_tiles(const Shape& shape, const Rows& rows, Packing packing) {
  if (!kHasTiles) return {};
  Tiles tiles = {{0}};
  for (size_t group = 0; group < rows.experts.size(); ++group)
    tiles.first.push_back(tiles.first.back() +
                          packing.num_tiles(rows.first[group + 1] - rows.first[group], shape.times_of(packing)));
  return tiles;
}

// rounded_of(r): where row r begins, in sorted order.
template <typename RoundedOf>
void fill_tiles(const Shape& shape, const Rows& rows, Packing packing, int64_t depth, const Tiles& tiles,
                RoundedOf rounded_of) {
  const int64_t bytes = shape.tile_bytes(packing, depth);
  for_shared(tiles.count(), kRoundedAtOnce / (kTiledRows * depth), [&](int64_t tile) {
    const int64_t group = std::upper_bound(tiles.first.begin(), tiles.first.end(), tile) - tiles.first.begin() - 1;
    const int64_t first_row = rows.first[group] + (tile - tiles.first[group]) * kTiledRows;
    const uint8_t* of_tile[kTiledRows];
    const int64_t count = std::min<int64_t>(kTiledRows, rows.first[group + 1] - first_row);
    for (int64_t r = 0; r < count; ++r) of_tile[r] = rounded_of(first_row + r);
    packing.tile(of_tile, int(count), depth, shape.times_of(packing), tiles.data + tile * bytes);
  });
}

constexpr int64_t kLeastParts = 128;       // The smallest part of a product that a thread takes at once is 1 of these.
constexpr int64_t kCombinedAtOnce = 65536;  // Products that a thread sums at once: fewer cost less than to share them.

// Sums a token's products [top_k, hidden] in the order of its choice. ids: null where all experts are here.
void combine(const float* products, int64_t top_k, int64_t hidden, const int64_t* ids, const float* weights,
             float* out) {
  std::fill_n(out, hidden, 0.0f);
  for (int64_t choice = 0; choice < top_k; ++choice) {
    if (ids && ids[choice] < 0) continue;
    const float weight = weights[choice];
    const float* product = products + choice * hidden;
    for (int64_t i = 0; i < hidden; ++i) out[i] = std::fma(weight, product[i], out[i]);
  }
}

void run(const Shape& shape, const Step& step, const int64_t* ids, const float* weights, float* out,
         int64_t out_stride) {
  const int64_t groups = int64_t(step.rows.experts.size()), chosen = int64_t(step.rows.places.size());
  const int64_t gate_up_panels = shape.gate_up_panels(), down_panels = num_panels(shape.hidden);
  const int64_t gate_up_grain = std::max<int64_t>(1, groups * gate_up_panels / kLeastParts);
  const int64_t down_grain = std::max<int64_t>(1, groups * down_panels / kLeastParts);
  if (shape.has_order) for_shared(chosen, 4, [&](int64_t row) { order_row(shape, step, row); });
  if (shape.rounds(shape.gate_up)) {
    const float* x = shape.has_order ? step.ordered : step.x;
    const int64_t x_stride = shape.has_order ? shape.hidden : step.x_stride;
    for_shared(shape.has_order ? chosen : step.num_tokens, kRoundedAtOnce / shape.hidden, [&](int64_t row) {
      shape.gate_up.round(x + row * x_stride, shape.hidden,
                          step.rounded_x + row * shape.rounded_bytes(shape.gate_up, shape.hidden),
                          shape.times_of(shape.gate_up));
    });
  }
  fill_tiles(shape, step.rows, shape.gate_up, shape.hidden, step.tiles_x, [&](int64_t row) {
    const int64_t at = shape.has_order ? row : step.rows.places[row] / step.top_k;
    return step.rounded_x + at * shape.rounded_bytes(shape.gate_up, shape.hidden);
  });
  for_shared(groups * gate_up_panels, gate_up_grain, [&](int64_t task) {
    gate_up_panel(shape, step, task / gate_up_panels, task % gate_up_panels);
  });
  if (shape.rounds(shape.down))
    for_shared(chosen, kRoundedAtOnce / shape.intermediate, [&](int64_t row) {
      shape.down.round(step.hidden + row * shape.padded_intermediate(), shape.intermediate,
                       step.rounded_hidden + row * shape.rounded_bytes(shape.down, shape.intermediate),
                       shape.times_of(shape.down));
    });
  fill_tiles(shape, step.rows, shape.down, shape.intermediate, step.tiles_hidden, [&](int64_t row) {
    return step.rounded_hidden + row * shape.rounded_bytes(shape.down, shape.intermediate);
  });
  for_shared(groups * down_panels, down_grain,
             [&](int64_t task) { down_panel(shape, step, task / down_panels, task % down_panels); });
  if (weights)
    for_shared(step.num_tokens, kCombinedAtOnce / (step.top_k * shape.hidden), [&](int64_t token) {
      const int64_t first = token * step.top_k;
      combine(step.results + first * shape.hidden, step.top_k, shape.hidden, ids + first, weights + first,
              out + token * out_stride);
    });
}

// Memory that is kept from call to call: fresh memory of this size would be cleared by the operating system each time.
template <typename Item>
Item* scratch(std::vector<Item>& kept, int64_t count) {
  if (int64_t(kept.size()) < count) kept.resize(count);
  return kept.data();
}

}  // namespace
}  // namespace moeserve

// What stays from step to step. experts [num_experts] point to packed experts, null for absent ones.
struct MoeExperts {
  const void* const* experts;
  int64_t num_experts;
  int64_t gate_up, down, times;  // gate_up, down: see Packing; times: see Shape.
  int64_t hidden, intermediate, has_bias, has_order, activation;
  double alpha, limit;
};

// out [num_tokens, hidden] = sum over k of weight * expert(x [num_tokens, hidden]). ids [num_tokens, top_k], -1 for an
// expert elsewhere; weights [num_tokens, top_k]. Where weights is null, nothing is summed: out is
// [num_tokens * top_k, hidden], and rows with an id of -1 are left untouched. Returns -1, or a chosen expert that is not
// here, and then computes nothing.
extern "C" int64_t moeserve_experts(const MoeExperts* layer, const float* x, int64_t x_stride, int64_t num_tokens,
                                    const int64_t* ids, const float* weights, int64_t top_k, float* out,
                                    int64_t out_stride) {
  using namespace moeserve;
  const int64_t hidden = layer->hidden, intermediate = layer->intermediate, num_experts = layer->num_experts;
  const void* const* experts = layer->experts;
  const Shape shape = {hidden, intermediate, {layer->gate_up}, {layer->down}, layer->times, layer->has_bias != 0,
                       layer->has_order != 0, static_cast<Activation>(layer->activation), float(layer->alpha),
                       float(layer->limit)};
  for (int64_t i = 0; i < num_tokens * top_k; ++i)
    if (ids[i] >= num_experts || (ids[i] >= 0 && !experts[ids[i]])) return ids[i];
  Step step = {x, x_stride, num_tokens, top_k, experts, sort_by_expert(ids, num_tokens * top_k, num_experts)};
  static thread_local std::vector<float> floats;
  static thread_local std::vector<uint8_t> rounded;
  const int64_t chosen = int64_t(step.rows.places.size());
  const int64_t hidden_floats = chosen * shape.padded_intermediate();
  const int64_t ordered_floats = shape.has_order ? chosen * hidden : 0;
  step.hidden = scratch(floats, hidden_floats + ordered_floats + (weights ? num_tokens * top_k * hidden : 0));
  step.ordered = step.hidden + hidden_floats;
  step.results = weights ? step.ordered + ordered_floats : out;
  const int64_t x_rows = shape.has_order ? chosen : num_tokens;
  const int64_t x_bytes = shape.rounds(shape.gate_up) ? x_rows * shape.rounded_bytes(shape.gate_up, hidden) : 0;
  const int64_t hidden_bytes = shape.rounds(shape.down) ? chosen * shape.rounded_bytes(shape.down, intermediate) : 0;
  step.rounded_x = scratch(rounded, x_bytes + hidden_bytes);
  step.rounded_hidden = step.rounded_x + x_bytes;
  static thread_local Lines<uint8_t> tiles;
  step.tiles_x = count_tiles(shape, step.rows, shape.gate_up);
  step.tiles_hidden = count_tiles(shape, step.rows, shape.down);
  const int64_t tiled_x_bytes = step.tiles_x.count() * shape.tile_bytes(shape.gate_up, hidden);
  tiles.reserve(tiled_x_bytes + step.tiles_hidden.count() * shape.tile_bytes(shape.down, intermediate));
  step.tiles_x.data = tiles.data();
  step.tiles_hidden.data = tiles.data() + tiled_x_bytes;
  run(shape, step, ids, weights, out, out_stride);
  return -1;
}

// out [num_tokens, hidden] = sum over k of weight * product, with the bits that moeserve_experts gives.
// products [num_tokens, top_k, hidden], weights [num_tokens, top_k].
extern "C" void moeserve_combine(const float* products, int64_t num_tokens, int64_t top_k, int64_t hidden,
                                 const float* weights, float* out, int64_t out_stride) {
  using namespace moeserve;
  for_shared(num_tokens, kCombinedAtOnce / (top_k * hidden), [&](int64_t token) {
    combine(products + token * top_k * hidden, top_k, hidden, nullptr, weights + token * top_k,
            out + token * out_stride);
  });
}
