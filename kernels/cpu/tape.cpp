#include "tape.h"

#include <cstdint>

namespace moeserve {

Tape*& recorded_tape() {
  static thread_local Tape* tape = nullptr;
  return tape;
}

}  // namespace moeserve

// Records the calling thread's kernels from now on, on a new tape, which is returned.
extern "C" void* moeserve_tape_begin() { return moeserve::recorded_tape() = new moeserve::Tape; }

// Ends the recording of the calling thread; returns how many calls the tape has.
extern "C" int64_t moeserve_tape_end() {
  const int64_t count = int64_t(moeserve::recorded_tape()->size());
  moeserve::recorded_tape() = nullptr;
  return count;
}

// Makes the calls of a tape again.
extern "C" void moeserve_tape_run(void* tape) {
  for (const auto& call : *static_cast<moeserve::Tape*>(tape)) call();
}

extern "C" void moeserve_tape_free(void* tape) { delete static_cast<moeserve::Tape*>(tape); }
