// Memory for numbers that are read as whole cache lines.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve {

// Numbers from the beginning of a cache line on. A vector that was stored across two lines is not forwarded to its load.
template <typename Number>
class Lines {
 public:
  // Makes room for `count` numbers, and keeps room that is there.
  void reserve(int64_t count) {
    const size_t needed = (count * sizeof(Number) + 63) / 64;
    if (lines_.size() < needed) lines_.resize(needed);
  }
  Number* data() { return reinterpret_cast<Number*>(lines_.data()); }
  const Number* data() const { return reinterpret_cast<const Number*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> lines_;
};

}  // namespace moeserve
