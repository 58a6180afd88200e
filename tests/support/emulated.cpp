// Calls functions of a library of kernels for another process, in whose memory all arguments lie.
//
// Memory is fetched page by page when it is touched, to the address that it has there, and what a call has changed is
// sent back. Standard input has calls and answers, standard output what is asked and returned.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

namespace {

constexpr uint64_t kPage = 4096;
constexpr int kMostIntegers = 20, kMostReals = 4;

std::map<uint64_t, std::vector<uint8_t>> fetched;  // By address: what a page held before the call.

void take(void* to, size_t size) {
  for (uint8_t* at = static_cast<uint8_t*>(to); size;) {
    const ssize_t got = read(0, at, size);
    if (got <= 0) _exit(0);
    at += got, size -= got;
  }
}

void give(const void* from, size_t size) {
  for (const uint8_t* at = static_cast<const uint8_t*>(from); size;) {
    const ssize_t put = write(1, at, size);
    if (put <= 0) _exit(1);
    at += put, size -= put;
  }
}

// Asks for the page that was touched. Memory that is nowhere ends the process.
void fetch(int, siginfo_t* info, void*) {
  const uint64_t page = reinterpret_cast<uint64_t>(info->si_addr) / kPage * kPage;
  give("P", 1), give(&page, sizeof page);
  uint8_t is_there;
  take(&is_there, 1);
  void* at = reinterpret_cast<void*>(page);
  if (!is_there || mmap(at, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != at)
    _exit(3);
  take(at, kPage);
  fetched[page].assign(static_cast<uint8_t*>(at), static_cast<uint8_t*>(at) + kPage);
}

// Only bytes that changed, for the other process may have written beside them meanwhile.
void give_back() {
  for (const auto& [page, before] : fetched) {
    const uint8_t* at = reinterpret_cast<const uint8_t*>(page);
    for (uint64_t first = 0, last; first < kPage; first = last) {
      const bool changed = at[first] != before[first];
      for (last = first + 1; last < kPage && (at[last] != before[last]) == changed;) ++last;
      const uint64_t run[] = {page + first, last - first};
      if (changed) give("W", 1), give(run, sizeof run), give(at + first, run[1]);
    }
    munmap(reinterpret_cast<void*>(page), kPage);
  }
  fetched.clear();
}

int one() { return 1; }

template <size_t... I>
int64_t call(void* function, const int64_t* integers, const double* reals, std::index_sequence<I...>) {
  // Integers and reals lie in registers of their own, so that their order among each other does not matter.
  using Function = int64_t (*)(decltype(int64_t(I))..., double, double, double, double);
  return reinterpret_cast<Function>(function)(integers[I]..., reals[0], reals[1], reals[2], reals[3]);
}

}  // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  reinterpret_cast<void (*)(int (*)())>(dlsym(library, "moeserve_count_threads_with"))(one);
  static uint8_t stack[1 << 16];
  stack_t other = {};
  other.ss_sp = stack, other.ss_size = sizeof stack;
  sigaltstack(&other, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = fetch;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  for (;;) {
    char name[64];
    int64_t integers[kMostIntegers];
    double reals[kMostReals];
    take(name, sizeof name), take(integers, sizeof integers), take(reals, sizeof reals);
    void* symbol = dlsym(library, name);
    if (!symbol) return 4;
    int64_t result;
    if (std::strncmp(name, "moeserve_", 9) || integers[0] != INT64_MIN)
      result = call(symbol, integers, reals, std::make_index_sequence<kMostIntegers>());
    else
      std::memcpy(&result, symbol, sizeof result);  // A number of the library, not a function.
    give_back();
    give("R", 1), give(&result, sizeof result);
  }
}
