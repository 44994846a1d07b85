// Reads of many files at many offsets, asynchronously: submit(file, offset, bytes, address, tag), later
// take() -> (tag, result). Nothing here polls: callers sleep in take(), and the back end's threads in the
// kernel. Thread-safe. The memory of a read must stay until the read has been taken.
#pragma once
#include <memory>
#include <shared_mutex>
#include <string>

#include <unistd.h>

#include "backend.h"

namespace moet {

class Reader {
 public:
  // uring: io_uring, refused where it cannot be used; otherwise threads. depth: pieces at a device at
  // once. piece: bytes of each.
  Reader(bool uring, int depth, uint64_t piece);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Keeps a duplicate of `fd`. direct: it was opened with O_DIRECT, so reads must be aligned.
  int add_file(int fd, bool direct);
  void remove_file(int file);
  void submit(std::span<const Read> reads);
  std::vector<Completion> take(double seconds);

  int register_memory(uint64_t address, uint64_t bytes);
  void unregister_memory(uint64_t address);

  // Reads that have not begun end with ECANCELED; waits for the others; ends the threads and closes the
  // files. What has ended can be taken afterwards.
  void close();

  const std::string& backend() const { return name_; }
  std::vector<int> thread_ids();
  size_t running() { return queue_.running(); }
  size_t pending() { return queue_.pending(); }
  void exam_fault(const FaultPlan& plan) { queue_.plan_fault(plan); }

 private:
  using Shared = std::shared_lock<std::shared_mutex>;
  void check_process() const;
  ReadBackend& open_backend();

  const pid_t process_;
  ReadQueue queue_;
  std::shared_mutex backend_lock_;  // exclusive: closing
  std::unique_ptr<ReadBackend> backend_;
  const std::string name_;
};

}  // namespace moet
