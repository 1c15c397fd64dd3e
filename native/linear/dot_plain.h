// Dot products in plain C++, for processors other than x86-64 and AArch64.
//
// A row's 64 bytes are 32 x int16, in order.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/tables.h"

namespace ts {

inline void store_pairs(const int32_t* q, uint8_t* row) {
  int16_t values[kBlockSize];
  for (int i = 0; i < kBlockSize; ++i) values[i] = static_cast<int16_t>(q[i]);
  std::memcpy(row, values, sizeof values);
}

template <WeightType T>
struct Codes {
  const uint8_t* quants;
};

template <WeightType T>
inline Codes<T> load_codes(const uint8_t* quants) {
  return {quants};
}

/// ORs input i of a quad x 16 outputs from a plane, at bit `left`.
inline void add_plane(const uint8_t* plane, int bits, int quad, int i, int left,
                      int16_t codes[kGroupSize]) {
  uint32_t packed[kGroupSize];
  std::memcpy(packed, plane + 64 * (quad % bits), sizeof packed);
  const int shift = 8 * i + quad / bits * bits;
  const uint32_t mask = (1U << bits) - 1;
  for (int o = 0; o < kGroupSize; ++o) {
    codes[o] = static_cast<int16_t>(codes[o] | (packed[o] >> shift & mask) << left);
  }
}

/// (code - offset) of one input x 16 outputs.
template <WeightType T>
inline void load_input(const uint8_t* quants, int quad, int i, int16_t codes[kGroupSize]) {
  constexpr BlockFormat format = block_format(T);
  std::memset(codes, 0, kGroupSize * sizeof codes[0]);
  add_plane(quants, format.low_bits, quad, i, 0, codes);
  if constexpr (format.high_bits != 0) {
    add_plane(quants + 64 * format.low_bits, format.high_bits, quad, i, format.low_bits, codes);
  }
  for (int o = 0; o < kGroupSize; ++o) {
    const int code = format.has_table() ? code_table(T)[codes[o]] : codes[o];
    codes[o] = static_cast<int16_t>(code - format.offset);
  }
}

template <WeightType T, int R, int Planes>
inline void dot_sub(const Codes<T>& codes, const PanelBlock<Planes>& block, int row, int sub,
                    Integers sums[R]) {
  constexpr int count = 4 * block_format(T).quads_per_sub();
  int16_t activations[R][kBlockSize];
  for (int r = 0; r < R; ++r) {
    std::memcpy(activations[r], block.rows[row + r], sizeof activations[r]);
    sums[r] = Integers{};
  }
  for (int input = sub * count; input < (sub + 1) * count; ++input) {
    int16_t weights[kGroupSize];
    load_input<T>(codes.quants, input / 4, input % 4, weights);
    for (int r = 0; r < R; ++r) {
      for (int o = 0; o < kGroupSize; ++o) sums[r].v[o] += weights[o] * activations[r][input];
    }
  }
}

}  // namespace ts
