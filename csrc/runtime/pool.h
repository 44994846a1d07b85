// The thread pool of a process's CPU tier.
//
// One step at a time: the caller opens a Session, runs Jobs in it and works along as worker 0. A job
// puts items on the Board; whoever is awake claims and does them. There is no barrier on *workers*:
// a job ends when its last item is done, so a worker that the kernel has not scheduled costs only
// what it has claimed. Idle workers sleep (0 % CPU); while a job is in flight they spin briefly first.
//
// Workers pin themselves, one CPU each, from the list given by the caller: an engine may have pinned
// its own thread to one core, and new threads inherit that.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "board.h"
#include "event.h"
#include "patience.h"
#include "workspace.h"

namespace moet {

class Pool;

// What a pool runs. Items of one phase of one slot may run at the same time, in any order.
class Job {
 public:
  virtual ~Job() = default;
  // Slots on the board that this job uses, at most kMaxSlots.
  virtual int slots() const = 0;
  // False for a job so short that it is done before a sleeping worker would be there.
  virtual bool worth_waking() const { return true; }
  // Publishes the first items; false where there is nothing to do at all.
  virtual bool begin(Pool& pool) noexcept = 0;
  // Does an item. What it throws is thrown again by Pool::run, after the last item.
  virtual void work(const Claim& claim, int worker) = 0;
  // Counts an item as done and publishes what became ready; true after the last one of the job.
  // Between its own count and its return it must not touch the job, unless it published nothing yet:
  // others may have brought the job to its end meanwhile.
  virtual bool finished(const Claim& claim, Pool& pool) noexcept = 0;
};

class Pool {
 public:
  // threads: workers, the caller included. cpus: where they may run; worker i is pinned to
  // cpus[i % size]. Where the calling thread is itself pinned to one of them, that one is worker 0's.
  Pool(int threads, std::vector<int> cpus);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  const std::vector<int>& cpus() const { return cpus_; }
  std::vector<int> thread_ids() const;  // of workers 1..threads-1, as in /proc/self/task

  // The right to use the pool. A second one at the same time is refused, as is one after a fork.
  class Session {
   public:
    explicit Session(Pool& pool);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

   private:
    Pool& pool_;
  };

  // Runs a job to its end; the calling thread works along. Allocates nothing.
  void run(const Session&, Job& job);

  // For jobs: put items up, then announce them (once for many slots).
  void publish(int slot, int phase, uint32_t items);
  void announce();

  // Memory that steps share. It only grows, and only outside sessions.
  void reserve(size_t bytes);
  uint8_t* workspace() const { return workspace_.data(); }
  size_t workspace_bytes() const { return workspace_.size(); }

  // Between jobs that follow each other at once, as a step's layers do: idle workers spin instead of
  // sleeping, on cores that nobody else wants. Ends with `let_sleep`. Any thread may call.
  void keep_awake();
  void let_sleep() { awake_.store(false); }

  // An address whose 64-bit word worker 0 raises with every item that it does: a sign of life that
  // the GPU can read. One at a time: false where the pool has another. Any thread may call both.
  bool claim_pulse(uint64_t* address);
  void release_pulse(uint64_t* address);

  // Counts the beginnings and the ends of jobs: odd while one is in flight. An address moves the
  // counter there (shared memory for a watchdog in another process); null brings it back.
  void set_heartbeat(uint64_t* address);
  uint64_t heartbeat() const;

  // For tests of watchdogs and stealing only: the next item that `worker` (-1: anyone) claims takes
  // `milliseconds` longer (negative: until release_stall, or until the pool is destroyed).
  void exam_stall(int worker, int64_t milliseconds);
  void exam_release();

 private:
  struct alignas(64) Worker {
    int id = 0;
    int cursor = 0;
    uint32_t epoch = 0;
    bool slept = false;
    Patience patience;
    std::atomic<int> thread_id{0};
    std::atomic<int> pin_error{0};
  };

  void order_cpus();
  void start_workers();
  void start(Worker& worker);
  void stop_workers();
  void serve(Worker& worker);
  void work_along(Worker& caller);
  bool take(Worker& worker);
  void execute(const Claim& claim, Worker& worker);
  void wait(Event& event, uint32_t seen, Worker& worker);
  void stall(const Worker& worker);
  void beat();

  const int threads_;
  std::vector<int> cpus_;
  const pid_t process_;
  Workspace workspace_;
  std::unique_ptr<Worker[]> workers_;
  std::vector<std::thread> running_;
  std::atomic<int> starting_{0};

  Board board_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<int> wakes_{0};  // workers that an announcement of this job wakes
  uint32_t last_epoch_ = 0;
  alignas(64) std::atomic<uint32_t> current_{0};  // epoch of the job in flight, 0 for none
  alignas(64) Event work_;                        // workers sleep here
  alignas(64) Event caller_;                      // the caller sleeps here
  std::atomic<bool> busy_{false}, stopping_{false};

  std::mutex error_lock_;
  std::exception_ptr error_;

  std::atomic<bool> awake_{false};
  std::atomic<uint64_t*> pulse_{nullptr};
  uint64_t own_heartbeat_ = 0;
  uint64_t* heartbeat_ = &own_heartbeat_;

  std::atomic<bool> stall_armed_{false};
  std::atomic<int> stall_worker_{-1};
  std::atomic<int64_t> stall_ms_{0};
};

}  // namespace moet
