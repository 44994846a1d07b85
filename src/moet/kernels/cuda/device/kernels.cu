// The routed experts of a MoE layer for up to a few hundred routings: four launches, no host.
//   moet_quantise        x -> quantised rows of tokens
//   moet_gate_up_8, _16  gate and up, the gate function, requantised: rows of routings
//   moet_down_8, _16     down, bias, rounding to the row type: fp32 rows [T * K][H]
//   moet_combine         the weighted sum over slots in order
// Each may start while its predecessor runs: what it reads before `wait_for_earlier_kernels` is
// older than the first of them (ids, table, weights). Bits: docs/numerics.md.
#include "combine.cuh"
#include "finish.cuh"
#include "mail.cuh"
#include "quantise.cuh"

// The room for the sums of one task, where the block's warps leave them; the warp that comes last
// finishes the task.
struct Gathering {
  u64 arrived;   // a barrier; its phase is the items of a task
  u32 finished;  // tasks, in this room
  u32 unused;
};

constexpr u32 kMostGatherings = 8;

// The parts of shared memory; `plan.py` computes the same size.
struct Parts {
  u8* slots;
  float* sums;
  u8* chunks;    // two of each warp
  Ahead* ahead;  // of the warps' rings
  u64* barriers;
  Gathering* gatherings;
  Routing routing;
};

MOET_DEVICE Parts part_shared_memory(const StageParams& p) {
  const u32 warps = blockDim.x >> 5;
  const u32 most = p.routings < p.experts ? p.routings : p.experts;
  Parts parts;
  parts.slots = shared_memory();
  parts.sums = reinterpret_cast<float*>(parts.slots + warps * p.depth * kSlotBytes);
  parts.chunks = reinterpret_cast<u8*>(parts.sums + p.sum_columns * kSumStride);
  parts.ahead = reinterpret_cast<Ahead*>(parts.chunks + warps * 2 * kChunkBytes);
  parts.barriers = reinterpret_cast<u64*>(parts.ahead + warps);
  parts.gatherings = reinterpret_cast<Gathering*>(parts.barriers + warps * p.depth);
  Routing& r = parts.routing;
  r.entries = reinterpret_cast<Entry*>(parts.gatherings + kMostGatherings);
  r.most = reinterpret_cast<u32*>(r.entries + most);
  r.warp_totals = r.most + 1;
  r.counts = r.warp_totals + warps;
  r.columns = r.counts + p.experts;
  return parts;
}

MOET_DEVICE Ring ring_of(const Parts& parts, u32 depth) {
  const u32 warp = threadIdx.x >> 5;
  Ring ring;
  ring.depth = depth;
  ring.slots = parts.slots + warp * depth * kSlotBytes;
  ring.ahead = parts.ahead + warp;
  ring.barriers = parts.barriers + warp * depth;
  if ((threadIdx.x & 31) == 0)
    for (u32 i = 0; i < depth; ++i) barrier_init(ring.barriers + i);
  barriers_ready();
  return ring;
}

// All lanes: this item's sums are stored. True for the warp that finds all others there.
MOET_DEVICE bool is_last(Gathering& gathering) {
  __syncwarp();
  u32 last = 0;
  if ((threadIdx.x & 31) == 0) last = arrive(&gathering.arrived);
  return __shfl_sync(0xFFFFFFFF, last, 0) != 0;
}

MOET_DEVICE void set_free(Gathering& gathering, u32 finished) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) publish(&gathering.finished, finished);
}

// How the room for sums is dealt out: each task has the columns of the expert that has most.
struct Rooms {
  u32 stride;  // floats of a segment
  u32 task;    // floats of a task
  u32 count;
};

MOET_DEVICE Rooms rooms_of(const Stage& s) {
  const u32 most = *s.routing.most < s.most_columns ? *s.routing.most : s.most_columns;
  const u32 count = most ? s.p.sum_columns / (s.segments * most) : 1;
  const u32 stride = most * kSumStride;
  return {stride, s.segments * stride, count < kMostGatherings ? count : kMostGatherings};
}

// One item, to its place in the sums, once the task that had this room before is finished.
template <class Act, int columns, class BeforeLast>
MOET_DEVICE void run_item(const Stage& s, const Work& w, Ring& ring, u8* chunk, const u32* finished,
                          u32 rounds, float* to, const BeforeLast& before_last) {
  Sums<Form<Act, columns>> sums;
  dot_item<Act, columns>(s, w, ring, chunk, sums, before_last);
  while (observe(finished) != rounds) {
  }
  store_sums(sums, w.count, to);
}

template <class Act, class Kind>
MOET_DEVICE void run_stage(const StageParams& p) {
  const Parts parts = part_shared_memory(p);
  u8* const chunks = parts.chunks + (threadIdx.x >> 5) * 2 * kChunkBytes;
  Ring ring = ring_of(parts, p.depth);
  const u32 groups = (p.blocks + kGroupBlocks - 1) / kGroupBlocks;
  const u32 segments = (p.blocks + kSegmentBlocks - 1) / kSegmentBlocks;
  if (threadIdx.x < kMostGatherings) {
    meeting_init(&parts.gatherings[threadIdx.x].arrived, segments);
    parts.gatherings[threadIdx.x].finished = 0;
  }
  const Stage s = {p,
                   parts.routing,
                   kPlaces / Act::slices,
                   groups,
                   segments,
                   groups * kGroupBytes,
                   (p.pairs + 1) / 2,
                   route(p, parts.routing)};
  start_ring(s, ring);
  const Rooms rooms = rooms_of(s);
  wait_for_earlier_kernels();
  let_next_kernel_start();

  Work next = work_of(s, ring.ahead->queue[0]);
  if (next.count) fetch<Act>(s, next, 0, chunks);
  for (u32 taken = 1; next.count; ++taken) {
    const Work w = next;
    u8* const chunk = chunks + (taken - 1) % 2 * kChunkBytes;
    u8* const other = chunks + taken % 2 * kChunkBytes;
    const auto look = [&] {
      next = work_of(s, ring.ahead->queue[taken % kQueue]);
      if (next.count) fetch<Act>(s, next, 0, other);
    };
    const u32 rounds = w.item.task / rooms.count, room = w.item.task - rounds * rooms.count;
    float* const sums = parts.sums + room * rooms.task;
    float* const to = sums + w.item.segment * rooms.stride;
    Gathering& gathering = parts.gatherings[room];
    const u32 form = form_of<Act>(w.count);
    if (form == 1)
      run_item<Act, 1>(s, w, ring, chunk, &gathering.finished, rounds, to, look);
    else if (Act::slices == 1 && form == 2)
      run_item<Act, 2>(s, w, ring, chunk, &gathering.finished, rounds, to, look);
    else if (form == 4)
      run_item<Act, 4>(s, w, ring, chunk, &gathering.finished, rounds, to, look);
    else if constexpr (Act::slices == 1)
      run_item<Act, 8>(s, w, ring, chunk, &gathering.finished, rounds, to, look);
    if (!is_last(gathering)) continue;
    Kind::template finish<Act>(s, w, {sums, rooms.stride});
    set_free(gathering, rounds + 1);
  }
}

// Where shared memory has room for no more than 12 warps' rings, their dot may have more registers.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int kMostThreads = 512;
#else
constexpr int kMostThreads = 384;
#endif

MOET_KERNEL(kMostThreads, 1) moet_gate_up_8(const __grid_constant__ StageParams p) {
  run_stage<MxInt8, GateUp>(p);
}
MOET_KERNEL(kMostThreads, 1) moet_gate_up_16(const __grid_constant__ StageParams p) {
  run_stage<MxInt16, GateUp>(p);
}
MOET_KERNEL(kMostThreads, 1) moet_down_8(const __grid_constant__ StageParams p) {
  run_stage<MxInt8, Down>(p);
}
MOET_KERNEL(kMostThreads, 1) moet_down_16(const __grid_constant__ StageParams p) {
  run_stage<MxInt16, Down>(p);
}
