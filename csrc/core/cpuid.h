// What this processor and this operating system can run.
#pragma once
#include <span>

namespace moet {

struct CpuFeature {
  const char* name;  // as in /proc/cpuinfo: "avx2", "avx512_vnni", "amx_int8"
  bool usable;       // the processor has it and the system saves its registers (XGETBV)
};

// Every feature that moet asks about, present or not. Found once, on the first call.
std::span<const CpuFeature> cpu_features();

// True where the kernel table of that name ("portable", "avx2", "avx512vnni") can run.
// A name that no table has gives false.
bool cpu_supports(const char* isa);

}  // namespace moet
