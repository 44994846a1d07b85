// How pieces get to the disks: io_uring, or threads that wait in pread. Both take them from the same
// queue, and nothing above can tell them apart.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "queue.h"

namespace moet {

class ReadBackend {
 public:
  // Ends when the queue is shut and what was at the disks is back.
  virtual ~ReadBackend() = default;

  virtual const char* name() const = 0;
  // The queue has more: called after every submit.
  virtual void wake() = 0;
  // A file of the queue was added, or is about to be removed.
  virtual void file_added(int file, int fd) = 0;
  virtual void file_removed(int file) = 0;
  // Pins memory that reads go to, so that the kernel need not look it up for every read. 0, or the
  // errno with which that was refused: reads to it work all the same.
  virtual int register_memory(uint64_t address, uint64_t bytes) = 0;
  virtual void unregister_memory(uint64_t address) = 0;
  virtual std::vector<int> thread_ids() = 0;
};

std::unique_ptr<ReadBackend> make_thread_backend(ReadQueue& queue, int depth);

// Throws where io_uring cannot be used; `probe_uring` says why beforehand.
std::unique_ptr<ReadBackend> make_uring_backend(ReadQueue& queue);

// Sets up a ring and does with it what the back end will do. Empty: it works; otherwise the reason.
std::string probe_uring();

// After a read through the page cache: experts are read once in a long while, other files live there.
void forget_cached(const Piece& piece);

}  // namespace moet
