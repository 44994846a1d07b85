#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "../core/cpuid.h"
#include "../core/refusal.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moet {
namespace {

constexpr size_t kItem = 1 << 20;

// Bytes of an item: a MiB, doubled until the part of one worker has no more items than a slot holds.
constexpr size_t item_bytes(size_t bytes, int threads) {
  size_t item = kItem;
  while ((bytes / item + threads) / threads > kMaxItems) item *= 2;
  return item;
}
static_assert(item_bytes(size_t(32) << 30, 1) == kItem);
static_assert(item_bytes(size_t(100) << 30, 1) == 2 * kItem);
static_assert(item_bytes(size_t(100) << 30, 2) == kItem);
static_assert((size_t(1) << 40) / item_bytes(size_t(1) << 40, 1) <= kMaxItems);

// Each loop xors everything into a value that is kept, so that no load can be dropped.
uint64_t read_plain(const uint8_t* p, size_t bytes) {
  uint64_t sum[8] = {};
  for (size_t i = 0; i < bytes; i += 64)
    for (int j = 0; j < 8; ++j) sum[j] ^= *reinterpret_cast<const uint64_t*>(p + i + 8 * j);
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t read_avx2(const uint8_t* p, size_t bytes) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i < bytes; i += 128) {
    const __m256i* v = reinterpret_cast<const __m256i*>(p + i);
    a = _mm256_xor_si256(a, _mm256_load_si256(v));
    b = _mm256_xor_si256(b, _mm256_load_si256(v + 1));
    c = _mm256_xor_si256(c, _mm256_load_si256(v + 2));
    d = _mm256_xor_si256(d, _mm256_load_si256(v + 3));
  }
  alignas(32) uint64_t sum[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sum),
                     _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}
#endif

auto best_read() {
#if defined(__x86_64__)
  if (cpu_supports("avx2")) return &read_avx2;
#endif
  return &read_plain;
}

// A slot a worker: each streams through its own part, and helps with another's when it is done.
class ReadJob final : public Job {
 public:
  ReadJob(const uint8_t* data, size_t bytes, int threads)
      : data_(data), bytes_(bytes), item_(item_bytes(bytes, threads)),
        total_((bytes + item_ - 1) / item_), each_((total_ + threads - 1) / threads),
        slots_(int((total_ + each_ - 1) / each_)), left_(total_) {}

  int slots() const override { return slots_; }
  bool begin(Pool& pool) noexcept override {
    const int slots = slots_;
    for (int s = 0; s < slots; ++s)
      pool.publish(s, 0, uint32_t(std::min(each_, total_ - s * each_)));
    pool.announce();
    return true;
  }
  void work(const Claim& claim, int) override {
    const size_t at = (claim.slot * each_ + claim.item) * item_;
    sum_.fetch_xor(read_(data_ + at, std::min(item_, bytes_ - at)), std::memory_order_relaxed);
  }
  bool finished(const Claim&, Pool&) noexcept override { return left_.fetch_sub(1) == 1; }

 private:
  const uint8_t* data_;
  const size_t bytes_, item_, total_, each_;
  const int slots_;
  std::atomic<size_t> left_;
  std::atomic<uint64_t> sum_{0};
  decltype(best_read()) read_ = best_read();
};

}  // namespace

ReadProbe::ReadProbe(std::shared_ptr<Pool> pool, const uint8_t* data, size_t bytes)
    : pool_(std::move(pool)), data_(data), bytes_(bytes / kItem * kItem) {
  if (!data || reinterpret_cast<uintptr_t>(data) % 64 || bytes_ == 0)
    throw Refusal("a read probe needs a MiB or more at a 64-byte boundary");
}

double ReadProbe::pass() {
  const Pool::Session session(*pool_);
  ReadJob job(data_, bytes_, pool_->threads());
  const auto start = std::chrono::steady_clock::now();
  pool_->run(session, job);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  return double(bytes_) / took.count();
}

}  // namespace moet
