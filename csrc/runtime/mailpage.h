// The page that a card and this process share: mapped, pinned host memory. Words of one writer have a
// cache line of their own. device/mail.cuh and kernels/cuda/mail.py give the same offsets.
#pragma once
#include <cstddef>
#include <cstdint>

namespace moet {

struct MailPage {
  // Card -> CPU. A post counts up: doorbell = 2 * sequence + (1 where the CPU has work).
  alignas(64) uint64_t doorbell;
  // What a post with work asks for; written before its doorbell, stays until it is answered.
  alignas(64) uint64_t sequence;
  uint32_t layer, tokens, slots, x_type;
  uint64_t check;  // mail_check of the fields above
  // CPU -> card. The sequence that was answered last.
  alignas(64) uint64_t answered;
  // Raised while the CPU gets on with an answer.
  alignas(64) uint64_t pulse;
  // Not 0: nobody will answer any more, and why (a Verdict).
  alignas(64) uint32_t broken;
  // 1 while there is nothing to wait for: what a stream's memory operation waits for.
  alignas(64) uint32_t gate;
  // Card -> CPU: why the card gave up waiting (a Verdict), 0: it did not.
  alignas(64) uint32_t given_up;
};

static_assert(offsetof(MailPage, sequence) == 64 && offsetof(MailPage, layer) == 72 &&
              offsetof(MailPage, check) == 88 && offsetof(MailPage, answered) == 128 &&
              offsetof(MailPage, pulse) == 192 && offsetof(MailPage, broken) == 256 &&
              offsetof(MailPage, gate) == 320 && offsetof(MailPage, given_up) == 384 &&
              sizeof(MailPage) == 448);

enum Verdict : uint32_t {
  kDone = 0,
  kRefused = 1,  // the layer refused the request: see the message
  kStalled = 2,  // the CPU's workers made no progress
  kCorrupt = 3,  // a word of the page is not what it can be
  kStopped = 4,  // the mailbox was closed or given up
  kUnannounced = 5,  // a post came that `begin` was not told of
};

// Tells a torn or overwritten request from a whole one.
static inline uint64_t mail_check(uint64_t sequence, uint32_t layer, uint32_t tokens,
                                  uint32_t slots, uint32_t x_type) {
  uint64_t h = 0x6D6F65746D61696Cull;
  for (uint64_t word : {sequence, uint64_t(layer) << 32 | tokens, uint64_t(slots) << 32 | x_type}) {
    h = (h ^ word) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  return h;
}

}  // namespace moet
