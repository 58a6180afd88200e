// The choice of experts: a gate's product, its scores, the best of them and their weights.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "matrix.h"
#include "softmax.h"
#include "team.h"

extern "C" {
void moeserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* weight,
                       double eps, float* out, int64_t out_stride);
}

namespace moeserve {

enum class Score : int64_t { kSoftmaxOfChosen, kSoftmax, kSigmoid };

struct Gate {
  const Matrix* product;  // Its width is the number of experts.
  int64_t top_k;
  Score score;
  const float* bias;  // Of each expert, added to what chooses; null for none.
  int64_t renormalises;
  double least_total, scale;  // least_total: of the sum that weights are divided by if `renormalises`; 0 for none.
  const float* scales;  // Of each expert, factors on the final weights; null for none.

  int64_t num_experts() const { return product->width; }
};

namespace {

// Turns numbers [count] into their softmax.
void softmax(float* x, int64_t count) {
  float top = x[0];
  for (int64_t i = 1; i < count; ++i) top = x[i] > top || x[i] != x[i] ? x[i] : top;
  write_softmax(x, count, top, x);
}

// Writes the places of the `top_k` largest of x [count], the largest first, of equal ones the lower place first. What
// is not a number is larger than any.
void choose(const float* x, int64_t count, int64_t top_k, int64_t* places) {
  const auto is_better = [&](int64_t a, int64_t b) {
    const bool a_is_none = x[a] != x[a], b_is_none = x[b] != x[b];
    return a_is_none || b_is_none ? a_is_none && !b_is_none : x[a] > x[b];
  };
  for (int64_t e = 0; e < count; ++e) {
    int64_t k = std::min(e, top_k);
    for (; k > 0 && is_better(e, places[k - 1]); --k)
      if (k < top_k) places[k] = places[k - 1];
    if (k < top_k) places[k] = e;
  }
}

// scores [num_experts]: the row's logits, which are overwritten. choice [num_experts]: room.
void choose_row(const Gate& gate, float* scores, float* choice, int64_t* ids, float* weights) {
  const int64_t num_experts = gate.num_experts();
  if (gate.score == Score::kSoftmax) softmax(scores, num_experts);
  if (gate.score == Score::kSigmoid)
    for (int64_t e = 0; e < num_experts; ++e) scores[e] = float(1.0 / (1.0 + std::exp(-double(scores[e]))));
  for (int64_t e = 0; e < num_experts; ++e) choice[e] = gate.bias ? scores[e] + gate.bias[e] : scores[e];
  choose(choice, num_experts, gate.top_k, ids);
  for (int64_t k = 0; k < gate.top_k; ++k) weights[k] = scores[ids[k]];
  if (gate.score == Score::kSoftmaxOfChosen) {
    softmax(weights, gate.top_k);
  } else if (gate.renormalises) {
    float total = float(std::accumulate(weights, weights + gate.top_k, 0.0));
    if (gate.least_total > 0.0) total = std::max(float(gate.least_total), total);
    for (int64_t k = 0; k < gate.top_k; ++k) weights[k] /= total;
  }
  if (gate.scale != 1.0)
    for (int64_t k = 0; k < gate.top_k; ++k) weights[k] *= float(gate.scale);
  if (gate.scales)
    for (int64_t k = 0; k < gate.top_k; ++k) weights[k] *= gate.scales[ids[k]];
}

// Counts in `votes` [count] the numbers among the `top_k` largest of x [count] that are sure to be: larger than the
// largest of all others by more than `sure` times the distance from the mean to the largest. places [top_k + 1]: room.
void vote(const float* x, int64_t count, int64_t top_k, double sure, int64_t* places, int64_t* votes) {
  const int64_t num_places = std::min(top_k + 1, count);
  choose(x, count, num_places, places);
  double least = -std::numeric_limits<double>::infinity();
  if (top_k < count) {
    double total = 0.0;
    for (int64_t e = 0; e < count; ++e) total += x[e];
    least = std::fma(sure, x[places[0]] - total / double(count), double(x[places[top_k]]));
  }
  for (int64_t k = 0; k < std::min(top_k, count); ++k)
    if (x[places[k]] > least) ++votes[places[k]];
}

}  // namespace
}  // namespace moeserve

// Writes the experts that rows are sure to choose to `wanted`, those of most rows first, and returns their number. A row's
// scores are the product of the norm of residual + shared, both contiguous [num_rows, depth]; shared: null for none.
extern "C" int64_t moeserve_foresee(const moeserve::Matrix* product, const float* residual, const float* shared,
                                    int64_t num_rows, const float* weight, double eps, int64_t top_k, double sure,
                                    int64_t* wanted) {
  using namespace moeserve;
  const int64_t depth = product->depth, count = product->width;
  static thread_local std::vector<float> kept;
  static thread_local std::vector<int64_t> counted;
  kept.resize(num_rows * (depth + count));
  counted.assign(count + top_k + 1, 0);
  float *state = kept.data(), *scores = state + num_rows * depth;
  int64_t *votes = counted.data(), *places = votes + count;
  for (int64_t i = 0; i < num_rows * depth; ++i) state[i] = shared ? residual[i] + shared[i] : residual[i];
  moeserve_rms_norm(state, depth, num_rows, depth, weight, eps, state, depth);
  multiply_rows(product, 1, state, depth, num_rows, scores, count);
  for (int64_t row = 0; row < num_rows; ++row) vote(scores + row * count, count, top_k, sure, places, votes);
  int64_t num_wanted = 0;
  for (int64_t e = 0; e < count; ++e)
    if (votes[e]) wanted[num_wanted++] = e;
  // Of one row the likeliest first.
  std::stable_sort(wanted, wanted + num_wanted, [&](int64_t a, int64_t b) {
    return num_rows == 1 ? scores[a] > scores[b] : votes[a] > votes[b];
  });
  return num_wanted;
}

// x [num_rows, depth], rows `x_stride` floats apart; ids and weights [num_rows, top_k].
extern "C" void moeserve_choose_experts(const moeserve::Gate* gate, const float* x, int64_t x_stride, int64_t num_rows,
                                        int64_t* ids, float* weights) {
  using namespace moeserve;
  const int64_t num_experts = gate->num_experts();
  static thread_local std::vector<float> kept;
  if (int64_t(kept.size()) < 2 * num_rows * num_experts) kept.resize(2 * num_rows * num_experts);
  float *logits = kept.data(), *choices = logits + num_rows * num_experts;
  multiply_rows(gate->product, 1, x, x_stride, num_rows, logits, num_experts);
  for_shared(num_rows, kRowsAtOnce, [&](int64_t row) {
    choose_row(*gate, logits + row * num_experts, choices + row * num_experts, ids + row * gate->top_k,
               weights + row * gate->top_k);
  });
}
