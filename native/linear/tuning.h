// What is best for the processor at hand where its instruction set does not say it.
#pragma once

#include <cstdint>

namespace ts {

/// Choices between ways that give the same bits.
struct Tuning {
  /// Zen 4 multiplies 512 bits in two halves. There loading activations anew for each group is
  /// free, and only what takes long to unpack is unpacked once for many rows (docs/adr/0032).
  bool has_half_ports;
  int64_t wide_blocks;  // blocks that are unpacked at a time: they stay in the first-level cache
  int64_t cached_row_bytes;  // prepared rows that stay in the second-level cache meanwhile
};

Tuning tuning_for(bool has_half_ports);

/// That of this processor, or the one that was last assumed.
const Tuning& tuning();

/// Computes as on another processor from now on; for tests and measurements. Not while products
/// run.
void assume_half_ports(bool has_half_ports);

}  // namespace ts
