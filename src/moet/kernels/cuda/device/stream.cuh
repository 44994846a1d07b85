// A block's list of work, and the rings through which its warps read weights.
//
// A *task* is one unit of pairs of one expert, for up to 8 of the expert's columns; the passes over
// further columns follow at once, so that they find the weights in the L2 cache. A task has one
// *item* a pair and segment; items are dealt to the warps round robin. Each warp reads the groups of
// its items through a ring of its own, which runs ahead across items and tasks: no barrier of the
// block stops the reading.
#pragma once
#include "routing.cuh"

// What a block of threads knows about its stage.
struct Stage {
  const StageParams& p;
  Routing routing;
  u32 entries;      // experts with work
  u32 units;        // of an expert
  u32 groups;       // of K
  u32 segments;     // of K
  u32 inverse;      // of segments, times 2^16, rounded up
  u32 strip_bytes;
};

struct Task {
  u32 entry, unit, pass;
  u32 cost;  // of all tasks before, over the whole stage
};

MOET_DEVICE u32 columns_of(const Stage& s, const Task& t) {
  return s.routing.entries[t.entry].columns & 0xFFFF;
}

MOET_DEVICE u32 pairs_of(const Stage& s, const Task& t) {
  const u32 left = s.p.pairs - t.unit * s.p.unit_pairs;
  return left < s.p.unit_pairs ? left : s.p.unit_pairs;
}

// item / segments: exact, since items are fewer than 2^16 / segments.
MOET_DEVICE u32 pair_of(const Stage& s, u32 item) { return item * s.inverse >> 16; }

MOET_DEVICE void advance(const Stage& s, Task& t) {
  ++t.cost;
  if (++t.pass < passes_of(columns_of(s, t))) return;
  t.pass = 0;
  if (++t.unit < s.units) return;
  t.unit = 0;
  ++t.entry;
}

// The first task at `cost` or later that begins a unit: all passes of a unit stay in one block.
MOET_DEVICE Task first_task(const Stage& s, u32 cost) {
  const Entry* entries = s.routing.entries;
  u32 entry = 0;
  for (u32 end = s.entries; end - entry > 1;) {
    const u32 middle = (entry + end) / 2;
    (entries[middle].cost <= cost ? entry : end) = middle;
  }
  const u32 passes = passes_of(entries[entry].columns & 0xFFFF);
  const u32 unit = (cost - entries[entry].cost + passes - 1) / passes;
  const u32 at = entries[entry].cost + unit * passes;
  return unit < s.units ? Task{entry, unit, 0, at} : Task{entry + 1, 0, 0, at};
}

// The item that a warp reads. In shared memory, so that the dot keeps its registers.
struct Ahead {
  const u8* source;
  u32 groups;  // 0: nothing is left to read
  u32 item;
  Task task;
  u32 end;          // cost
};

// A warp's slots.
struct Ring {
  u8* slots;
  u64* barriers;
  Ahead* ahead;
  const u8* source;  // what is read next
  u32 groups_left;   // of its item; 0: nothing is left to read
  u32 depth;
  u32 slot, parity;  // of the next slot to be used
};

MOET_DEVICE u32 item_groups(const Stage& s, u32 segment) {
  const u32 left = s.groups - segment * (kSegmentBlocks / kGroupBlocks);
  return left < kSegmentBlocks / kGroupBlocks ? left : kSegmentBlocks / kGroupBlocks;
}

// Moves to the item at hand, past tasks that have none for this warp.
MOET_DEVICE void find_item(const Stage& s, Ahead& a) {
  while (a.task.cost < a.end && a.item >= pairs_of(s, a.task) * s.segments) {
    advance(s, a.task);
    a.item = threadIdx.x >> 5;
  }
  a.groups = 0;
  if (a.task.cost >= a.end) return;
  const u32 pair = pair_of(s, a.item), segment = a.item - pair * s.segments;
  a.groups = item_groups(s, segment);
  const u64 strip = 2 * static_cast<u64>(a.task.unit * s.p.unit_pairs + pair);
  a.source = reinterpret_cast<const u8*>(s.routing.entries[a.task.entry].record) + s.p.section +
             strip * s.strip_bytes + segment * (kSegmentBlocks / kGroupBlocks * kGroupBytes);
}

MOET_DEVICE u32 slot_groups(u32 left) { return left < kSlotGroups ? left : kSlotGroups; }

// All lanes: the warp's next item, found by one of them.
MOET_DEVICE void next_item(const Stage& s, Ring& r) {
  if ((threadIdx.x & 31) == 0) {
    r.ahead->item += blockDim.x >> 5;
    find_item(s, *r.ahead);
  }
  __syncwarp();
  r.source = r.ahead->source;
  r.groups_left = r.ahead->groups;
  __syncwarp();
}

// Starts reading the next groups, if there are any, into the slot.
MOET_DEVICE void read_ahead(const Stage& s, Ring& r, u32 slot) {
  if (r.groups_left == 0) return;
  const u32 groups = slot_groups(r.groups_left), bytes = groups * kGroupBytes;
  copy_pair(r.slots + slot * kSlotBytes, kSlotGroups * kGroupBytes, r.source, s.strip_bytes, bytes,
            r.barriers + slot);
  r.source += bytes;
  r.groups_left -= groups;
  if (r.groups_left == 0) next_item(s, r);
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

MOET_DEVICE void start_ring(const Stage& s, Ring& r, const Task& first, u32 end) {
  r.slot = r.parity = 0;
  if ((threadIdx.x & 31) == 0)
    *r.ahead = {nullptr, 0, (threadIdx.x >> 5) - (blockDim.x >> 5), first, end};
  next_item(s, r);
  for (u32 slot = 0; slot < r.depth; ++slot) read_ahead(s, r, slot);
}
