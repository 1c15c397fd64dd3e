// Packed weights to bfloat16 tiles (32 inputs x 16 outputs, pairs of inputs together), AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "linear/dot.h"
#include "linear/lanes.h"
#include "linear/layout.h"

namespace ts {

/// Rounds two inputs' weights to bfloat16 and lays them in pairs: one row of a tile.
inline __m512i pair_bfloat16(__m512 even, __m512 odd) {
  const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
  const __m512i order = _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a,
                                         0x190009, 0x180008, 0x170007, 0x160006, 0x150005, 0x140004,
                                         0x130003, 0x120002, 0x110001, 0x100000);
  return _mm512_permutexvar_epi16(order, halves);
}

/// Weights of the quants in byte `shift / 8` of each dword, as the format defines them.
template <WeightType T>
inline __m512 dequantize(__m512i quads, int shift, __m512 scale, __m512 minimum) {
  constexpr int offset = T == WeightType::Q8_0 ? 128 : T == WeightType::Q4_0 ? 8 : 0;
  __m512i quants = _mm512_and_si512(_mm512_srli_epi32(quads, static_cast<unsigned>(shift)),
                                    _mm512_set1_epi32(255));
  if constexpr (offset != 0) quants = _mm512_sub_epi32(quants, _mm512_set1_epi32(offset));
  const __m512 values = _mm512_cvtepi32_ps(quants);
  return T == WeightType::Q4_1 ? _mm512_fmadd_ps(values, scale, minimum)
                               : _mm512_mul_ps(values, scale);
}

template <WeightType T>
inline void unpack_block_tile(const uint8_t* group, int64_t block, uint8_t* tile) {
  const uint8_t* scales = group + scale_offset(T, block);
  const __m512 scale = load_halves(scales).v;
  const __m512 minimum = T == WeightType::Q4_1 ? load_halves(scales + 32).v : _mm512_setzero_ps();
  __m512i quads[8];
  load_quads<T>(group + quant_offset(T, block), quads);
  TS_UNROLL
  for (int i = 0; i < 8; ++i) {
    const __m512i first = pair_bfloat16(dequantize<T>(quads[i], 0, scale, minimum),
                                        dequantize<T>(quads[i], 8, scale, minimum));
    const __m512i second = pair_bfloat16(dequantize<T>(quads[i], 16, scale, minimum),
                                         dequantize<T>(quads[i], 24, scale, minimum));
    _mm512_store_si512(tile + 128 * i, first);
    _mm512_store_si512(tile + 128 * i + 64, second);
  }
}

/// Unpacks a whole group; tile t of it goes to tiles + t * stride.
template <WeightType T>
void unpack_group_tiles(const uint8_t* group, int64_t num_tiles, uint8_t* tiles, int64_t stride) {
  for (int64_t index = 0; index < num_tiles; ++index, tiles += stride) {
    if constexpr (is_block_format(T)) {
      unpack_block_tile<T>(group, index, tiles);
      continue;
    }
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

}  // namespace ts
