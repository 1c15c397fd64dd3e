// Groups of outputs unpacked for many rows: bytes in VNNI order (on AVX2 pairs of int16), scales in
// float32.
#pragma once

#include "linear/layout.h"

#if TS_LEVEL >= 1

#include <cstdint>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/scales.h"

namespace ts {

constexpr int kWideRows = TS_LEVEL == 3 ? int{kPanelRows} : 4;
constexpr int kWideLines = TS_LEVEL == 1 ? 2 * kQuads : kQuads;  // of 64 bytes, for 16 outputs

/// What the kernel needs to know of a format: a format without minimums has signed weights.
template <WeightType T>
struct WideShape {
  static constexpr int num_subs = block_format(T).num_subs;
  static constexpr bool has_minimum = block_format(T).has_minimum;
  static_assert(has_minimum == (block_format(T).offset == 0 && !block_format(T).has_zero));
};

/// One 32-block of G groups, as the kernel reads it: bytes in VNNI order, 128 added to signed ones,
/// or int16, of each quad inputs 0 and 2, then 1 and 3; float32 scales; minimums where the format
/// has them.
template <int NumSubs, int G>
struct alignas(64) WideBlock {
  uint8_t lines[kWideLines][G][64];
  float scale[NumSubs][G][kGroupSize];
  float minimum[NumSubs][G][kGroupSize];
};

/// Unpacks one block of a group into its column of a wide one.
template <WeightType T, int G>
TS_INLINE void unpack_wide_block(const uint8_t* group, int64_t index, const ScaleReader<T>& reader,
                                 int g, WideBlock<WideShape<T>::num_subs, G>* block) {
  constexpr BlockFormat format = block_format(T);
#if TS_LEVEL == 1
  const uint8_t* quants = group + format.quant_offset(index);
  TS_UNROLL
  for (int quad = 0; quad < kQuads; ++quad) {
    TS_UNROLL
    for (int part = 0; part < kParts; ++part) {
      const __m256i bytes = load_byte_quad<T>(quants, quad, part);
      TS_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        __m256i pairs = _mm256_sub_epi16(pairs_of(bytes, odd), _mm256_set1_epi16(format.offset));
        if constexpr (format.has_zero) {
          const __m256i zeros = reader.zeros.v[part];
          pairs = _mm256_sub_epi16(pairs, combine(zeros, _mm256_slli_epi32(zeros, 16)));
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(block->lines[2 * quad + odd][g]) + part,
                           pairs);
      }
    }
  }
#else
  constexpr int to_bytes = format.has_minimum ? 0 : 128 - format.offset;
  const Codes<T> codes = load_codes<T>(group + format.quant_offset(index));
  TS_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    __m512i bytes = _mm512_add_epi8(codes.quads[i], _mm512_set1_epi8(to_bytes));
    if constexpr (format.has_zero) {
      const __m512i zeros = _mm512_mullo_epi32(reader.zeros.v, _mm512_set1_epi32(0x01010101));
      bytes = _mm512_sub_epi8(bytes, zeros);
    }
    _mm512_store_si512(block->lines[i][g], bytes);
  }
#endif
  TS_UNROLL
  for (int sub = 0; sub < format.num_subs; ++sub) {
    Lanes scale;
    Lanes minimum;
    reader.read(sub, &scale, &minimum);
    store_lanes(block->scale[sub][g], scale);
    if constexpr (format.has_minimum) store_lanes(block->minimum[sub][g], minimum);
  }
}

/// Unpacks blocks [begin, end) of G groups that follow each other.
template <WeightType T, int G>
void unpack_wide(const uint8_t* groups, int64_t num_inputs, int64_t begin, int64_t end,
                 WideBlock<WideShape<T>::num_subs, G>* blocks) {
  const int64_t size = group_bytes(T, num_inputs);
  ScaleReader<T> readers[G];
  for (int64_t index = begin; index < end; ++index) {
    for (int g = 0; g < G; ++g) {
      const uint8_t* group = groups + g * size;
      readers[g].enter(group, index);
      unpack_wide_block<T, G>(group, index, readers[g], g, blocks + (index - begin));
    }
  }
}

/// The packed blocks that come next, of groups `group_bytes` apart; none if there are no
/// bytes of them for each block.
struct NextBlocks {
  const uint8_t* data;
  int64_t group_bytes;
  int64_t block_bytes;

  template <int G>
  TS_INLINE void fetch(int64_t index) const {
    for (int64_t offset = 0; offset < block_bytes; offset += 64) {
      const uint8_t* line = data + index * block_bytes + offset;
      TS_UNROLL
      for (int g = 0; g < G; ++g) __builtin_prefetch(line + g * group_bytes, 0, 2);
    }
  }
};

}  // namespace ts

#endif
