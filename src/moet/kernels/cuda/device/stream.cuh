// A block's list of work, and the rings through which its warps read weights.
//
// A *unit* is four strips of one expert, a *task* one unit for as many of the expert's columns as
// an MMA takes; the passes over further columns follow at once, so that they find the weights in
// the L2 cache. Units are dealt to the blocks one by one. A task has one *item* a segment of K;
// items are dealt to the warps one by one, over the bounds of tasks. Each warp reads its items
// through a ring of its own, which runs ahead of the dot: no barrier stops the reading.
#pragma once
#include "routing.cuh"

struct alignas(16) Item {
  u32 entry;  // kNoEntry: there are no more items
  u32 unit;
  u32 task;  // number of the task in the block
  u16 pass, segment;
};

constexpr u32 kNoEntry = ~0u;
constexpr u32 kQueue = 8;  // items that a ring is ahead, at most: its slots and two more

// Where a warp's reading is.
struct Ahead {
  Item item;
  const u8* source;
  u32 groups;
  u32 runs;   // strips of the unit
  u32 found;  // items so far
  u32 unused[3];
  Item queue[kQueue];
};

// What a block of threads knows about its stage.
struct Stage {
  const StageParams& p;
  Routing routing;
  u32 most_columns;      // of a task, a power of two
  u32 groups, segments;  // of K
  u32 strip_bytes;
  u32 units;             // of an expert
  u32 entries;           // experts with work
};

// A warp's slots.
struct Ring {
  u8* slots;
  u64* barriers;
  Ahead* ahead;
  const u8* source;  // what is read next
  u32 groups_left;   // of its item; 0: nothing is left to read
  u32 runs;
  u32 depth;
  u32 slot, parity;  // of the next slot to be used
};

MOET_DEVICE u32 passes_of(const Stage& s, u32 entry) {
  return ((s.routing.entries[entry].columns & 0xFFFF) + s.most_columns - 1) / s.most_columns;
}

// The item that is `place` items on from the first one of the task at hand, if the block has it.
MOET_DEVICE Item find_item(const Stage& s, Item item, u32 place) {
  while (item.entry < s.entries) {
    if (place < s.segments) {
      item.segment = place;
      return item;
    }
    place -= s.segments;
    ++item.task;
    if (++item.pass < passes_of(s, item.entry)) continue;
    item.pass = 0;
    item.unit += gridDim.x;
    item.entry += item.unit / s.units;
    item.unit %= s.units;
  }
  item.entry = kNoEntry;
  return item;
}

constexpr u32 kSegmentGroups = kSegmentBlocks / kGroupBlocks;

MOET_DEVICE u32 item_groups(const Stage& s, u32 segment) {
  const u32 left = s.groups - segment * kSegmentGroups;
  return left < kSegmentGroups ? left : kSegmentGroups;
}

// One lane: puts an item on the list of what the dot will find in the ring.
MOET_DEVICE void announce(const Stage& s, Ahead& a, const Item& item) {
  a.item = item;
  a.queue[a.found++ % kQueue] = item;
  a.groups = 0;
  if (item.entry == kNoEntry) return;
  a.groups = item_groups(s, item.segment);
  a.runs = 2 * item.unit + 1 < s.p.pairs ? kStrips : kStrips / 2;
  a.source = reinterpret_cast<const u8*>(s.routing.entries[item.entry].record) + s.p.section +
             static_cast<u64>(kStrips * item.unit) * s.strip_bytes +
             item.segment * (kSegmentGroups * kGroupBytes);
}

// All lanes: what is read next, after one of them has found it.
MOET_DEVICE void look_ahead(Ring& r) {
  __syncwarp();
  r.source = r.ahead->source;
  r.groups_left = r.ahead->groups;
  r.runs = r.ahead->runs;
  __syncwarp();
}

// Starts reading the next group, if there is one, into the slot.
MOET_DEVICE void read_ahead(const Stage& s, Ring& r, u32 slot) {
  if (r.groups_left == 0) return;
  copy_runs(r.slots + slot * kSlotBytes, kGroupBytes, r.source, s.strip_bytes, kGroupBytes, r.runs,
            r.barriers + slot);
  r.source += kGroupBytes;
  if (--r.groups_left > 0) return;
  if ((threadIdx.x & 31) == 0) {
    Ahead& a = *r.ahead;
    announce(s, a, find_item(s, a.item, a.item.segment + (blockDim.x >> 5)));
  }
  look_ahead(r);
}

MOET_DEVICE const u8* wait_for_slot(const Ring& r) {
  barrier_wait(r.barriers + r.slot, r.parity);
  return r.slots + r.slot * kSlotBytes;
}

// All lanes are done with the slot: it is free again.
MOET_DEVICE void release_slot(const Stage& s, Ring& r) {
  __syncwarp();
  read_ahead(s, r, r.slot);
  if (++r.slot == r.depth) {
    r.slot = 0;
    r.parity ^= 1;
  }
}

MOET_DEVICE void start_ring(const Stage& s, Ring& r) {
  r.slot = r.parity = 0;
  if ((threadIdx.x & 31) == 0) {
    r.ahead->found = 0;
    const Item first = {blockIdx.x / s.units, blockIdx.x % s.units, 0, 0, 0};
    announce(s, *r.ahead, find_item(s, first, threadIdx.x >> 5));
  }
  look_ahead(r);
  for (u32 slot = 0; slot < r.depth; ++slot) read_ahead(s, r, slot);
}
