// One block of page-backed memory that only grows: the scratch that every step of a pool shares.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace moet {

class Workspace {
 public:
  Workspace() = default;
  ~Workspace() { release(); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

  // Makes room for `bytes`; what was there is lost when it has to grow. Huge pages where the system
  // grants them: the rows of a large batch would otherwise miss the TLB.
  void reserve(size_t bytes) {
    if (bytes <= size_) return;
    const size_t wanted = (bytes + kPage - 1) / kPage * kPage;
    void* fresh = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    madvise(fresh, wanted, MADV_HUGEPAGE);
    release();
    data_ = static_cast<uint8_t*>(fresh);
    size_ = wanted;
  }

 private:
  static constexpr size_t kPage = size_t(2) << 20;

  void release() {
    if (data_) munmap(data_, size_);
    data_ = nullptr;
    size_ = 0;
  }

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace moet
