// The card's end of the mailbox (docs/decisions/mailbox.md): a step asks the CPU for the rows of the
// experts that are not here, goes on with those that are, and waits before the combine.
//   moet_post   x and ids of the tokens that need the CPU -> mapped host memory, then the doorbell
//   moet_wait   until the answer is there, or nobody will answer any more
// Only this side knows which experts are on the card: ids that the CPU has no part in leave as -1.
#pragma once
#include "layout.cuh"

// Offsets in the page: csrc/runtime/mailpage.h.
constexpr u32 kDoorbellAt = 0, kRequestAt = 64, kAnsweredAt = 128, kPulseAt = 192, kBrokenAt = 256,
              kGateAt = 320, kGivenUpAt = 384;

enum Verdict : u32 { kDone = 0, kStalled = 2, kCorrupt = 3 };

// In device memory; one for all layers of a stream, since they follow each other.
struct MailState {
  u64 sequence;  // posts so far
  u32 arrived;   // blocks of the post at hand
  u32 working;   // tokens of it that need the CPU
  u32 waits;     // the last post had work
  u32 failed;    // a Verdict; from then on the CPU's rows are NaN
};

struct PostParams {
  const u64* table;  // [E]
  const int* ids;    // [T][K]
  const u8* x;       // [T] rows of row_bytes, 16-byte aligned
  u8* page;          // mapped host memory, as all that follow
  u8* mail_x;        // [T] rows of row_bytes
  int* mail_ids;     // [T][K]
  MailState* state;
  u32 tokens;
  u32 top_k;
  u32 experts;
  u32 row_bytes;
  u32 layer;
  u32 x_type;
};

struct WaitParams {
  u8* page;
  MailState* state;
  u64 patience_ns;  // without a sign of life of the CPU
  u32 early;        // the post ended before the kernel before this one began
};

MOET_DEVICE u64 mail_check(u64 sequence, u32 layer, u32 tokens, u32 slots, u32 x_type) {
  u64 h = 0x6D6F65746D61696Cull;
  const u64 words[3] = {sequence, static_cast<u64>(layer) << 32 | tokens,
                        static_cast<u64>(slots) << 32 | x_type};
  for (int i = 0; i < 3; ++i) {
    h = (h ^ words[i]) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  }
  return h;
}

MOET_DEVICE bool is_elsewhere(const PostParams& p, int id) {
  return id >= 0 && static_cast<u32>(id) < p.experts && p.table[id] == kElsewhere;
}

// The last block of a post: the request, then the doorbell.
MOET_DEVICE void ring(const PostParams& p) {
  MailState& s = *p.state;
  const u64 sequence = s.sequence + 1;
  const bool work = s.working != 0 && s.failed == 0;
  s.sequence = sequence;
  s.waits = work;
  s.arrived = s.working = 0;
  if (work) {
    u8* request = p.page + kRequestAt;
    store_system(reinterpret_cast<u32*>(p.page + kGateAt), 0u);
    *reinterpret_cast<volatile u64*>(request) = sequence;
    volatile u32* words = reinterpret_cast<volatile u32*>(request + 8);
    words[0] = p.layer;
    words[1] = p.tokens;
    words[2] = p.top_k;
    words[3] = p.x_type;
    *reinterpret_cast<volatile u64*>(request + 24) =
        mail_check(sequence, p.layer, p.tokens, p.top_k, p.x_type);
  }
  fence_system();
  store_system(reinterpret_cast<u64*>(p.page + kDoorbellAt), 2 * sequence + (work ? 1 : 0));
}

// Grid: T blocks, one a token.
MOET_KERNEL(256, 4) moet_post(const __grid_constant__ PostParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const u32 token = blockIdx.x;
  const int* ids = p.ids + token * p.top_k;
  bool needed = false;
  for (u32 slot = 0; slot < p.top_k; ++slot) needed |= is_elsewhere(p, ids[slot]);
  if (threadIdx.x < p.top_k) {
    const int id = ids[threadIdx.x];
    p.mail_ids[token * p.top_k + threadIdx.x] = is_elsewhere(p, id) ? id : -1;
  }
  if (needed) {
    const u64 row = static_cast<u64>(token) * p.row_bytes;
    for (u32 at = 16 * threadIdx.x; at < p.row_bytes; at += 16 * blockDim.x)
      *reinterpret_cast<uint4*>(p.mail_x + row + at) =
          *reinterpret_cast<const uint4*>(p.x + row + at);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (needed) atomicAdd(&p.state->working, 1u);
  fence_system();
  if (atomicAdd(&p.state->arrived, 1u) + 1 != gridDim.x) return;
  fence_system();  // what the others did before they arrived
  ring(p);
}

// Why the rows will not come, or kDone when they are there.
MOET_DEVICE u32 wait_for_answer(const WaitParams& p) {
  const u64 sequence = p.state->sequence;
  const u64* answered = reinterpret_cast<const u64*>(p.page + kAnsweredAt);
  const u64* pulse = reinterpret_cast<const u64*>(p.page + kPulseAt);
  const u32* broken = reinterpret_cast<const u32*>(p.page + kBrokenAt);
  u64 last = load_system(pulse), since = nanoseconds();
  for (u32 polls = 0;; ++polls) {
    const u64 answer = load_system(answered);
    if (answer == sequence) return kDone;
    if (answer > sequence) return kCorrupt;
    if (polls % 16) continue;
    const u32 why = load_system(broken);
    if (why) return why;
    const u64 now = nanoseconds(), beat = load_system(pulse);
    if (beat != last) last = beat, since = now;
    else if (now - since > p.patience_ns) return kStalled;
  }
}

// One thread. Where kernels lie between the post and this one, it starts while they run. It ends after
// them, so that the combine can rely on it.
MOET_KERNEL(32, 1) moet_wait(const __grid_constant__ WaitParams p) {
  if (!p.early) wait_for_earlier_kernels();
  if (threadIdx.x == 0) {
    MailState& s = *p.state;
    if (s.waits && !s.failed) {
      const u32 why = wait_for_answer(p);
      if (why) {
        s.failed = why;
        store_system(reinterpret_cast<u32*>(p.page + kGivenUpAt), why);
      }
    }
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();
}
