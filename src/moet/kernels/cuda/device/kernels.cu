// The routed experts of a MoE layer for up to a few hundred routings: four launches, no host.
//   moet_quantise        x -> quantised rows of tokens
//   moet_gate_up_8, _16  gate and up, the gate function, requantised: rows of routings
//   moet_down_8, _16     down, bias, rounding to the row type: fp32 rows [T * K][H]
//   moet_combine         the weighted sum over slots in order
// Each may start while its predecessor runs: what it reads before `wait_for_earlier_kernels` is
// older than the first of them (ids, table, weights). Bits: docs/numerics.md.
#include "combine.cuh"
#include "dot.cuh"
#include "mail.cuh"

// --- quantise: one thread a run of 8 elements, four to a block of 32

template <class Act>
MOET_DEVICE void quantise_piece(const QuantiseParams& p, const float (&x)[8], u8* row, u32 block,
                                u32 t) {
  using Row = QuantisedRow<Act>;
  u32 largest = 0;
  for (int i = 0; i < 8; ++i) {
    const u32 magnitude = __float_as_uint(x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  for (int step = 1; step < 4; step *= 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFF, largest, step);
    largest = other > largest ? other : largest;
  }
  const u32 be = block_exponent<Act>(largest);
  u32 bytes[2][2] = {};  // [low, high][dword]
  for (int i = 0; i < 8; ++i) {
    const int q = quantised<Act>(x[i], be);
    const int high = Act::slices == 2 ? high_slice(q) : 0;
    const int low = q - 256 * high;
    bytes[0][i / 4] |= (low & 0xFFu) << 8 * (i % 4);
    bytes[1][i / 4] |= (high & 0xFFu) << 8 * (i % 4);
  }
  // Whole warps take part in the exchange above; lanes past the last group store nothing.
  if (block >= p.groups * kGroupBlocks) return;
  u8* at = row + block / kGroupBlocks * Row::group_bytes + Row::element(block % kGroupBlocks, 8 * t);
  if (Act::slices == 1)
    *reinterpret_cast<uint2*>(at) = {bytes[0][0], bytes[0][1]};
  else
    *reinterpret_cast<uint4*>(at) = {bytes[1][0], bytes[1][1], bytes[0][0], bytes[0][1]};
  if (t == 0) Row::store_constants(row, p.groups, block, block_scale<Act>(be));
}

// Grid: (ceil(16 * groups / 128), T).
MOET_KERNEL(128, 8) moet_quantise(const __grid_constant__ QuantiseParams p) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const u32 piece = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  const u32 block = piece / 4, t = piece % 4;
  float x[8];
  for (u32 i = 0; i < 8; ++i) {
    const u32 k = 8 * piece + i;
    x[i] = k < p.hidden ? widened(p.x, p.x_type, static_cast<u64>(token) * p.hidden + k) : 0.0f;
  }
  const u32 bytes = p.act == 8 ? QuantisedRow<MxInt8>::bytes(p.groups)
                               : QuantisedRow<MxInt16>::bytes(p.groups);
  u8* row = p.rows + static_cast<u64>(token) * bytes;
  if (p.act == 8) quantise_piece<MxInt8>(p, x, row, block, t);
  else quantise_piece<MxInt16>(p, x, row, block, t);
}

// --- the two matrix stages

// Gate, up and the gate function for 32 rows of one column, one a lane; then h, requantised.
struct GateUp {
  MOET_DEVICE u32 chunks(u32 pairs) { return pairs / 2; }

  template <class Act>
  MOET_DEVICE void finish(const Stage& s, const Task& task, u32 chunk, u32 column, u32 routing,
                          const float* sums) {
    using Row = QuantisedRow<Act>;
    const u32 lane = threadIdx.x & 31;
    const u32 pair = 2 * chunk + (lane >> 4);
    const float* first = sums + pair * s.segments * kItemSums + column * kSumStride + (lane & 15);
    float g = total(s, first), u = total(s, first + kStripSums);
    const u32 block = (task.unit * s.p.unit_pairs) / 2 + chunk;
    if (s.p.bias) {
      const u8* record = reinterpret_cast<const u8*>(s.routing.entries[task.entry].record);
      const u32 at = sizeof(float) * (32 * block + lane);
      g = __fadd_rn(g, *reinterpret_cast<const float*>(record + s.p.bias + at));
      u = __fadd_rn(u, *reinterpret_cast<const float*>(record + s.p.second_bias + at));
    }
    const float h = gated(s.p.gate, s.p.limit, g, u);

    const u32 be =
        block_exponent<Act>(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(h) & 0x7FFFFFFF));
    const int q = quantised<Act>(h, be);
    u8* row = static_cast<u8*>(s.p.out) + static_cast<u64>(routing) * Row::bytes(s.p.out_size);
    u8* at = row + block / kGroupBlocks * Row::group_bytes + Row::element(block % kGroupBlocks, lane);
    if (Act::slices == 1) {
      at[0] = static_cast<u8>(q);
    } else {
      const int high = high_slice(q);
      at[0] = static_cast<u8>(high);
      at[8] = static_cast<u8>(q - 256 * high);
    }
    if (lane == 0) Row::store_constants(row, s.p.out_size, block, block_scale<Act>(be));
  }
};

// 32 rows of down of one column, one a lane.
struct Down {
  MOET_DEVICE u32 chunks(u32 pairs) { return pairs; }

  template <class Act>
  MOET_DEVICE void finish(const Stage& s, const Task& task, u32 chunk, u32 column, u32 routing,
                          const float* sums) {
    const u32 lane = threadIdx.x & 31;
    float v = total(s, sums + chunk * s.segments * kItemSums + (lane >> 4) * kStripSums +
                           column * kSumStride + (lane & 15));
    const u32 row = 32 * (task.unit * s.p.unit_pairs + chunk) + lane;
    if (s.p.bias) {
      const u8* record = reinterpret_cast<const u8*>(s.routing.entries[task.entry].record);
      v = __fadd_rn(v, reinterpret_cast<const float*>(record + s.p.bias)[row]);
    }
    if (Act::rows_bf16) v = __uint_as_float(static_cast<u32>(to_bf16(v)) << 16);
    static_cast<float*>(s.p.out)[static_cast<u64>(routing) * s.p.out_size + row] = v;
  }
};

// The parts of shared memory; `plan.py` computes the same size.
struct Parts {
  u8* slots;
  float* sums;
  u32 sums_size;  // floats of one buffer
  Ahead* ahead;   // of the warps' rings
  u64* barriers;
  Routing routing;
};

MOET_DEVICE Parts part_shared_memory(const StageParams& p, u32 segments) {
  const u32 warps = blockDim.x >> 5;
  const u32 most = p.routings < p.experts ? p.routings : p.experts;
  Parts parts;
  parts.slots = shared_memory();
  parts.sums = reinterpret_cast<float*>(parts.slots + warps * p.depth * kSlotBytes);
  parts.sums_size = p.unit_pairs * segments * kItemSums;
  Routing& r = parts.routing;
  r.entries = reinterpret_cast<Entry*>(parts.sums + p.sum_buffers * parts.sums_size);
  parts.ahead = reinterpret_cast<Ahead*>(r.entries + most);
  parts.barriers = reinterpret_cast<u64*>(parts.ahead + warps);
  r.warp_totals = parts.barriers + warps * p.depth;
  r.counts = reinterpret_cast<u32*>(r.warp_totals + warps);
  r.columns = r.counts + p.experts;
  return parts;
}

template <class Act, class Kind>
MOET_DEVICE void finish_task(const Stage& s, const Task& task, const float* sums) {
  const u32 warps = blockDim.x >> 5;
  const u32 packed = s.routing.entries[task.entry].columns;
  const u32 left = (packed & 0xFFFF) - task.pass * kColumns;
  const u32 columns = left < kColumns ? left : kColumns;
  const u32* routings = s.routing.columns + (packed >> 16) + task.pass * kColumns;
  const u32 jobs = Kind::chunks(pairs_of(s, task)) * columns;
  for (u32 job = threadIdx.x >> 5; job < jobs; job += warps) {
    const u32 chunk = job / columns, column = job - chunk * columns;
    Kind::template finish<Act>(s, task, chunk, column, routings[column] & 0xFFFF, sums);
  }
}

template <class Act, class Kind>
MOET_DEVICE void run_stage(const StageParams& p) {
  const u32 warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const u32 segments = (p.blocks + kSegmentBlocks - 1) / kSegmentBlocks;
  const u32 groups = (p.blocks + kGroupBlocks - 1) / kGroupBlocks;
  const u32 units = (p.pairs + p.unit_pairs - 1) / p.unit_pairs;
  const Parts parts = part_shared_memory(p, segments);
  Ring ring;
  ring.depth = p.depth;
  ring.slots = parts.slots + warp * p.depth * kSlotBytes;
  ring.ahead = parts.ahead + warp;
  ring.barriers = parts.barriers + warp * p.depth;
  if ((threadIdx.x & 31) == 0)
    for (u32 i = 0; i < p.depth; ++i) barrier_init(ring.barriers + i);
  barriers_ready();

  const Totals totals = route(p, parts.routing, units);
  const Stage s = {p,        parts.routing, totals.entries,           units,
                   groups,   segments,      0xFFFF / segments + 1,    groups * kGroupBytes};
  // This block's share; the first blocks take one more where it does not come out even.
  const u32 share = totals.cost / gridDim.x, extra = totals.cost % gridDim.x;
  const u32 begin = blockIdx.x * share + (blockIdx.x < extra ? blockIdx.x : extra);
  const u32 size = share + (blockIdx.x < extra ? 1 : 0);
  Task task = {0, 0, 0, 0};
  u32 end = 0;
  if (totals.entries) {
    task = first_task(s, begin);
    end = first_task(s, begin + size).cost;
  }
  start_ring(s, ring, task, end);
  wait_for_earlier_kernels();
  let_next_kernel_start();

  for (; task.cost < end; advance(s, task)) {
    float* sums = parts.sums + (task.cost & (p.sum_buffers - 1)) * parts.sums_size;
    const Columns columns = find_columns<Act>(s, task);
    const u32 items = pairs_of(s, task) * segments;
    for (u32 item = warp; item < items; item += warps)
      dot_item<Act>(s, columns, ring, item - segments * pair_of(s, item), sums + item * kItemSums);
    __syncthreads();
    finish_task<Act, Kind>(s, task, sums);
    // With two buffers, the barrier of the next task is what makes this one's buffer free.
    if (p.sum_buffers == 1) __syncthreads();
  }
}

// Where memory is fast for its multiprocessors, 24 warps of 80 registers each hide the latency of
// the dot; elsewhere 16 warps do.
constexpr int kMostThreads = 256;
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int kResident = 3;
#else
constexpr int kResident = 2;
#endif

MOET_KERNEL(kMostThreads, kResident) moet_gate_up_8(const __grid_constant__ StageParams p) {
  run_stage<MxInt8, GateUp>(p);
}
MOET_KERNEL(kMostThreads, kResident) moet_gate_up_16(const __grid_constant__ StageParams p) {
  run_stage<MxInt16, GateUp>(p);
}
MOET_KERNEL(kMostThreads, kResident) moet_down_8(const __grid_constant__ StageParams p) {
  run_stage<MxInt8, Down>(p);
}
MOET_KERNEL(kMostThreads, kResident) moet_down_16(const __grid_constant__ StageParams p) {
  run_stage<MxInt16, Down>(p);
}
