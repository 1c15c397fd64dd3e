// Choices that depend on the processor and do not follow from its instruction set.
#pragma once

#include <cstdint>

namespace ts {

/// Choices between ways that give the same bits, by the caches and ports of a processor.
struct Tuning {
  /// Zen 4 multiplies 512 bits in two halves ("double-pumped"). There loading activations anew for
  /// each group is free, and only what takes long to unpack is unpacked once for many rows
  /// (docs/development/kernels/avx512.md).
  bool has_half_ports;
  /// Keys and values are fetched far ahead, into the second-level cache; else near, into the first.
  bool fetches_far;
  /// Packed weights that meet one or two rows are fetched into the first-level cache, else into the
  /// second-level one (linear/kernels.h).
  bool fetches_weights_near;
  int64_t wide_blocks;       // that are unpacked at a time: they stay in the first-level cache
  int64_t cached_row_bytes;  // prepared rows that stay in the second-level cache meanwhile
};

/// That of this processor, or the one that was last assumed.
extern Tuning current_tuning;

inline const Tuning& tuning() { return current_tuning; }

/// Computes as on Zen 4 from now on, or as on a Xeon; for tests and measurements. Not while
/// products run.
void assume_half_ports(bool has_half_ports);

/// Whether keys and values are fetched into the second-level cache: on AVX2 always, on AMX never,
/// as on other processors of its maker, on AVX-512 where the processor is faster with it. Weights
/// are on all these levels (linear/kernels.h).
inline bool fetches_far() {
  if (TS_LEVEL == 2) return tuning().fetches_far;
  return TS_LEVEL == 1;
}

/// Fetches a line of cache that will be read soon.
inline void fetch(const void* p, bool is_far) {
  if (is_far) {
    __builtin_prefetch(p, 0, 2);
  } else {
    __builtin_prefetch(p, 0, 3);
  }
}

}  // namespace ts
