#include "exam.h"

#include <stdexcept>
#include <string>

#include "../core/refusal.h"
#include "float_env.h"

namespace moet {
namespace {

class ExamJob final : public Job {
 public:
  ExamJob(Pool& pool, int slots, int items, int spin, int throw_at)
      : slots_(slots), items_(items), spin_(spin), throw_at_(throw_at), slots_left_(slots),
        left_(new std::atomic<int>[slots]), first_done_(slots), done_(size_t(slots) * 2 * items),
        by_worker_(pool.threads()), mxcsr_(pool.threads()) {}

  int slots() const override { return slots_; }

  bool begin(Pool& pool) noexcept override {
    if (slots_ == 0) return false;
    const int slots = slots_;
    for (int s = 0; s < slots; ++s) put_up(s, 0, pool);
    pool.announce();
    return true;
  }

  void work(const Claim& claim, int worker) override {
    done_[index(claim)].fetch_add(1);
    by_worker_[worker].fetch_add(1);
    mxcsr_[worker].store(read_mxcsr());
    if (claim.phase == 0) first_done_[claim.slot].fetch_add(1);
    if (claim.phase == 1 && first_done_[claim.slot].load() != items_) early_.store(true);
    for (int i = 0; i < spin_; ++i) asm volatile("" ::: "memory");
    if (claim.phase == 0 && claim.slot * items_ + int(claim.item) == throw_at_)
      throw std::runtime_error("item " + std::to_string(throw_at_) + " failed on purpose");
  }

  bool finished(const Claim& claim, Pool& pool) noexcept override {
    if (left_[claim.slot].fetch_sub(1) != 1) return false;
    if (claim.phase == 1) return slots_left_.fetch_sub(1) == 1;
    put_up(claim.slot, 1, pool);
    pool.announce();
    return false;
  }

  ExamReport report() const {
    return {{done_.begin(), done_.end()}, {by_worker_.begin(), by_worker_.end()},
            {mxcsr_.begin(), mxcsr_.end()}, early_.load()};
  }

 private:
  size_t index(const Claim& c) const { return (size_t(c.slot) * 2 + c.phase) * items_ + c.item; }

  void put_up(int slot, int phase, Pool& pool) noexcept {
    left_[slot].store(items_);
    pool.publish(slot, phase, uint32_t(items_));
  }

  const int slots_, items_, spin_, throw_at_;
  std::atomic<int> slots_left_;
  std::atomic<bool> early_{false};
  std::unique_ptr<std::atomic<int>[]> left_;
  std::vector<std::atomic<int>> first_done_, done_, by_worker_;
  std::vector<std::atomic<uint32_t>> mxcsr_;
};

}  // namespace

ExamReport run_exam(Pool& pool, int slots, int items, int spin, int throw_at) {
  if (slots < 0 || slots > kMaxSlots || items < 1 || items > int(kMaxItems))
    throw Refusal("an exam of " + std::to_string(slots) + " slots of " + std::to_string(items) + " items");
  const Pool::Session session(pool);
  ExamJob job(pool, slots, items, spin, throw_at);
  pool.run(session, job);
  return job.report();
}

}  // namespace moet
