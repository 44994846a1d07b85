#include "isa.h"

#include "../core/cpuid.h"
#include "../core/refusal.h"

namespace moet {

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> usable;
  for (const Kernels* table : {avx512vnni_kernels(), avx2_kernels(), portable_kernels()})
    if (table && cpu_supports(table->name)) usable.push_back(table);
  return usable;
}

const Kernels& find_kernels(const std::string& isa) {
  std::string have;
  for (const Kernels* table : usable_kernels()) {
    if (isa == table->name) return *table;
    have += (have.empty() ? "" : ", ") + std::string(table->name);
  }
  throw Refusal("no kernels '" + isa + "' on this machine", "it has " + have);
}

}  // namespace moet
