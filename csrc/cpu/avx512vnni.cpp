#include "kernels.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 headers start values as "x = x" (gcc.gnu.org/PR105593); drop when GCC 12 is gone.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include "avx512vnni.h"

#include "kernels.inl"

namespace moet {

const Kernels* avx512vnni_kernels() { return &kKernels; }

}  // namespace moet
#else
namespace moet {

const Kernels* avx512vnni_kernels() { return nullptr; }

}  // namespace moet
#endif
