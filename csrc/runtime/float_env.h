// The floating-point environment of the contract (docs/numerics.md, section 0): round to nearest
// even, no flush to zero, no denormals-are-zero, every exception masked. MXCSR = 0x1F80.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace moet {

constexpr uint32_t kContractMxcsr = 0x1F80;

static inline uint32_t read_mxcsr() {
#if defined(__x86_64__)
  return _mm_getcsr();
#else
  return kContractMxcsr;
#endif
}

// Sets the environment and gives the old one back at the end of the scope. The barriers keep the
// compiler from moving arithmetic across: it does not know that MXCSR is an operand of it.
class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(read_mxcsr()) { write(kContractMxcsr); }
  ~FloatEnvironment() { write(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  static void write([[maybe_unused]] uint32_t value) {
#if defined(__x86_64__)
    asm volatile("" ::: "memory");
    _mm_setcsr(value);
    asm volatile("" ::: "memory");
#endif
  }
  uint32_t saved_;
};

}  // namespace moet
