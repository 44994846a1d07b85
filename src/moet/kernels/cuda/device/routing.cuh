// Which experts a step needs, found by every block of threads for itself from the ids: no host, no
// global list. Entries are ordered by expert; an entry's columns are its routings (token, slot) in
// any order, since columns of an MMA do not meet.
#pragma once
#include "layout.cuh"

struct Entry {
  u64 record;
  u32 columns;  // first column << 16 | number of columns
};

// All in shared memory.
struct Routing {
  Entry* entries;
  u32* columns;  // [routings]: row of `in` << 16 | routing
  u32* counts;
  u32* warp_totals;  // [warps]
  u32* most;         // columns of an expert
};

// Two counters in one word: entries, columns.
MOET_DEVICE u32 tally(u32 columns) { return columns ? 1u << 16 | columns : 0; }

// Sum over the threads before this one; the total of the block through `total`. All threads call.
MOET_DEVICE u32 exclusive_scan(u32 mine, u32* warp_totals, u32& total) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  u32 sum = mine;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 other = __shfl_up_sync(0xFFFFFFFF, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_totals[warp] = sum;
  __syncthreads();
  u32 before = 0;
  total = 0;
#pragma unroll 1
  for (u32 w = 0; w < warps; ++w) {
    if (w < warp) before += warp_totals[w];
    total += warp_totals[w];
  }
  return before + sum - mine;
}

// Fills `r`; returns the number of entries. All threads call; they may read `r` afterwards. The
// table is read beside the ids, not after them: each read of global memory that waits for another
// one costs a good part of a microsecond.
MOET_DEVICE u32 route(const StageParams& p, const Routing& r) {
  constexpr u32 kNotHere = ~0u;
  const u32 share = (p.experts + blockDim.x - 1) / blockDim.x;
  const u32 first = threadIdx.x * share;
  const u32 last = first + share < p.experts ? first + share : p.experts;
  const u64 first_record = first < p.experts ? p.table[first] : kForeign;
  const auto record = [&](u32 e) { return e == first ? first_record : p.table[e]; };
  // A thread's first id, usually its only one, is read once.
  const int first_id = threadIdx.x < p.routings ? p.ids[threadIdx.x] : -1;
  const auto id = [&](u32 i) { return static_cast<u32>(i == threadIdx.x ? first_id : p.ids[i]); };
#pragma unroll 1
  for (u32 e = threadIdx.x; e < p.experts; e += blockDim.x) r.counts[e] = 0;
  if (threadIdx.x == 0) *r.most = 0;
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < p.routings; i += blockDim.x)
    if (const u32 e = id(i); e < p.experts) atomicAdd(&r.counts[e], 1u);
  __syncthreads();

  u32 mine = 0, most = 0, total;
#pragma unroll 1
  for (u32 e = first; e < last; ++e) {
    if (record(e) <= kForeign) r.counts[e] = kNotHere;
    else mine += tally(r.counts[e]), most = r.counts[e] > most ? r.counts[e] : most;
  }
  most = __reduce_max_sync(0xFFFFFFFF, most);
  if (most && (threadIdx.x & 31) == 0) atomicMax(r.most, most);
  u32 before = exclusive_scan(mine, r.warp_totals, total);
#pragma unroll 1
  for (u32 e = first; e < last; ++e) {
    const u32 columns = r.counts[e];
    if (columns == kNotHere) continue;
    r.counts[e] = before & 0xFFFF;  // where the expert's columns begin
    if (columns == 0) continue;
    r.entries[before >> 16] = {record(e), (before & 0xFFFF) << 16 | columns};
    before += tally(columns);
  }
  __syncthreads();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < p.routings; i += blockDim.x)
    if (const u32 e = id(i); e < p.experts && r.counts[e] != kNotHere)
      r.columns[atomicAdd(&r.counts[e], 1u)] = i / p.in_divisor << 16 | i;
  __syncthreads();
  return total >> 16;
}
