// Grouped-query attention from the layer's input to its output, in one call: the steps are those of the calls named
// below, with their bits.
#include <memory>
#include <vector>

#include "matrix.h"

extern "C" {
void moeserve_rms_norm(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, const float* weight,
                       double eps, float* out, int64_t out_stride);
void moeserve_rotate_and_store(float* qkv, int64_t stride, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads,
                               int64_t dim, const float* q_norm, const float* k_norm, const float* v_norm, double eps,
                               const float* cos, const float* sin, int64_t half, int64_t interleaved,
                               const int64_t* slots, uint8_t* keys, uint8_t* values, int64_t num_slots,
                               int64_t kind_of_rows);
void moeserve_attention(const float* q, int64_t q_stride, int64_t num_heads, int64_t num_kv_heads, int64_t key_dim,
                        int64_t value_dim, const uint8_t* keys, const uint8_t* values, int64_t kind, int64_t num_slots,
                        int64_t block_size, int64_t num_chunks, const int64_t* first_rows, const int64_t* starts,
                        const int64_t* table_offsets, const int32_t* block_tables, double scale, int64_t window,
                        const float* sinks, float* out);
}

namespace moeserve {

// What stays from step to step. Norms are weights or null: of whole queries and keys, or of each head [dim].
struct Attention {
  const Matrix* qkv;
  int64_t num_qkv;
  const Matrix* out;
  int64_t num_heads, num_kv_heads, dim;
  const float *q_norm, *k_norm, *q_head_norm, *k_head_norm, *v_head_norm;
  double eps, scale;
  int64_t interleaved, window;
  const float* sinks;
};

// What all layers of a step share: cos, sin [num_rows, half], slots [num_rows], and the chunks of `ChunkArrays`.
struct Rows {
  int64_t num_rows;
  const float *cos, *sin;
  int64_t half;
  const int64_t* slots;
  int64_t block_size, num_chunks;
  const int64_t *first_rows, *starts, *table_offsets;
  const int32_t* block_tables;
};

// The pools of a layer: keys and values [num_kv_heads, num_slots] of rows of a kind (kv_rows.h).
struct Pools {
  uint8_t *keys, *values;
  int64_t num_slots, kind;
};

namespace {

constexpr int64_t kKeptFloats = 1 << 20;

// Room for floats of one call: small room stays for the next one.
class Room {
 public:
  explicit Room(int64_t count) {
    static thread_local std::vector<float> kept;
    if (count > kKeptFloats) {
      large_.reset(new float[count]);
    } else if (int64_t(kept.size()) < count) {
      kept.resize(count);
    }
    floats_ = large_ ? large_.get() : kept.data();
  }
  float* floats() const { return floats_; }

 private:
  std::unique_ptr<float[]> large_;
  float* floats_;
};

}  // namespace
}  // namespace moeserve

// x and out [num_rows, hidden], rows of x `x_stride` floats apart.
extern "C" void moeserve_attention_block(const moeserve::Attention* a, const moeserve::Rows* rows,
                                         const moeserve::Pools* pools, const float* x, int64_t x_stride, float* out) {
  using namespace moeserve;
  const int64_t queries = a->num_heads * a->dim, keys = a->num_kv_heads * a->dim, width = queries + 2 * keys;
  const int64_t num_rows = rows->num_rows;
  const Room room(num_rows * (width + queries));
  float *qkv = room.floats(), *attended = qkv + num_rows * width;
  multiply_rows(a->qkv, a->num_qkv, x, x_stride, num_rows, qkv, width);
  if (a->q_norm) {
    moeserve_rms_norm(qkv, width, num_rows, queries, a->q_norm, a->eps, qkv, width);
    moeserve_rms_norm(qkv + queries, width, num_rows, keys, a->k_norm, a->eps, qkv + queries, width);
  }
  moeserve_rotate_and_store(qkv, width, num_rows, a->num_heads, a->num_kv_heads, a->dim, a->q_head_norm, a->k_head_norm,
                            a->v_head_norm, a->eps, rows->cos, rows->sin, rows->half, a->interleaved, rows->slots,
                            pools->keys, pools->values, pools->num_slots, pools->kind);
  moeserve_attention(qkv, width, a->num_heads, a->num_kv_heads, a->dim, a->dim, pools->keys, pools->values, pools->kind,
                     pools->num_slots, rows->block_size, rows->num_chunks, rows->first_rows, rows->starts,
                     rows->table_offsets, rows->block_tables, a->scale, a->window, a->sinks, attended);
  multiply_rows(a->out, 1, attended, queries, num_rows, out, a->out->width);
}
