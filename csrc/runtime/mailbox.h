// The CPU's end of the mailbox: a captured GPU step asks, layer by layer, for the rows of the experts
// that are not on the card, and this side answers (docs/decisions/mailbox.md).
//
//   engine thread     begin(posts): a step of so many posts is about to be enqueued
//   conductor thread  sleeps until then; polls the doorbell while a step is in flight, and answers
//                     each request as worker 0 of the pool, whose other workers stay awake meanwhile
//   guard thread      looks in while a step is in flight; releases the card where an answer makes no
//                     progress
//
// Nothing here calls CUDA: a thread of ours must not disturb a capture that goes on elsewhere.
// One request at a time: a layer's output is needed before the next layer can ask.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "event.h"
#include "layer.h"
#include "mailpage.h"
#include "pool.h"

namespace moet {

// Memory that the card reads and writes too. Rows: [max_tokens * slots][H] in the layers' row type.
struct MailMemory {
  MailPage* page;
  const uint8_t* x;      // [max_tokens][H] of the request's type
  const uint8_t* ids;    // int32 [max_tokens][slots]; negative where the CPU has nothing to do
  uint8_t* rows;
  uint32_t max_tokens, max_slots;
};

class Mailbox {
 public:
  // stall_ns: an answer without progress for so long is given up. polls: false where the card calls
  // `answer_now` through a host function instead of ringing.
  Mailbox(std::shared_ptr<Pool> pool, const MailMemory& memory, int64_t stall_ns, bool polls);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // The layer of an index. Not while a step is in flight.
  void attach(uint32_t index, std::shared_ptr<Layer> layer);

  // Any thread, just before a step is enqueued. Costs one system call.
  void begin(uint32_t posts);
  // The card is idle: posts that never came (a step that failed half-way) are not waited for.
  void settle();

  // From a host function of a stream: returns when the request in the page is answered or given up.
  void answer_now();

  // Why nobody answers any more (kDone: all is well), and in words.
  Verdict verdict() const;
  std::string message() const;
  std::string hint() const;

  // After a failure, with the card idle and the workers back: as new, its sequence at `posted`.
  void reset();

  // Stops the threads. False where one of them is stuck in a layer: then the memory must stay.
  bool close();

  uint64_t answered() const;   // requests with work, so far
  int64_t busy_ns() const;     // time spent in answers, so far
  std::vector<int> thread_ids() const;

  // Faults for exams: the next answer finds (1) or leaves (2) a page with a wrong word.
  void exam_corrupt(int what);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // the threads own it too: a stuck one may outlive us
  std::thread conductor_, guard_;
  bool closed_ = false, clean_ = true;
};

// What a stream's host function calls; `mailbox` is the address of a Mailbox.
extern "C" void moet_answer_now(void* mailbox);

}  // namespace moet
