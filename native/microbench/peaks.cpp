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

__attribute__((target("avx2"))) void read_all_by_halves(const uint8_t* data, int64_t bytes) {
  __m256i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 128) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      if (j % 2 == 0) __builtin_prefetch(data + i + 32 * j + 2560);
      const auto* p = reinterpret_cast<const __m256i*>(data + i + 32 * j);
      sums[j] = _mm256_or_si256(sums[j], _mm256_load_si256(p));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) asm volatile("" : : "x"(sums[j]));
}

__attribute__((target("avx2"))) void run_pair_chains() {
  __m256i sums[kChains] = {};
  const __m256i operand = _mm256_set1_epi16(1);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      __m256i product;
      asm volatile("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0"
                   : "+x"(sums[j]), "=&x"(product)
                   : "x"(operand));
    }
  }
}

__attribute__((target("avx2,fma"))) void run_float_chains_by_halves() {
  __m256 sums[kChains] = {};
  const __m256 operand = _mm256_set1_ps(1.0F);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("vfmadd231ps %1, %1, %0" : "+x"(sums[j]) : "x"(operand));
    }
  }
}

using Read = void (*)(const uint8_t* data, int64_t bytes);

double read_rate(Read read, int64_t bytes, int passes) {
  uint8_t* data = allocate(bytes);
  const double time_s = best_time_s([&] {
    for (int i = 0; i < passes; ++i) read(data, bytes);
  });
  std::free(data);
  return static_cast<double>(bytes) * passes / time_s;
}

/// `integer_lanes` multiply-adds are in a step of integer chains, `float_lanes` in one of floats.
Peaks measure(int64_t footprint, Read read, void (*run_integers)(), double integer_lanes,
              void (*run_floats)(), double float_lanes) {
  constexpr int near_passes = 10000;
  const double steps = 1.0 * kChains * kChainSteps;
  Peaks peaks;
  peaks.are_measured = true;
  peaks.read_bytes_s = read_rate(read, footprint, 1);
  peaks.near_bytes_s = read_rate(read, kNearBytes, near_passes);
  peaks.quantized_macs_s = integer_lanes * steps / best_time_s(run_integers);
  peaks.float_macs_s = float_lanes * steps / best_time_s(run_floats);
  return peaks;
}

}  // namespace

Peaks measure_peaks(int64_t footprint) {
  if (__builtin_cpu_supports("avx512vnni")) {
    return measure(footprint, read_all, run_dot_chains, 64.0 / 2, run_float_chains, 16);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return measure(footprint, read_all_by_halves, run_pair_chains, 16, run_float_chains_by_halves,
                   8);
  }
  return {};
}

#else

Peaks measure_peaks(int64_t) { return {}; }

#endif
