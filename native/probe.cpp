// What this machine can run: the processor's flags and the operating system's consent.
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Bits of the answer, one a level above portable; library.py knows them by the same order.
constexpr int32_t kAvx2 = 1;
constexpr int32_t kAvx512 = 2;
constexpr int32_t kAmx = 4;
constexpr int32_t kNeonDotprod = 8;
constexpr int32_t kBfloat16 = 16;  // AVX-512 with BF16, which emulated tiles need
constexpr int32_t kAvxVnni = 32;

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers query(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool has(uint32_t word, int bit) { return (word >> bit & 1) != 0; }

/// Which register states the operating system saves (Intel SDM, volume 1, chapter 13).
uint64_t saved_states() {
  uint32_t low = 0;
  uint32_t high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

int32_t probe() {
  const Registers basic = query(1, 0);
  constexpr int kOsxsave = 27;
  if (!has(basic.ecx, kOsxsave)) return 0;
  const uint64_t states = saved_states();
  constexpr uint64_t kYmm = 0x6;
  constexpr uint64_t kZmm = 0xe6;
  constexpr uint64_t kTiles = 0x60000;
  const Registers extended = query(7, 0);
  const Registers more = query(7, 1);
  const bool fma = has(basic.ecx, 12);
  const bool f16c = has(basic.ecx, 29);
  const bool avx2 = (states & kYmm) == kYmm && fma && f16c && has(extended.ebx, 5);
  const bool avx_vnni = avx2 && has(more.eax, 4);
  const bool avx512 = avx2 && (states & kZmm) == kZmm && has(extended.ebx, 16) &&  // F
                      has(extended.ebx, 17) && has(extended.ebx, 30) &&            // DQ, BW
                      has(extended.ebx, 31) && has(extended.ecx, 11);              // VL, VNNI
  const bool bfloat16 = avx512 && has(more.eax, 5);
  const bool amx = bfloat16 && (states & kTiles) == kTiles && has(extended.edx, 22) &&  // BF16
                   has(extended.edx, 24) && has(extended.edx, 25);  // TILE, INT8
#ifdef TS_EMULATE_AVX512
  if (avx2) return kAvx2 | kAvx512 | kBfloat16;  // built to run on it
#endif
  return (avx2 ? kAvx2 : 0) | (avx_vnni ? kAvxVnni : 0) | (avx512 ? kAvx512 : 0) |
         (amx ? kAmx : 0) | (bfloat16 ? kBfloat16 : 0);
}

#elif defined(__aarch64__) && defined(__linux__)

/// Of AT_HWCAP: what the system's <asm/hwcap.h> calls HWCAP_ATOMICS, _ASIMDRDM and _ASIMDDP. The
/// compiler may use the first two, which belong to Armv8.2-A, anywhere.
int32_t probe() {
  constexpr unsigned long kNeeded = 1UL << 8 | 1UL << 12 | 1UL << 20;
  return (getauxval(AT_HWCAP) & kNeeded) == kNeeded ? kNeonDotprod : 0;
}

#else

int32_t probe() { return 0; }

#endif

}  // namespace

/// Levels that can run here besides portable: 1 AVX2, 2 AVX-512, 4 AMX (permission not yet asked),
/// 8 NEON with dot products, 32 AVX-VNNI; and 16, AVX-512 with BF16.
TS_EXPORT int32_t ts_probe() { return probe(); }

#ifdef TS_EMULATE_AVX512
/// Exists where level 2 and the levels above it run on AVX2: tests look for it.
TS_EXPORT void ts_emulates_avx512() {}
#endif
