// A call opens a job, in which threads take parts until none is left. The caller waits for the threads that entered the
// job, not for those that sleep or have no core: next to busy neighbours a call takes as long as on fewer threads.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "waiting.h"

namespace moeserve {
namespace {

// A thread without a job waits so long awake, which bridges the gap to the next operation of a step, and then sleeps:
// waking it takes tens of microseconds. It yields its core to any other thread.
constexpr auto kAwake = std::chrono::microseconds(250);
// The caller waits so long awake for the others' last parts, and then leaves its core to them.
constexpr auto kCallerAwake = std::chrono::microseconds(50);

constexpr uint32_t kOpen = 1u << 31, kCallerSleeps = 1u << 30, kInside = kCallerSleeps - 1;
constexpr int kMostThreads = 256;
constexpr int64_t kPartsOfThread = 8;  // With n threads, each takes 1 / (8 n) of the remaining parts at once.

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word, int most) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
}

struct Job {
  int64_t count, grain, parts;
  WorkPart part;
  const void* body;
};

class Team {
 public:
  bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
  void give_back() { taken_.store(false, std::memory_order_release); }

  // Only the thread that took the team calls it. threads: including this one.
  void run(const Job& job, int threads) {
    start_helpers(threads - 1);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    helpers_wanted_.store(threads - 1, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    number_.fetch_add(1);
    if (sleeping_.load()) wake(number_, kMostThreads);
    compute();
    close();
  }

  // In a child process after a fork, which has no threads but one.
  void forget() {
    taken_ = false;
    helpers_ = 0;
    sleeping_ = 0;
    state_ = 0;
  }

 private:
  std::atomic<bool> taken_{false};
  int helpers_ = 0;
  Job job_{};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> state_{0};   // kOpen, kCallerSleeps, and the number of helpers inside.
  alignas(64) std::atomic<uint32_t> number_{0};  // Of the last job.
  std::atomic<uint32_t> sleeping_{0};
  std::atomic<int> helpers_wanted_{0};

  struct Start {
    Team* team;
    int place;
  };
  Start starts_[kMostThreads];

  void start_helpers(int wanted) {
    for (; helpers_ < wanted; ++helpers_) {
      starts_[helpers_] = {this, helpers_};
      pthread_t thread;
      if (pthread_create(&thread, nullptr, &Team::help, &starts_[helpers_])) return;
      pthread_detach(thread);
    }
  }

  static void* help(void* start) {
    const auto& [team, place] = *static_cast<Start*>(start);
    for (uint32_t seen = 0;;) {
      seen = team->await_job(seen);
      if (place < team->helpers_wanted_.load(std::memory_order_relaxed)) team->enter();
    }
  }

  uint32_t await_job(uint32_t seen) {
    const auto is_new = [&] { return number_.load(std::memory_order_acquire) != seen; };
    while (!await(is_new, kAwake)) {
      sleeping_.fetch_add(1);
      if (number_.load() == seen) sleep_while(number_, seen);
      sleeping_.fetch_sub(1);
    }
    return number_.load(std::memory_order_acquire);
  }

  void enter() {
    uint32_t state = state_.load(std::memory_order_acquire);
    do {
      if (!(state & kOpen)) return;
    } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    compute();
    state = state_.fetch_sub(1, std::memory_order_acq_rel);
    if (state & kCallerSleeps && (state & kInside) == 1) wake(state_, 1);
  }

  void compute() {
    const Job& job = job_;
    for (int64_t first = next_.load(std::memory_order_relaxed); first < job.count;) {
      const int64_t left = job.count - first, last = first + std::min(left, std::max(job.grain, left / job.parts));
      if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      job.part(job.body, first, last);
      first = next_.load(std::memory_order_relaxed);
    }
  }

  void close() {
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto alone = [&] { return !(state_.load(std::memory_order_acquire) & kInside); };
    if (await(alone, kCallerAwake)) return;
    uint32_t state = state_.fetch_or(kCallerSleeps) | kCallerSleeps;
    for (; state & kInside; state = state_.load(std::memory_order_acquire)) sleep_while(state_, state);
  }
};

// Not destroyed at exit, when its threads still wait.
Team& the_team() {
  static Team* team = [] {
    static Team* made = new Team;
    pthread_atfork(nullptr, nullptr, [] { made->forget(); });
    return made;
  }();
  return *team;
}

thread_local bool computes_alone = false;

using CountThreads = int (*)();
std::atomic<CountThreads> count_threads{nullptr};

}  // namespace

int64_t team_size() {
  if (computes_alone) return 1;
  const CountThreads count = count_threads.load(std::memory_order_relaxed);
  return std::clamp(count ? count() : int(sysconf(_SC_NPROCESSORS_ONLN)), 1, kMostThreads);
}

void share_out(int64_t count, int64_t grain, WorkPart part, const void* body) {
  if (count <= 0) return;
  const int threads = int(std::min(team_size(), (count + grain - 1) / grain));
  Team& team = the_team();
  if (threads == 1 || !team.take()) return part(body, 0, count);
  team.run({count, grain, kPartsOfThread * threads, part, body}, threads);
  team.give_back();
}

}  // namespace moeserve

// From now on the calling thread computes its calls alone: it is one of several that share work among themselves.
extern "C" void moeserve_compute_alone() { moeserve::computes_alone = true; }

// Calls are shared among as many threads as `count` returns; before, among as many as there are cores.
extern "C" void moeserve_count_threads_with(int (*count)()) { moeserve::count_threads = count; }
