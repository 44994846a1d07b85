#include "reader.h"

#include <cerrno>

#include "../core/refusal.h"

namespace moet {

Reader::Reader(bool uring, int depth, uint64_t piece)
    : process_(getpid()),
      queue_(depth, piece),
      backend_(uring ? make_uring_backend(queue_) : make_thread_backend(queue_, depth)),
      name_(backend_->name()) {}

Reader::~Reader() {
  if (getpid() == process_)
    close();
  else  // a forked child has no such threads: they can be neither woken nor joined
    (void)backend_.release();
}

void Reader::check_process() const {
  if (getpid() != process_)
    throw Refusal("this reader was made before a fork: its threads are not in this process",
                  "make the reader in the process that uses it");
}

ReadBackend& Reader::open_backend() {
  if (!backend_) throw Refusal("the reader is closed", "make a new one");
  return *backend_;
}

int Reader::add_file(int fd, bool direct) {
  check_process();
  const Shared lock(backend_lock_);
  ReadBackend& backend = open_backend();
  const int file = queue_.add_file(fd, direct);
  try {
    backend.file_added(file, queue_.fd_of(file));
  } catch (...) {
    queue_.remove_file(file);
    throw;
  }
  return file;
}

void Reader::remove_file(int file) {
  check_process();
  const Shared lock(backend_lock_);
  ReadBackend& backend = open_backend();
  queue_.remove_file(file);
  backend.file_removed(file);
}

void Reader::submit(std::span<const Read> reads) {
  check_process();
  const Shared lock(backend_lock_);
  queue_.submit(reads);
  open_backend().wake();
}

std::vector<Completion> Reader::take(double seconds) {
  check_process();
  return queue_.take(seconds);
}

int Reader::register_memory(uint64_t address, uint64_t bytes) {
  check_process();
  if (!address || !bytes) throw Refusal("memory of " + std::to_string(bytes) + " bytes");
  const Shared lock(backend_lock_);
  return open_backend().register_memory(address, bytes);
}

void Reader::unregister_memory(uint64_t address) {
  check_process();
  const Shared lock(backend_lock_);
  open_backend().unregister_memory(address);
}

std::vector<int> Reader::thread_ids() {
  const Shared lock(backend_lock_);
  return open_backend().thread_ids();
}

void Reader::close() {
  check_process();
  queue_.shut(ECANCELED);
  const std::unique_lock<std::shared_mutex> lock(backend_lock_);
  backend_.reset();
  queue_.close_files();
}

}  // namespace moet
