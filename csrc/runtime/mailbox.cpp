#include "mailbox.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <map>

#include <pthread.h>
#include <time.h>

#include "../core/refusal.h"
#include "../core/signals.h"
#include "starvation.h"

namespace moet {
namespace {

constexpr int64_t kQuietNs = 1'000'000'000;  // without a post for so long, polls become rare
constexpr int64_t kRarePollNs = 200'000;
constexpr int kMostStalls = 10;
constexpr int kPausesAPoll = 4;
constexpr int kPollsAClock = 256;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

template <class T>
T load(const T& word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& word, T value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

struct Failure {
  Verdict why = kDone;
  std::string message, hint;
};

// A request that is not what the card can have written.
class Torn : public Refusal {
  using Refusal::Refusal;
};

Failure bell_fault(uint64_t sequence, uint64_t seen, uint64_t most) {
  const std::string what = "the doorbell shows post " + std::to_string(sequence) + " after " +
                           std::to_string(seen) + " of " + std::to_string(most);
  if (sequence == most + 1)
    return {kUnannounced, what, "announce every step before it is enqueued or replayed"};
  return {kCorrupt, what, ""};
}

int pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

void sleep_ns(int64_t ns) { std::this_thread::sleep_for(std::chrono::nanoseconds(ns)); }

}  // namespace

struct Mailbox::State {
  std::shared_ptr<Pool> pool;
  MailMemory memory;
  int64_t stall_ns;
  bool polls;

  std::map<uint32_t, std::shared_ptr<Layer>> layers;
  std::atomic<uint64_t> expected{0}, served{0};  // posts: announced by begin, seen on the doorbell
  std::atomic<uint64_t> asked{0};                // by host functions
  std::atomic<bool> answering{false}, stopping{false};
  std::atomic<int> ended{0};                     // threads that have returned
  std::atomic<uint64_t> answers{0};
  std::atomic<int64_t> busy{0};
  std::atomic<int> fault{0};
  std::atomic<int> thread_id[2] = {0, 0}, pin_error{0};
  Event steps, answered;
  std::mutex lock;
  std::string message, hint;

  MailPage& page() const { return *memory.page; }
  bool broken() const { return load(page().broken) != kDone; }
  bool in_flight() const { return served.load() < expected.load() && !broken(); }

  void conduct();
  void poll();
  void look();
  void answer(uint64_t sequence);
  void run_request(uint64_t sequence);
  void guard();
  void watch_the_bell();
  void give_up(const Failure& failure);
};

// --- the conductor

void Mailbox::State::conduct() {
  bool awake = false;
  for (;;) {
    const uint32_t seen = steps.now();
    if (stopping.load()) break;
    if (in_flight() != awake) {
      awake = !awake;
      awake ? pool->keep_awake() : pool->let_sleep();
    }
    if (awake && polls)
      poll();
    else if (served.load() < asked.load() && !broken())
      look();
    else
      steps.wait(seen);
  }
  pool->let_sleep();
}

// Until all announced posts were seen. A step may keep the card busy elsewhere for long (a prompt's
// attention): after a quiet second the polls leave the core to others.
void Mailbox::State::poll() {
  uint64_t before = served.load();
  bool quiet = false;
  for (int64_t last = now_ns(); in_flight() && !stopping.load();) {
    for (int i = 0; i < kPollsAClock && served.load() == before && !broken(); ++i) {
      look();
      for (int j = 0; j < kPausesAPoll; ++j) pause();
    }
    if (served.load() != before) {
      before = served.load();
      last = now_ns();
      if (quiet) pool->keep_awake();
      quiet = false;
    } else if (now_ns() - last > kQuietNs) {
      if (!quiet) pool->let_sleep();
      quiet = true;
      sleep_ns(kRarePollNs);
    }
  }
}

void Mailbox::State::look() {
  const uint64_t seen = served.load();  // before the bell, which only grows
  const uint64_t bell = load(page().doorbell), sequence = bell >> 1;
  if (sequence == seen) return;
  const uint64_t most = expected.load();
  if (sequence < seen || sequence > most) return give_up(bell_fault(sequence, seen, most));
  if (bell & 1) {
    answering.store(true);
    answer(sequence);
  }
  served.store(sequence);
  answering.store(false);  // last: a reset may follow at once
  answered.signal(1);
}

void Mailbox::State::answer(uint64_t sequence) {
  const int64_t start = now_ns();
  Failure failure;
  try {
    run_request(sequence);
  } catch (const Torn& torn) {
    failure = {kCorrupt, torn.what(), torn.hint()};
  } catch (const Refusal& refusal) {
    failure = {kRefused, refusal.what(), refusal.hint()};
  } catch (const std::exception& error) {
    failure = {kRefused, error.what(), ""};
  }
  busy.fetch_add(now_ns() - start);
  answers.fetch_add(1);
  if (failure.why != kDone) give_up(failure);
  if (broken()) return;  // too late: the guard has released the card
  const bool wrong = fault.load() == 2 && fault.exchange(0) == 2;
  store(page().answered, wrong ? sequence + 12345 : sequence);
  store(page().gate, 1u);
}

void Mailbox::State::run_request(uint64_t sequence) {
  const MailPage& p = page();
  uint64_t check = p.check;
  if (fault.load() == 1 && fault.exchange(0) == 1) check ^= 1;
  const bool whole = p.sequence == sequence &&
                     check == mail_check(p.sequence, p.layer, p.tokens, p.slots, p.x_type) &&
                     p.tokens >= 1 && p.tokens <= memory.max_tokens && p.slots >= 1 &&
                     p.slots <= memory.max_slots && p.x_type <= 2;
  const auto layer = layers.find(p.layer);
  if (!whole || layer == layers.end())
    throw Torn("the request of post " + std::to_string(sequence) + " is not whole: layer " +
               std::to_string(p.layer) + ", " + std::to_string(p.tokens) + " tokens");
  layer->second->run({memory.x, DType(p.x_type), int(p.tokens), nullptr, memory.ids, IdType::kI32,
                      int(p.slots), nullptr, DType::kF32, 1.0f, false, memory.rows});
}

// Releases the card, whatever it waits on: it will not use rows, and says so in its output.
void Mailbox::State::give_up(const Failure& failure) {
  {
    const std::lock_guard<std::mutex> hold(lock);
    if (broken()) return;
    message = failure.message;
    hint = failure.hint;
    store(page().broken, uint32_t(failure.why));
  }
  store(page().gate, 1u);
  answered.signal(1 << 20);
}

// --- the guard

// A stop is a stall in which the workers had the cores that they wanted: where others had them, or
// where this thread itself came late, the time does not count, up to kMostStalls.
void Mailbox::State::guard() {
  const int64_t tick = std::max<int64_t>(stall_ns / 16, 100'000);
  std::vector<int> threads = pool->thread_ids();
  threads.push_back(thread_id[0].load());
  Starvation starvation(threads);
  uint64_t pulse = 0, count = 0;
  int64_t began = now_ns(), counted = 0;
  while (!stopping.load()) {
    const uint32_t seen = steps.now();
    if (broken()) {  // a post that the card made before it knew must not wait either
      store(page().gate, 1u);
      sleep_ns(tick);
      continue;
    }
    if (!in_flight()) {
      steps.wait_a_second(seen);
      watch_the_bell();
      began = now_ns(), counted = 0;
      continue;
    }
    const int64_t before = now_ns();
    sleep_ns(tick);
    const int64_t now = now_ns(), slept = now - before;
    const bool starved = starvation.since_last(slept) || slept > 4 * tick;
    const uint64_t now_pulse = load(page().pulse), now_count = answers.load();
    if (!answering.load() || now_pulse != pulse || now_count != count) {
      pulse = now_pulse, count = now_count;
      began = now, counted = 0;
      continue;
    }
    if (!starved) counted += slept;
    if (counted > stall_ns || now - began > kMostStalls * stall_ns)
      give_up({kStalled, "the CPU's workers made no progress for " +
                             std::to_string((now - began) / 1'000'000) + " ms", ""});
  }
}

// While nobody polls: a post with work that nobody was told of would wait for ever.
void Mailbox::State::watch_the_bell() {
  const uint64_t most = expected.load();
  const uint64_t bell = load(page().doorbell);
  if ((bell & 1) && bell >> 1 > most && most == expected.load())
    give_up(bell_fault(bell >> 1, served.load(), most));
}

// --- the door

Mailbox::Mailbox(std::shared_ptr<Pool> pool, const MailMemory& memory, int64_t stall_ns, bool polls)
    : state_(std::make_shared<State>()) {
  State& s = *state_;
  s.pool = std::move(pool);
  s.memory = memory;
  s.stall_ns = stall_ns;
  s.polls = polls;
  *memory.page = MailPage{};
  memory.page->gate = 1;
  if (!s.pool->claim_pulse(&memory.page->pulse))
    throw Refusal("this pool has a mailbox already", "close that one first, or give each its own pool");
  // Worker 0's core: the conductor runs the pool's steps.
  const int core = s.pool->cpus().front();
  const SignalsHeldBack held_back;
  conductor_ = std::thread([state = state_, core] {
    state->pin_error = pin_to(core);
    pthread_setname_np(pthread_self(), "moet-mail");
    state->thread_id[0] = int(syscall(SYS_gettid));
    state->thread_id[0].notify_all();
    state->conduct();
    state->ended.fetch_add(1);
  });
  s.thread_id[0].wait(0);
  if (s.pin_error) {
    close();
    throw Refusal("the mailbox cannot run on CPU " + std::to_string(core),
                  "pass only CPUs that the process may use (its cpuset)");
  }
  guard_ = std::thread([state = state_] {
    pthread_setname_np(pthread_self(), "moet-guard");
    state->thread_id[1] = int(syscall(SYS_gettid));
    state->guard();
    state->ended.fetch_add(1);
  });
}

Mailbox::~Mailbox() { close(); }

void Mailbox::attach(uint32_t index, std::shared_ptr<Layer> layer) {
  if (state_->in_flight()) throw Refusal("a step is in flight", "attach layers before the first step");
  state_->layers[index] = std::move(layer);
}

void Mailbox::begin(uint32_t posts) {
  state_->expected.fetch_add(posts);
  state_->steps.signal(2);
}

void Mailbox::settle() {
  State& s = *state_;
  while (s.answering.load() && !s.broken()) sleep_ns(10'000);
  const uint64_t posted = load(s.page().doorbell) >> 1;
  s.served.store(posted);
  s.expected.store(posted);
  s.steps.signal(2);  // nothing is in flight any more: everybody may sleep
}

void Mailbox::answer_now() {
  State& s = *state_;
  const uint64_t bell = load(s.page().doorbell);
  if (!(bell & 1)) {
    s.served.store(bell >> 1);
    if (!s.in_flight()) s.steps.signal(2);  // the last of its step
    return;
  }
  s.asked.store(bell >> 1);
  s.steps.signal(2);
  for (;;) {
    const uint32_t seen = s.answered.now();
    if (s.served.load() >= bell >> 1 || s.broken()) return;
    s.answered.wait(seen);
  }
}

Verdict Mailbox::verdict() const { return Verdict(load(state_->page().broken)); }

std::string Mailbox::message() const {
  const std::lock_guard<std::mutex> hold(state_->lock);
  return state_->message;
}

std::string Mailbox::hint() const {
  const std::lock_guard<std::mutex> hold(state_->lock);
  return state_->hint;
}

void Mailbox::reset() {
  State& s = *state_;
  if (s.answering.load()) throw Refusal("a worker is still in a layer", "it must come back first");
  settle();
  const std::lock_guard<std::mutex> hold(s.lock);
  s.message.clear();
  s.hint.clear();
  s.asked.store(s.served.load());
  store(s.page().given_up, 0u);
  store(s.page().gate, 1u);
  store(s.page().answered, s.served.load());
  store(s.page().broken, uint32_t(kDone));
}

bool Mailbox::close() {
  if (closed_) return clean_;
  closed_ = true;
  State& s = *state_;
  s.give_up({kStopped, "the mailbox was closed", ""});
  s.stopping.store(true);
  s.steps.signal(2);
  const int running = int(conductor_.joinable()) + int(guard_.joinable());
  for (int waited = 0; s.ended.load() < running && waited < 2000; ++waited) sleep_ns(1'000'000);
  clean_ = s.ended.load() == running;
  for (std::thread* thread : {&conductor_, &guard_})
    if (thread->joinable()) clean_ ? thread->join() : thread->detach();
  if (clean_) s.pool->release_pulse(&s.page().pulse);
  return clean_;
}

uint64_t Mailbox::answered() const { return state_->answers.load(); }
int64_t Mailbox::busy_ns() const { return state_->busy.load(); }

std::vector<int> Mailbox::thread_ids() const {
  return {state_->thread_id[0].load(), state_->thread_id[1].load()};
}

void Mailbox::exam_corrupt(int what) { state_->fault.store(what); }

extern "C" void moet_answer_now(void* mailbox) { static_cast<Mailbox*>(mailbox)->answer_now(); }

}  // namespace moet
