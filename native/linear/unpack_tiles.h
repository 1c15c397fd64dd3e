// Packed weights to bfloat16 tiles (32 inputs x 16 outputs, pairs of inputs together), AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

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

/// Tiles [begin, end) of a group, and the memory that they are unpacked into, `stride` bytes each.
/// With `low`, what rounding took away from a tile lies that many bytes after it. Meanwhile the
/// same amount of packed weights at `next` is fetched.
struct UnpackedTiles {
  int64_t begin;
  int64_t end;
  uint8_t* data;
  int64_t stride;
  int64_t low;
  const uint8_t* next;
};

/// Fetches the packed weights of one tile into the second-level cache.
template <int64_t Bytes>
TS_INLINE void fetch_tile(const uint8_t* packed) {
  TS_UNROLL
  for (int64_t offset = 0; offset < Bytes; offset += 64) __builtin_prefetch(packed + offset, 0, 2);
}

/// One row of a tile; the same of what rounding took away.
template <bool IsSplit>
TS_INLINE void store_pairs(uint8_t* row, int64_t low, __m512 even, __m512 odd) {
  const __m512i pairs = pair_bfloat16(even, odd);
  _mm512_store_si512(row, pairs);
  if constexpr (IsSplit) {
    const __m512 even_high = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 odd_high = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
    _mm512_store_si512(row + low,
                       pair_bfloat16(_mm512_sub_ps(even, even_high), _mm512_sub_ps(odd, odd_high)));
  }
}

/// Weights of the codes in byte `shift / 8` of each dword, as the format defines them.
template <WeightType T>
inline __m512 dequantize(__m512i quads, int shift, const Integers& zeros, Lanes scale,
                         Lanes minimum) {
  constexpr BlockFormat format = block_format(T);
  __m512i codes = _mm512_and_si512(_mm512_srli_epi32(quads, static_cast<unsigned>(shift)),
                                   _mm512_set1_epi32(255));
  if constexpr (format.offset != 0) {
    codes = _mm512_sub_epi32(codes, _mm512_set1_epi32(format.offset));
  }
  if constexpr (format.has_zero) codes = _mm512_sub_epi32(codes, zeros.v);
  const Lanes values = to_lanes({codes});
  return format.has_minimum ? multiply_add(values, scale, minimum).v : multiply(values, scale).v;
}

template <WeightType T, bool IsSplit>
TS_INLINE void unpack_block_tile(const uint8_t* quants, const ScaleReader<T>& reader, uint8_t* tile,
                                 int64_t low) {
  constexpr BlockFormat format = block_format(T);
  const Codes<T> codes = load_codes<T>(quants);
  Lanes scale[format.num_subs];
  Lanes minimum[format.num_subs];
  for (int sub = 0; sub < format.num_subs; ++sub) reader.read(sub, &scale[sub], &minimum[sub]);
  TS_UNROLL
  for (int i = 0; i < kQuads; ++i) {
    const int sub = i / format.quads_per_sub();
    store_pairs<IsSplit>(tile + 128 * i, low,
                         dequantize<T>(codes.quads[i], 0, reader.zeros, scale[sub], minimum[sub]),
                         dequantize<T>(codes.quads[i], 8, reader.zeros, scale[sub], minimum[sub]));
    store_pairs<IsSplit>(tile + 128 * i + 64, low,
                         dequantize<T>(codes.quads[i], 16, reader.zeros, scale[sub], minimum[sub]),
                         dequantize<T>(codes.quads[i], 24, reader.zeros, scale[sub], minimum[sub]));
  }
}

template <WeightType T, bool IsSplit>
void unpack_block_group(const uint8_t* group, UnpackedTiles tiles) {
  constexpr BlockFormat format = block_format(T);
  ScaleReader<T> reader;
  for (int64_t index = tiles.begin; index < tiles.end; ++index, tiles.data += tiles.stride) {
    fetch_tile<format.block_bytes()>(tiles.next + (index - tiles.begin) * format.block_bytes());
    if (index == tiles.begin) {
      reader.template enter<true>(group, index);
    } else {
      reader.enter(group, index);
    }
    unpack_block_tile<T, IsSplit>(group + format.quant_offset(index), reader, tiles.data,
                                  tiles.low);
  }
}

/// Float16: in the order of tiles already, but for the pairs.
template <bool IsSplit>
void unpack_half_group(const uint8_t* group, UnpackedTiles tiles) {
  for (int64_t index = tiles.begin; index < tiles.end; ++index, tiles.data += tiles.stride) {
    const uint8_t* source = group + index * kTileBytes;
    fetch_tile<kTileBytes>(tiles.next + (index - tiles.begin) * kTileBytes);
    for (int64_t row = 0; row < kTileBytes; row += 64) {
      store_pairs<IsSplit>(tiles.data + row, tiles.low, load_halves(source + row).v,
                           load_halves(source + row + 32).v);
    }
  }
}

/// Unpacks tiles of any type but F32 and BF16.
template <WeightType T, bool IsSplit>
void unpack_group_tiles(const uint8_t* group, const UnpackedTiles& tiles) {
  if constexpr (is_block_format(T)) {
    unpack_block_group<T, IsSplit>(group, tiles);
  } else {
    static_assert(T == WeightType::F16);
    unpack_half_group<IsSplit>(group, tiles);
  }
}

}  // namespace ts
