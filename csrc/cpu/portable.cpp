#include "portable.h"

#include "kernels.inl"

namespace moet {

const Kernels* portable_kernels() { return &kKernels; }

}  // namespace moet
