// A board in memory that processes of one machine share: each lays bytes on it for the others to read.
//
// In a round a process lays its bytes in its place and counts the round at its seat; it reads those of another process
// once that one has counted the round. A process has two places, which rounds take in turn: who counts a round has read
// all of the round before, so that its place is free again.
#include <linux/futex.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "waiting.h"

namespace moeserve {
namespace {

// A wait stays awake so long: a process that computes the same as this one is not much later. Waking one that sleeps
// takes tens of microseconds.
constexpr auto kAwake = std::chrono::microseconds(200);
constexpr long kSliceNs = 5'000'000;  // A sleep ends so soon, to see whether the other process has ended.

struct alignas(64) Seat {
  std::atomic<uint32_t> round;  // The last one that was counted.
  std::atomic<uint32_t> sleepers;
  std::atomic<int32_t> process;

  bool has_counted(uint32_t number) const {
    return static_cast<int32_t>(round.load(std::memory_order_acquire) - number) >= 0;
  }

  void count(uint32_t number) {
    round.store(number);
    if (sleepers.load()) syscall(SYS_futex, &round, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }

  void sleep_until(uint32_t number) {
    const timespec slice{0, kSliceNs};
    sleepers.fetch_add(1);
    const uint32_t seen = round.load();
    if (static_cast<int32_t>(seen - number) < 0) {
      syscall(SYS_futex, &round, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
    sleepers.fetch_sub(1);
  }

  bool has_ended() const {
    const int32_t number = process.load();
    return number && kill(number, 0) && errno == ESRCH;
  }
};

bool wait_for(Seat& seat, uint32_t round, std::chrono::milliseconds longest) {
  const auto is_there = [&] { return seat.has_counted(round); };
  if (await(is_there, kAwake)) return true;
  for (const auto begin = Clock::now(); !is_there(); seat.sleep_until(round)) {
    if (seat.has_ended() || Clock::now() - begin > longest) return is_there();
  }
  return true;
}

}  // namespace
}  // namespace moeserve

// Lays `size` bytes on the board in a round, which all of `num_seats` processes call, and copies `length` bytes from
// `first` on of each process to `gathered`, in the order of seats. Returns -1, or the seat of a process that has ended or
// did not come within these milliseconds. board: num_seats seats, and behind them two places of `capacity` bytes for
// each; zeros before the first round, which is 1.
extern "C" int64_t moeserve_exchange(void* board, int64_t seat, int64_t num_seats, int64_t capacity, int64_t round,
                                     const void* bytes, int64_t size, int64_t first, int64_t length, void* gathered,
                                     int64_t milliseconds) {
  auto* seats = static_cast<moeserve::Seat*>(board);
  const auto number = static_cast<uint32_t>(round);
  const auto place = [&](int64_t of) {
    return reinterpret_cast<char*>(seats + num_seats) + (2 * of + (number & 1)) * capacity;
  };
  const auto take = [&](int64_t of, const void* from) {
    std::memcpy(static_cast<char*>(gathered) + of * length, static_cast<const char*>(from) + first, length);
  };
  seats[seat].process.store(getpid());
  std::memcpy(place(seat), bytes, size);
  seats[seat].count(number);
  take(seat, bytes);
  for (int64_t of = 0; of < num_seats; ++of) {
    if (of == seat) continue;
    if (!moeserve::wait_for(seats[of], number, std::chrono::milliseconds(milliseconds))) return of;
    take(of, place(of));
  }
  return -1;
}
