// Where things lie in packed weights and in prepared activations: shared by packing and kernels.
//
// Packed block formats: per group of 16 outputs, per unit (2 blocks of 32 inputs, or the 8 of a
// format whose scales come in two steps, or those of two groups, at most 8): quants of all its
// blocks, scales of all its blocks, and with two steps the float16 of the whole unit. Units begin
// on 64-byte lines and so do quants; what a last unit lacks in blocks is zero.
//   quants: planes of 1, 2, 4 or 8 bits: the low bits of all codes, then the high bits. A plane of
//     b bits is b vectors of 64 bytes. Byte 4 o + i of one belongs to output o and to input i of
//     several quads (four inputs each): bits 0 .. b - 1 of vector v hold quad v, the next b bits
//     quad v + b, and so on. So a quad is a shift and a mask away from the order that VNNI wants.
//   scales of a block, in one step: 16 x float16 d, then 16 x float16 m if there are minimums.
//   scales of a group, if floats: per sub-block 16 x float32, then 16 x uint8 zero points if any.
//   scales of a block, in two: per sub-block 16 x int8, then the same of the minimums (or both in
//     one byte, the minimum in its high nibble). Of a unit: 16 x float16 d, 16 x float16 -dmin.
// Packed float formats: inputs padded with zeros to a multiple of 32.
//   F32, F16: per input, 16 outputs. BF16: per pair of inputs, 16 outputs x 2 (an AMX tile's rows).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "linear/linear.h"

#ifndef TS_LEVEL
#error "TS_LEVEL must be 1 (AVX2), 2 (AVX-512 with VNNI), 3 (AMX) or 0 (what the flags allow)"
#endif

// For parts of kernels: a call between them would move all lanes to memory and back.
#define TS_INLINE __attribute__((always_inline)) inline

namespace ts {

/// AVX-VNNI is AVX2 with a dot product of bytes that has 32-bit sums. It shares level 1, but meets
/// all codes as bytes, so that it needs no pairs of int16.
#if defined(TS_AVX_VNNI)
constexpr bool kHasByteDots = true;
#else
constexpr bool kHasByteDots = false;
#endif

constexpr int64_t kBlockSize = 32;  // inputs that share a scale of the activations
constexpr int kQuads = 8;           // of four inputs, in a block
constexpr int64_t kPanelRows = 8;   // rows of activations that lie together
constexpr int64_t kTileRows = 16;   // rows of an AMX tile
constexpr int64_t kTileBytes = 1024;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

/// How the scale of a sub-block is stored: as float16 or float32, or as an int8 or a nibble that a
/// float16 of 256 inputs is multiplied by.
enum class Scales { Halves, Floats, Bytes, Nibbles };

/// What a format looks its codes up in.
enum class Table { None, Levels, Floats, Iq1, Iq2, Iq3Xxs, Iq3S };

/// In what block formats differ. A weight is scale * (code - offset - zero point) + minimum, where
/// a format with a table looks the code up first.
struct BlockFormat {
  int low_bits;  // of a code, in the first plane; 0 if this is no block format
  int high_bits;
  int offset;
  int num_subs;  // sub-blocks of a block, each with a scale
  Scales scales;
  bool has_minimum;
  Table table;
  int blocks_per_scale = 1;
  bool has_zero = false;
  float unit = 1.0F;  // what the float16 of 256 inputs is multiplied by

  TS_INLINE constexpr bool has_table() const { return table != Table::None; }
  TS_INLINE constexpr int num_bits() const { return low_bits + high_bits; }
  TS_INLINE constexpr int quads_per_sub() const { return kQuads / num_subs; }
  TS_INLINE constexpr bool two_steps() const {
    return scales == Scales::Bytes || scales == Scales::Nibbles;
  }
  /// Bits of a code, or of what it is looked up as.
  TS_INLINE constexpr int value_bits() const {
    switch (table) {
      case Table::Levels:
        return 8;
      case Table::Iq2:
        return 7;
      case Table::Iq3Xxs:
        return 6;
      case Table::Floats:
      case Table::Iq1:
      case Table::Iq3S:
        return 5;
      case Table::None:
        break;
    }
    return num_bits();
  }

  TS_INLINE constexpr int64_t blocks_per_unit() const {
    return two_steps() ? 8 : std::min(8, 2 * blocks_per_scale);
  }
  TS_INLINE constexpr int64_t quant_bytes() const { return 64 * num_bits(); }
  /// Bytes between the scales of a sub-block and of the next.
  TS_INLINE constexpr int64_t scale_step() const {
    return kGroupSize * (two_steps() ? 1 : scales == Scales::Floats ? 4 : 2);
  }
  /// From a block's scales to its minimums.
  TS_INLINE constexpr int64_t minimum_offset() const { return num_subs * scale_step(); }
  /// From a group's scales to its zero points.
  TS_INLINE constexpr int64_t zero_offset() const { return num_subs * scale_step(); }
  TS_INLINE constexpr int64_t scale_bytes() const {
    return minimum_offset() * (has_minimum && scales != Scales::Nibbles ? 2 : 1) +
           (has_zero ? kGroupSize : 0);
  }
  TS_INLINE constexpr int64_t unit_bytes() const {
    const int64_t unit_scales = two_steps() ? 2 * kGroupSize * (has_minimum ? 2 : 1) : 0;
    const int64_t all_scales = blocks_per_unit() / blocks_per_scale * scale_bytes();
    return round_up(blocks_per_unit() * quant_bytes() + all_scales + unit_scales, 64);
  }
  /// An even share of a unit's bytes.
  TS_INLINE constexpr int64_t block_bytes() const { return unit_bytes() / blocks_per_unit(); }

  TS_INLINE constexpr int64_t unit_offset(int64_t block) const {
    return block / blocks_per_unit() * unit_bytes();
  }
  TS_INLINE constexpr int64_t quant_offset(int64_t block) const {
    return unit_offset(block) + block % blocks_per_unit() * quant_bytes();
  }
  TS_INLINE constexpr int64_t scale_offset(int64_t block) const {
    return unit_offset(block) + blocks_per_unit() * quant_bytes() +
           block % blocks_per_unit() / blocks_per_scale * scale_bytes();
  }
  /// Of the float16 scales of the block's unit; those of the minimums follow.
  TS_INLINE constexpr int64_t unit_scale_offset(int64_t block) const {
    return unit_offset(block) + blocks_per_unit() * (quant_bytes() + scale_bytes());
  }
};

constexpr BlockFormat codebook_format(WeightType type) {
  switch (type) {
    //        low high offset subs scales    minimum table      blocks a scale, zero point, unit
    case WeightType::IQ1G16:
      return {2, 1, 16, 2, Scales::Bytes, false, Table::Iq1, 1, false, 0.125F};
    case WeightType::IQ2G16:
      return {2, 1, 64, 2, Scales::Bytes, false, Table::Iq2, 1, false, 0.125F};
    case WeightType::IQ2G32:
      return {2, 1, 64, 1, Scales::Bytes, false, Table::Iq2, 1, false, 0.125F};
    case WeightType::IQ3XXS:
      return {4, 0, 32, 1, Scales::Bytes, false, Table::Iq3Xxs, 1, false, 0.5F};
    case WeightType::IQ3S:
      return {4, 0, 16, 1, Scales::Bytes, false, Table::Iq3S};
    default:
      return {};
  }
}

constexpr BlockFormat block_format(WeightType type) {
  switch (type) {
    //        low high offset subs scales        minimum table
    case WeightType::Q4_0:
      return {4, 0, 8, 1, Scales::Halves, false, Table::None};
    case WeightType::Q4_1:
      return {4, 0, 0, 1, Scales::Halves, true, Table::None};
    case WeightType::Q5_0:
      return {4, 1, 16, 1, Scales::Halves, false, Table::None};
    case WeightType::Q5_1:
      return {4, 1, 0, 1, Scales::Halves, true, Table::None};
    case WeightType::Q8_0:
      return {8, 0, 128, 1, Scales::Halves, false, Table::None};
    case WeightType::Q2_K:
      return {2, 0, 0, 2, Scales::Nibbles, true, Table::None};
    case WeightType::Q3_K:
      return {2, 1, 4, 2, Scales::Bytes, false, Table::None};
    case WeightType::Q4_K:
      return {4, 0, 0, 1, Scales::Bytes, true, Table::None};
    case WeightType::Q5_K:
      return {4, 1, 0, 1, Scales::Bytes, true, Table::None};
    case WeightType::Q6_K:
      return {4, 2, 32, 2, Scales::Bytes, false, Table::None};
    case WeightType::IQ4_NL:
      return {4, 0, 128, 1, Scales::Halves, false, Table::Levels};
    case WeightType::IQ4_XS:
      return {4, 0, 128, 1, Scales::Bytes, false, Table::Levels};
    //        low high offset subs scales        minimum table       blocks a scale, zero point
    case WeightType::TQ2_0:
      return {2, 0, 1, 1, Scales::Halves, false, Table::None, 8};
    case WeightType::Int4G32:
      return {4, 0, 8, 1, Scales::Floats, false, Table::None};
    case WeightType::Int4G128:
      return {4, 0, 8, 1, Scales::Floats, false, Table::None, 4};
    case WeightType::Int4G32Z:
      return {4, 0, 0, 1, Scales::Floats, false, Table::None, 1, true};
    case WeightType::Int4G128Z:
      return {4, 0, 0, 1, Scales::Floats, false, Table::None, 4, true};
    case WeightType::Int8G32:
      return {8, 0, 128, 1, Scales::Floats, false, Table::None};
    case WeightType::Int8G128:
      return {8, 0, 128, 1, Scales::Floats, false, Table::None, 4};
    case WeightType::E2M1G16:
      return {4, 0, 16, 2, Scales::Floats, false, Table::Floats};
    case WeightType::E2M1G32:
      return {4, 0, 16, 1, Scales::Floats, false, Table::Floats};
    default:
      return codebook_format(type);
  }
}

constexpr bool is_block_format(WeightType type) { return block_format(type).low_bits != 0; }

constexpr int64_t element_bytes(WeightType type) { return type == WeightType::F32 ? 4 : 2; }

/// Bytes of one packed group of 16 outputs.
TS_INLINE constexpr int64_t group_bytes(WeightType type, int64_t num_inputs) {
  if (is_block_format(type)) {
    const BlockFormat format = block_format(type);
    return format.unit_offset(round_up(num_inputs / kBlockSize, format.blocks_per_unit()));
  }
  return round_up(num_inputs, kBlockSize) * kGroupSize * element_bytes(type);
}

#define TS_VISIT(name)   \
  case WeightType::name: \
    return visit(std::integral_constant<WeightType, WeightType::name>{}), true

/// Calls `visit` with the type as a constant (a std::integral_constant) if it is a float or a block
/// of 32; else returns false.
template <typename Visitor>
bool with_plain_type(WeightType type, const Visitor& visit) {
  switch (type) {
    TS_VISIT(F32);
    TS_VISIT(F16);
    TS_VISIT(BF16);
    TS_VISIT(Q4_0);
    TS_VISIT(Q4_1);
    TS_VISIT(Q5_0);
    TS_VISIT(Q5_1);
    TS_VISIT(Q8_0);
    TS_VISIT(IQ4_NL);
    default:
      return false;
  }
}

/// The same for super-blocks of 256.
template <typename Visitor>
bool with_super_type(WeightType type, const Visitor& visit) {
  switch (type) {
    TS_VISIT(Q2_K);
    TS_VISIT(Q3_K);
    TS_VISIT(Q4_K);
    TS_VISIT(Q5_K);
    TS_VISIT(Q6_K);
    TS_VISIT(IQ4_XS);
    TS_VISIT(TQ2_0);
    default:
      return false;
  }
}

/// The same for groups of published folders.
template <typename Visitor>
bool with_published_type(WeightType type, const Visitor& visit) {
  switch (type) {
    TS_VISIT(Int4G32);
    TS_VISIT(Int4G128);
    TS_VISIT(Int4G32Z);
    TS_VISIT(Int4G128Z);
    TS_VISIT(Int8G32);
    TS_VISIT(Int8G128);
    TS_VISIT(E2M1G16);
    TS_VISIT(E2M1G32);
    default:
      return false;
  }
}

/// The same for codebook formats.
template <typename Visitor>
bool with_codebook_type(WeightType type, const Visitor& visit) {
  switch (type) {
    TS_VISIT(IQ1G16);
    TS_VISIT(IQ2G16);
    TS_VISIT(IQ2G32);
    TS_VISIT(IQ3XXS);
    TS_VISIT(IQ3S);
    default:
      return false;
  }
}

#undef TS_VISIT

/// The same for every type.
template <typename Visitor>
bool with_type(WeightType type, const Visitor& visit) {
  return with_plain_type(type, visit) || with_super_type(type, visit) ||
         with_published_type(type, visit) || with_codebook_type(type, visit);
}

/// 32 inputs of 8 rows, quantized; panels of 8 rows follow each other, each with all its blocks.
/// What a row's bytes hold is the level's own business: two int8 planes, or one for activations of
/// 8 bits, or int16, which counts as two.
template <int Planes>
struct alignas(64) PanelBlock {
  static constexpr int kRowBytes = Planes * kBlockSize;

  uint8_t rows[kPanelRows][kRowBytes];
  float scale[kPanelRows];
  float scaled_sum[3][kPanelRows];   // scale * sum of q: of all 32, of the first 16, of the others
  int32_t minus_sum[3][kPanelRows];  // -(sum of q), of the same values
  int32_t minus_eight_sum[kPanelRows];  // -8 (sum of all q), which spares Q4_0 a shift
};
static_assert(sizeof(PanelBlock<1>) == 512 && sizeof(PanelBlock<2>) == 768);

/// Which of a panel's sums belong to sub-block `sub` of `num_subs`.
constexpr int sum_index(int num_subs, int sub) { return num_subs - 1 + sub; }

/// 16 inputs of 8 rows in float32, for F32, F16 and BF16 weights.
constexpr int64_t kFloatsPerLine = 16;
struct alignas(64) FloatBlock {
  float rows[kPanelRows][kFloatsPerLine];
};

/// Whether activations meet codes of a block format as planes of int8. AVX2 without AVX-VNNI
/// multiplies codes of 8 bits as int16, and levels without an instruction for bytes all codes.
constexpr bool has_planes(WeightType type) {
#if TS_LEVEL == 1 && !defined(TS_AVX_VNNI)
  return is_block_format(type) && block_format(type).value_bits() < 8;
#elif TS_LEVEL >= 1 || defined(__ARM_FEATURE_DOTPROD)
  return is_block_format(type);
#else
  static_cast<void>(type);
  return false;
#endif
}

constexpr bool kHasPlanes = has_planes(WeightType::Q4_0);
constexpr bool kHasPairs = !has_planes(WeightType::Q8_0);

/// Mixed rows: one of this many blocks is fine, in each stretch (measured,
/// docs/development/kernels/activations.md).
constexpr int64_t kMixedShare = 8;
constexpr int64_t kMixedStretch = 1024;
static_assert(kMixedStretch % kMixedShare == 0);

constexpr int64_t num_fine_blocks(int64_t num_blocks) {
  return round_up(num_blocks, kMixedShare) / kMixedShare;
}

/// Where in the weights the fine blocks of a panel's rows belong: the first ones of all rows, the
/// second ones, ...; a row's are in order.
using FinePlaces = int32_t[kPanelRows];

/// A panel of mixed rows: coarse blocks, then what the fine ones lack, then their places.
template <int Planes>
constexpr int64_t mixed_panel_blocks(int64_t num_blocks) {
  const int64_t num_fine = num_fine_blocks(num_blocks);
  const auto size = static_cast<int64_t>(sizeof(PanelBlock<Planes>));
  const int64_t places = num_fine * static_cast<int64_t>(sizeof(FinePlaces));
  return num_blocks + num_fine + round_up(places, size) / size;
}

/// Whether mixed rows have blocks of 8 bits against such weights.
constexpr bool is_mixed_format(WeightType type) {
  const BlockFormat format = block_format(type);
  return is_block_format(type) && format.num_subs == 1 && format.num_bits() <= 5 &&
         !format.has_table();
}

/// What the rows were made into. Blocks have activations of 15 bits, coarse blocks of 8, mixed ones
/// of either; those of int16 are apart on the level that knows both. Tiles: 16 rows x 32 inputs of
/// bfloat16, 1 KB each; split tiles: each followed by that of what rounding took away.
enum class Preparation {
  Blocks,
  CoarseBlocks,
  MixedBlocks,
  Pairs,
  CoarsePairs,
  MixedPairs,
  Floats,
  Tiles,
  SplitTiles
};

constexpr Preparation preparation(WeightType type, RowKind kind) {
  if (TS_LEVEL == 3 && type != WeightType::F32) {
    if (kind == RowKind::Prompt) return Preparation::Tiles;
    if (kind == RowKind::PrecisePrompt) return Preparation::SplitTiles;
  }
  if (!is_block_format(type)) return Preparation::Floats;
  const bool has_bytes = has_planes(type);
  if (kind == RowKind::Coarse) {
    return has_bytes ? Preparation::CoarseBlocks : Preparation::CoarsePairs;
  }
  if (kind == RowKind::Mixed && is_mixed_format(type)) {
    return has_bytes ? Preparation::MixedBlocks : Preparation::MixedPairs;
  }
  return has_bytes ? Preparation::Blocks : Preparation::Pairs;
}

}  // namespace ts
