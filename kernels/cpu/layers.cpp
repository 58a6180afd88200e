// The layers of a decoder in one call: grouped-query attention and experts, each behind a norm and added to the residual
// stream. The steps are those of the calls named below, with their bits.
#include <algorithm>
#include <vector>

#include "matrix.h"

namespace moeserve {
struct Attention;
struct Rows;
struct Pools;
struct Gate;
}  // namespace moeserve
struct MoeExperts;

extern "C" {
void moeserve_attention_block(const moeserve::Attention* a, const moeserve::Rows* rows, const moeserve::Pools* pools,
                              const float* x, int64_t x_stride, float* out);
void moeserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* weight,
                       double eps, float* out, int64_t out_stride);
void moeserve_norm_of_sum(float* x, float* residual, int64_t num_rows, int64_t width, double multiplier, double scale,
                          const float* weight, double eps, float* out);
void moeserve_choose_experts(const moeserve::Gate* gate, const float* x, int64_t x_stride, int64_t num_rows,
                             int64_t* ids, float* weights);
int64_t moeserve_experts(const MoeExperts* layer, const float* x, int64_t x_stride, int64_t num_tokens,
                         const int64_t* ids, const float* weights, int64_t top_k, float* out, int64_t out_stride);
}

namespace moeserve {
namespace {

// What stays from step to step. shared: an expert for every row, or null. next_norm: before the next layer's attention,
// or the last norm. The norms between them are null where there are none: of what attention adds, of the stream as the
// input of the gate and of the experts, and of what experts, the shared expert and both together add.
struct Layer {
  const Attention* attention;
  const Gate* gate;
  const MoeExperts *experts, *shared;
  const float *norm, *next_norm;
  const float *after_attention, *for_gate, *for_experts, *after_experts, *after_shared, *after_both;
  double eps, next_eps;
  double scale;  // Of the stream behind the layer.
  int64_t is_windowed;
};

struct Sizes {
  int64_t num_layers, hidden, top_k;
  double multiplier;  // Of all that is added to the stream.
};

// Moves rows of x [., width] to its beginning. room [num_rows, width].
void keep_rows(const int64_t* rows, int64_t num_rows, int64_t width, float* x, float* room) {
  for (int64_t i = 0; i < num_rows; ++i) std::copy_n(x + rows[i] * width, width, room + i * width);
  std::copy_n(room, num_rows * width, x);
}

// The rows of one call that lie between its parts.
struct Between {
  int64_t hidden, top_k;
  float *added, *other, *input, *weights, *ones;
  const int64_t* zeros;
};

// Writes to `added` what gate, experts and shared expert add to the stream. normed: the stream behind the layer's norm.
// Returns -1, or a chosen expert that is not here.
int64_t add_experts(const Layer& layer, const Between& between, int64_t num_rows, const float* normed,
                    const float* residual, int64_t* ids) {
  const auto [hidden, top_k, added, other, input, weights, ones, zeros] = between;
  const auto norm = [&](const float* x, const float* weight, float* out) {
    if (weight) moeserve_rms_norm(x, hidden, num_rows, hidden, weight, layer.eps, out, hidden);
  };
  norm(residual, layer.for_gate, input);
  moeserve_choose_experts(layer.gate, layer.for_gate ? input : normed, hidden, num_rows, ids, weights);
  norm(residual, layer.for_experts, input);
  const float* of_experts = layer.for_experts ? input : normed;
  int64_t missing = moeserve_experts(layer.experts, of_experts, hidden, num_rows, ids, weights, top_k, added, hidden);
  if (missing >= 0) return missing;
  norm(added, layer.after_experts, added);
  if (layer.shared) {
    missing = moeserve_experts(layer.shared, normed, hidden, num_rows, zeros, ones, 1, other, hidden);
    if (missing >= 0) return missing;
    norm(other, layer.after_shared, other);
    for (int64_t i = 0; i < num_rows * hidden; ++i) added[i] += other[i];
  }
  norm(added, layer.after_both, added);
  return -1;
}

}  // namespace
}  // namespace moeserve

// normed [num_rows, hidden]: the norm of `residual` before the first layer. Both are overwritten: the norm after the last
// layer is written to normed. windowed: the rows for layers with window blocks. pools: of each layer. last_rows [num_last]:
// the rows that the last layer's experts compute, which come first then; all if num_last is -1. ids: the chosen experts,
// [num_rows, top_k] of each layer, of the last one only those rows. Returns -1, or a chosen expert that is not here.
extern "C" int64_t moeserve_layers(const moeserve::Sizes* sizes, const moeserve::Layer* layers,
                                   const moeserve::Rows* rows, const moeserve::Rows* windowed,
                                   const moeserve::Pools* const* pools, int64_t num_rows, const int64_t* last_rows,
                                   int64_t num_last, float* normed, float* residual, int64_t* ids) {
  using namespace moeserve;
  static thread_local std::vector<float> kept, ones;
  static thread_local std::vector<int64_t> zeros;
  const int64_t hidden = sizes->hidden, top_k = sizes->top_k, size = num_rows * hidden;
  if (int64_t(kept.size()) < 3 * size + num_rows * top_k) kept.resize(3 * size + num_rows * top_k);
  if (int64_t(ones.size()) < num_rows) {
    ones.resize(num_rows, 1.0f);
    zeros.resize(num_rows);
  }
  float* added = kept.data();
  const Between between = {hidden,          top_k,       added,       added + size, added + 2 * size,
                           added + 3 * size, ones.data(), zeros.data()};
  for (int64_t number = 0; number < sizes->num_layers; ++number, ids += num_rows * top_k) {
    const Layer& layer = layers[number];
    moeserve_attention_block(layer.attention, layer.is_windowed ? windowed : rows, pools[number], normed, hidden, added);
    if (number == sizes->num_layers - 1 && num_last >= 0) {
      keep_rows(last_rows, num_last, hidden, added, normed);
      keep_rows(last_rows, num_last, hidden, residual, normed);
      num_rows = num_last;
      if (!num_rows) break;
    }
    if (layer.after_attention)
      moeserve_rms_norm(added, hidden, num_rows, hidden, layer.after_attention, layer.eps, added, hidden);
    moeserve_norm_of_sum(added, residual, num_rows, hidden, sizes->multiplier, 1.0, layer.norm, layer.eps, normed);
    const int64_t missing = add_experts(layer, between, num_rows, normed, residual, ids);
    if (missing >= 0) return missing;
    moeserve_norm_of_sum(added, residual, num_rows, hidden, sizes->multiplier, layer.scale, layer.next_norm,
                         layer.next_eps, normed);
  }
  return -1;
}
