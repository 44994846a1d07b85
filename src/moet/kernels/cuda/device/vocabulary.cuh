// The few words in which the kernels speak to the hardware: integer MMA, asynchronous copies into
// shared memory, barriers on them, and the ordering of dependent launches. One meaning on every
// architecture from sm_80 on; the tests give the same words a meaning on the CPU (MOET_HOST).
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define MOET_KERNEL(threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks)

#ifdef MOET_HOST
#include "host_vocabulary.h"
#else

#define MOET_DEVICE static __device__ __forceinline__

// Bulk copies (sm_90 and later) move a whole group with one instruction of one lane; before that,
// and where the build says so, every lane copies 16 bytes at a time.
#if __CUDA_ARCH__ >= 900 && !defined(MOET_NO_BULK)
#define MOET_BULK 1
#else
#define MOET_BULK 0
#endif

extern __shared__ uint4 moet_shared[];
MOET_DEVICE u8* shared_memory() { return reinterpret_cast<u8*>(moet_shared); }

MOET_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Bytes picked by the selector's nibbles out of {b, a}; bit 3 of a nibble asks for the sign of the
// byte, eight times, instead of the byte.
MOET_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// d += A * B for a 16 x 32 tile A and a 32 x 8 tile B of signed bytes.
MOET_DEVICE void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

MOET_DEVICE float half_to_float(u16 x) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
  return f;
}

MOET_DEVICE u16 float_to_half(float x) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

// --- barriers that count the bytes, or the lanes, of asynchronous copies

// One barrier serves one slot of one warp's ring. Call from one lane, then `barriers_ready`.
MOET_DEVICE void barrier_init(u64* barrier) {
  constexpr u32 arrivals = MOET_BULK ? 1 : 32;
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

MOET_DEVICE void barriers_ready() {
#if MOET_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  __syncwarp();
}

// True for one lane, the same each time. All lanes call.
MOET_DEVICE bool elected() {
#if __CUDA_ARCH__ >= 900
  u32 is;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }" : "=r"(is));
  return is != 0;
#else
  return (threadIdx.x & 31) == 0;
#endif
}

MOET_DEVICE bool barrier_passed(u64* barrier, u32 parity) {
  u32 passed;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return passed != 0;
}

// All lanes wait until the copies that the current phase of the barrier counts have landed.
MOET_DEVICE void barrier_wait(u64* barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) {
  }
}

// All lanes of a warp: starts copying `runs` (2 or 4) runs of `bytes` (a multiple of 16) into
// shared memory, each `from_step` bytes on from the last one, to places `to_step` bytes apart. The
// barrier's current phase ends when all have landed.
MOET_DEVICE void copy_runs(u8* to, u32 to_step, const u8* from, u32 from_step, u32 bytes, u32 runs,
                           u64* barrier) {
#if MOET_BULK
  if (elected()) {
    const u32 target = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(target),
                 "r"(runs * bytes)
                 : "memory");
    const u32 place = shared_address(to);
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
      if (i < 2 || runs > 2)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
            ::"r"(place + i * to_step), "l"(from + i * from_step), "r"(bytes), "r"(target)
            : "memory");
  }
#else
#pragma unroll 1
  for (u32 i = 0; i < runs; ++i, from += from_step, to += to_step)
    for (u32 at = 16 * (threadIdx.x & 31); at < bytes; at += 512)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + at)),
                   "l"(from + at)
                   : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
#endif
}

// 16 bytes of global memory to shared memory, past the nearest cache; `wait_for_pieces` waits for
// all that this lane has asked for.
MOET_DEVICE void copy_piece(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
MOET_DEVICE void wait_for_pieces() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// x = 16 bytes of shared memory, where wanted.
MOET_DEVICE void load_if(uint4& x, bool wanted, const u8* p) {
  asm volatile(
      "{ .reg .pred q; setp.ne.u32 q, %5, 0; @q ld.shared.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "r"(shared_address(p)), "r"(static_cast<u32>(wanted)));
}

// --- barriers that count warps. One lane of a warp calls, after the warp's lanes have met

MOET_DEVICE void meeting_init(u64* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// True for whoever comes last, who can read what the others wrote before they came.
MOET_DEVICE bool arrive(u64* barrier) {
  u32 last;
  asm volatile(
      "{ .reg .b64 s; .reg .b32 n; .reg .pred p;\n"
      "mbarrier.arrive.shared.b64 s, [%1];\n"
      "mbarrier.pending_count.b64 n, s;\n"
      "setp.eq.u32 p, n, 1;\n"
      "@p mbarrier.test_wait.shared.b64 p, [%1], s;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(last)
      : "r"(shared_address(barrier))
      : "memory");
  return last != 0;
}

// A word of shared memory: what was written before `publish` can be read after an `observe` that
// shows its value.
MOET_DEVICE void publish(u32* p, u32 v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(p)), "r"(v) : "memory");
}
MOET_DEVICE u32 observe(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(p)) : "memory");
  return v;
}

// --- words that the CPU reads or writes at the same time

template <class T>
MOET_DEVICE T load_system(const T* p) {
  T v;
  if constexpr (sizeof(T) == 8)
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  else
    asm volatile("ld.acquire.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

template <class T>
MOET_DEVICE void store_system(T* p, T v) {
  if constexpr (sizeof(T) == 8)
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  else
    asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

MOET_DEVICE void fence_system() { __threadfence_system(); }

// Four or eight bytes a lane of mapped host memory, past the caches.
MOET_DEVICE uint2 load_host(const uint2* p) {
  uint2 v;
  asm volatile("ld.volatile.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
MOET_DEVICE float4 load_host(const float4* p) {
  float4 v;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
  return v;
}

MOET_DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// --- dependent launches: no-ops where the launch did not ask for overlap

// Everything that earlier kernels of the stream wrote is visible from here on.
MOET_DEVICE void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream may start; it waits in turn before it reads our results.
MOET_DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif  // MOET_HOST
