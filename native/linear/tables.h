// What codes of formats with a table stand for: whole numbers, plus the format's offset.
#pragma once

#include <cstdint>

#include "linear/layout.h"

namespace ts {

/// The weights of the codes of IQ4_NL and IQ4_XS, plus their offset of 128.
alignas(16) constexpr uint8_t kCodeTable[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};

/// Twice the numbers of E2M1, plus their offset of 16.
alignas(16) constexpr uint8_t kFloatTable[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                 16, 15, 14, 13, 12, 10, 8,  4};

/// Codebook formats (model/quant/iq_quants.py): magnitudes, then the same with a minus sign, plus
/// their offsets. IQ1 has -1, 0 and 1, in eighths, plus and minus a shift of one eighth.
alignas(16) constexpr uint8_t kIq1Table[16] = {9, 17, 25, 0, 7, 15, 23};
alignas(16) constexpr uint8_t kIq2Table[16] = {72, 89, 107, 0, 56, 39, 21};
alignas(16) constexpr uint8_t kIq3XxsTable[16] = {34, 38, 42, 46, 50, 54, 58, 63,
                                                  30, 26, 22, 18, 14, 10, 6,  1};
alignas(16) constexpr uint8_t kIq3STable[16] = {17, 19, 21, 23, 25, 27, 29, 31,
                                                15, 13, 11, 9,  7,  5,  3,  1};

/// The 16 entries of a format's table.
constexpr const uint8_t* code_table(WeightType type) {
  switch (block_format(type).table) {
    case Table::Floats:
      return kFloatTable;
    case Table::Iq1:
      return kIq1Table;
    case Table::Iq2:
      return kIq2Table;
    case Table::Iq3Xxs:
      return kIq3XxsTable;
    case Table::Iq3S:
      return kIq3STable;
    default:
      return kCodeTable;
  }
}

}  // namespace ts
