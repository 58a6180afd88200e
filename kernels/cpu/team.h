// The threads that compute a step: they stay between calls, and wait for the next one without sleeping at once.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moeserve {

constexpr int64_t kRowsAtOnce = 12;  // Rows that a thread normalises at once: fewer cost less than to share them.

using WorkPart = void (*)(const void* body, int64_t first, int64_t last);

// Calls part(body, first, last) for the parts of [0, count) on all threads of the team. Parts have at least `grain` items;
// the first ones have more, so that no thread waits long for the last one.
void share_out(int64_t count, int64_t grain, WorkPart part, const void* body);

// The number of threads that share work of the calling thread: OpenMP's, as torch sets it, or 1 for a thread that
// computes alone.
int64_t team_size();

// Calls use(i) for i in [0, count), at least `grain` of them at a time, in any order and on all threads. Returns when all
// are done. A call inside of another one, or while another thread makes one, computes on its own thread alone.
template <typename Use>
void for_shared(int64_t count, int64_t grain, const Use& use) {
  share_out(
      count, std::max<int64_t>(1, grain),
      [](const void* body, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) (*static_cast<const Use*>(body))(i);
      },
      &use);
}

// The same in one part per thread, for items of equal size.
template <typename Use>
void for_equal(int64_t count, const Use& use) {
  const int64_t threads = team_size();
  for_shared(count, (count + threads - 1) / threads, use);
}

}  // namespace moeserve
