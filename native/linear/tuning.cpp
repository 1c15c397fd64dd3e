#include "linear/tuning.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ts {
namespace {

bool is_zen4() {
#if defined(__x86_64__)
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  __get_cpuid(0, &eax, &ebx, &ecx, &edx);
  const bool is_amd = ebx == signature_AMD_ebx && ecx == signature_AMD_ecx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const uint32_t family = (eax >> 8 & 0xf) + (eax >> 20 & 0xff);
  constexpr uint32_t kZen3And4 = 0x19;  // of which Zen 3 has no AVX-512
  return is_amd && family == kZen3And4;
#else
  return false;
#endif
}

Tuning& chosen() {
  static Tuning tuning = tuning_for(is_zen4());
  return tuning;
}

}  // namespace

Tuning tuning_for(bool has_half_ports) {
  constexpr int64_t kKilobyte = 1024;
  if (TS_LEVEL < 2) return {has_half_ports, 16, 512 * kKilobyte};
  return {has_half_ports, has_half_ports ? 8 : 16, (has_half_ports ? 512 : 1024) * kKilobyte};
}

const Tuning& tuning() { return chosen(); }

void assume_half_ports(bool has_half_ports) { chosen() = tuning_for(has_half_ports); }

}  // namespace ts
