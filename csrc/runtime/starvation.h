// Tells a machine that is busy with others from a thread that is stuck: a thread that could run (state
// R) but was not given a core. Linux counts a wait for a core only when it is over, so the state and
// the time that the thread has run are what can be looked at meanwhile.
#pragma once
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace moet {

class Starvation {
 public:
  explicit Starvation(const std::vector<int>& threads) {
    for (int thread : threads) threads_.push_back({thread, ran(thread)});
  }

  // Whether, in the `ns` since the last call, a thread that wants a core ran less than a quarter of it.
  bool since_last(int64_t ns) {
    bool starved = false;
    for (Thread& t : threads_) {
      const uint64_t now = ran(t.id);
      if (now - t.ran < uint64_t(ns) / 4 && wants_core(t.id)) starved = true;
      t.ran = now;
    }
    return starved;
  }

 private:
  struct Thread {
    int id;
    uint64_t ran;  // nanoseconds
  };

  template <class... Out>
  static bool scan(int thread, const char* file, const char* format, Out*... out) {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread, file);
    FILE* f = std::fopen(path, "r");
    if (!f) return false;
    const bool all = std::fscanf(f, format, out...) == int(sizeof...(out));
    std::fclose(f);
    return all;
  }

  static uint64_t ran(int thread) {
    uint64_t ns = 0;
    return scan(thread, "schedstat", "%" SCNu64, &ns) ? ns : 0;
  }

  static bool wants_core(int thread) {
    char state = 0;  // behind the thread's name, which is ours and has no parenthesis
    return scan(thread, "stat", "%*d (%*[^)]) %c", &state) && state == 'R';
  }

  std::vector<Thread> threads_;
};

}  // namespace moet
