// A job for the tests of the pool: it counts, and can fail. No runtime code uses it.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool.h"

namespace moet {

struct ExamReport {
  std::vector<int> done;             // times each item ran: [slot][phase 0..1][item]
  std::vector<int> by_worker;        // items of each worker
  std::vector<uint32_t> mxcsr;       // that each worker saw, 0 where it did nothing
  bool early = false;                // an item of phase 1 began before its slot's phase 0 was done
};

// `slots` slots of `items` items in each of two phases; an item spins for `spin` loops. The item with
// the number `throw_at` (of phase 0, slots first) throws; negative: none does.
ExamReport run_exam(Pool& pool, int slots, int items, int spin, int throw_at);

}  // namespace moet
