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

Tuning tuning_for(bool has_half_ports) {
  constexpr int64_t kKilobyte = 1024;
  if (TS_LEVEL == 2 && has_half_ports) return {true, true, 8, 512 * kKilobyte};
  if (TS_LEVEL >= 2) return {false, false, 16, 1024 * kKilobyte};
  return {false, TS_LEVEL == 1, 16, 512 * kKilobyte};
}

}  // namespace

Tuning current_tuning = tuning_for(is_zen4());

void assume_half_ports(bool has_half_ports) { current_tuning = tuning_for(has_half_ports); }

}  // namespace ts
