// What the machine can do at best: bytes read a second, operations a second.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "executor/memory.h"
#include "linear/lanes.h"
#include "pool.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using ts::Pool;
using Clock = std::chrono::steady_clock;

constexpr int64_t kLargestStream = int64_t{384}
                                   << 20;  // larger than the last-level cache of one machine
constexpr double kMeasured_s = 0.12;

/// Runs `body(thread, num_threads)` on all threads again and again; returns the shortest time.
template <class Body>
double shortest_s(Pool& pool, const Body& body) {
  const auto task = [](void* context, int thread, int num_threads) {
    (*static_cast<const Body*>(context))(thread, num_threads);
  };
  double shortest = 1e30;
  const Clock::time_point begin = Clock::now();
  for (double total = 0; total < kMeasured_s;) {
    const Clock::time_point start = Clock::now();
    pool.run(task, const_cast<Body*>(&body));
    const Clock::time_point end = Clock::now();
    shortest = std::min(shortest, std::chrono::duration<double>(end - start).count());
    total = std::chrono::duration<double>(end - begin).count();
  }
  return shortest;
}

uint64_t read_stream(const uint64_t* data, int64_t num_lines) {
  constexpr int64_t kAhead = 40;  // lines; a loop that does no more than read is fastest so (0027)
  uint64_t sums[8] = {};
  for (int64_t line = 0; line < num_lines; ++line) {
    __builtin_prefetch(data + (line + kAhead) * 8);
    for (int i = 0; i < 8; ++i) sums[i] += data[line * 8 + i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

// One round is kChains independent chains of one multiply-add each, on registers alone.
constexpr int kChains = 12;
constexpr int64_t kRounds = 400000;

#if TS_LEVEL == 3 && !defined(TS_EMULATE_TILES)

constexpr const char* kPeakKind = "bfloat16 tiles";
constexpr double kOpsARound = 4 * 2.0 * 16 * 16 * 32;  // four tiles of sums

struct alignas(64) TileShape {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

float run_chains(int64_t rounds) {
  TileShape shape;
  asm volatile("" ::"m"(shape) : "memory");  // GCC 12 may drop stores that fill it
  _tile_loadconfig(&shape);
  alignas(64) static const uint8_t zeros[1024] = {};
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 0;
}

constexpr int64_t kRoundsRun = kRounds / 16;

#elif TS_LEVEL >= 2

constexpr const char* kPeakKind = "int8 VNNI";
constexpr double kOpsARound = kChains * 2.0 * 64;
constexpr int64_t kRoundsRun = kRounds;

float run_chains(int64_t rounds) {
  __m512i sums[kChains];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  __m512i a = _mm512_set1_epi8(1);
  const __m512i b = _mm512_set1_epi8(2);
  for (int64_t i = 0; i < rounds; ++i) {
#ifndef TS_EMULATE_AVX512
    asm volatile("" : "+v"(a));  // or the compiler would add all rounds at once
#endif
    TS_UNROLL
    for (int k = 0; k < kChains; ++k) sums[k] = _mm512_dpbusd_epi32(sums[k], a, b);
  }
  for (const __m512i& sum : sums) a = _mm512_add_epi32(a, sum);
  return static_cast<float>(_mm512_reduce_add_epi32(a));
}

#elif TS_LEVEL == 1 || defined(__SSE2__)

// Bytes on AVX2, as linear/dot_avx2.h has them for codes of up to 6 bits; pairs of int16 on SSE2
// (linear/dot_pairs.h). In assembly: of intrinsics GCC 12 makes a loop that keeps sums in memory
// and takes three times as long.
#if TS_LEVEL == 1
using Integers = __m256i;
using Factor = int8_t;
#if defined(TS_AVX_VNNI) && !defined(TS_EMULATE_AVX_VNNI)
constexpr const char* kPeakKind = "int8 VNNI";
#define TS_MULTIPLY_ADD "%{vex%} vpdpbusd %2, %2, %0"
#else
constexpr const char* kPeakKind = "int8 multiply-add";
#define TS_MULTIPLY_ADD "vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0"
#endif
#else
using Integers = __m128i;
using Factor = int16_t;
constexpr const char* kPeakKind = "int16 multiply-add";
#define TS_MULTIPLY_ADD "movdqa %2, %1\n\tpmaddwd %2, %1\n\tpaddd %1, %0"
#endif

constexpr double kOpsARound = kChains * 2.0 * sizeof(Integers) / sizeof(Factor);
constexpr int64_t kRoundsRun = kRounds;

float run_chains(int64_t rounds) {
  Integers sums[kChains] = {};
  const Integers zeros = {};
  for (int64_t i = 0; i < rounds; ++i) {
    TS_UNROLL
    for (int k = 0; k < kChains; ++k) {
      Integers product;
      asm volatile(TS_MULTIPLY_ADD : "+x"(sums[k]), "=&x"(product) : "x"(zeros));
    }
  }
  return 0;
}

#undef TS_MULTIPLY_ADD

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr const char* kPeakKind = "int8 dot products";
constexpr double kOpsARound = kChains * 2.0 * 16;
constexpr int64_t kRoundsRun = kRounds;

float run_chains(int64_t rounds) {
  int32x4_t sums[kChains];
  for (int32x4_t& sum : sums) sum = vdupq_n_s32(0);
  int8x16_t a = vdupq_n_s8(1);
  const int8x16_t b = vdupq_n_s8(2);
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile("" : "+w"(a));  // or the compiler would add all rounds at once
    TS_UNROLL
    for (int k = 0; k < kChains; ++k) sums[k] = vdotq_s32(sums[k], a, b);
  }
  int32x4_t total = vdupq_n_s32(0);
  for (const int32x4_t& sum : sums) total = vaddq_s32(total, sum);
  return static_cast<float>(vaddvq_s32(total));
}

#else

constexpr const char* kPeakKind = "float32 multiply and add";
constexpr double kOpsARound = 4 * 2.0 * ts::kGroupSize;
constexpr int64_t kRoundsRun = kRounds / 4;

float run_chains(int64_t rounds) {
  float sums[4 * ts::kGroupSize] = {};
  float a = 1.0F;
  for (int64_t i = 0; i < rounds; ++i) {
    a *= 0.999F;
    for (float& sum : sums) sum += sum * a;
  }
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

#endif

}  // namespace

/// Bytes a second that all threads together read from a stream of `num_bytes`, each its own part;
/// 0 if there is no memory for it.
TS_EXPORT double ts_measure_bandwidth(Pool* pool, int64_t num_bytes) {
  constexpr int64_t kLine = 64;
  const int64_t size = std::min(num_bytes, kLargestStream);
  const int64_t part_lines = std::max<int64_t>(1, size / kLine / pool->num_threads());
  const int64_t part = part_lines * kLine;
  const int64_t total = part * pool->num_threads();
  auto* memory = static_cast<uint8_t*>(ts::map_memory(total));
  if (memory == nullptr) return 0;
  ts::parallel_for(*pool, pool->num_threads(), 1, [&](int64_t i) {
    std::memset(memory + i * part, static_cast<int>(i + 1), static_cast<size_t>(part));
  });
  std::atomic<uint64_t> sink{0};
  const double seconds = shortest_s(*pool, [&](int thread, int) {
    const auto* data = reinterpret_cast<const uint64_t*>(memory + thread * part);
    sink += read_stream(data, part_lines);
  });
  ts::unmap_memory(memory, total);
  return static_cast<double>(total) / seconds;
}

/// Operations a second of all threads together, a multiply-add being two.
TS_EXPORT double ts_measure_peak(Pool* pool) {
  std::atomic<int> sink{0};
  const double seconds =
      shortest_s(*pool, [&](int, int) { sink += run_chains(kRoundsRun) == 0 ? 0 : 1; });
  return kOpsARound * static_cast<double>(kRoundsRun) * pool->num_threads() / seconds;
}

TS_EXPORT const char* ts_peak_kind() { return kPeakKind; }
