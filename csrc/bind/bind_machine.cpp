// What this build is and what this processor can run.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "../core/cpuid.h"
#include "../runtime/isa.h"
#include "bind.h"

namespace nb = nanobind;

namespace moet {
namespace {

nb::dict features() {
  nb::dict found;
  for (const CpuFeature& f : cpu_features()) found[f.name] = f.usable;
  return found;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* table : usable_kernels()) names.push_back(table->name);
  return names;
}

// The flags of every part of the build; of a kernel table those that its own unit was compiled with.
nb::dict build_flags() {
  nb::dict flags;
  for (const Kernels* table : {portable_kernels(), avx2_kernels(), avx512vnni_kernels()})
    if (table) flags[table->name] = table->build_flags;
  flags["runtime"] = MOET_FLAGS;
  return flags;
}

}  // namespace

void bind_machine(nb::module_& m) {
  m.attr("__version__") = MOET_VERSION;
  m.attr("sanitized") = MOET_SANITIZED != 0;
  m.def("cpu_features", &features, "Features by their /proc/cpuinfo names: usable or not.");
  m.def("isa_available", &isas, "Kernel tables that this machine can run, best first.");
  m.def("build_flags", &build_flags, "Compiler flags by part of the build.");
}

}  // namespace moet
