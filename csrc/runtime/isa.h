// The kernel tables of this build that this processor can run, best first.
#pragma once
#include <string>
#include <vector>

#include "../cpu/kernels.h"

namespace moet {

std::vector<const Kernels*> usable_kernels();

// The table of that name. Refuses unknown names and tables that this processor cannot run.
const Kernels& find_kernels(const std::string& isa);

}  // namespace moet
