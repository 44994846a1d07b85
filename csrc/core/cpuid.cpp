#include "cpuid.h"

#include <array>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moet {
namespace {

// One table: a feature is usable where its CPUID bit is set and XCR0 holds the state it needs.
enum Register { kEax, kEbx, kEcx, kEdx };
constexpr uint64_t kYmm = 0x6;            // XMM and YMM
constexpr uint64_t kZmm = 0xE6;           // and opmask, both halves of ZMM
constexpr uint64_t kTiles = 0x60006;      // XMM, YMM, tile configuration and data

struct Probe {
  const char* name;
  uint32_t leaf, subleaf;
  Register reg;
  int bit;
  uint64_t state;
};

constexpr Probe kProbes[] = {
    {"fma", 1, 0, kEcx, 12, kYmm},          {"f16c", 1, 0, kEcx, 29, kYmm},
    {"avx", 1, 0, kEcx, 28, kYmm},          {"avx2", 7, 0, kEbx, 5, kYmm},
    {"avx512f", 7, 0, kEbx, 16, kZmm},      {"avx512dq", 7, 0, kEbx, 17, kZmm},
    {"avx512bw", 7, 0, kEbx, 30, kZmm},     {"avx512vl", 7, 0, kEbx, 31, kZmm},
    {"avx512_vbmi", 7, 0, kEcx, 1, kZmm},   {"avx512_vnni", 7, 0, kEcx, 11, kZmm},
    {"avx512_bf16", 7, 1, kEax, 5, kZmm},   {"avx_vnni", 7, 1, kEax, 4, kYmm},
    {"amx_tile", 7, 0, kEdx, 24, kTiles},   {"amx_int8", 7, 0, kEdx, 25, kTiles},
};
constexpr size_t kCount = sizeof(kProbes) / sizeof(kProbes[0]);

#if defined(__x86_64__)
// XCR0: the register state that the operating system saves. Zero where it has not enabled XSAVE.
uint64_t saved_state() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27))) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool probe(const Probe& p, uint64_t state) {
  uint32_t r[4];
  if (!__get_cpuid_count(p.leaf, 0, &r[kEax], &r[kEbx], &r[kEcx], &r[kEdx])) return false;
  if (p.subleaf > 0) {
    if (r[kEax] < p.subleaf) return false;  // leaf 7 tells its highest subleaf in EAX
    __get_cpuid_count(p.leaf, p.subleaf, &r[kEax], &r[kEbx], &r[kEcx], &r[kEdx]);
  }
  return (r[p.reg] >> p.bit & 1) && (state & p.state) == p.state;
}
#else
uint64_t saved_state() { return 0; }
bool probe(const Probe&, uint64_t) { return false; }
#endif

std::array<CpuFeature, kCount> find_features() {
  const uint64_t state = saved_state();
  std::array<CpuFeature, kCount> found;
  for (size_t i = 0; i < kCount; ++i) found[i] = {kProbes[i].name, probe(kProbes[i], state)};
  return found;
}

bool usable(const char* name) {
  for (const CpuFeature& f : cpu_features())
    if (!std::strcmp(f.name, name)) return f.usable;
  return false;
}

}  // namespace

std::span<const CpuFeature> cpu_features() {
  static const std::array<CpuFeature, kCount> features = find_features();
  return features;
}

bool cpu_supports(const char* isa) {
  if (!std::strcmp(isa, "portable")) return true;
  if (!std::strcmp(isa, "avx2")) return usable("avx2") && usable("fma") && usable("f16c");
  if (!std::strcmp(isa, "avx512vnni"))
    return usable("avx512f") && usable("avx512bw") && usable("avx512vl") && usable("avx512dq") &&
           usable("avx512_vnni");
  return false;
}

}  // namespace moet
