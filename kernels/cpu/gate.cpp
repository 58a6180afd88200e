// The choice of experts from a gate's logits, and the largest logit of a row. Weights have the bits that torch gives on
// a machine with AVX-512: its exponential, and its order of sums.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"
#include "tape.h"
#include "team.h"

namespace moeserve {
namespace {

// How logits become weights.
enum class Score : int64_t { kSoftmaxOfChosen, kSoftmax, kSigmoid };

struct Gate {
  int64_t num_experts, top_k;
  Score score;
  const float* bias;  // Of each expert, added to what chooses; null for none.
  bool renormalises;
  float least_total, scale;
};

// e^x as torch's softmax has it, on all lanes; x is at most 0.
inline Floats exp_of_softmax(Floats x) {
  const Floats magic = splat(12582912.0f);  // Adding it rounds to an integer in the low bits.
  const Floats whole = (max(x, splat(-104.0f)) * 1.442695041f + magic) - magic;
  Floats rest = fma(whole, splat(-0.693145751953125f), x);
  rest = fma(whole, splat(-1.428606765330187045e-06f), rest);
  Floats value = splat(0.000198527617612853646278381f);
  value = fma(value, rest, splat(0.00139304355252534151077271f));
  value = fma(value, rest, splat(0.00833336077630519866943359f));
  value = fma(value, rest, splat(0.0416664853692054748535156f));
  value = fma(value, rest, splat(0.166666671633720397949219f));
  value = fma(value, rest, splat(0.5f));
  value = fma(rest * rest, value, rest) + 1.0f;
  // 2^whole in two steps, because the result may be subnormal.
  const Ints power = __builtin_convertvector(whole, Ints), half = power >> 1;
  const Floats first = (Floats)((half + 127) << 23), second = (Floats)((power - half + 127) << 23);
  return select((Ints)(x < -104.0f), Floats{}, value * first * second);
}

// Turns numbers [count] into their softmax.
void softmax(float* x, int64_t count) {
  float top = x[0];
  for (int64_t i = 1; i < count; ++i) top = x[i] > top || x[i] != x[i] ? x[i] : top;
  Floats lanes{};
  float lane[kLanes];
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t width = std::min<int64_t>(kLanes, count - first);
    std::fill_n(lane, kLanes, 0.0f);
    std::copy_n(x + first, width, lane);
    store(lane, exp_of_softmax(load(lane) - top));
    for (int64_t i = width; i < kLanes; ++i) lane[i] = 0.0f;
    lanes = first ? lanes + load(lane) : load(lane);
    std::copy_n(lane, width, x + first);
  }
  float total = 0.0f;
  if (count < kLanes) {
    total = lanes[0];
    for (int64_t i = 1; i < count; ++i) total += lanes[i];
  } else {
    total = sum(lanes);
  }
  const float share = 1.0f / total;
  for (int64_t i = 0; i < count; ++i) x[i] *= share;
}

// The sum of x [count] in torch's order for up to 31 numbers: in 1, 4 or 8 lanes.
float sum_of(const float* x, int64_t count) {
  const int64_t lanes = count < 4 ? 1 : count < 8 ? 4 : 8, whole = count / lanes * lanes;
  float sums[8];
  for (int64_t i = 0; i < lanes; ++i) {
    sums[i] = x[i];
    for (int64_t k = i + lanes; k < whole; k += lanes) sums[i] += x[k];
  }
  if (lanes == 4)
    for (int64_t k = whole; k < count; ++k) sums[0] += x[k];
  int64_t next = lanes == 8 ? whole : count;
  float total = next < count ? x[next++] : 0.0f;
  for (; next < count; ++next) total += x[next];
  for (int64_t i = 0; i < lanes; ++i) total += sums[i];
  return total;
}

// Writes the places of the `top_k` largest of x [count], the largest first, of equal ones the lower place first.
void choose(const float* x, int64_t count, int64_t top_k, int64_t* places) {
  for (int64_t k = 0; k < top_k; ++k) places[k] = -1;
  const auto before = [&](int64_t a, int64_t b) {
    const bool a_is_none = x[a] != x[a], b_is_none = x[b] != x[b];
    return a_is_none || b_is_none ? a_is_none && !b_is_none : x[a] > x[b];
  };
  for (int64_t e = 0; e < count; ++e) {
    int64_t k = top_k;
    for (; k > 0 && (places[k - 1] < 0 || before(e, places[k - 1])); --k)
      if (k < top_k) places[k] = places[k - 1];
    if (k < top_k) places[k] = e;
  }
}

void select_row(const Gate& gate, const float* logits, int64_t* ids, float* weights) {
  static thread_local std::vector<float> kept;
  kept.resize(2 * gate.num_experts);
  float *scores = kept.data(), *choice = scores + gate.num_experts;
  std::copy_n(logits, gate.num_experts, scores);
  if (gate.score == Score::kSoftmax) softmax(scores, gate.num_experts);
  if (gate.score == Score::kSigmoid)
    for (int64_t e = 0; e < gate.num_experts; ++e) scores[e] = float(1.0 / (1.0 + std::exp(-double(logits[e]))));
  for (int64_t e = 0; e < gate.num_experts; ++e) choice[e] = gate.bias ? scores[e] + gate.bias[e] : scores[e];
  choose(choice, gate.num_experts, gate.top_k, ids);
  for (int64_t k = 0; k < gate.top_k; ++k) weights[k] = scores[ids[k]];
  if (gate.score == Score::kSoftmaxOfChosen) {
    softmax(weights, gate.top_k);
  } else if (gate.renormalises) {
    float total = sum_of(weights, gate.top_k);
    if (gate.least_total > 0.0f) total = std::max(gate.least_total, total);
    for (int64_t k = 0; k < gate.top_k; ++k) weights[k] /= total;
  }
  if (gate.scale != 1.0f)
    for (int64_t k = 0; k < gate.top_k; ++k) weights[k] *= gate.scale;
}

// The largest of x [width], not a number if any is none, and its first place.
int64_t find_largest(const float* x, int64_t width, float* value) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats tops = splat(-std::numeric_limits<float>::infinity());
  Ints places = lane, none{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Floats next = load(x + i);
    const Ints better = (Ints)(next > tops);
    places = (better & (lane + int32_t(i))) | (~better & places);
    tops = select(better, next, tops);
    none |= (Ints)(next != next);
  }
  *value = tops[0];
  int64_t place = places[0];
  bool has_none = false;
  for (int l = 0; l < kLanes; ++l) {
    has_none |= none[l] != 0;
    if (l < width && (tops[l] > *value || (tops[l] == *value && places[l] < place))) *value = tops[l], place = places[l];
  }
  for (; i < width; ++i) {
    has_none |= x[i] != x[i];
    if (x[i] > *value) *value = x[i], place = i;
  }
  if (!has_none) return place;
  *value = std::numeric_limits<float>::quiet_NaN();
  return std::find_if(x, x + width, [](float number) { return number != number; }) - x;
}

}  // namespace
}  // namespace moeserve

// logits [num_rows, num_experts], contiguous; score: see Score; bias [num_experts] or null. ids and weights
// [num_rows, top_k]. least_total: of the sum that weights are divided by if `renormalises`; 0 for none.
extern "C" void moeserve_select_experts(const float* logits, int64_t num_rows, int64_t num_experts, int64_t top_k,
                                        int64_t score, const float* bias, int64_t renormalises, double least_total,
                                        double scale, int64_t* ids, float* weights) {
  using namespace moeserve;
  const Gate gate = {num_experts, top_k, Score(score), bias, renormalises != 0, float(least_total), float(scale)};
  perform([=] {
    for_shared(num_rows, kRowsAtOnce, [&](int64_t row) {
      select_row(gate, logits + row * num_experts, ids + row * top_k, weights + row * top_k);
    });
  });
}

// x [num_rows, width], rows `stride` floats apart: the largest number of each row and its first place.
extern "C" void moeserve_largest(const float* x, int64_t stride, int64_t num_rows, int64_t width, int64_t* places,
                                 float* values) {
  moeserve::for_shared(num_rows, 1, [&](int64_t row) {
    places[row] = moeserve::find_largest(x + row * stride, width, values + row);
  });
}
