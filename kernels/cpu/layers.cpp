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
void moeserve_norm_of_sum(float* x, float* residual, int64_t num_rows, int64_t width, double multiplier,
                          const float* weight, double eps, float* out);
void moeserve_choose_experts(const moeserve::Gate* gate, const float* x, int64_t x_stride, int64_t num_rows,
                             int64_t* ids, float* weights);
int64_t moeserve_experts(const MoeExperts* layer, const float* x, int64_t x_stride, int64_t num_tokens,
                         const int64_t* ids, const float* weights, int64_t top_k, float* out, int64_t out_stride);
}

namespace moeserve {
namespace {

// What stays from step to step. next_norm: before the next layer's attention, or the last norm.
struct Layer {
  const Attention* attention;
  const Gate* gate;
  const MoeExperts* experts;
  const float *norm, *next_norm;
  double eps, next_eps;
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
  static thread_local std::vector<float> kept;
  const int64_t hidden = sizes->hidden, top_k = sizes->top_k;
  if (int64_t(kept.size()) < num_rows * (hidden + top_k)) kept.resize(num_rows * (hidden + top_k));
  float *added = kept.data(), *weights = added + num_rows * hidden;
  for (int64_t number = 0; number < sizes->num_layers; ++number, ids += num_rows * top_k) {
    const Layer& layer = layers[number];
    moeserve_attention_block(layer.attention, layer.is_windowed ? windowed : rows, pools[number], normed, hidden, added);
    if (number == sizes->num_layers - 1 && num_last >= 0) {
      keep_rows(last_rows, num_last, hidden, added, normed);
      keep_rows(last_rows, num_last, hidden, residual, normed);
      num_rows = num_last;
      if (!num_rows) break;
    }
    moeserve_norm_of_sum(added, residual, num_rows, hidden, sizes->multiplier, layer.norm, layer.eps, normed);
    moeserve_choose_experts(layer.gate, normed, hidden, num_rows, ids, weights);
    const int64_t missing =
        moeserve_experts(layer.experts, normed, hidden, num_rows, ids, weights, top_k, added, hidden);
    if (missing >= 0) return missing;
    moeserve_norm_of_sum(added, residual, num_rows, hidden, sizes->multiplier, layer.next_norm, layer.next_eps, normed);
  }
  return -1;
}
