// How long a worker spins before it sleeps. Spinning pays only while the thread that is waited for
// runs, so the budget shrinks with every miss and is zero for a while after this thread was preempted
// (an involuntary context switch): on shared cores a spin takes time from what it waits for.
#pragma once
#include <algorithm>
#include <cstdint>

#include <sys/resource.h>
#include <time.h>

namespace moet {

class Patience {
 public:
  // Spins until `changed()`, as long as `wanted()`; true when it changed. Gives up at once where this
  // thread was preempted: others want its core.
  template <class Changed, class Wanted>
  bool stay(Changed changed, Wanted wanted) {
    while (wanted()) {
      if (budget_now() == 0) return false;
      for (int i = 0; i < kStayPauses; ++i) {
        if (changed()) return true;
        pause();
      }
    }
    return false;
  }

  // Spins until `changed()` or the budget is used up; true when it changed.
  template <class Changed>
  bool spin(Changed changed) {
    const int64_t budget = budget_now();
    if (budget == 0) return false;
    const int64_t end = now_ns() + budget;
    for (;;) {
      for (int i = 0; i < kPauses; ++i) {
        if (changed()) return learn(true);
        pause();
      }
      if (now_ns() >= end) return learn(false);
    }
  }

 private:
  static constexpr int64_t kLongest = 50'000, kShortest = 2'000;  // ns
  static constexpr int kPauses = 16, kCrowdedWaits = 32, kStayPauses = 1024;

  static int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int64_t budget_now() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    if (usage.ru_nivcsw != switches_) {
      switches_ = usage.ru_nivcsw;
      crowded_ = kCrowdedWaits;
    }
    if (crowded_ == 0) return budget_;
    --crowded_;
    return 0;
  }

  bool learn(bool hit) {
    budget_ = hit ? std::min(budget_ * 2, kLongest) : std::max(budget_ / 2, kShortest);
    return hit;
  }

  int64_t budget_ = kLongest;
  long switches_ = 0;
  int crowded_ = 0;
};

}  // namespace moet
