#include "queue.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../core/refusal.h"

namespace moet {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kBlock = 4096;    // what O_DIRECT needs of offsets, sizes and addresses, at most
constexpr int kTriesInVain = 64;     // EINTR, EAGAIN and reads of nothing, in a row

int64_t nanoseconds(Clock::duration d) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
}

bool ends_at(int fd, uint64_t offset) {
  struct stat state;
  return fstat(fd, &state) == 0 && S_ISREG(state.st_mode) && offset >= uint64_t(state.st_size);
}

}  // namespace

struct ReadQueue::Lane {
  dev_t device;
  size_t running = 0;
  std::array<std::deque<Request*>, 2> waiting;  // urgent ones, others
  std::deque<Piece*> again;
};

struct ReadQueue::File {
  int fd;
  bool direct;
  Lane* lane;
  int reads = 0;
  ~File() { close(fd); }
};

struct Request {
  Read read;
  ReadQueue::File* file;
  uint64_t handed = 0;  // bytes that pieces were made for
  int pieces = 0;       // of them not over
  uint64_t got = 0;
  int error = 0;
  Clock::time_point submitted, started;
};

int Piece::fd() const { return request_->file->fd; }
int Piece::file() const { return request_->read.file; }
bool Piece::direct() const { return request_->file->direct; }
uint64_t Piece::offset() const { return request_->read.offset + at_; }
uint8_t* Piece::to() const { return request_->read.to + at_; }

ReadQueue::ReadQueue(int depth, uint64_t piece) : depth_(size_t(depth)), piece_bytes_(piece) {
  if (depth < 1 || depth > 256)
    throw Refusal("a depth of " + std::to_string(depth), "1 to 256 pieces at a device");
  if (piece < kBlock || piece % kBlock || piece > (uint64_t(1) << 30))
    throw Refusal("pieces of " + std::to_string(piece) + " bytes", "a multiple of 4096, at most 1 GiB");
}

ReadQueue::~ReadQueue() = default;

ReadQueue::Lane* ReadQueue::lane_of(dev_t device) {
  for (const auto& lane : lanes_)
    if (lane->device == device) return lane.get();
  lanes_.push_back(std::make_unique<Lane>());
  lanes_.back()->device = device;
  return lanes_.back().get();
}

int ReadQueue::add_file(int fd, bool direct) {
  struct stat state;
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) throw Refusal("a file cannot be kept open: " + std::string(std::strerror(errno)), "raise ulimit -n");
  if (fstat(own, &state) != 0) {
    close(own);
    throw Refusal("a file cannot be looked at: " + std::string(std::strerror(errno)));
  }
  const std::lock_guard<std::mutex> lock(lock_);
  files_.push_back(std::unique_ptr<File>(new File{own, direct, lane_of(state.st_dev)}));
  return int(files_.size()) - 1;
}

ReadQueue::File& ReadQueue::file_at(int file) {
  if (file < 0 || size_t(file) >= files_.size() || !files_[size_t(file)])
    throw Refusal("no file " + std::to_string(file));
  return *files_[size_t(file)];
}

void ReadQueue::remove_file(int file) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (const int reads = file_at(file).reads)
    throw Refusal("file " + std::to_string(file) + " has " + std::to_string(reads) + " reads under way",
                  "wait for them first");
  files_[size_t(file)].reset();
}

void ReadQueue::close_files() {
  const std::lock_guard<std::mutex> lock(lock_);
  if (pending_ == 0) files_.clear();
}

int ReadQueue::fd_of(int file) {
  const std::lock_guard<std::mutex> lock(lock_);
  return file_at(file).fd;
}

int ReadQueue::lanes() {
  const std::lock_guard<std::mutex> lock(lock_);
  return int(lanes_.size());
}

void ReadQueue::check(const Read& read) {
  const File& file = file_at(read.file);
  if (read.bytes < 1 || read.bytes > (uint64_t(1) << 46) || read.offset > (uint64_t(1) << 62) || !read.to)
    throw Refusal("a read of " + std::to_string(read.bytes) + " bytes at " + std::to_string(read.offset));
  if (file.direct && (read.offset | read.bytes | reinterpret_cast<uintptr_t>(read.to)) % kBlock)
    throw Refusal("a read of " + std::to_string(read.bytes) + " bytes at " + std::to_string(read.offset) +
                      " past the page cache is not aligned",
                  "offset, size and address must be multiples of 4096");
}

void ReadQueue::submit(std::span<const Read> reads) {
  const auto now = Clock::now();
  std::vector<std::unique_ptr<Request>> made;
  const std::lock_guard<std::mutex> lock(lock_);
  if (shut_ && shut_error_ != ECANCELED)
    throw Refusal("the reader has failed: " + std::string(std::strerror(shut_error_)), "make a new one");
  if (shut_) throw Refusal("the reader is closed", "make a new one");
  for (const Read& read : reads) {
    check(read);
    made.push_back(std::make_unique<Request>());
    made.back()->read = read;
    made.back()->file = &file_at(read.file);
    made.back()->submitted = now;
  }
  for (auto& request : made) {  // all or none
    ++request->file->reads;
    request->file->lane->waiting[request->read.urgent ? 0 : 1].push_back(request.get());
    request.release();
    ++pending_;
  }
  reads.size() > 1 ? work_.notify_all() : work_.notify_one();
}

Piece* ReadQueue::next() {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = *lanes_[(turn_ + i) % lanes_.size()];
    if (lane.running >= depth_) continue;
    if (Piece* piece = next_of(lane)) {
      turn_ = (turn_ + i + 1) % lanes_.size();
      ++lane.running;
      ++running_;
      spoil(*piece);
      return piece;
    }
  }
  return nullptr;
}

Piece* ReadQueue::next_of(Lane& lane) {
  if (!lane.again.empty()) {
    Piece* piece = lane.again.front();
    lane.again.pop_front();
    return piece;
  }
  for (auto& waiting : lane.waiting)
    if (!waiting.empty()) return carve(waiting);
  return nullptr;
}

// The next piece of the first read in line; the read leaves the line with its last one.
Piece* ReadQueue::carve(std::deque<Request*>& waiting) {
  Request& request = *waiting.front();
  if (free_.empty()) {
    pieces_.emplace_back();
    free_.push_back(&pieces_.back());
  }
  Piece* piece = free_.back();
  free_.pop_back();
  if (request.handed == 0) request.started = Clock::now();
  *piece = Piece();
  piece->request_ = &request;
  piece->at_ = request.handed;
  piece->left_ = std::min(piece_bytes_, request.read.bytes - request.handed);
  request.handed += piece->left_;
  ++request.pieces;
  if (request.handed == request.read.bytes) waiting.pop_front();
  return piece;
}

void ReadQueue::spoil(Piece& piece) {
  piece.ask_ = piece.left_;
  const int64_t ordinal = ++started_;
  piece.spoilt_ = ordinal >= plan_.nth && ordinal - plan_.nth < plan_.count;
  piece.fault_ = plan_;
  if (!piece.spoilt_ || plan_.kind != ReadFault::kShort) return;
  const uint64_t most = std::max<uint64_t>(uint64_t(plan_.value), 1);
  piece.ask_ = std::min(piece.left_, piece.direct() ? std::max(most / kBlock * kBlock, kBlock) : most);
}

void ReadQueue::start(size_t most, std::vector<Piece*>& out) {
  const std::lock_guard<std::mutex> lock(lock_);
  for (Piece* piece; most > 0 && (piece = next()); --most) out.push_back(piece);
}

Piece* ReadQueue::start_or_wait() {
  std::unique_lock<std::mutex> lock(lock_);
  for (;;) {
    if (Piece* piece = next()) return piece;
    if (shut_) return nullptr;
    work_.wait(lock);
  }
}

void ReadQueue::end(Piece* piece, int64_t result) {
  const bool flips = piece->spoilt_ && piece->fault_.kind == ReadFault::kFlip && result > 0;
  if (flips) piece->to()[uint64_t(piece->fault_.value) % uint64_t(result)] ^= 1;
  if (piece->spoilt_ && piece->fault_.kind == ReadFault::kError) result = -piece->fault_.value;
  const bool short_read = result >= 0 && uint64_t(result) < piece->left_;
  const bool at_end = result == 0 || (short_read && ends_at(piece->fd(), piece->offset() + uint64_t(result)));

  const std::lock_guard<std::mutex> lock(lock_);
  Request& request = *piece->request_;
  Lane& lane = *request.file->lane;
  --lane.running;
  --running_;
  int64_t error = advance(*piece, result, at_end);
  if (!error && piece->left_ > 0 && shut_) error = shut_error_;
  if (error) drop_rest(request, int(error));
  if (!request.error && piece->left_ > 0) {
    lane.again.push_back(piece);
    work_.notify_one();
    return;
  }
  retire(piece);
  finish_if_over(request);
}

// Counts what came; an errno where the piece cannot go on.
int64_t ReadQueue::advance(Piece& piece, int64_t result, bool at_end) {
  if (result < 0) {
    const int64_t error = -result;
    const bool again = (error == EINTR || error == EAGAIN) && ++piece.tries_ < kTriesInVain;
    return again ? 0 : error;
  }
  uint64_t step = std::min(uint64_t(result), piece.left_);
  // Past the page cache a read goes on at a block; what came of a broken block is read once more.
  if (piece.direct() && step < piece.left_ && !at_end) step = step / kBlock * kBlock;
  piece.tries_ = step > 0 || at_end ? 0 : piece.tries_ + 1;
  if (piece.tries_ >= kTriesInVain) return EIO;
  piece.request_->got += step;
  piece.at_ += step;
  piece.left_ = at_end ? 0 : piece.left_ - step;
  return 0;
}

// No further pieces of this read; those at the disk come back first.
void ReadQueue::drop_rest(Request& request, int error) {
  if (!request.error) request.error = error;
  if (request.handed < request.read.bytes)
    for (auto& waiting : request.file->lane->waiting) std::erase(waiting, &request);
  request.handed = request.read.bytes;
}

void ReadQueue::retire(Piece* piece) {
  --piece->request_->pieces;
  piece->request_ = nullptr;
  free_.push_back(piece);
}

void ReadQueue::finish_if_over(Request& request) {
  if (request.pieces > 0 || request.handed < request.read.bytes) return;
  const auto now = Clock::now();
  const bool began = request.started != Clock::time_point();
  const int64_t result = request.error ? -int64_t(request.error) : int64_t(request.got);
  completions_.push_back({request.read.tag, result,
                          nanoseconds((began ? request.started : now) - request.submitted),
                          began ? nanoseconds(now - request.started) : 0});
  --request.file->reads;
  --pending_;
  delete &request;
  done_.notify_all();
}

void ReadQueue::shut(int error) {
  const std::lock_guard<std::mutex> lock(lock_);
  if (shut_) return;
  shut_ = true;
  shut_error_ = error;
  for (const auto& lane : lanes_) {
    for (Piece* piece : std::exchange(lane->again, {})) {
      Request& request = *piece->request_;
      drop_rest(request, error);
      retire(piece);
      finish_if_over(request);
    }
    for (auto& waiting : lane->waiting)
      for (Request* request : std::exchange(waiting, {})) {
        drop_rest(*request, error);
        finish_if_over(*request);
      }
  }
  work_.notify_all();
  done_.notify_all();
}

bool ReadQueue::is_shut() {
  const std::lock_guard<std::mutex> lock(lock_);
  return shut_;
}

std::vector<Completion> ReadQueue::take(double seconds) {
  std::unique_lock<std::mutex> lock(lock_);
  const auto ready = [&] { return !completions_.empty() || (shut_ && pending_ == 0); };
  if (seconds < 0)
    done_.wait(lock, ready);
  else
    done_.wait_for(lock, std::chrono::duration<double>(std::min(seconds, 1e6)), ready);
  return std::exchange(completions_, {});
}

size_t ReadQueue::running() {
  const std::lock_guard<std::mutex> lock(lock_);
  return running_;
}

size_t ReadQueue::pending() {
  const std::lock_guard<std::mutex> lock(lock_);
  return pending_;
}

void ReadQueue::plan_fault(const FaultPlan& plan) {
  if (plan.nth < 1 || plan.count < 0 || (plan.kind == ReadFault::kError && plan.value < 1))
    throw Refusal("no such fault", "nth from 1, count from 0, an errno above 0");
  const std::lock_guard<std::mutex> lock(lock_);
  plan_ = plan;
  plan_.nth += started_;
}

}  // namespace moet
