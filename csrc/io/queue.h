// What waits, what is at the disks and what has ended: the part of a reader that both of its back ends
// share. Reads are cut into pieces; every device has a lane of its own, so that a slow one fills only
// its own share of the depth. Urgent reads go before others of their lane.
//
// A back end takes pieces (`start`, or `start_or_wait` where it sleeps here), reads `bytes` at
// `offset` to `to`, and reports what the system answered (`end`). Short reads, EINTR and EAGAIN are
// this side's business: it hands the rest out again.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include <sys/types.h>

namespace moet {

struct Read {
  int file;
  uint64_t offset, bytes;
  uint8_t* to;
  uint64_t tag;
  bool urgent;
};

struct Completion {
  uint64_t tag;
  int64_t result;     // bytes read: fewer than asked only where the file ends; or -errno
  int64_t queued_ns;  // from submit until its first piece went to the disk
  int64_t read_ns;    // from then until the last one was back
};

// Faults that tests ask for: `count` pieces from the nth on (the next one is 1) are spoilt.
enum class ReadFault { kError, kShort, kFlip };
struct FaultPlan {
  ReadFault kind = ReadFault::kError;
  int64_t nth = 0, count = 0;
  int64_t value = 0;  // kError: errno; kShort: bytes that are read at most; kFlip: which byte
};

class ReadQueue;
struct Request;

// A part of a read, on its way.
class Piece {
 public:
  int fd() const;
  int file() const;
  bool direct() const;
  uint64_t offset() const;
  uint8_t* to() const;
  uint64_t bytes() const { return ask_; }

 private:
  friend class ReadQueue;
  Request* request_ = nullptr;
  uint64_t at_ = 0, left_ = 0;  // within the read: what is still missing
  uint64_t ask_ = 0;
  int tries_ = 0;  // without progress
  bool spoilt_ = false;
  FaultPlan fault_;
};

class ReadQueue {
 public:
  // depth: pieces at a device at once. piece: bytes of each.
  ReadQueue(int depth, uint64_t piece);
  ~ReadQueue();

  // Owns a duplicate of `fd`. direct: opened with O_DIRECT. The file's index; no index comes twice.
  int add_file(int fd, bool direct);
  // Refused while the file is being read.
  void remove_file(int file);
  void close_files();  // once nothing is pending
  int fd_of(int file);
  int lanes();

  void submit(std::span<const Read> reads);

  // At most `most` pieces that may go to a disk now; appended to `out`.
  void start(size_t most, std::vector<Piece*>& out);
  // One, as soon as there is one; null when the queue is shut.
  Piece* start_or_wait();
  // The answer to a piece: bytes, or -errno. The piece is not the back end's any more.
  void end(Piece* piece, int64_t result);

  // Ends all reads that have not begun, with ECANCELED (or another errno, where the back end is
  // broken); no further ones are taken. What is at a disk is not called back, since its memory is being
  // written: it is waited for.
  void shut(int error);
  bool is_shut();

  // What has ended; waits for the first. Empty after `seconds` (negative: no limit), and at once when
  // the queue is shut and all reads have been taken.
  std::vector<Completion> take(double seconds);

  size_t running();  // pieces at the disks
  size_t pending();  // reads that have not ended
  void plan_fault(const FaultPlan& plan);

 private:
  struct File;
  struct Lane;
  friend class Piece;
  friend struct Request;

  Lane* lane_of(dev_t device);
  File& file_at(int file);
  void check(const Read& read);
  Piece* next();
  Piece* next_of(Lane& lane);
  Piece* carve(std::deque<Request*>& waiting);
  void spoil(Piece& piece);
  int64_t advance(Piece& piece, int64_t result, bool at_end);
  void drop_rest(Request& request, int error);
  void finish_if_over(Request& request);
  void retire(Piece* piece);

  const size_t depth_;
  const uint64_t piece_bytes_;
  std::mutex lock_;
  std::condition_variable work_, done_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  size_t turn_ = 0;  // the lane that is asked first
  std::deque<Piece> pieces_;
  std::vector<Piece*> free_;
  std::vector<Completion> completions_;
  size_t pending_ = 0, running_ = 0;
  bool shut_ = false;
  int shut_error_ = 0;
  FaultPlan plan_;
  int64_t started_ = 0;
};

}  // namespace moet
