// Random bits that are a function of (seed, counter) and of nothing else: Philox4x32-10.
//
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

namespace ts::sampling {

// The first 64 of the 128 bits that key `seed` gives for the counter words
// (low, high, 0, 0) of `counter`. Words 2 and 3 are left for other uses of the same seed.
inline uint64_t philox_bits(uint64_t seed, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c0 | uint64_t{c1} << 32;
}

// floor(bits / 2^64 * bound): uniform below `bound` up to one part in 2^64 / bound.
inline uint64_t below(uint64_t bits, uint64_t bound) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bits) * bound >> 64);
}

}  // namespace ts::sampling
