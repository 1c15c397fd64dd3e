// Packed weights to bfloat16 tiles (32 inputs x 16 outputs, pairs of inputs together), AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"
#include "linear/scales.h"

namespace ts {

/// Rounds two inputs' weights to bfloat16 and lays them in pairs: one row of a tile.
inline __m512i pair_bfloat16(__m512 even, __m512 odd) {
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i order = _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a,
                                         0x190009, 0x180008, 0x170007, 0x160006, 0x150005, 0x140004,
                                         0x130003, 0x120002, 0x110001, 0x100000);
  return _mm512_permutexvar_epi16(order, halves);
}

/// Weights of the codes in byte `shift / 8` of each dword, as the format defines them.
template <WeightType T>
inline __m512 dequantize(__m512i quads, int shift, Lanes scale, Lanes minimum) {
  constexpr BlockFormat format = block_format(T);
  __m512i codes = _mm512_and_si512(_mm512_srli_epi32(quads, static_cast<unsigned>(shift)),
                                   _mm512_set1_epi32(255));
  if constexpr (format.offset != 0) {
    codes = _mm512_sub_epi32(codes, _mm512_set1_epi32(format.offset));
  }
  const Lanes values = to_lanes({codes});
  return format.has_minimum ? multiply_add(values, scale, minimum).v : multiply(values, scale).v;
}

template <WeightType T>
TS_INLINE void unpack_block_tile(const uint8_t* quants, const ScaleReader<T>& reader,
                                 uint8_t* tile) {
  constexpr BlockFormat format = block_format(T);
  const Codes<T> codes = load_codes<T>(quants);
  Lanes scale[format.num_subs];
  Lanes minimum[format.num_subs];
  for (int sub = 0; sub < format.num_subs; ++sub) reader.read(sub, &scale[sub], &minimum[sub]);
  TS_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    const int sub = i / format.quads_per_sub();
    const __m512i first = pair_bfloat16(dequantize<T>(codes.quads[i], 0, scale[sub], minimum[sub]),
                                        dequantize<T>(codes.quads[i], 8, scale[sub], minimum[sub]));
    const __m512i second =
        pair_bfloat16(dequantize<T>(codes.quads[i], 16, scale[sub], minimum[sub]),
                      dequantize<T>(codes.quads[i], 24, scale[sub], minimum[sub]));
    _mm512_store_si512(tile + 128 * i, first);
    _mm512_store_si512(tile + 128 * i + 64, second);
  }
}

template <WeightType T>
void unpack_block_group(const uint8_t* group, int64_t num_tiles, uint8_t* tiles, int64_t stride) {
  ScaleReader<T> reader;
  for (int64_t index = 0; index < num_tiles; ++index, tiles += stride) {
    reader.enter(group, index);
    unpack_block_tile<T>(group + block_format(T).quant_offset(index), reader, tiles);
  }
}

/// Float formats, which are tiles already but for the rounding.
template <WeightType T>
void unpack_float_group(const uint8_t* group, int64_t num_tiles, uint8_t* tiles, int64_t stride) {
  for (int64_t index = 0; index < num_tiles; ++index, tiles += stride) {
    const uint8_t* source = group + index * kTileBytes;
    for (int64_t row = 0; row < kTileBytes; row += 64) {
      __m512i pairs = _mm512_load_si512(source + row);
      if constexpr (T == WeightType::F16) {
        pairs = pair_bfloat16(load_halves(source + row).v, load_halves(source + row + 32).v);
      }
      _mm512_store_si512(tiles + row, pairs);
    }
  }
}

/// Unpacks a whole group of any type but F32; tile t of it goes to tiles + t * stride.
template <WeightType T>
void unpack_group_tiles(const uint8_t* group, int64_t num_tiles, uint8_t* tiles, int64_t stride) {
  if constexpr (is_block_format(T)) {
    unpack_block_group<T>(group, num_tiles, tiles, stride);
  } else {
    static_assert(element_bytes(T) == 2);
    unpack_float_group<T>(group, num_tiles, tiles, stride);
  }
}

}  // namespace ts
