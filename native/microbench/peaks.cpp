// The limits that kernels are shown beside: streams and chains of instructions, on one thread.
#include "bench.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr int64_t kNearBytes = 16 << 10;
constexpr int64_t kChainSteps = 1000000;
constexpr int kChains = 12;

__attribute__((target("avx512f"))) void read_all(const uint8_t* data, int64_t bytes) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(data + i + 64 * j + 2560);
      sums[j] = _mm512_or_si512(sums[j], _mm512_load_si512(data + i + 64 * j));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) asm volatile("" : : "v"(sums[j]));
}

__attribute__((target("avx512f,avx512vnni"))) void run_dot_chains() {
  __m512i sums[kChains] = {};
  const __m512i operand = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[j]) : "v"(operand));
    }
  }
}

__attribute__((target("avx512f"))) void run_float_chains() {
  __m512 sums[kChains] = {};
  const __m512 operand = _mm512_set1_ps(1.0F);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[j]) : "v"(operand));
    }
  }
}

double read_rate(int64_t bytes, int passes) {
  uint8_t* data = allocate(bytes);
  const double time_s = best_time_s([&] {
    for (int i = 0; i < passes; ++i) read_all(data, bytes);
  });
  std::free(data);
  return static_cast<double>(bytes) * passes / time_s;
}

}  // namespace

Peaks measure_peaks(int64_t footprint) {
  if (!__builtin_cpu_supports("avx512vnni")) return {};
  constexpr int near_passes = 10000;
  const double steps = 1.0 * kChains * kChainSteps;
  Peaks peaks;
  peaks.read_bytes_s = read_rate(footprint, 1);
  peaks.near_bytes_s = read_rate(kNearBytes, near_passes);
  peaks.quantized_macs_s = 64 * steps / best_time_s(run_dot_chains) / 2;
  peaks.float_macs_s = 16 * steps / best_time_s(run_float_chains);
  return peaks;
}

#else

Peaks measure_peaks(int64_t) { return {}; }

#endif
