// Which experts a step needs, found by every block of threads for itself from the ids: no host, no
// global list. Entries are ordered by expert; an entry's columns are its routings (token, slot) in
// any order, since columns of an MMA do not meet.
#pragma once
#include "layout.cuh"

struct Entry {
  u64 record;
  u32 columns;  // first column << 16 | number of columns
  u32 cost;     // of all entries before, in passes of one unit
};

// All in shared memory.
struct Routing {
  Entry* entries;
  u32* columns;  // [routings]: row of `in` << 16 | routing
  u32* counts;
  u64* warp_totals;  // [33]
};

struct Totals {
  u32 entries, cost;
};

MOET_DEVICE u32 passes_of(u32 columns) { return (columns + kColumns - 1) / kColumns; }

// The expert of a routing, or a negative number where it is not computed here.
MOET_DEVICE int expert_of(const StageParams& p, u32 routing) {
  const int id = p.ids[routing];
  return static_cast<u32>(id) < p.experts && p.table[id] > kForeign ? id : -1;
}

// Three counters in one word: entries, columns, passes.
MOET_DEVICE u64 tally(u32 columns) {
  if (columns == 0) return 0;
  return 1 | static_cast<u64>(columns) << 20 | static_cast<u64>(passes_of(columns)) << 40;
}
MOET_DEVICE u32 counter(u64 word, int i) { return static_cast<u32>(word >> 20 * i) & 0xFFFFF; }

// Sum over the threads before this one; the total of the block through `total`. All threads call.
MOET_DEVICE u64 exclusive_scan(u64 mine, u64* warp_totals, u64& total) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  u64 sum = mine;
  for (u32 step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(0xFFFFFFFF, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (u32 w = 0; w < warps; ++w) {
    if (w < warp) before += warp_totals[w];
    total += warp_totals[w];
  }
  return before + sum - mine;
}

// Fills `r`. All threads call; they may read it afterwards.
MOET_DEVICE Totals route(const StageParams& p, const Routing& r, u32 units) {
  for (u32 e = threadIdx.x; e < p.experts; e += blockDim.x) r.counts[e] = 0;
  // A thread's first routing, usually its only one, is looked up once.
  const int first_expert = threadIdx.x < p.routings ? expert_of(p, threadIdx.x) : -1;
  const auto expert = [&](u32 i) { return i == threadIdx.x ? first_expert : expert_of(p, i); };
  __syncthreads();
  for (u32 i = threadIdx.x; i < p.routings; i += blockDim.x)
    if (const int e = expert(i); e >= 0) atomicAdd(&r.counts[e], 1u);
  __syncthreads();

  const u32 share = (p.experts + blockDim.x - 1) / blockDim.x;
  const u32 first = threadIdx.x * share;
  const u32 last = first + share < p.experts ? first + share : p.experts;
  u64 mine = 0, total;
  for (u32 e = first; e < last; ++e) mine += tally(r.counts[e]);
  u64 before = exclusive_scan(mine, r.warp_totals, total);
  for (u32 e = first; e < last; ++e) {
    const u32 columns = r.counts[e];
    r.counts[e] = counter(before, 1);  // where the expert's columns begin
    if (columns == 0) continue;
    r.entries[counter(before, 0)] = {p.table[e], counter(before, 1) << 16 | columns,
                                     counter(before, 2) * units};
    before += tally(columns);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < p.routings; i += blockDim.x)
    if (const int e = expert(i); e >= 0)
      r.columns[atomicAdd(&r.counts[e], 1u)] = i / p.in_divisor << 16 | i;
  __syncthreads();
  return {counter(total, 0), counter(total, 2) * units};
}
