// The io_uring back end. One thread owns the ring: it hands over pieces and sleeps in io_uring_enter
// until one is back or an eventfd says that the queue has more. Reads must not belong to the threads
// that ask for them: the kernel cancels what a thread has submitted when that thread ends.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/uio.h>

#include "../core/refusal.h"
#include "../core/signals.h"
#include "backend.h"
#include "ring.h"

namespace moet {

#ifdef MOET_HAS_URING
namespace {

constexpr unsigned kEntries = 128, kAnswers = 1024;
constexpr unsigned kFiles = 256;                     // registered ones; further files work as well
constexpr unsigned kBuffers = 1024;                  // registered memory in parts of
constexpr uint64_t kBufferBytes = uint64_t(1) << 30;  // what the kernel takes at most
constexpr int kPatienceMs = 10'000;                  // with a kernel that has no memory for a request
constexpr uint64_t kWake = 0;                        // user data: no piece

class Eventfd {
 public:
  Eventfd() : fd_(eventfd(0, EFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Eventfd() { close(fd_); }
  Eventfd(const Eventfd&) = delete;
  Eventfd& operator=(const Eventfd&) = delete;
  int fd() const { return fd_; }
  void signal() { (void)eventfd_write(fd_, 1); }  // fails only where 2^64 signals are unread

 private:
  const int fd_;
};

void read_event(Ring& ring, const Eventfd& event, uint64_t& to) {
  io_uring_sqe& entry = ring.add();
  entry.opcode = IORING_OP_READ;
  entry.fd = event.fd();
  entry.addr = reinterpret_cast<uintptr_t>(&to);
  entry.len = sizeof to;
  entry.user_data = kWake;
}

// Memory that is pinned for the ring, and in which slots of the ring's table.
class Buffers {
 public:
  explicit Buffers(Ring& ring) : ring_(ring) {
    io_uring_rsrc_register table{};
    table.nr = kBuffers;
    table.flags = IORING_RSRC_REGISTER_SPARSE;
    refused_ = ring.update(IORING_REGISTER_BUFFERS2, &table, sizeof table);
  }
  ~Buffers() {
    if (!refused_) ring_.update(IORING_UNREGISTER_BUFFERS, nullptr, 0);
  }

  int add(uint64_t address, uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(lock_);
    if (refused_) return refused_;
    const uint64_t slots = (bytes + kBufferBytes - 1) / kBufferBytes;
    const unsigned first = find_room(slots);
    if (first == kBuffers) return ENOSPC;
    Region region{address, bytes, first, unsigned(slots)};
    for (unsigned i = 0; i < region.slots; ++i) {
      const uint64_t begin = i * kBufferBytes;
      if (const int error = set(first + i, address + begin, std::min(kBufferBytes, bytes - begin))) {
        while (i-- > 0) set(first + i, 0, 0);
        return error;
      }
    }
    regions_.push_back(region);
    return 0;
  }

  void remove(uint64_t address) {
    const std::lock_guard<std::mutex> lock(lock_);
    const auto found = std::find_if(regions_.begin(), regions_.end(),
                                    [&](const Region& r) { return r.address == address; });
    if (found == regions_.end()) return;
    for (unsigned i = 0; i < found->slots; ++i) set(found->first + i, 0, 0);
    regions_.erase(found);
  }

  // The slot that holds all of it, or -1.
  int slot_of(const uint8_t* to, uint64_t bytes) {
    const uint64_t address = reinterpret_cast<uintptr_t>(to);
    const std::lock_guard<std::mutex> lock(lock_);
    for (const Region& r : regions_) {
      if (address < r.address || address + bytes > r.address + r.bytes) continue;
      const uint64_t part = (address - r.address) / kBufferBytes;
      if (address - r.address + bytes <= (part + 1) * kBufferBytes) return int(r.first + part);
    }
    return -1;
  }

 private:
  struct Region {
    uint64_t address, bytes;
    unsigned first, slots;
  };

  unsigned find_room(uint64_t slots) const {
    for (unsigned first = 0; first + slots <= kBuffers;) {
      const auto hit = std::find_if(regions_.begin(), regions_.end(), [&](const Region& r) {
        return r.first < first + slots && first < r.first + r.slots;
      });
      if (hit == regions_.end()) return first;
      first = hit->first + hit->slots;
    }
    return kBuffers;
  }

  int set(unsigned slot, uint64_t address, uint64_t bytes) {
    iovec part{reinterpret_cast<void*>(uintptr_t(address)), size_t(bytes)};
    io_uring_rsrc_update2 change{};
    change.offset = slot;
    change.data = reinterpret_cast<uintptr_t>(&part);
    change.nr = 1;
    return ring_.update(IORING_REGISTER_BUFFERS_UPDATE, &change, sizeof change);
  }

  Ring& ring_;
  std::mutex lock_;
  std::vector<Region> regions_;
  int refused_ = 0;
};

class UringBackend final : public ReadBackend {
 public:
  explicit UringBackend(ReadQueue& queue) : queue_(queue), ring_(kEntries, kAnswers), buffers_(ring_) {
    std::array<int, kFiles> none;
    none.fill(-1);
    files_usable_ = ring_.update(IORING_REGISTER_FILES, none.data(), kFiles) == 0;
    const SignalsHeldBack held;
    thread_ = std::thread([this] { serve(); });
  }

  ~UringBackend() override {
    queue_.shut(ECANCELED);
    wake();
    thread_.join();
  }

  const char* name() const override { return "io_uring"; }
  void wake() override { event_.signal(); }

  void file_added(int file, int fd) override {
    if (files_usable_ && unsigned(file) < kFiles) fixed_[size_t(file)] = set_file(file, fd) == 0;
  }
  void file_removed(int file) override {
    if (unsigned(file) < kFiles && fixed_[size_t(file)].exchange(false)) set_file(file, -1);
  }
  int register_memory(uint64_t address, uint64_t bytes) override { return buffers_.add(address, bytes); }
  void unregister_memory(uint64_t address) override { buffers_.remove(address); }
  std::vector<int> thread_ids() override {
    thread_id_.wait(0);
    return {thread_id_.load()};
  }

 private:
  int set_file(int file, int fd) {
    io_uring_files_update change{};
    change.offset = unsigned(file);
    change.fds = reinterpret_cast<uintptr_t>(&fd);
    return ring_.update(IORING_REGISTER_FILES_UPDATE, &change, 1);
  }

  void serve() {
    pthread_setname_np(pthread_self(), "moet-uring");
    thread_id_.store(int(syscall(SYS_gettid)));
    thread_id_.notify_all();
    for (int vain = 0;;) {
      // Whoever shuts the queue signals afterwards, so the event's read is always answered.
      if (queue_.is_shut() && flying_ == 0 && !listening_) return;
      fill();
      const int error = ring_.enter(1);
      reap();
      if (error == 0 || error == EINTR) {
        vain = 0;
      } else if (!is_passing(error) || ++vain > kPatienceMs) {
        return give_up(error);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  static bool is_passing(int error) { return error == EAGAIN || error == EBUSY || error == ENOMEM; }

  void fill() {
    if (!listening_ && !queue_.is_shut() && ring_.room() > 0) {
      read_event(ring_, event_, signals_);
      listening_ = true;
    }
    ready_.clear();
    queue_.start(std::min<size_t>(ring_.room(), ring_.capacity() - 1 - flying_), ready_);
    for (Piece* piece : ready_) prepare(*piece);
    flying_ += unsigned(ready_.size());
  }

  void prepare(Piece& piece) {
    io_uring_sqe& entry = ring_.add();
    const int slot = buffers_.slot_of(piece.to(), piece.bytes());
    const bool fixed = unsigned(piece.file()) < kFiles && fixed_[size_t(piece.file())];
    entry.opcode = slot < 0 ? IORING_OP_READ : IORING_OP_READ_FIXED;
    entry.buf_index = slot < 0 ? uint16_t(0) : uint16_t(slot);
    entry.flags = fixed ? IOSQE_FIXED_FILE : 0;
    entry.fd = fixed ? piece.file() : piece.fd();
    entry.off = piece.offset();
    entry.addr = reinterpret_cast<uintptr_t>(piece.to());
    entry.len = uint32_t(piece.bytes());
    entry.user_data = reinterpret_cast<uintptr_t>(&piece);
  }

  void reap() {
    ring_.reap([this](uint64_t data, int result) {
      if (data == kWake) {
        listening_ = false;
        return;
      }
      Piece* piece = reinterpret_cast<Piece*>(uintptr_t(data));
      --flying_;
      forget_cached(*piece);
      queue_.end(piece, result);
    });
  }

  // The ring takes nothing any more. What it has taken is waited for, since its memory is being written.
  void give_up(int error) {
    queue_.shut(error);
    ring_.withdraw([&](uint64_t data) {
      if (data == kWake) return;
      --flying_;
      queue_.end(reinterpret_cast<Piece*>(uintptr_t(data)), -error);
    });
    for (; flying_ > 0; reap()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  ReadQueue& queue_;
  Eventfd event_;
  Ring ring_;
  Buffers buffers_;
  bool files_usable_ = false;
  std::array<std::atomic<bool>, kFiles> fixed_{};
  std::atomic<int> thread_id_{0};
  // The ring thread's own.
  uint64_t signals_ = 0;
  bool listening_ = false;
  unsigned flying_ = 0;
  std::vector<Piece*> ready_;
  std::thread thread_;
};

std::string reason_of(const std::string& what, int error) {
  std::string text = what + ": " + std::strerror(error);
  if (error == EPERM || error == ENOSYS)
    text += " (a container's seccomp profile, kernel.io_uring_disabled, or a kernel before 5.6)";
  if (error == ENOMEM) text += " (before Linux 5.12 rings count against ulimit -l)";
  return text;
}

}  // namespace

std::string probe_uring() {
  try {
    const Eventfd event;
    eventfd_write(event.fd(), 7);
    Ring ring(4, 8);
    uint64_t value = 0;
    int answer = 0;
    read_event(ring, event, value);
    int error;
    do {
      error = ring.enter(1);
      ring.reap([&](uint64_t, int result) { answer = result; });
    } while (answer == 0 && error == EINTR);
    if (error) return reason_of("io_uring_enter", error);
    if (answer < 0) return reason_of("a read through io_uring", -answer);
    return answer == int(sizeof value) && value == 7 ? "" : "a read through io_uring gave wrong bytes";
  } catch (const std::system_error& error) {
    return reason_of("io_uring", error.code().value());
  }
}

std::unique_ptr<ReadBackend> make_uring_backend(ReadQueue& queue) {
  try {
    return std::make_unique<UringBackend>(queue);
  } catch (const std::system_error& error) {
    throw Refusal(reason_of("io_uring", error.code().value()), "MOET_IO=threads reads without it");
  }
}

#else  // no header, or one that is too old

std::string probe_uring() {
  return "this build has no io_uring: it was made with kernel headers before Linux 5.19";
}

std::unique_ptr<ReadBackend> make_uring_backend(ReadQueue&) {
  throw Refusal(probe_uring(), "MOET_IO=threads reads without it");
}

#endif

}  // namespace moet
