// An event counter to sleep on. A waiter reads now(), looks for work, and waits with the value that
// it read: a signal in between makes the wait return at once, so none is lost. A signal that finds
// nobody asleep costs one atomic add and no system call.
#pragma once
#include <atomic>
#include <cstdint>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace moet {

class Event {
 public:
  uint32_t now() const { return count_.load(std::memory_order_seq_cst); }

  // Wakes at most `sleepers` of the threads that wait; those that spin see it in any case.
  void signal(int sleepers) {
    count_.fetch_add(1, std::memory_order_seq_cst);
    wake(sleepers);
  }

  // Wakes sleepers without an event: they look for work themselves.
  void wake(int sleepers) {
    if (sleepers > 0 && asleep_.load(std::memory_order_seq_cst) > 0)
      futex(FUTEX_WAKE_PRIVATE, uint32_t(sleepers));
  }

  // Sleeps until woken, unless something was signalled after `seen`. May return early.
  void wait(uint32_t seen) { sleep(seen, nullptr); }

  // The same, for a second at most.
  void wait_a_second(uint32_t seen) {
    const timespec limit = {1, 0};
    sleep(seen, &limit);
  }

 private:
  void sleep(uint32_t seen, const timespec* limit) {
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    futex(FUTEX_WAIT_PRIVATE, seen, limit);
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  void futex(int operation, uint32_t value, const timespec* limit = nullptr) {
    static_assert(sizeof(count_) == sizeof(uint32_t));
    syscall(SYS_futex, &count_, operation, value, limit, nullptr, 0);
  }

  std::atomic<uint32_t> count_{0};
  std::atomic<int> asleep_{0};
};

}  // namespace moet
