// The positions that sparse attention attends to (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 2.1): an
// indexer of a few narrow heads scores all positions of a context, and each token keeps the best.
//
// A score is one chain of sums in the order of channels, then of heads, whatever else is computed, so a token chooses the
// same positions in any batch and any chunking. Of equal scores the earlier position is chosen.
#include <algorithm>
#include <functional>
#include <vector>

#include "attention_tile.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int kHeadsAtOnce = 6;                 // Heads that share the registers.
constexpr int64_t kTokensAtOnce = 4;            // Tokens that share a transposed tile of keys.
constexpr int64_t kSegmentKeys = 1024;          // Keys of a task.
constexpr int64_t kScoresAtOnce = 2 * 1 << 20;  // Scores in memory; one token may have more.

struct Inputs {
  const float *q, *weights;
  int64_t num_heads, dim;
  const uint8_t* keys;
  Kind kind;
  int64_t block_size;
  const int64_t *first_rows, *starts, *table_offsets;  // As in attention.cpp.
  const int32_t* block_tables;
  int64_t top_k;
  int32_t* chosen;
};

// A token that has more than top_k positions, and where its scores lie.
struct Token {
  int64_t chunk, row, position;
  float* scores;
};

// Some tokens of a chunk over the keys of a segment.
struct Task {
  const Token* tokens;
  int64_t num_tokens, first_key;
};

// Buffers of one thread, kept from call to call.
struct Workspace {
  Lines<float> wide, keys, scores;
  std::vector<uint32_t> order;
};

[[gnu::noinline]] Workspace& own_workspace() {
  static thread_local Workspace work;
  return work;
}

void widen(Kind kind, const uint8_t* row, int64_t dim, float* out) {
  if (kind == Kind::kBfloat16) {
    for (int64_t i = 0; i < dim; ++i) {
      uint16_t half;
      std::memcpy(&half, row + 2 * i, sizeof(half));
      const uint32_t bits = uint32_t(half) << 16;
      std::memcpy(out + i, &bits, sizeof(bits));
    }
    return;
  }
  const float scale = scale_of(row, dim);
  for (int64_t i = 0; i < dim; ++i) out[i] = float(int8_t(row[i])) * scale;
}

// Transposes a tile of `count` keys to [dim][64].
void take_keys(const Inputs& in, int64_t chunk, int64_t first_key, int64_t count, Workspace& work) {
  const int32_t* table = in.block_tables + in.table_offsets[chunk];
  const uint8_t* rows[kTileKeys];
  const int64_t bytes = row_bytes(in.kind, in.dim);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t position = first_key + k;
    rows[k] = in.keys + (table[position / in.block_size] * in.block_size + position % in.block_size) * bytes;
    if (in.kind == Kind::kFloat32) continue;
    float* wide = work.wide.data() + k * in.dim;
    widen(in.kind, rows[k], in.dim, wide);
    rows[k] = reinterpret_cast<const uint8_t*>(wide);
  }
  for (int64_t k = count; k % kLanes; ++k) rows[k] = rows[k - 1];
  transpose_words(rows, count, in.dim, [](Words (&)[4]) {}, reinterpret_cast<uint32_t*>(work.keys.data()));
}

// sums[key] += weights[head] * max(0, scores[head][key]), one head after the other.
template <int Rows>
void add_heads(const float* queries, int64_t dim, const float* weights, Workspace& work, float* sums) {
  float* scores = work.scores.data();
  score<Rows>(queries, dim, work.keys.data(), scores);
  for (int v = 0; v < kVectors; ++v) {
    Floats sum = load(sums + v * kLanes);
    for (int r = 0; r < Rows; ++r)
      sum = fma(splat(weights[r]), max(Floats{}, load(scores + r * kTileKeys + v * kLanes)), sum);
    store(sums + v * kLanes, sum);
  }
}

void score_tile(const Inputs& in, const Token& token, int64_t first_key, int64_t count, Workspace& work) {
  alignas(64) float sums[kTileKeys] = {};
  const float* queries = in.q + token.row * in.num_heads * in.dim;
  const float* weights = in.weights + token.row * in.num_heads;
  int64_t head = 0;
  for (; head + kHeadsAtOnce <= in.num_heads; head += kHeadsAtOnce)
    add_heads<kHeadsAtOnce>(queries + head * in.dim, in.dim, weights + head, work, sums);
  for (; head < in.num_heads; ++head) add_heads<1>(queries + head * in.dim, in.dim, weights + head, work, sums);
  std::copy_n(sums, count, token.scores + first_key);
}

void run(const Inputs& in, const Task& task) {
  Workspace& work = own_workspace();
  work.wide.reserve(kTileKeys * in.dim), work.keys.reserve(kTileKeys * in.dim);
  work.scores.reserve(kHeadsAtOnce * kTileKeys);
  count_progress();
  const int64_t last_position = task.tokens[task.num_tokens - 1].position;
  const int64_t end = std::min(task.first_key + kSegmentKeys, last_position + 1);
  for (int64_t first = task.first_key; first < end; first += kTileKeys) {
    take_keys(in, task.tokens->chunk, first, std::min(kTileKeys, end - first), work);
    for (int64_t t = 0; t < task.num_tokens; ++t) {
      const int64_t count = std::min(kTileKeys, task.tokens[t].position + 1 - first);
      if (count > 0) score_tile(in, task.tokens[t], first, count, work);
    }
  }
}

// Bits that are ordered as the numbers are.
uint32_t ordered(float number) {
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void choose(const Inputs& in, const Token& token) {
  std::vector<uint32_t>& order = own_workspace().order;
  const int64_t count = token.position + 1;
  order.resize(count);
  for (int64_t i = 0; i < count; ++i) order[i] = ordered(token.scores[i]);
  std::nth_element(order.begin(), order.begin() + in.top_k - 1, order.end(), std::greater<uint32_t>());
  const uint32_t least = order[in.top_k - 1];
  int64_t ties = std::count(order.begin(), order.begin() + in.top_k, least);
  int32_t* to = in.chosen + token.row * in.top_k;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t own = ordered(token.scores[i]);
    if (own > least || (own == least && ties-- > 0)) *to++ = int32_t(i);
  }
}

// Scores some tokens and chooses their positions. Tokens of a chunk stand side by side.
void run_batch(const Inputs& in, const std::vector<Token>& tokens) {
  std::vector<Task> tasks;
  for (size_t first = 0; first < tokens.size();) {
    size_t last = first + 1;
    while (last < tokens.size() && last < first + kTokensAtOnce && tokens[last].chunk == tokens[first].chunk) ++last;
    for (int64_t key = 0; key <= tokens[last - 1].position; key += kSegmentKeys)
      tasks.push_back({&tokens[first], int64_t(last - first), key});
    first = last;
  }
  for_shared(int64_t(tasks.size()), 1, [&](int64_t i) { run(in, tasks[i]); });
  for_shared(int64_t(tokens.size()), 1, [&](int64_t i) { choose(in, tokens[i]); });
}

[[gnu::noinline]] std::vector<float>& own_scores() {
  static thread_local std::vector<float> scores;
  return scores;
}

void run_all(const Inputs& in, int64_t num_chunks) {
  std::vector<Token> tokens;
  std::vector<float>& scores = own_scores();
  int64_t used = 0;
  const auto flush = [&] {
    scores.resize(std::max<size_t>(scores.size(), used));
    float* at = scores.data();
    for (Token& token : tokens) token.scores = at, at += token.position + 1;
    run_batch(in, tokens);
    tokens.clear(), used = 0;
  };
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
    const int64_t count = in.first_rows[chunk + 1] - in.first_rows[chunk], start = in.starts[chunk];
    for (int64_t first = std::max<int64_t>(0, in.top_k - start); first < count; ++first) {
      if (used && used + start + first + 1 > kScoresAtOnce) flush();
      tokens.push_back({chunk, in.first_rows[chunk] + first, start + first, nullptr});
      used += start + first + 1;
    }
  }
  if (used) flush();
}

}  // namespace
}  // namespace moeserve

// q [num_rows, num_heads, dim] and weights [num_rows, num_heads], scales included; keys [num_slots] of rows (kv_rows.h; dim
// a multiple of 16); chunks as in attention.cpp. For rows from position top_k on, write the top_k positions of the largest
// sums over heads of weight * max(0, q . key) to `chosen` [num_rows, top_k], in order. Other rows are left as they are.
extern "C" void moeserve_choose_positions(const float* q, const float* weights, int64_t num_heads, int64_t dim,
                                          const uint8_t* keys, int64_t kind, int64_t block_size, int64_t num_chunks,
                                          const int64_t* first_rows, const int64_t* starts,
                                          const int64_t* table_offsets, const int32_t* block_tables, int64_t top_k,
                                          int32_t* chosen) {
  moeserve::run_all({q, weights, num_heads, dim, keys, moeserve::Kind(kind), block_size, first_rows, starts,
                     table_offsets, block_tables, top_k, chosen},
                    num_chunks);
}
