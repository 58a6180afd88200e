// A tape: calls of kernels in order, with their arguments, which are made again by one call.
#pragma once

#include <functional>
#include <vector>

namespace moeserve {

using Tape = std::vector<std::function<void()>>;

// The tape that the calling thread records on, or null.
Tape*& recorded_tape();

// Makes a call, and records it while a tape is recorded: every kernel of a decoder's step goes through here. The call
// keeps its arguments, not what they point to.
template <typename Call>
void perform(const Call& call) {
  call();
  if (Tape* tape = recorded_tape()) tape->push_back(call);
}

}  // namespace moeserve
