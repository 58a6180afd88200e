// The likeliest token of a row of logits, and the probabilities of all.
#include <algorithm>
#include <limits>

#include "softmax.h"
#include "team.h"

namespace moeserve {
namespace {

constexpr int64_t kBlock = 1024;             // Logits whose largest is found before their place is looked for.
constexpr int64_t kComparedAtOnce = 16384;  // Logits that a thread compares at once: fewer cost less than to share them.

// The place of the first of the largest of x [count], or of the first that is no number.
int64_t place_of_largest(const float* x, int64_t count) {
  int64_t best = 0, place = 0;
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t last = std::min(count, first + kBlock);
    Floats tops = splat(top);
    Ints no_numbers{};
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) {
      const Floats value = load(x + i);
      tops = max(tops, value);
      no_numbers |= (Ints)(value != value);
    }
    float found = largest(tops);
    bool has_none = false;
    for (int lane = 0; lane < kLanes; ++lane) has_none |= no_numbers[lane] != 0;
    for (; i < last; ++i) found = std::max(found, x[i]), has_none |= x[i] != x[i];
    if (has_none) {
      for (place = first; x[place] == x[place];) ++place;
      return place;
    }
    if (found > top) top = found, best = first;
  }
  for (place = best; place < count && x[place] != top;) ++place;
  return place < count ? place : 0;
}

}  // namespace
}  // namespace moeserve

// The largest of each row of x [num_rows, width], the first of equal ones, and its place. What is not a number is larger
// than any.
extern "C" void moeserve_largest(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, float* largest,
                                 int64_t* places) {
  using namespace moeserve;
  for_shared(num_rows, kComparedAtOnce / width, [&](int64_t row) {
    const float* logits = x + row * x_stride;
    places[row] = place_of_largest(logits, width);
    largest[row] = logits[places[row]];
  });
}

// The softmax of each row of x [num_rows, width], or its logarithms if `takes_logs`.
extern "C" void moeserve_softmax(const float* x, int64_t x_stride, int64_t num_rows, int64_t width, int64_t takes_logs,
                                 float* out) {
  using namespace moeserve;
  for_shared(num_rows, kComparedAtOnce / width, [&](int64_t row) {
    const float* logits = x + row * x_stride;
    const float top = logits[place_of_largest(logits, width)];
    (takes_logs ? write_log_softmax : write_softmax)(logits, width, top, out + row * width);
  });
}
