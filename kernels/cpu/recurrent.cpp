// Layers that carry a state from token to token: the short convolution, delta rules and Mamba. A chunk is a run of
// rows of one request; its state lies in a slot. A row's result does not depend on how its request was cut into chunks.
#include <algorithm>
#include <type_traits>

#include "simd.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int64_t kMostKeys = 512;  // Channels of a key: what a head keeps of a token on the stack.
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

float softplus(float x) { return x > 20.0f ? x : float(log_of_next(exp(x))); }

// The convolution of `rows` rows at up to sixteen channels. bias may be null.
void convolve(const float* x, int64_t stride, int64_t rows, const float* weight, const float* bias, int64_t width,
              int64_t num_channels, bool activates, float* state, float* out, int64_t count) {
  const Floats start = bias ? load_some(bias, count) : Floats{};
  for (int64_t row = 0; row < rows; ++row) {
    Floats total = start;
    for (int64_t tap = 0; tap < width; ++tap) {
      const int64_t source = row - (width - 1) + tap;
      const float* input = source < 0 ? state + (source + width - 1) * num_channels : x + source * stride;
      total = fma(load_some(input, count), load_some(weight + tap * num_channels, count), total);
    }
    store_some(out + row * num_channels, activates ? silu(total) : total, count);
  }
  // The last width - 1 inputs; the first ones may still be the state's.
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
    squares = fma(value, value, squares);
  }
  const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

// S <- diag(decay) S + key delta^T;  out += S^T query, at kVectors * 16 value channels of a head; state [num_keys,
// num_values]. decay: one number for all key channels or one for each.
template <int kVectors, bool kOneDecay>
void absorb(float* state, int64_t num_keys, int64_t num_values, const float* decay, const float* key,
            const Floats (&delta)[kVectors], const float* query, Floats (&out)[kVectors]) {
  const float all = decay[0];
  for (int64_t i = 0; i < num_keys; ++i) {
    float* row = state + i * num_values;
    const float kept = kOneDecay ? all : decay[i], part = key[i], asked = query[i];
    for (int v = 0; v < kVectors; ++v) {
      const Floats next = fma(load(row + v * kLanes), splat(kept), delta[v] * part);
      store(row + v * kLanes, next);
      out[v] = fma(next, splat(asked), out[v]);
    }
  }
}

// What a token brings to a head of the delta rule: unit key and query; the decay, in the first place the one of all key
// channels, or of each, and then the decayed key too.
struct DeltaToken {
  alignas(64) float decay[kMostKeys], key[kMostKeys], query[kMostKeys], faded[kMostKeys];
  float beta;

  void fade(int64_t num_keys, const float* logs) {
    for (int64_t i = 0; i < num_keys; i += kLanes) {
      const Floats each = exp(load_some(logs + i, num_keys - i));
      store(decay + i, each);
      store(faded + i, each * load(key + i));
    }
  }
};

// One token of the delta rule at kVectors * 16 value channels of a head.
template <int kVectors, bool kOneDecay>
void step(float* state, int64_t num_keys, int64_t num_values, const DeltaToken& token, const float* value, float* out) {
  Floats known[kVectors]{}, delta[kVectors], result[kVectors]{};
  const float* key = kOneDecay ? token.key : token.faded;
  const float fading = kOneDecay ? token.decay[0] : 1.0f;
  for (int64_t i = 0; i < num_keys; ++i) {
    const float* row = state + i * num_values;
    for (int v = 0; v < kVectors; ++v) known[v] = fma(load(row + v * kLanes), splat(key[i]), known[v]);
  }
  for (int v = 0; v < kVectors; ++v) delta[v] = fma(-known[v], splat(fading), load(value + v * kLanes)) * token.beta;
  absorb<kVectors, kOneDecay>(state, num_keys, num_values, token.decay, token.key, delta, token.query, result);
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, result[v]);
}

// Calls with the number of vectors, as a constant, and the first channel of each group of value channels.
template <typename Compute>
void by_columns(int64_t num_values, Compute compute) {
  int64_t i = 0;
  for (; i + kColumns * kLanes <= num_values; i += kColumns * kLanes)
    compute(std::integral_constant<int, kColumns>{}, i);
  for (; i < num_values; i += kLanes) compute(std::integral_constant<int, 1>{}, i);
}

}  // namespace
}  // namespace moeserve

// Causal depthwise convolution, and SiLU if it `activates`. x [T, num_channels], rows `stride` floats apart; weight
// [width, num_channels], the newest input's last; bias [num_channels] or null; states [num_slots, width - 1,
// num_channels], slots `slot_stride` floats apart: the inputs before a chunk, which become those before the next one.
// Chunk c has the rows first_rows[c] to first_rows[c + 1] - 1 and the slot slots[c]. out [T, num_channels].
extern "C" void moeserve_short_conv(const float* x, int64_t stride, const float* weight, const float* bias,
                                    int64_t width, int64_t num_channels, int64_t activates, float* states,
                                    int64_t slot_stride, const int64_t* first_rows, const int64_t* slots,
                                    int64_t num_chunks, float* out) {
  using namespace moeserve;
  const int64_t num_parts = (num_channels + kLanes - 1) / kLanes;
  for_equal(num_chunks * num_parts, [&](int64_t task) {
    const int64_t chunk = task / num_parts, part = task % num_parts;
    const int64_t first = first_rows[chunk], channel = part * kLanes;
    convolve(x + first * stride + channel, stride, first_rows[chunk + 1] - first, weight + channel,
             bias ? bias + channel : nullptr, width, num_channels, activates,
             states + slots[chunk] * slot_stride + channel, out + first * num_channels + channel,
             num_channels - channel);
  });
}

// The gated delta rule, token by token. Per value head, with S [num_keys, num_values]:
//   S <- diag(exp(g)) S;  S <- S + k (beta (v - S^T k))^T;  out = S^T q / sqrt(num_keys)
// with q and k of unit length. gates [T, value_heads * (1 + num_decays)], rows `gate_stride` floats apart: of each head
// what makes beta, then of each what makes the `num_decays` numbers g, one for all channels of a key or one for each.
// With rate and bias [value_heads]: beta = sigmoid(gate), g = rate * softplus(gate + bias), num_decays = 1. Where these
// are null, gates are beta and g themselves.
// qkv [T, 2 * key_heads * num_keys + value_heads * num_values], rows `stride` floats apart; states [num_slots,
// value_heads, num_keys, num_values], slots `slot_stride` floats apart; out [T, value_heads, num_values]. Chunks as above.
// num_keys is at most 512, num_values a multiple of 16.
extern "C" void moeserve_gated_delta_rule(const float* qkv, int64_t stride, const float* gates, int64_t gate_stride,
                                          int64_t num_decays, const float* rate, const float* bias, float* states,
                                          int64_t slot_stride, const int64_t* first_rows, const int64_t* slots,
                                          int64_t num_chunks, int64_t key_heads, int64_t value_heads, int64_t num_keys,
                                          int64_t num_values, float* out) {
  using namespace moeserve;
  const float scale = 1.0f / std::sqrt(float(num_keys));
  const int64_t group = value_heads / key_heads;
  for_shared(num_chunks * value_heads, 1, [&](int64_t task) {
    const int64_t chunk = task / value_heads, head = task % value_heads;
    count_progress();
    DeltaToken token;
    float* state = states + slots[chunk] * slot_stride + head * num_keys * num_values;
    for (int64_t row = first_rows[chunk]; row < first_rows[chunk + 1]; ++row) {
      const float* heads = qkv + row * stride;
      const float* value = heads + 2 * key_heads * num_keys + head * num_values;
      const float* gate = gates + row * gate_stride;
      const float* logs = gate + value_heads + head * num_decays;
      normalise(heads + head / group * num_keys, num_keys, scale, token.query);
      normalise(heads + (key_heads + head / group) * num_keys, num_keys, 1.0f, token.key);
      token.beta = rate ? 1.0f / (1.0f + exp(-gate[head])) : gate[head];
      float* target = out + (row * value_heads + head) * num_values;
      if (num_decays == 1) {
        token.decay[0] = exp(rate ? rate[head] * softplus(logs[0] + bias[head]) : logs[0]);
        by_columns(num_values, [&](auto columns, int64_t i) {
          step<columns, true>(state + i, num_keys, num_values, token, value + i, target + i);
        });
      } else {
        token.fade(num_keys, logs);
        by_columns(num_values, [&](auto columns, int64_t i) {
          step<columns, false>(state + i, num_keys, num_values, token, value + i, target + i);
        });
      }
    }
  });
}

// Mamba 2, token by token. Per head, with S [num_keys, num_values]:
//   S <- exp(rate * d) S + B (d x)^T;  out = S^T C + skip x
// with d = softplus(step + bias), cut to [least, most]. xbc [T, heads * num_values + 2 * groups * num_keys], rows
// `stride` floats apart: x of each head, then B and then C, each shared by equally many neighbouring heads. steps
// [T, heads], rows `step_stride` floats apart; rate, bias, skip [heads]; states [num_slots, heads, num_keys, num_values],
// slots `slot_stride` floats apart; out [T, heads, num_values]. Chunks and bounds as above.
extern "C" void moeserve_mamba2_scan(const float* xbc, int64_t stride, const float* steps, int64_t step_stride,
                                     const float* rate, const float* bias, const float* skip, double least, double most,
                                     float* states, int64_t slot_stride, const int64_t* first_rows,
                                     const int64_t* slots, int64_t num_chunks, int64_t num_heads, int64_t num_groups,
                                     int64_t num_keys, int64_t num_values, float* out) {
  using namespace moeserve;
  const int64_t group = num_heads / num_groups;
  for_shared(num_chunks * num_heads, 1, [&](int64_t task) {
    const int64_t chunk = task / num_heads, head = task % num_heads;
    count_progress();
    float* state = states + slots[chunk] * slot_stride + head * num_keys * num_values;
    for (int64_t row = first_rows[chunk]; row < first_rows[chunk + 1]; ++row) {
      const float* x = xbc + row * stride + head * num_values;
      const float* key = xbc + row * stride + num_heads * num_values + head / group * num_keys;
      const float* query = key + num_groups * num_keys;
      const float size = softplus(steps[row * step_stride + head] + bias[head]);
      const float cut = std::min(std::max(size, float(least)), float(most));
      const float decay = exp(rate[head] * cut);
      float* target = out + (row * num_heads + head) * num_values;
      by_columns(num_values, [&](auto columns, int64_t i) {
        Floats delta[columns], result[columns];
        for (int v = 0; v < columns; ++v) {
          const Floats value = load(x + i + v * kLanes);
          delta[v] = value * cut;
          result[v] = value * skip[head];
        }
        absorb<columns, true>(state + i, num_keys, num_values, &decay, key, delta, query, result);
        for (int v = 0; v < columns; ++v) store(target + i + v * kLanes, result[v]);
      });
    }
  });
}

// Mamba 1, token by token. Per channel, with its states s [num_states]:
//   s <- exp(rate * d) s + B d x;  out = s . C + skip x
// x, d (`sizes`) and out [T, num_channels], bc [T, 2 * num_states]: B, then C of all channels; rows of the first three
// `..._stride` floats apart; rate [num_states, num_channels]; skip [num_channels]; states [num_slots, num_states,
// num_channels], slots `slot_stride` floats apart. Chunks as above. num_channels is a multiple of 16.
extern "C" void moeserve_mamba1_scan(const float* x, int64_t stride, const float* sizes, int64_t size_stride,
                                     const float* bc, int64_t bc_stride, const float* rate, const float* skip,
                                     float* states, int64_t slot_stride, const int64_t* first_rows,
                                     const int64_t* slots, int64_t num_chunks, int64_t num_states,
                                     int64_t num_channels, float* out) {
  using namespace moeserve;
  const int64_t num_parts = num_channels / kLanes;
  for_equal(num_chunks * num_parts, [&](int64_t task) {
    const int64_t chunk = task / num_parts, channel = task % num_parts * kLanes;
    count_progress();
    float* state = states + slots[chunk] * slot_stride + channel;
    for (int64_t row = first_rows[chunk]; row < first_rows[chunk + 1]; ++row) {
      const Floats value = load(x + row * stride + channel), size = load(sizes + row * size_stride + channel);
      const Floats part = value * size;
      const float* key = bc + row * bc_stride;
      Floats result = value * load(skip + channel);
      for (int64_t i = 0; i < num_states; ++i) {
        const Floats decay = exp(load(rate + i * num_channels + channel) * size);
        const Floats next = fma(load(state + i * num_channels), decay, part * key[i]);
        store(state + i * num_channels, next);
        result = fma(next, splat(key[num_states + i]), result);
      }
      store(out + row * num_channels + channel, result);
    }
  });
}

// out = x / rms(x) * weight * silu(gate): x and out [num_rows * num_heads, width]; gate [num_rows, num_heads * width],
// rows `gate_stride` floats apart; weight [width].
extern "C" void moeserve_gated_norm(const float* x, const float* gate, int64_t gate_stride, int64_t num_rows,
                                    int64_t num_heads, int64_t width, const float* weight, double eps, float* out) {
  using namespace moeserve;
  for_shared(num_rows, kRowsAtOnce, [&](int64_t row) {
    for (int64_t head = 0; head < num_heads; ++head) {
      const int64_t place = (row * num_heads + head) * width;
      const float* open = gate + row * gate_stride + head * width;
      Floats squares{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats value = load_some(x + place + i, width - i);
        squares = fma(value, value, squares);
      }
      const float inverse = 1.0f / std::sqrt(sum(squares) / float(width) + float(eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = width - i;
        const Floats normed = load_some(x + place + i, left) * inverse * load_some(weight + i, left);
        store_some(out + place + i, normed * silu(load_some(open + i, left)), left);
      }
    }
  });
}

// out = x silu(gate) over the root mean square of its group, times weight. x and out [num_rows, num_groups * width], rows
// of gate `gate_stride` floats apart; weight [num_groups * width].
extern "C" void moeserve_norm_of_gated(const float* x, const float* gate, int64_t gate_stride, int64_t num_rows,
                                       int64_t num_groups, int64_t width, const float* weight, double eps, float* out) {
  using namespace moeserve;
  for_shared(num_rows, kRowsAtOnce, [&](int64_t row) {
    for (int64_t first = 0; first < num_groups * width; first += width) {
      const float *in = x + row * num_groups * width + first, *open = gate + row * gate_stride + first;
      float* gated = out + row * num_groups * width + first;
      Floats squares{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats value = load_some(in + i, width - i) * silu(load_some(open + i, width - i));
        squares = fma(value, value, squares);
        store_some(gated + i, value, width - i);
      }
      const float inverse = 1.0f / std::sqrt(sum(squares) / float(width) + float(eps));
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats value = load_some(gated + i, width - i) * inverse * load_some(weight + first + i, width - i);
        store_some(gated + i, value, width - i);
      }
    }
  });
}
