#include "pool.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include <pthread.h>
#include <sched.h>

#include "../core/refusal.h"
#include "../core/signals.h"
#include "float_env.h"

namespace moet {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kWakeFanOut = 2;  // a woken worker wakes two more: log time, and the caller pays for two

// The CPU to which the calling thread is pinned, or -1 where it may run on several.
int pinned_cpu() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0 || CPU_COUNT(&set) != 1) return -1;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) return cpu;
  return -1;
}

int pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

}  // namespace

Pool::Pool(int threads, std::vector<int> cpus)
    : threads_(threads), cpus_(std::move(cpus)), process_(getpid()) {
  if (threads < 1 || threads > kMaxThreads)
    throw Refusal("a pool of " + std::to_string(threads) + " threads", "1 to 1024 threads");
  if (cpus_.empty()) throw Refusal("a pool without CPUs", "pass the CPUs that the process may use");
  for (int cpu : cpus_)
    if (cpu < 0 || cpu >= CPU_SETSIZE) throw Refusal("CPU " + std::to_string(cpu) + " is no CPU");
  order_cpus();
  workers_.reset(new Worker[threads]);
  for (int i = 0; i < threads; ++i) workers_[i].id = i;
  start_workers();
}

Pool::~Pool() {
  if (getpid() == process_)
    stop_workers();
  else  // a forked child has no such threads: their handles can be neither joined nor destroyed
    new std::vector<std::thread>(std::move(running_));
}

void Pool::order_cpus() {
  const auto own = std::find(cpus_.begin(), cpus_.end(), pinned_cpu());
  if (own != cpus_.end()) std::rotate(cpus_.begin(), own, own + 1);
}

void Pool::start_workers() {
  const SignalsHeldBack held_back;
  starting_.store(threads_ - 1);
  try {
    for (int i = 1; i < threads_; ++i)
      running_.emplace_back([this, i] { start(workers_[i]); });
  } catch (const std::exception& error) {  // no thread (system_error) or no memory for its state
    stop_workers();
    throw Refusal("no thread could be made: " + std::string(error.what()),
                  "raise the limit of processes, or use fewer threads");
  }
  for (int left; (left = starting_.load()) > 0;) starting_.wait(left);
  for (int i = 1; i < threads_; ++i)
    if (const int error = workers_[i].pin_error) {
      stop_workers();
      throw Refusal("worker " + std::to_string(i) + " cannot run on CPU " +
                        std::to_string(cpus_[i % cpus_.size()]) + ": " + std::strerror(error),
                    "pass only CPUs that the process may use (its cpuset)");
    }
}

void Pool::start(Worker& worker) {
  const int cpu = cpus_[worker.id % cpus_.size()];
  pthread_setname_np(pthread_self(), ("moet-" + std::to_string(worker.id)).c_str());
  worker.pin_error = pin_to(cpu);
  worker.thread_id = int(syscall(SYS_gettid));
  starting_.fetch_sub(1);
  starting_.notify_one();
  serve(worker);
}

void Pool::stop_workers() {
  stopping_.store(true);
  work_.signal(threads_);
  for (std::thread& thread : running_) thread.join();
  running_.clear();
}

std::vector<int> Pool::thread_ids() const {
  std::vector<int> ids;
  for (int i = 1; i < threads_; ++i) ids.push_back(workers_[i].thread_id);
  return ids;
}

Pool::Session::Session(Pool& pool) : pool_(pool) {
  if (getpid() != pool.process_)
    throw Refusal("this pool was made before a fork: its threads are not in this process",
                  "make the pool in the process that uses it");
  if (pool.busy_.exchange(true))
    throw Refusal("this pool is already running a step", "one step at a time: give each calling thread its own pool");
}

Pool::Session::~Session() { pool_.busy_.store(false); }

void Pool::run(const Session&, Job& job) {
  FloatEnvironment environment;
  beat();
  error_ = nullptr;
  last_epoch_ = last_epoch_ == kEpochMask ? 1 : last_epoch_ + 1;
  job_.store(&job, std::memory_order_relaxed);
  wakes_.store(job.worth_waking() ? kWakeFanOut : 0, std::memory_order_relaxed);
  board_.open(job.slots());
  current_.store(last_epoch_, std::memory_order_seq_cst);
  if (job.begin(*this))
    work_along(workers_[0]);
  else
    current_.store(0);
  beat();
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::publish(int slot, int phase, uint32_t items) {
  board_.publish(last_epoch_, slot, phase, items);
}

void Pool::announce() {
  work_.signal(wakes_.load(std::memory_order_relaxed));
  caller_.signal(1);
}

void Pool::serve(Worker& worker) {
  FloatEnvironment environment;
  for (;;) {
    const uint32_t seen = work_.now();
    if (stopping_.load()) return;
    if (!take(worker)) wait(work_, seen, worker);
  }
}

void Pool::work_along(Worker& caller) {
  for (;;) {
    const uint32_t seen = caller_.now();
    if (take(caller)) continue;
    if (current_.load() == 0) return;
    wait(caller_, seen, caller);
  }
}

// Claims one item and does it; false where none is up.
bool Pool::take(Worker& worker) {
  const uint32_t epoch = current_.load(std::memory_order_acquire);
  if (epoch == 0) return false;
  if (worker.epoch != epoch) {
    worker.epoch = epoch;
    worker.cursor = int(int64_t(worker.id) * board_.count() / threads_);
  }
  Claim claim;
  if (!board_.claim(epoch, worker.cursor, claim)) return false;
  if (worker.id == 0)
    if (uint64_t* pulse = pulse_.load(std::memory_order_relaxed))
      __atomic_store_n(pulse, *pulse + 1, __ATOMIC_RELAXED);
  if (worker.slept) work_.wake(kWakeFanOut);
  worker.slept = false;
  execute(claim, worker);
  return true;
}

// From a claim to its end the job is alive: it cannot end before this item does.
void Pool::execute(const Claim& claim, Worker& worker) {
  if (stall_armed_.load(std::memory_order_relaxed)) stall(worker);
  Job& job = *job_.load(std::memory_order_relaxed);
  try {
    job.work(claim, worker.id);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_lock_);
    if (!error_) error_ = std::current_exception();
  }
  if (!job.finished(claim, *this)) return;
  current_.store(0);
  caller_.signal(1);
}

void Pool::wait(Event& event, uint32_t seen, Worker& worker) {
  const auto signalled = [&] { return event.now() != seen; };
  const auto awake = [&] { return awake_.load(std::memory_order_relaxed); };
  if (awake() && worker.patience.stay(signalled, awake)) return;
  const auto changed = [&] { return signalled() || current_.load() == 0; };
  if (current_.load() != 0 && worker.patience.spin(changed)) return;
  event.wait(seen);
  worker.slept = true;
}

void Pool::reserve(size_t bytes) {
  const Session session(*this);
  workspace_.reserve(bytes);
}

void Pool::keep_awake() {
  awake_.store(true);
  work_.signal(threads_);
}

bool Pool::claim_pulse(uint64_t* address) {
  uint64_t* none = nullptr;
  return pulse_.compare_exchange_strong(none, address);
}

void Pool::release_pulse(uint64_t* address) {
  pulse_.compare_exchange_strong(address, nullptr);
}

void Pool::set_heartbeat(uint64_t* address) {
  const Session session(*this);
  uint64_t* next = address ? address : &own_heartbeat_;
  if (next == heartbeat_) return;
  __atomic_store_n(next, heartbeat(), __ATOMIC_RELEASE);
  heartbeat_ = next;
}

uint64_t Pool::heartbeat() const { return __atomic_load_n(heartbeat_, __ATOMIC_ACQUIRE); }

void Pool::beat() { __atomic_fetch_add(heartbeat_, 1, __ATOMIC_ACQ_REL); }

void Pool::exam_stall(int worker, int64_t milliseconds) {
  if (worker < -1 || worker >= threads_) throw Refusal("no worker " + std::to_string(worker));
  stall_worker_.store(worker);
  stall_ms_.store(milliseconds);
  stall_armed_.store(true);
}

void Pool::exam_release() { stall_ms_.store(0); }

void Pool::stall(const Worker& worker) {
  const int wanted = stall_worker_.load();
  if ((wanted >= 0 && wanted != worker.id) || !stall_armed_.exchange(false)) return;
  for (int64_t waited = 0; !stopping_.load(); ++waited) {
    const int64_t limit = stall_ms_.load();
    if (limit >= 0 && waited >= limit) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace moet
