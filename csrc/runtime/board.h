// The notice board of a step: slots in which work is published and from which workers claim items.
//
// A slot is one 64-bit word: epoch (30 bits), phase (2), first unclaimed item (16), end (16). A claim
// is one compare-and-swap. The epoch makes a claim of a finished step fail, so a worker that slept
// through the end of its step does no harm and nobody has to wait for it: a step ends when its last
// *item* is done, whether or not every worker ever woke up. Epochs repeat after 2^30 steps.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

namespace moet {

constexpr int kMaxSlots = 4096;
constexpr uint32_t kMaxItems = 0xFFFF;
constexpr uint32_t kEpochMask = (1u << 30) - 1;

struct Claim {
  int slot;
  int phase;  // 0..3: what the slot's items mean now
  uint32_t item;
};

class Board {
 public:
  Board() : slots_(new Slot[kMaxSlots]) {}

  // Opens a step of `count` slots, all empty.
  void open(int count) { count_.store(count, std::memory_order_relaxed); }
  int count() const { return count_.load(std::memory_order_relaxed); }

  // Puts up items 0..items-1 of a phase. The slot must be empty (all claimed) or of an older epoch.
  void publish(uint32_t epoch, int slot, int phase, uint32_t items) {
    slots_[slot].word.store(uint64_t(epoch) << 34 | uint64_t(phase) << 32 | items,
                            std::memory_order_release);
  }

  // Claims the next item, looking from slot `cursor` on, round the board; the cursor stays at the
  // slot that had one, so that one worker streams through neighbouring weights.
  bool claim(uint32_t epoch, int& cursor, Claim& out) {
    const int slots = count();
    for (int i = 0; i < slots; ++i) {
      if (cursor >= slots) cursor = 0;
      if (claim_from(epoch, cursor, out)) return true;
      ++cursor;
    }
    return false;
  }

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> word{0};
  };

  bool claim_from(uint32_t epoch, int slot, Claim& out) {
    std::atomic<uint64_t>& word = slots_[slot].word;
    uint64_t seen = word.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t first = uint32_t(seen >> 16) & 0xFFFF, end = uint32_t(seen) & 0xFFFF;
      if (uint32_t(seen >> 34) != epoch || first == end) return false;
      if (word.compare_exchange_weak(seen, seen + (1u << 16), std::memory_order_acq_rel,
                                     std::memory_order_acquire)) {
        out = {slot, int(seen >> 32 & 3), first};
        return true;
      }
    }
  }

  std::unique_ptr<Slot[]> slots_;
  std::atomic<int> count_{0};
};

}  // namespace moet
