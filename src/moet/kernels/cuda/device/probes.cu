// A read-only kernel: what the memory gives, in the same run as the kernels that are judged by it.
#include "vocabulary.cuh"

constexpr u32 kUnroll = 8;

// Reads `count` 16-byte words once; `sink` is written only if they add up to a number that they
// never do, so that the loads stay.
extern "C" __global__ void __launch_bounds__(512, 2)
    moet_read(const uint4* words, u64 count, u32* sink) {
  const u64 threads = static_cast<u64>(gridDim.x) * blockDim.x;
  u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  u32 sum = 0;
  for (; i + (kUnroll - 1) * threads < count; i += kUnroll * threads) {
    uint4 v[kUnroll];
#pragma unroll
    for (u32 j = 0; j < kUnroll; ++j)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                   : "l"(words + i + j * threads));
#pragma unroll
    for (u32 j = 0; j < kUnroll; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += threads) sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  if (sum == 0x13579BDF) *sink = sum;
}
