// Causal attention of new tokens over paged keys and values, block by block in place.
//
// A row is one query head of one token. Its keys are taken in tiles of 64 positions, and its softmax is kept running
// over the tiles of a segment of 256 positions (Milakov and Gimelshein, 2018); segments are then put together in order,
// as split-KV decoding does (Dao et al., 2023). Tiles and segments lie at fixed positions, so a row has the same bits
// in any batch and any chunking, whether its segments were computed one after another or side by side.
//
// With chosen positions (indexer.cpp), a token that has more than `top_k` positions attends to the ones that were chosen
// for it, as if they were a context of their own; its heads share no tile with those of other tokens.
#include <algorithm>
#include <utility>
#include <vector>

#include "integer_tile.h"
#include "pair_tile.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int64_t kSegmentKeys = 256;
constexpr int kGroupRows = 6;         // Rows that share the registers: 6 x 64 floats.
constexpr int kBatchRows = kHasTiles ? 32 : 24;  // Rows that are scored, then weighed, then added: weighing a group alone waits for itself.
constexpr int64_t kTaskRows = 96;     // Rows that share a transposed tile of keys; twice as many where there are enough
constexpr int64_t kTasksOfThread = 6;  // tasks for each thread all the same.
constexpr int64_t kLineBytes = 64;    // Of the cache.
constexpr int64_t kShortTasks = 6;    // Of short chunks that a thread takes at once, so that it knows the next one.
constexpr int64_t kSplitTokens = 4;   // Chunks up to this long have their segments computed side by side.

struct Inputs {
  const float* q;
  int64_t q_stride, num_heads, num_kv_heads, key_dim, value_dim;
  const uint8_t *keys, *values;
  Kind kind;
  int64_t num_slots, block_size;
  const int64_t *first_rows, *starts, *table_offsets;  // Per chunk, first_rows and table_offsets with one more bound.
  const int32_t* block_tables;
  float scale;
  int64_t window;  // 0 for none.
  const float* sinks;
  const int32_t* chosen;  // [rows, top_k] positions in order, null if all rows see all positions; without a window.
  int64_t top_k;
  float* out;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t key_bytes() const { return row_bytes(kind, key_dim); }
  int64_t value_bytes() const { return row_bytes(kind, value_dim); }

  // The keys of a tile of `num_keys` positions that a row at `position` sees.
  Seen seen(int64_t position, int64_t first_key, int64_t num_keys) const {
    const int64_t end = position + 1 - first_key;
    return {window ? std::max<int64_t>(0, end - window) : 0, std::min(num_keys, end)};
  }
};

// Some tokens of a chunk under one KV head, over some of their segments.
struct Task {
  int64_t chunk, kv_head, first_token, num_tokens, first_segment, last_segment;
  int64_t scratch;  // Where its State lies if segments are computed side by side, else -1.
  const int32_t* chosen;  // The positions that its only token attends to, null for all up to its own.

  // The position of its first token among those that it attends to.
  int64_t position(const Inputs& in) const { return chosen ? in.top_k - 1 : in.starts[chunk] + first_token; }
};

// Where the rows of a tile lie. Up to the next multiple of 16 the last one is repeated.
struct TileRows {
  const uint8_t *keys[kTileKeys], *values[kTileKeys];
  int64_t count = 0;
  int64_t fetched = 0;  // Rows that the memory was asked for.
};

// The functions that ask the memory must be inlined: the compiler drops calls of functions that do nothing else.
MOESERVE_INLINE void fetch_lines(const uint8_t* from, int64_t bytes) {
  const uint8_t* line = from - reinterpret_cast<uintptr_t>(from) % kLineBytes;
  for (; line < from + bytes; line += kLineBytes) __builtin_prefetch(line);
}

MOESERVE_INLINE void fetch_rows(const uint8_t* const* rows, int64_t first, int64_t last, int64_t bytes) {
  const int64_t apart = (last - 1 - first) * bytes;
  if (rows[last - 1] == rows[first] + apart) return fetch_lines(rows[first], apart + bytes);
  for (int64_t k = first; k < last; ++k) fetch_lines(rows[k], bytes);
}

// Asks the memory for a quarter of a tile. More at once would hold up the loads of the tile that is computed.
MOESERVE_INLINE void fetch_quarter(TileRows& tile, int64_t key_bytes, int64_t value_bytes) {
  const int64_t first = tile.fetched, last = std::min(first + kTileKeys / 4, tile.count);
  if (first >= last) return;
  tile.fetched = last;
  fetch_rows(tile.keys, first, last, key_bytes);
  fetch_rows(tile.values, first, last, value_bytes);
}

// Buffers of one thread, kept from call to call.
class Workspace {
 public:
  void reserve(int64_t rows, int64_t key_dim, int64_t value_dim, Kind kind) {
    rows_ = rows;
    value_dim_ = value_dim;
    queries.resize(rows * key_dim);
    positions.resize(rows);
    scores.reserve(kBatchRows * kTileKeys);
    if (kind == Kind::kInt8) {
      rounded_queries.reserve(rows, key_dim);
      integers.reserve(key_dim, value_dim);
    } else if (kind == Kind::kBfloat16) {
      query_pairs.reserve(rows * num_pairs(key_dim));
      weight_pairs.reserve(kBatchRows * kTileKeys / 2);
      pairs.reserve(key_dim, value_dim);
    } else {
      keys.reserve(key_dim * kTileKeys);
    }
    states_.reserve(2 * rows * (value_dim + 2));
  }

  WeightFactors weight_factors() { return {bases, units, shares, factors}; }

  State state(int which) {
    float* base = states_.data() + which * rows_ * (value_dim_ + 2);
    return {base, base + rows_, base + 2 * rows_};
  }

  std::vector<float> queries;
  Lines<float> keys, scores;
  std::vector<int64_t> positions;
  // Of the rows of a batch; see raise_tops and WeightFactors. The last vectors that are written begin within them.
  alignas(64) float bases[kBatchRows + kLanes], shares[kBatchRows + kLanes], units[kBatchRows + kLanes],
      factors[kBatchRows + kLanes];
  RoundedQueries rounded_queries;
  IntegerTile integers;
  Lines<Pair> query_pairs, weight_pairs;
  PairTile pairs;
  TileRows tiles[2], *following = nullptr;  // The tile that is computed and the one behind it.

  // Is called four times for each tile.
  MOESERVE_INLINE void fetch_ahead(const Inputs& in) { fetch_quarter(*following, in.key_bytes(), in.value_bytes()); }

 private:
  Lines<float> states_;
  int64_t rows_ = 0, value_dim_ = 0;
};

// Rows of a task that share the registers: from `row` on, at `place` among those of their batch.
struct Group {
  int64_t row, place;
};

// The keys of a tile that each row of a group sees, or null where all see all of them.
template <int Rows>
const Seen* find_seen(const Inputs& in, int64_t row, int64_t first_key, int64_t num_keys, const Workspace& work,
                      Seen (&seen)[Rows]) {
  const int64_t* positions = work.positions.data() + row;
  if (in.seen(positions[0], first_key, num_keys).last == kTileKeys &&
      in.seen(positions[Rows - 1], first_key, num_keys).first == 0)
    return nullptr;
  for (int r = 0; r < Rows; ++r) seen[r] = in.seen(positions[r], first_key, num_keys);
  return seen;
}

// Groups of rows, and a tile of keys and values that are floats.
struct WideRows {
  static constexpr bool kTakesTiles = false, kTakesGroups = true;
  struct Mode {};  // Of scores and sums of values.

  static void take_tile(const Inputs& in, const TileRows& tile, Workspace& work) {
    transpose_words(tile.keys, tile.count, in.key_dim, [](Words (&)[4]) {}, (uint32_t*)work.keys.data());
  }

  template <int Rows>
  static void score(const Inputs& in, const Group& group, Workspace& work) {
    moeserve::score<Rows>(work.queries.data() + group.row * in.key_dim, in.key_dim, work.keys.data(),
                          work.scores.data() + group.place * kTileKeys);
  }

  template <int Rows>
  static void raise(const Inputs& in, const Group& group, const Seen* seen, Workspace& work, State state) {
    const Floats tops = scale_scores<Rows>(seen, work.scores.data() + group.place * kTileKeys,
                                           [&](int, int) { return splat(in.scale); });
    raise_tops<Rows>(tops, state.largest + group.row, state.total + group.row, work.bases + group.place,
                     work.shares + group.place);
  }

  template <int Rows>
  static void weigh(const Inputs&, const Group& group, Workspace& work, State state) {
    moeserve::weigh<Rows>(work.bases + group.place, work.scores.data() + group.place * kTileKeys,
                          state.total + group.row);
  }

  template <int Rows>
  static void add(const Inputs& in, const Group& group, const TileRows& tile, Workspace& work, float* sums) {
    add_all_values<Rows>(work.scores.data() + group.place * kTileKeys, work.shares + group.place, tile.values,
                                 tile.count, in.value_dim, sums);
  }
};

// The same with a tile of pairs of bfloat16.
struct PairRows {
  static constexpr bool kTakesTiles = kHasTiles, kTakesGroups = !kHasTiles;
  using Mode = PairMode;

  static bool fills_tiles(const Inputs&, int64_t) { return true; }

  static void take_tile(const Inputs& in, const TileRows& tile, Workspace& work) {
    work.pairs.take(tile.keys, tile.values, tile.count, in.key_dim, in.value_dim);
  }

  template <int Rows>
  static void score(const Inputs& in, const Group& group, Workspace& work) {
    score_pairs<Rows>(work.query_pairs.data() + group.row * num_pairs(in.key_dim), in.key_dim, work.pairs.keys.data(),
                      work.scores.data() + group.place * kTileKeys);
  }

  // Rows of a batch in tiles, in place of groups.
  static void score_batch(const Inputs& in, int64_t row, int64_t count, Workspace& work) {
    score_in_tiles(work.query_pairs.data() + row * num_pairs(in.key_dim), count, in.key_dim, work.pairs.keys.data(),
                   work.scores.data());
  }

  static void add_batch(const Inputs& in, int64_t count, Workspace& work, float* sums) {
    add_in_tiles(work.weight_pairs.data(), work.shares, count, work.pairs.values.data(), in.value_dim, sums);
  }

  template <int Rows>
  static void raise(const Inputs& in, const Group& group, const Seen* seen, Workspace& work, State state) {
    const Floats tops = top_scores<Rows>(seen, work.scores.data() + group.place * kTileKeys) * in.scale;
    raise_tops<Rows>(tops, state.largest + group.row, state.total + group.row, work.bases + group.place,
                     work.shares + group.place);
  }

  template <int Rows>
  static void weigh(const Inputs& in, const Group& group, Workspace& work, State state) {
    weigh_pairs<Rows>(in.scale, work.bases + group.place, work.scores.data() + group.place * kTileKeys,
                      state.total + group.row, work.weight_pairs.data() + group.place * kTileKeys / 2);
  }

  template <int Rows>
  static void add(const Inputs& in, const Group& group, const TileRows& tile, Workspace& work, float* sums) {
    const Pair* weights = work.weight_pairs.data() + group.place * kTileKeys / 2;
    const float* shares = work.shares + group.place;
    const uint32_t* values = work.pairs.values.data();
    int64_t channel = 0;
    for (; channel + 4 * kLanes <= in.value_dim; channel += 4 * kLanes)
      add_pairs<Rows, 4>(weights, shares, values + channel, in.value_dim, sums + channel);
    for (; channel < in.value_dim; channel += kLanes)
      add_pairs<Rows, 1>(weights, shares, values + channel, in.value_dim, sums + channel);
  }
};

// The same with a tile of integers.
struct IntegerRows {
  static constexpr bool kTakesTiles = kHasTiles, kTakesGroups = true;
  struct Mode {};

  // In groups rows have the same bits.
  static bool fills_tiles(const Inputs& in, int64_t count) {
    return count >= kTileHeight && in.key_dim % kTileRowBytes == 0;
  }

  static void score_batch(const Inputs& in, int64_t row, int64_t count, Workspace& work) {
    score_integers_in_tiles(work.rounded_queries, row, count, in.key_dim, work.integers.keys.data(), work.scores.data());
  }

  static void add_batch(const Inputs& in, int64_t count, Workspace& work, float* sums) {
    add_integers_in_tiles(work.scores.data(), work.weight_factors(), count, work.integers.values.data(), in.value_dim, sums);
  }

  static void take_tile(const Inputs& in, const TileRows& tile, Workspace& work) {
    work.integers.take(tile.keys, tile.values, tile.count, in.key_dim, in.value_dim);
  }

  template <int Rows>
  static void score(const Inputs& in, const Group& group, Workspace& work) {
    const RoundedQueries& queries = work.rounded_queries;
    float* scores = work.scores.data() + group.place * kTileKeys;
    for (int64_t column = 0; column < kTileKeys; column += kColumnsAtOnce * kLanes)
      score_integers<Rows>(queries.high.data() + group.row * in.key_dim, queries.low.data() + group.row * in.key_dim,
                           queries.high_shifts.data() + group.row, queries.low_shifts.data() + group.row, in.key_dim,
                           work.integers.keys.data() + column, scores + column);
  }

  template <int Rows>
  static void raise(const Inputs&, const Group& group, const Seen* seen, Workspace& work, State) {
    const float* factors = work.rounded_queries.factors.data() + group.row;
    store(work.bases + group.place,
          scale_scores<Rows>(seen, work.scores.data() + group.place * kTileKeys, [&](int r, int v) {
            return load(work.integers.key_scales + v * kLanes) * factors[r];
          }));
  }

  template <int Rows>
  static void weigh(const Inputs&, const Group& group, Workspace& work, State state) {
    weigh_integers<Rows>(work.integers, work.scores.data() + group.place * kTileKeys, state.largest + group.row,
                         state.total + group.row, work.weight_factors().from(group.place));
  }

  template <int Rows>
  static void add(const Inputs& in, const Group& group, const TileRows& tile, Workspace& work, float* sums) {
    const WeightFactors factors = work.weight_factors().from(group.place);
    RoundedWeights weights[Rows];
    for (int r = 0; r < Rows; ++r)
      round_weights(work.scores.data() + (group.place + r) * kTileKeys, factors.units[r], weights[r]);
    const uint32_t* values = work.integers.values.data();
    int64_t channel = 0;
    for (; channel + kColumnsAtOnce * kLanes <= in.value_dim; channel += kColumnsAtOnce * kLanes)
      add_integers<Rows, kColumnsAtOnce>(weights, factors, values + channel, tile.count, in.value_dim, sums + channel);
    for (; channel < in.value_dim; channel += kLanes)
      add_integers<Rows, 1>(weights, factors, values + channel, tile.count, in.value_dim, sums + channel);
  }
};

// Calls use(number of rows, group) for the groups of a batch; the number is known to the compiler.
template <typename Use>
void for_groups(int64_t first_row, int64_t num_rows, Use use) {
  for (int64_t place = 0; place < num_rows; place += kGroupRows) {
    const Group group = {first_row + place, place};
    switch (std::min<int64_t>(kGroupRows, num_rows - place)) {
      case 1: use(std::integral_constant<int, 1>(), group); break;
      case 2: use(std::integral_constant<int, 2>(), group); break;
      case 3: use(std::integral_constant<int, 3>(), group); break;
      case 4: use(std::integral_constant<int, 4>(), group); break;
      case 5: use(std::integral_constant<int, 5>(), group); break;
      default: use(std::integral_constant<int, kGroupRows>(), group);
    }
  }
}

// A tile of keys and values for the rows of a task from the first that sees any of it.
template <typename Form>
void attend_tile(const Inputs& in, int64_t first_row, int64_t num_rows, int64_t first_key, const TileRows& tile,
                 Workspace& work, State state) {
  work.fetch_ahead(in);
  Form::take_tile(in, tile, work);
  work.fetch_ahead(in);
  for (int64_t row = first_row; row < num_rows; row += kBatchRows) {
    const int64_t count = std::min<int64_t>(kBatchRows, num_rows - row);
    bool in_tiles = false;
    if constexpr (Form::kTakesTiles) in_tiles = Form::fills_tiles(in, count);
    if constexpr (Form::kTakesTiles) {
      if (in_tiles) Form::score_batch(in, row, count, work);
    }
    if constexpr (Form::kTakesGroups) {
      [[maybe_unused]] const typename Form::Mode mode{};
      if (!in_tiles)
        for_groups(row, count, [&](auto rows, const Group& group) { Form::template score<rows()>(in, group, work); });
    }
    work.fetch_ahead(in);
    for_groups(row, count, [&](auto rows, const Group& group) {
      Seen seen[rows()];
      Form::template raise<rows()>(in, group, find_seen(in, group.row, first_key, tile.count, work, seen), work, state);
    });
    for_groups(row, count, [&](auto rows, const Group& group) { Form::template weigh<rows()>(in, group, work, state); });
    work.fetch_ahead(in);
    if constexpr (Form::kTakesTiles) {
      if (in_tiles) Form::add_batch(in, count, work, state.sums + row * in.value_dim);
    }
    if constexpr (Form::kTakesGroups) {
      [[maybe_unused]] const typename Form::Mode mode{};
      if (!in_tiles)
        for_groups(row, count, [&](auto rows, const Group& group) {
          Form::template add<rows()>(in, group, tile, work, state.sums + group.row * in.value_dim);
        });
    }
  }
}

// A segment of a task's rows.
struct TaskSegment {
  const Task& task;
  int64_t segment;
};

// The positions of a segment that rows of the task see, from the begin of a tile on.
struct Extent {
  int64_t begin, end;
};

Extent extent(const Inputs& in, const TaskSegment& part) {
  const auto& [task, segment] = part;
  const int64_t first = task.position(in);
  const int64_t oldest = in.window ? std::max<int64_t>(0, first + 1 - in.window) : 0;
  return {std::max(segment * kSegmentKeys, oldest / kTileKeys * kTileKeys),
          std::min((segment + 1) * kSegmentKeys, first + task.num_tokens)};
}

// Finds the rows of a tile of chosen positions.
void find_chosen_rows(const Inputs& in, const Task& task, int64_t first_key, TileRows& tile) {
  const int32_t* table = in.block_tables + in.table_offsets[task.chunk];
  const int64_t key_bytes = in.key_bytes(), value_bytes = in.value_bytes();
  for (int64_t k = 0; k < tile.count; ++k) {
    const int64_t position = task.chosen[first_key + k];
    const int64_t slot = task.kv_head * in.num_slots + table[position / in.block_size] * in.block_size +
                         position % in.block_size;
    tile.keys[k] = in.keys + slot * key_bytes, tile.values[k] = in.values + slot * value_bytes;
  }
}

// Finds the rows of the task's tile from `first_key` on. Rows of a block lie side by side.
void find_rows(const Inputs& in, const Task& task, int64_t first_key, int64_t end, TileRows& tile) {
  const int32_t* table = in.block_tables + in.table_offsets[task.chunk];
  const int64_t key_bytes = in.key_bytes(), value_bytes = in.value_bytes();
  const int64_t first_slot = task.kv_head * in.num_slots;
  tile.count = std::min(kTileKeys, end - first_key), tile.fetched = 0;
  if (task.chosen) find_chosen_rows(in, task, first_key, tile);
  int64_t block = first_key / in.block_size, skipped = first_key % in.block_size;
  for (int64_t k = task.chosen ? tile.count : 0; k < tile.count; ++block, skipped = 0) {
    const int64_t slot = first_slot + table[block] * in.block_size + skipped;
    const int64_t last = std::min(k + in.block_size - skipped, tile.count);
    const uint8_t *keys = in.keys + slot * key_bytes, *values = in.values + slot * value_bytes;
    for (; k < last; ++k, keys += key_bytes, values += value_bytes) tile.keys[k] = keys, tile.values[k] = values;
  }
  for (int64_t k = tile.count; k % kLanes; ++k) tile.keys[k] = tile.keys[k - 1], tile.values[k] = tile.values[k - 1];
}

// One segment of a task's rows into `state`, which is cleared first. The first tile of `next` is fetched beside its
// last one.
template <typename Form>
void attend_segment(const Inputs& in, const TaskSegment& part, const TaskSegment& next, Workspace& work, State state) {
  const Task& task = part.task;
  const int64_t* positions = work.positions.data();
  const int64_t rows = task.num_tokens * in.group();
  count_progress();
  clear(state, rows, in.value_dim);
  const auto [begin, end] = extent(in, part);
  TileRows* tile = &work.tiles[0];
  TileRows*& following = work.following;
  following = &work.tiles[1];
  find_rows(in, task, begin, end, *tile);
  while (tile->fetched < tile->count) fetch_quarter(*tile, in.key_bytes(), in.value_bytes());
  int64_t first_row = 0;  // That sees the tile.
  for (int64_t first_key = begin; first_key < end; first_key += kTileKeys, std::swap(tile, following)) {
    if (first_key + kTileKeys < end) {
      find_rows(in, task, first_key + kTileKeys, end, *following);
    } else {
      const auto [next_begin, next_end] = extent(in, next);
      find_rows(in, next.task, next_begin, next_end, *following);
    }
    while (positions[first_row] < first_key) ++first_row;
    attend_tile<Form>(in, first_row, rows, first_key, *tile, work, state);
  }
}

void attend_segment_of_kind(const Inputs& in, const TaskSegment& part, const TaskSegment& next, Workspace& work,
                            State state) {
  switch (in.kind) {
    case Kind::kFloat32: return attend_segment<WideRows>(in, part, next, work, state);
    case Kind::kBfloat16: return attend_segment<PairRows>(in, part, next, work, state);
    case Kind::kInt8: return attend_segment<IntegerRows>(in, part, next, work, state);
  }
}

// The task's queries, rows of one KV head side by side, and the position of each row.
void take_queries(const Inputs& in, const Task& task, Workspace& work) {
  const int64_t group = in.group();
  for (int64_t t = 0; t < task.num_tokens; ++t) {
    const int64_t token = task.first_token + t;
    const float* from = in.q + (in.first_rows[task.chunk] + token) * in.q_stride + task.kv_head * group * in.key_dim;
    std::copy_n(from, group * in.key_dim, work.queries.data() + t * group * in.key_dim);
    std::fill_n(work.positions.data() + t * group, group, task.position(in) + t);
  }
  if (in.kind == Kind::kInt8)
    work.rounded_queries.take(work.queries.data(), task.num_tokens * group, in.key_dim, in.scale);
  if (in.kind == Kind::kBfloat16)
    for (int64_t r = 0; r < task.num_tokens * group; ++r)
      round_to_pairs(work.queries.data() + r * in.key_dim, in.key_dim, work.query_pairs.data() + r * num_pairs(in.key_dim));
}

// Divides by the sum of weights, to which a sink adds its own, and stores the rows of a task.
void finish(const Inputs& in, const Task& task, State state) {
  const int64_t group = in.group();
  for (int64_t row = 0; row < task.num_tokens * group; ++row) {
    const int64_t token = in.first_rows[task.chunk] + task.first_token + row / group;
    const int64_t head = task.kv_head * group + row % group;
    float share = 1.0f, total = state.total[row];
    if (in.sinks) {
      const float top = std::max(state.largest[row], in.sinks[head]);
      share = exp(state.largest[row] - top);
      total = std::fma(total, share, exp(in.sinks[head] - top));
    }
    const float factor = share / total;
    float* to = in.out + (token * in.num_heads + head) * in.value_dim;
    const float* sums = state.sums + row * in.value_dim;
    for (int64_t i = 0; i < in.value_dim; ++i) to[i] = sums[i] * factor;
  }
}

State scratch_state(float* scratch, int64_t place, int64_t rows) {
  return {scratch + place, scratch + place + rows, scratch + place + 2 * rows};
}

// next: a task that is likely to follow on this thread.
void run(const Inputs& in, const Task& task, const Task& next, Workspace& work, float* scratch) {
  take_queries(in, task, work);
  const TaskSegment behind{next, next.first_segment};
  if (task.scratch >= 0)
    return attend_segment_of_kind(in, {task, task.first_segment}, behind, work,
                                  scratch_state(scratch, task.scratch, task.num_tokens * in.group()));
  State whole = work.state(0);
  for (int64_t segment = task.first_segment; segment < task.last_segment; ++segment) {
    const bool is_first = segment == task.first_segment;
    const bool is_last = segment + 1 == task.last_segment;
    attend_segment_of_kind(in, {task, segment}, is_last ? behind : TaskSegment{task, segment + 1}, work,
                           work.state(is_first ? 0 : 1));
    if (!is_first) merge(whole, work.state(1), task.num_tokens * in.group(), in.value_dim);
  }
  finish(in, task, whole);
}

class Plan {
 public:
  Plan(const Inputs& in, int64_t num_chunks) {
    const bool is_large = in.first_rows[num_chunks] * in.num_heads >= 2 * kTaskRows * kTasksOfThread * team_size();
    task_rows = std::max(is_large ? 2 * kTaskRows : kTaskRows, in.group());
    const int64_t task_tokens = std::max<int64_t>(1, task_rows / in.group());
    for (int64_t kv_head = 0; kv_head < in.num_kv_heads; ++kv_head)
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) {
        const int64_t tokens = in.first_rows[chunk + 1] - in.first_rows[chunk];
        const int64_t seeing_all = in.chosen ? std::clamp<int64_t>(in.top_k - in.starts[chunk], 0, tokens) : tokens;
        for (int64_t first = 0; first < seeing_all; first += task_tokens)
          add(in, {chunk, kv_head, first, std::min(task_tokens, seeing_all - first), 0, 0, -1, nullptr}, tokens);
        for (int64_t first = seeing_all; first < tokens; ++first)
          add(in, {chunk, kv_head, first, 1, 0, 0, -1, in.chosen + (in.first_rows[chunk] + first) * in.top_k}, tokens);
        is_short = is_short && tokens <= kSplitTokens;
      }
    // Tasks of one segment stand side by side, so that requests that share blocks find them in the cache.
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
      return a.kv_head != b.kv_head ? a.kv_head < b.kv_head : a.first_segment < b.first_segment;
    });
  }

  std::vector<Task> tasks;
  std::vector<Task> splits;  // Each stands for its segments' tasks; their states lie one after another at `scratch`.
  int64_t task_rows, scratch_size = 0;
  bool is_short = true;  // No chunk has more than kSplitTokens.

 private:
  void add(const Inputs& in, Task task, int64_t tokens) {
    const int64_t start = task.position(in);
    const int64_t oldest = in.window ? std::max<int64_t>(0, start + 1 - in.window) : 0;
    task.first_segment = oldest / kSegmentKeys;
    task.last_segment = (start + task.num_tokens - 1) / kSegmentKeys + 1;
    if (tokens > kSplitTokens || task.last_segment - task.first_segment == 1) {
      tasks.push_back(task);
      return;
    }
    task.scratch = scratch_size;
    splits.push_back(task);
    for (int64_t segment = task.first_segment; segment < task.last_segment; ++segment) {
      tasks.push_back({task.chunk, task.kv_head, task.first_token, task.num_tokens, segment, segment + 1, scratch_size,
                       task.chosen});
      scratch_size += task.num_tokens * in.group() * (in.value_dim + 2);
    }
  }
};

// Not inlined: where the compiler knows that an object belongs to its thread it looks for it again at every use.
[[gnu::noinline]] Workspace& own_workspace() {
  static thread_local Workspace work;
  return work;
}

void run_all(const Inputs& in, int64_t num_chunks) {
  const Plan plan(in, num_chunks);
  std::vector<float> scratch(plan.scratch_size);
  const int64_t num_tasks = int64_t(plan.tasks.size()), num_splits = int64_t(plan.splits.size());
  const int64_t grain = plan.is_short ? std::clamp<int64_t>(num_tasks / (4 * team_size()), 1, kShortTasks) : 1;
  for_shared(num_tasks, grain, [&](int64_t i) {
    Workspace& work = own_workspace();
    work.reserve(plan.task_rows, in.key_dim, in.value_dim, in.kind);
    run(in, plan.tasks[i], plan.tasks[std::min(i + 1, num_tasks - 1)], work, scratch.data());
  });
  for_equal(num_splits, [&](int64_t i) {
    const Task& task = plan.splits[i];
    const int64_t rows = task.num_tokens * in.group(), size = rows * (in.value_dim + 2);
    const State whole = scratch_state(scratch.data(), task.scratch, rows);
    for (int64_t segment = task.first_segment + 1; segment < task.last_segment; ++segment)
      merge(whole, scratch_state(scratch.data(), task.scratch + (segment - task.first_segment) * size, rows), rows,
            in.value_dim);
    finish(in, task, whole);
  });
}

}  // namespace
}  // namespace moeserve

// q rows `q_stride` floats apart, each [num_heads, key_dim]; keys and values pools [num_kv_heads, num_slots] of rows
// (kv_rows.h; dims multiples of 16); per chunk its rows, the position of its first token and its block table. window 0 and sinks null
// for none. out [num_rows, num_heads, value_dim].
extern "C" void moeserve_attention(const float* q, int64_t q_stride, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t key_dim, int64_t value_dim, const uint8_t* keys, const uint8_t* values,
                                   int64_t kind, int64_t num_slots, int64_t block_size, int64_t num_chunks,
                                   const int64_t* first_rows, const int64_t* starts, const int64_t* table_offsets,
                                   const int32_t* block_tables, double scale, int64_t window, const float* sinks,
                                   float* out) {
  moeserve::run_all({q, q_stride, num_heads, num_kv_heads, key_dim, value_dim, keys, values, moeserve::Kind(kind),
                     num_slots, block_size, first_rows, starts, table_offsets, block_tables, float(scale), window, sinks,
                     nullptr, 0, out},
                    num_chunks);
}

// The same over the positions that `moeserve_choose_positions` chose: rows from position top_k on attend to their own
// `chosen` [num_rows, top_k], rows before it to all up to their own.
extern "C" void moeserve_indexed_attention(const float* q, int64_t q_stride, int64_t num_heads, int64_t num_kv_heads,
                                           int64_t key_dim, int64_t value_dim, const uint8_t* keys,
                                           const uint8_t* values, int64_t kind, int64_t num_slots, int64_t block_size,
                                           int64_t num_chunks, const int64_t* first_rows, const int64_t* starts,
                                           const int64_t* table_offsets, const int32_t* block_tables, double scale,
                                           const int32_t* chosen, int64_t top_k, float* out) {
  moeserve::run_all({q, q_stride, num_heads, num_kv_heads, key_dim, value_dim, keys, values, moeserve::Kind(kind),
                     num_slots, block_size, first_rows, starts, table_offsets, block_tables, float(scale), 0, nullptr,
                     chosen, top_k, out},
                    num_chunks);
}
