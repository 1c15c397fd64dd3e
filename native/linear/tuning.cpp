#include "linear/tuning.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ts {
namespace {

enum class Processor { Zen4, Zen5, Other };

Processor this_processor() {
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
  constexpr uint32_t kZen5 = 0x1a;
  if (is_amd && family == kZen3And4) return Processor::Zen4;
  if (is_amd && family == kZen5) return Processor::Zen5;
#endif
  return Processor::Other;
}

Tuning tuning_for(Processor processor) {
  constexpr int64_t kKilobyte = 1024;
  if (TS_LEVEL == 2 && processor == Processor::Zen4) {
    return {true, true, false, 8, 512 * kKilobyte};
  }
  if (TS_LEVEL == 2 && processor == Processor::Zen5) {
    return {false, false, true, 16, 1024 * kKilobyte};
  }
  if (TS_LEVEL >= 2) return {false, false, false, 16, 1024 * kKilobyte};
  return {false, TS_LEVEL == 1, false, 16, 512 * kKilobyte};
}

}  // namespace

Tuning current_tuning = tuning_for(this_processor());

void assume_half_ports(bool has_half_ports) {
  current_tuning = tuning_for(has_half_ports ? Processor::Zen4 : Processor::Other);
}

}  // namespace ts
