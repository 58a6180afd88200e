// Waiting for another thread, or process, that is about to be done.
#pragma once

#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moeserve {

using Clock = std::chrono::steady_clock;

// A wait keeps its core so long, and then yields it to any other thread.
constexpr auto kWithoutYielding = std::chrono::microseconds(10);

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until done(), but at most `longest`; returns whether it is done.
template <typename Done>
bool await(Done done, Clock::duration longest) {
  const auto begin = Clock::now();
  for (auto passed = Clock::duration::zero(); passed < longest; passed = Clock::now() - begin) {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      relax();
    }
    if (passed > kWithoutYielding) sched_yield();
  }
  return done();
}

}  // namespace moeserve
