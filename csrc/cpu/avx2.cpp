#include "kernels.h"

#if defined(__x86_64__)
#include "avx2.h"

#include "kernels.inl"

namespace moet {

const Kernels* avx2_kernels() { return &kKernels; }

}  // namespace moet
#else
namespace moet {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace moet
#endif
