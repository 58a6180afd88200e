// Norms, a bound on logits, and rotating and storing new keys and values.
#include <algorithm>

#include "kv_rows.h"
#include "team.h"

int64_t moeserve_progress = 0;

namespace moeserve {
namespace {

// out = x / rms(x) * weight over `width` floats.
void norm_row(const float* x, const float* weight, int64_t width, float eps, float* out) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Floats value = load(x + i);
    squares = fma(value, value, squares);
  }
  float total = sum(squares);
  for (; i < width; ++i) total = std::fma(x[i], x[i], total);
  const float inverse = 1.0f / std::sqrt(total / float(width) + eps);
  for (i = 0; i + kLanes <= width; i += kLanes) store(out + i, load(x + i) * inverse * load(weight + i));
  for (; i < width; ++i) out[i] = x[i] * inverse * weight[i];
}

void scale_row(float* x, int64_t width, float factor) {
  for (int64_t i = 0; i < width; ++i) x[i] *= factor;
}

// tanh(x): near 0, where the quotient would lose digits, its series.
inline Floats tanh_of(Floats x) {
  const Floats size = max(x, -x), square = x * x;
  const Floats shrunk = exp_of_negative(-2.0f * size), far = (1.0f - shrunk) / (1.0f + shrunk);
  Floats series = splat(62.0f / 2835.0f);
  series = fma(series, square, splat(-17.0f / 315.0f));
  series = fma(series, square, splat(2.0f / 15.0f));
  series = fma(series, square, splat(-1.0f / 3.0f));
  const Floats near = fma(series * square, x, x);
  const Floats found = select((Ints)(size < 0.25f), near, select((Ints)(x < 0.0f), -far, far));
  return select((Ints)(x == x), found, x);
}

constexpr int64_t kNumbersAtOnce = 1 << 14;

// The first 2 * half channels of a head, by angles [half].
void rotate(float* head, const float* cos, const float* sin, int64_t half, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    float* first = head + i * step;
    const float a = first[0], b = first[apart];
    first[0] = std::fma(a, cos[i], -(b * sin[i]));
    first[apart] = std::fma(b, cos[i], a * sin[i]);
  }
}

}  // namespace
}  // namespace moeserve

// x and out [num_rows, width], rows `*_stride` floats apart; weight [width].
extern "C" void moeserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* weight,
                                  double eps, float* out, int64_t out_stride) {
  moeserve::for_shared(num_rows, moeserve::kRowsAtOnce, [&](int64_t row) {
    moeserve::norm_row(x + row * x_stride, weight, width, float(eps), out + row * out_stride);
  });
}

// x [count] becomes cap * tanh(x / cap).
extern "C" void moeserve_softcap(float* x, int64_t count, double cap) {
  using namespace moeserve;
  const float bound = float(cap);
  for_shared((count + kNumbersAtOnce - 1) / kNumbersAtOnce, 1, [&](int64_t part) {
    const int64_t end = std::min(count, (part + 1) * kNumbersAtOnce);
    for (int64_t i = part * kNumbersAtOnce; i < end; i += kLanes) {
      const int64_t width = std::min<int64_t>(kLanes, end - i);
      float lanes[kLanes] = {};
      std::copy_n(x + i, width, lanes);
      store(lanes, tanh_of(load(lanes) / bound) * bound);
      std::copy_n(lanes, width, x + i);
    }
  });
}

// Adds x [num_rows, width] times `multiplier` to the rows of `residual`, both contiguous, multiplies the sums by `scale`
// and writes their norms to out. x is overwritten.
extern "C" void moeserve_norm_of_sum(float* x, float* residual, int64_t num_rows, int64_t width, double multiplier,
                                     double scale, const float* weight, double eps, float* out) {
  moeserve::for_shared(num_rows, moeserve::kRowsAtOnce, [&](int64_t row) {
    float *added = x + row * width, *sum = residual + row * width;
    if (multiplier != 1.0) moeserve::scale_row(added, width, float(multiplier));
    for (int64_t i = 0; i < width; ++i) sum[i] += added[i];
    if (scale != 1.0) moeserve::scale_row(sum, width, float(scale));
    moeserve::norm_row(sum, weight, width, float(eps), out + row * width);
  });
}

// qkv [num_rows, num_heads + 2 * num_kv_heads, dim], rows `stride` floats apart: normalises query, key and value heads
// (norm weights [dim] or null), rotates queries and keys by cos, sin [num_rows, half], all in place, and stores keys and
// values in the slots [num_rows] of pools [num_kv_heads, num_slots] of rows (kv_rows.h).
extern "C" void moeserve_rotate_and_store(float* qkv, int64_t stride, int64_t num_rows, int64_t num_heads,
                                          int64_t num_kv_heads, int64_t dim, const float* q_norm, const float* k_norm,
                                          const float* v_norm, double eps, const float* cos, const float* sin,
                                          int64_t half, int64_t interleaved, const int64_t* slots, uint8_t* keys,
                                          uint8_t* values, int64_t num_slots, int64_t kind_of_rows) {
  const moeserve::Kind kind = moeserve::Kind(kind_of_rows);
  const int64_t bytes = moeserve::row_bytes(kind, dim);
  moeserve::for_shared(num_rows, moeserve::kRowsAtOnce, [&](int64_t row) {
    float* heads = qkv + row * stride;
    for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
      float* head = heads + h * dim;
      const float* weight = h < num_heads ? q_norm : k_norm;
      if (weight) moeserve::norm_row(head, weight, dim, float(eps), head);
      moeserve::rotate(head, cos + row * half, sin + row * half, half, interleaved != 0);
    }
    for (int64_t h = 0; h < num_kv_heads; ++h) {
      const int64_t slot = (h * num_slots + slots[row]) * bytes;
      moeserve::store_row(kind, heads + (num_heads + h) * dim, dim, keys + slot);
      float* value = heads + (num_heads + num_kv_heads + h) * dim;
      if (v_norm) moeserve::norm_row(value, v_norm, dim, float(eps), value);
      moeserve::store_row(kind, value, dim, values + slot);
    }
  });
}
