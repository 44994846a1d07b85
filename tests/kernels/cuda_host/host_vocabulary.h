// The kernels' vocabulary with a meaning on the CPU, so that the CUDA sources themselves run in tests
// without a GPU: each thread of a block is a fiber; exchanges between lanes and barriers switch
// fibers; an asynchronous copy lands either at once or only when somebody waits for it.
// One block at a time, x86-64, one host thread.
#pragma once
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define MOET_DEVICE [[maybe_unused]] static inline
#define MOET_BULK 1
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

namespace host {

struct Index { u32 x, y; };

struct Fiber {
  void* stack_pointer;
  u32 thread;
  bool alive;
};

struct Copy { u8* to; const u8* from; u32 bytes; u64* barrier; };

// Arrivals of a group of fibers; `words` carries what lanes exchange, for two generations.
struct Meeting {
  u32 arrived = 0, generation = 0;
  u64 words[2][32][6];
};

inline Index thread, block, block_size, grid_size;
inline std::vector<Fiber> fibers;
// Kept for the next launch: to make them anew would take most of its time.
constexpr size_t kStackBytes = 256 << 10;
inline std::vector<std::unique_ptr<char[]>> stacks;
inline u32 running;
inline u64 observations;  // by this block
inline u32 alive;
inline std::vector<Meeting> warps;
inline Meeting everybody;
inline std::vector<u8> shared;
inline std::vector<Copy> copies;
inline bool lazy_copies;
inline std::function<void()> kernel;
inline void* scheduler;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "block (%u, %u), thread %u: %s\n", block.x, block.y, thread.x, what);
  std::abort();
}

// Saves the callee-saved registers on the stack of one fiber and takes those of another.
extern "C" void moet_switch(void** save, void* load);
asm(R"(
.text
.globl moet_switch
moet_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");

inline void yield() {
  Fiber& mine = fibers[running];
  for (u32 i = 1; i <= fibers.size(); ++i) {
    const u32 next = (running + i) % fibers.size();
    if (!fibers[next].alive) continue;
    if (next == running) return;
    running = next;
    thread = {fibers[next].thread, 0};
    return moet_switch(&mine.stack_pointer, fibers[next].stack_pointer);
  }
}

inline void fiber_main() {
  kernel();
  fibers[running].alive = false;
  if (--alive == 0) {
    void* dead;
    moet_switch(&dead, scheduler);
  }
  yield();
  fail("a finished fiber was resumed");
}

// Waits until `count` fibers have come; returns the generation in which they met.
inline u32 meet(Meeting& m, u32 count) {
  const u32 generation = m.generation;
  if (++m.arrived == count) {
    m.arrived = 0;
    ++m.generation;
  }
  for (u64 spins = 0; m.generation == generation; ++spins) {
    if (spins > 100000) fail("a barrier that not all threads reach");
    yield();
  }
  return generation;
}

template <size_t n>
inline const u64 (*exchange(const u64 (&mine)[n]))[6] {
  Meeting& m = warps[thread.x / 32];
  std::memcpy(m.words[m.generation & 1][thread.x % 32], mine, sizeof(mine));
  return m.words[meet(m, 32) & 1];
}

inline void start(Fiber& f, u32 index) {
  while (stacks.size() <= index) stacks.emplace_back(new char[kStackBytes]);
  f.thread = index;
  f.alive = true;
  auto top = reinterpret_cast<uintptr_t>(stacks[index].get() + kStackBytes) & ~uintptr_t(15);
  auto slots = reinterpret_cast<void**>(top) - 8;  // six registers, the return address, alignment
  std::memset(slots, 0, 8 * sizeof(void*));
  slots[6] = reinterpret_cast<void*>(&fiber_main);
  f.stack_pointer = slots;
}

inline void run_block(u32 threads, u32 shared_bytes) {
  fibers.resize(threads);
  warps.assign(threads / 32, Meeting{});
  everybody = Meeting{};
  shared.assign(shared_bytes + 64, 0xAA);
  copies.clear();
  for (u32 i = 0; i < threads; ++i) start(fibers[i], i);
  alive = threads;
  running = 0;
  observations = 0;
  thread = {0, 0};
  moet_switch(&scheduler, fibers[0].stack_pointer);
  if (!copies.empty()) fail("a copy that nobody waited for");
  for (u32 i = 0; i < 64; ++i)
    if (shared[shared_bytes + i] != 0xAA) fail("shared memory past the planned size was written");
}

// Runs a kernel over a grid. Blocks run in order, or in reverse: no order may matter.
inline void launch(std::function<void()> body, Index grid, u32 threads, u32 shared_bytes, bool lazy,
                   bool reverse) {
  kernel = std::move(body);
  lazy_copies = lazy;
  block_size = {threads, 1};
  grid_size = grid;
  for (u32 i = 0; i < grid.x * grid.y; ++i) {
    const u32 at = reverse ? grid.x * grid.y - 1 - i : i;
    block = {at % grid.x, at / grid.x};
    run_block(threads, shared_bytes);
  }
}

}  // namespace host

#define threadIdx (host::thread)
#define blockIdx (host::block)
#define blockDim (host::block_size)
#define gridDim (host::grid_size)

MOET_DEVICE u8* shared_memory() {
  return reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(host::shared.data()) + 15) & ~15ull);
}

// --- arithmetic: the compiler is told not to contract

MOET_DEVICE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
MOET_DEVICE float __fmul_rn(float a, float b) { return a * b; }
MOET_DEVICE float __fadd_rn(float a, float b) { return a + b; }
MOET_DEVICE float __fdiv_rn(float a, float b) { return a / b; }
MOET_DEVICE float __int2float_rn(int x) { return static_cast<float>(x); }

template <class To, class From>
inline To moet_bits(From x) {
  To y;
  static_assert(sizeof(x) == sizeof(y));
  std::memcpy(&y, &x, sizeof(y));
  return y;
}
MOET_DEVICE u32 __float_as_uint(float x) { return moet_bits<u32>(x); }
MOET_DEVICE int __float_as_int(float x) { return moet_bits<int>(x); }
MOET_DEVICE float __uint_as_float(u32 x) { return moet_bits<float>(x); }
MOET_DEVICE float __int_as_float(int x) { return moet_bits<float>(x); }

MOET_DEVICE float half_to_float(u16 x) {
  const int exponent = x >> 10 & 31, fraction = x & 1023;
  float v = std::ldexp(static_cast<float>(exponent ? fraction + 1024 : fraction),
                       (exponent ? exponent : 1) - 25);
  if (exponent == 31) v = fraction ? NAN : INFINITY;
  return x & 0x8000 ? -v : v;
}

MOET_DEVICE u16 float_to_half(float x) {
  const u16 sign = std::signbit(x) ? 0x8000 : 0;
  const float v = std::fabs(x);
  if (!(v < 65520.0f)) return sign | (v == v ? 0x7C00 : 0x7FFF);
  const int exponent = v < 0x1p-14f ? -14 : std::ilogb(v);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(v, 10 - exponent)));
  return sign | static_cast<u16>((exponent + 14) * 1024 + units);  // 1024 units carry the exponent
}

MOET_DEVICE u32 permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = static_cast<u64>(b) << 32 | a;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 nibble = selector >> 4 * i & 15;
    const u32 byte = bytes >> 8 * (nibble & 7) & 0xFF;
    d |= (nibble & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << 8 * i;
  }
  return d;
}

// --- lanes

MOET_DEVICE void __syncthreads() { host::meet(host::everybody, blockDim.x); }
MOET_DEVICE void __syncwarp() { host::exchange<1>({0}); }

template <class T>
MOET_DEVICE T __shfl_up_sync(u32, T x, u32 step) {
  const auto words = host::exchange<1>({static_cast<u64>(x)});
  const u32 lane = threadIdx.x & 31;
  return static_cast<T>(words[lane < step ? lane : lane - step][0]);
}
template <class T>
MOET_DEVICE T __shfl_xor_sync(u32, T x, u32 mask) {
  const auto words = host::exchange<1>({static_cast<u64>(x)});
  return static_cast<T>(words[(threadIdx.x & 31) ^ mask][0]);
}
MOET_DEVICE u32 __reduce_max_sync(u32, u32 x) {
  const auto words = host::exchange<1>({x});
  u64 most = 0;
  for (int i = 0; i < 32; ++i) most = words[i][0] > most ? words[i][0] : most;
  return static_cast<u32>(most);
}
MOET_DEVICE int __reduce_add_sync(u32, int x) {
  const auto words = host::exchange<1>({static_cast<u32>(x)});
  u32 sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<u32>(words[i][0]);
  return static_cast<int>(sum);
}
template <class T>
MOET_DEVICE T __shfl_sync(u32, T x, u32 from) {
  const auto words = host::exchange<1>({static_cast<u64>(x)});
  return static_cast<T>(words[from][0]);
}
MOET_DEVICE u32 atomicMax(u32* p, u32 x) {
  const u32 old = *p;
  if (x > old) *p = x;
  return old;
}
MOET_DEVICE u32 atomicAdd(u32* p, u32 x) {
  const u32 old = *p;
  *p += x;
  return old;
}

// Fragments of mma.m16n8k32: lane 4g + t holds rows g, g + 8 and k = 4t.. and 16 + 4t.. of A.
MOET_DEVICE void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto words = host::exchange<6>({a[0], a[1], a[2], a[3], b0, b1});
  const auto byte = [&](u32 lane, u32 reg, u32 k) {
    return static_cast<int>(static_cast<int8_t>(words[lane][reg] >> 8 * (k % 4)));
  };
  const u32 lane = threadIdx.x & 31;
  for (u32 i = 0; i < 4; ++i) {
    const u32 row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (u32 k = 0; k < 32; ++k) {
      const u32 piece = k % 16 / 4, half = k / 16;
      d[i] += byte(row % 8 * 4 + piece, row / 8 + 2 * half, k) *
              byte(column * 4 + piece, 4 + half, k);
    }
  }
}

// --- copies. A barrier is the number of its phases that are over.

MOET_DEVICE void barrier_init(u64* barrier) { *barrier = 0; }
MOET_DEVICE void barriers_ready() { __syncwarp(); }

MOET_DEVICE void land(const host::Copy& c) { std::memcpy(c.to, c.from, c.bytes); }

MOET_DEVICE void copy_runs(u8* to, u32 to_step, const u8* from, u32 from_step, u32 bytes, u32 runs,
                           u64* barrier) {
  if (threadIdx.x & 31) return;
  for (const auto& c : host::copies)
    if (c.barrier == barrier) host::fail("a slot that is filled twice");
  for (u32 i = 0; i < runs; ++i) {
    const host::Copy c = {to + i * to_step, from + static_cast<u64>(i) * from_step, bytes, barrier};
    if ((reinterpret_cast<uintptr_t>(c.to) | reinterpret_cast<uintptr_t>(c.from) | bytes) % 16)
      host::fail("a copy that is not aligned to 16 bytes");
    host::copies.push_back(c);
    if (!host::lazy_copies) land(c);
  }
}

// Whether copies of this barrier were on their way; they have landed now.
MOET_DEVICE bool land_copies(const u64* barrier) {
  bool landed = false;
  for (size_t i = host::copies.size(); i-- > 0;) {
    if (host::copies[i].barrier != barrier) continue;
    if (host::lazy_copies) land(host::copies[i]);
    host::copies.erase(host::copies.begin() + i);
    landed = true;
  }
  return landed;
}

MOET_DEVICE void barrier_wait(u64* barrier, u32 parity) {
  for (u32 spins = 0; (*barrier & 1) == parity; ++spins) {
    if (land_copies(barrier)) ++*barrier;
    else if (spins > 100000) host::fail("a wait for a copy that is never started");
    else host::yield();
  }
}

MOET_DEVICE void copy_piece(u8* to, const u8* from) { std::memcpy(to, from, 16); }
MOET_DEVICE void wait_for_pieces() {}
MOET_DEVICE void load_if(uint4& x, bool wanted, const u8* p) {
  if (wanted) std::memcpy(&x, p, 16);
}

// --- meetings: the arrivals that a phase needs, those that have come, and the phases that are over

MOET_DEVICE void meeting_init(u64* barrier, u32 arrivals) { *barrier = static_cast<u64>(arrivals) << 48; }
MOET_DEVICE bool arrive(u64* barrier) {
  const u64 come = 1ull << 32;
  *barrier += come;
  if ((*barrier >> 32 & 0xFFFF) != *barrier >> 48) return false;
  *barrier = (*barrier & ~(0xFFFFull << 32)) + 1;
  return true;
}

MOET_DEVICE void publish(u32* p, u32 v) { *p = v; }
MOET_DEVICE u32 observe(const u32* p) {
  if (++host::observations > 10000000) host::fail("a word that nobody publishes");
  host::yield();
  return *p;
}

// --- words shared with another thread of the host, which is the real one

template <class T>
MOET_DEVICE T load_system(const T* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
template <class T>
MOET_DEVICE void store_system(T* p, T v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
MOET_DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T>
MOET_DEVICE T load_host(const T* p) { return *p; }
MOET_DEVICE u64 nanoseconds() {
  return static_cast<u64>(std::chrono::steady_clock::now().time_since_epoch() /
                          std::chrono::nanoseconds(1));
}

MOET_DEVICE void wait_for_earlier_kernels() {}
MOET_DEVICE void let_next_kernel_start() {}
