// Layers that carry a state from token to token: the short convolution and the gated delta rule. A chunk is a run of
// rows of one request; its state lies in a slot. A row's result does not depend on how its request was cut into chunks.
#include "simd.h"

namespace moeserve {
namespace {

constexpr int64_t kMostKeys = 512;  // Channels of a key: what a head's normalised key and query take on the stack.
constexpr int kColumns = 4;         // Vectors of value channels that are computed together.

Floats load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Floats value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}

void store_some(float* to, Floats value, int64_t count) {
  std::memcpy(to, &value, (count < kLanes ? count : kLanes) * sizeof(float));
}

Floats silu(Floats x) { return x / (1.0f + exp(-x)); }

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The convolution of `rows` rows at up to sixteen channels.
void convolve(const float* x, int64_t stride, int64_t rows, const float* weight, int64_t width, int64_t num_channels,
              float* state, float* out, int64_t count) {
  for (int64_t row = 0; row < rows; ++row) {
    Floats total{};
    for (int64_t tap = 0; tap < width; ++tap) {
      const int64_t source = row - (width - 1) + tap;
      const float* input = source < 0 ? state + (source + width - 1) * num_channels : x + source * stride;
      total += load_some(input, count) * load_some(weight + tap * num_channels, count);
    }
    store_some(out + row * num_channels, silu(total), count);
  }
  // The last width - 1 inputs, of which the first may still be those of the state.
  for (int64_t place = 0; place < width - 1; ++place) {
    const int64_t source = rows - (width - 1) + place;
    const float* input = source < 0 ? state + (source + width - 1) * num_channels : x + source * stride;
    store_some(state + place * num_channels, load_some(input, count), count);
  }
}

// to = from / sqrt(sum of squares + 1e-6) * scale
void normalise(const float* from, int64_t count, float scale, float* to) {
  Floats squares{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load_some(from + i, count - i);
    squares += value * value;
  }
  const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

// One token of the rule at kVectors * 16 value channels of a head; state [num_keys, num_values].
template <int kVectors>
void step(float* state, int64_t num_keys, int64_t num_values, const float* key, const float* query, const float* value,
          float decay, float beta, float* out) {
  Floats known[kVectors]{}, delta[kVectors], result[kVectors]{};
  for (int64_t i = 0; i < num_keys; ++i) {
    const float* row = state + i * num_values;
    for (int v = 0; v < kVectors; ++v) known[v] += load(row + v * kLanes) * key[i];
  }
  for (int v = 0; v < kVectors; ++v) delta[v] = (load(value + v * kLanes) - known[v] * decay) * beta;
  for (int64_t i = 0; i < num_keys; ++i) {
    float* row = state + i * num_values;
    for (int v = 0; v < kVectors; ++v) {
      const Floats next = load(row + v * kLanes) * decay + delta[v] * key[i];
      store(row + v * kLanes, next);
      result[v] += next * query[i];
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

}  // namespace
}  // namespace moeserve

// Causal depthwise convolution and SiLU. x [T, num_channels], rows `stride` floats apart; weight [width, num_channels],
// the newest input's last; states [num_slots, width - 1, num_channels], slots `slot_stride` floats apart: the inputs
// before a chunk, which become those before the next one. Chunk c has the rows first_rows[c] to first_rows[c + 1] - 1
// and the slot slots[c]. out [T, num_channels].
extern "C" void moeserve_short_conv(const float* x, int64_t stride, const float* weight, int64_t width,
                                    int64_t num_channels, float* states, int64_t slot_stride, const int64_t* first_rows,
                                    const int64_t* slots, int64_t num_chunks, float* out) {
  using namespace moeserve;
  const int64_t num_parts = (num_channels + kLanes - 1) / kLanes;
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t part = 0; part < num_parts; ++part) {
      const int64_t first = first_rows[chunk], channel = part * kLanes;
      convolve(x + first * stride + channel, stride, first_rows[chunk + 1] - first, weight + channel, width,
               num_channels, states + slots[chunk] * slot_stride + channel, out + first * num_channels + channel,
               num_channels - channel);
    }
}

// The gated delta rule, token by token. Per value head, with S [num_keys, num_values]:
//   S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q / sqrt(num_keys)
// with q and k of unit length, g = rate * softplus(step + bias) and beta = sigmoid(strength).
// qkv [T, 2 * key_heads * num_keys + value_heads * num_values], rows `stride` floats apart; gates [T, 2 * value_heads]:
// strengths, then steps, rows `gate_stride` floats apart; rate, bias [value_heads]; states [num_slots, value_heads,
// num_keys, num_values], slots `slot_stride` floats apart; out [T, value_heads, num_values]. Chunks as above. num_keys is
// at most 512, num_values a multiple of 16.
extern "C" void moeserve_gated_delta_rule(const float* qkv, int64_t stride, const float* gates, int64_t gate_stride,
                                          const float* rate, const float* bias, float* states, int64_t slot_stride,
                                          const int64_t* first_rows, const int64_t* slots, int64_t num_chunks,
                                          int64_t key_heads, int64_t value_heads, int64_t num_keys, int64_t num_values,
                                          float* out) {
  using namespace moeserve;
  const float scale = 1.0f / std::sqrt(float(num_keys));
  const int64_t group = value_heads / key_heads;
#pragma omp parallel for schedule(dynamic) collapse(2)
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk)
    for (int64_t head = 0; head < value_heads; ++head) {
      alignas(64) float query[kMostKeys], key[kMostKeys];
      float* state = states + slots[chunk] * slot_stride + head * num_keys * num_values;
      for (int64_t row = first_rows[chunk]; row < first_rows[chunk + 1]; ++row) {
        const float* heads = qkv + row * stride;
        const float* value = heads + 2 * key_heads * num_keys + head * num_values;
        const float* gate = gates + row * gate_stride;
        normalise(heads + head / group * num_keys, num_keys, scale, query);
        normalise(heads + (key_heads + head / group) * num_keys, num_keys, 1.0f, key);
        const float beta = 1.0f / (1.0f + std::exp(-gate[head]));
        const float decay = std::exp(rate[head] * softplus(gate[value_heads + head] + bias[head]));
        float* target = out + (row * value_heads + head) * num_values;
        int64_t i = 0;
        for (; i + kColumns * kLanes <= num_values; i += kColumns * kLanes)
          step<kColumns>(state + i, num_keys, num_values, key, query, value + i, decay, beta, target + i);
        for (; i < num_values; i += kLanes)
          step<1>(state + i, num_keys, num_values, key, query, value + i, decay, beta, target + i);
      }
    }
}

// out = x / rms(x) * weight * silu(gate): x and out [num_rows * num_heads, width]; gate [num_rows, num_heads * width],
// rows `gate_stride` floats apart; weight [width].
extern "C" void moeserve_gated_norm(const float* x, const float* gate, int64_t gate_stride, int64_t num_rows,
                                    int64_t num_heads, int64_t width, const float* weight, double eps, float* out) {
  using namespace moeserve;
#pragma omp parallel for schedule(static) if (num_rows >= 24)
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = (row * num_heads + head) * width;
      const float* open = gate + row * gate_stride + head * width;
      Floats squares{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats value = load_some(x + place + i, width - i);
        squares += value * value;
      }
      const float inverse = 1.0f / std::sqrt(sum(squares) / float(width) + float(eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        const Floats normed = load_some(x + place + i, left) * inverse * load_some(weight + i, left);
        store_some(out + place + i, normed * silu(load_some(open + i, left)), left);
      }
    }
}
