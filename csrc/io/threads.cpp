// Threads that wait in pread: for containers that forbid io_uring, and for filesystems without
// O_DIRECT, where a read through the page cache may block its caller.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../core/refusal.h"
#include "../core/signals.h"
#include "backend.h"

namespace moet {
namespace {

constexpr size_t kMostThreads = 256;

class ThreadBackend final : public ReadBackend {
 public:
  ThreadBackend(ReadQueue& queue, int depth) : queue_(queue), depth_(size_t(depth)) {}

  ~ThreadBackend() override {
    queue_.shut(ECANCELED);
    for (std::thread& thread : threads_) thread.join();
  }

  const char* name() const override { return "threads"; }
  void wake() override {}
  void file_removed(int) override {}
  int register_memory(uint64_t, uint64_t) override { return EOPNOTSUPP; }
  void unregister_memory(uint64_t) override {}

  // As many threads as pieces may be at the devices.
  void file_added(int, int) override {
    const std::lock_guard<std::mutex> lock(lock_);
    const size_t wanted = std::min(kMostThreads, depth_ * size_t(queue_.lanes()));
    const SignalsHeldBack held;
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error& error) {
      if (threads_.empty())
        throw Refusal("no thread can be made to read with: " + std::string(error.what()),
                      "raise ulimit -u or the container's pids limit");
    }
  }

  std::vector<int> thread_ids() override {
    const std::lock_guard<std::mutex> lock(ids_lock_);
    return ids_;
  }

 private:
  void serve() {
    pthread_setname_np(pthread_self(), "moet-read");
    {
      const std::lock_guard<std::mutex> lock(ids_lock_);
      ids_.push_back(int(syscall(SYS_gettid)));
    }
    while (Piece* piece = queue_.start_or_wait()) {
      const ssize_t got = pread(piece->fd(), piece->to(), piece->bytes(), off_t(piece->offset()));
      const int64_t result = got < 0 ? -int64_t(errno) : int64_t(got);
      forget_cached(*piece);
      queue_.end(piece, result);
    }
  }

  ReadQueue& queue_;
  const size_t depth_;
  std::mutex lock_, ids_lock_;
  std::vector<std::thread> threads_;
  std::vector<int> ids_;
};

}  // namespace

void forget_cached(const Piece& piece) {
  if (!piece.direct())
    posix_fadvise(piece.fd(), off_t(piece.offset()), off_t(piece.bytes()), POSIX_FADV_DONTNEED);
}

std::unique_ptr<ReadBackend> make_thread_backend(ReadQueue& queue, int depth) {
  return std::make_unique<ThreadBackend>(queue, depth);
}

}  // namespace moet
