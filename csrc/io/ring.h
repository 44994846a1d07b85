// One io_uring by raw system calls (io_uring(7), io_uring_setup(2), io_uring_enter(2)). Used by one
// thread, but for `update`, which any thread may call.
#pragma once

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

// The newest thing that is used. Older headers: the build has no io_uring, and says so.
#if defined(IORING_RSRC_REGISTER_SPARSE)
#define MOET_HAS_URING 1

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace moet {

class Ring {
 public:
  // Room for `entries` submissions a call and `completions` answers. Throws std::system_error.
  Ring(unsigned entries, unsigned completions) {
    io_uring_params params{};
    params.flags = IORING_SETUP_CLAMP | IORING_SETUP_CQSIZE;
    params.cq_entries = completions;
    fd_ = int(syscall(SYS_io_uring_setup, entries, &params));
    if (fd_ < 0) fail("io_uring_setup");
    if (!(params.features & IORING_FEAT_SINGLE_MMAP) || !(params.features & IORING_FEAT_NODROP)) {
      errno = ENOSYS;
      fail("io_uring of Linux 5.5");
    }
    map(params);
  }
  ~Ring() { release(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  unsigned capacity() const { return cq_entries_; }

  // Entries that can be filled before the next `enter`.
  unsigned room() const { return sq_entries_ - (tail_ - at(sq_head_).load(std::memory_order_acquire)); }

  // An empty entry; only while there is room.
  io_uring_sqe& add() {
    io_uring_sqe& entry = entries_[tail_ & (sq_entries_ - 1)];
    std::memset(&entry, 0, sizeof entry);
    ++tail_;
    return entry;
  }

  // Hands over what was added and sleeps until `wait` answers are there. An errno, 0 for none.
  int enter(unsigned wait) {
    at(sq_tail_).store(tail_, std::memory_order_release);
    const unsigned flags = wait ? IORING_ENTER_GETEVENTS : 0;
    const unsigned added = tail_ - submitted_;
    const long took = syscall(SYS_io_uring_enter, fd_, added, wait, flags, nullptr, 0);
    if (took < 0) return errno;
    submitted_ += unsigned(took);
    return 0;
  }

  // Calls f(user_data, result) for every answer that is there.
  template <class F>
  void reap(F&& f) {
    unsigned head = at(cq_head_).load(std::memory_order_relaxed);
    for (; head != at(cq_tail_).load(std::memory_order_acquire);) {
      const io_uring_cqe answer = answers_[head & (cq_entries_ - 1)];
      at(cq_head_).store(++head, std::memory_order_release);
      f(answer.user_data, answer.res);
    }
  }

  // Takes back what was added and never handed over: calls f(user_data) for each.
  template <class F>
  void withdraw(F&& f) {
    for (; tail_ != submitted_; --tail_) f(entries_[(tail_ - 1) & (sq_entries_ - 1)].user_data);
    at(sq_tail_).store(tail_, std::memory_order_release);
  }

  // io_uring_register(2). An errno, 0 for none.
  int update(unsigned operation, const void* argument, unsigned count) {
    return syscall(SYS_io_uring_register, fd_, operation, argument, count) < 0 ? errno : 0;
  }

 private:
  static std::atomic_ref<unsigned> at(unsigned* word) { return std::atomic_ref<unsigned>(*word); }

  [[noreturn]] void fail(const char* what) {
    const int error = errno;
    release();
    throw std::system_error(error, std::generic_category(), what);
  }

  void* map_part(size_t bytes, uint64_t offset) {
    void* memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, off_t(offset));
    if (memory == MAP_FAILED) fail("io_uring's mmap");
    madvise(memory, bytes, MADV_DONTFORK);  // a child must not find a ring that it cannot use
    return memory;
  }

  void map(const io_uring_params& p) {
    const size_t sq = p.sq_off.array + p.sq_entries * sizeof(unsigned);
    const size_t cq = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe);
    rings_bytes_ = sq > cq ? sq : cq;
    rings_ = static_cast<char*>(map_part(rings_bytes_, IORING_OFF_SQ_RING));
    entries_bytes_ = p.sq_entries * sizeof(io_uring_sqe);
    entries_ = static_cast<io_uring_sqe*>(map_part(entries_bytes_, IORING_OFF_SQES));
    const auto word = [&](unsigned offset) { return reinterpret_cast<unsigned*>(rings_ + offset); };
    sq_head_ = word(p.sq_off.head);
    sq_tail_ = word(p.sq_off.tail);
    cq_head_ = word(p.cq_off.head);
    cq_tail_ = word(p.cq_off.tail);
    answers_ = reinterpret_cast<const io_uring_cqe*>(rings_ + p.cq_off.cqes);
    sq_entries_ = p.sq_entries;
    cq_entries_ = p.cq_entries;
    for (unsigned i = 0; i < sq_entries_; ++i) word(p.sq_off.array)[i] = i;
  }

  void release() {
    if (entries_) munmap(entries_, entries_bytes_);
    if (rings_) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
    entries_ = nullptr;
    rings_ = nullptr;
    fd_ = -1;
  }

  int fd_ = -1;
  char* rings_ = nullptr;
  size_t rings_bytes_ = 0, entries_bytes_ = 0;
  io_uring_sqe* entries_ = nullptr;
  const io_uring_cqe* answers_ = nullptr;
  unsigned *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  unsigned sq_entries_ = 0, cq_entries_ = 0;
  unsigned tail_ = 0, submitted_ = 0;
};

}  // namespace moet

#endif
