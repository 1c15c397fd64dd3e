// AMX tile registers as a few macros: the real ones, or an emulation of them in plain C++.
//
// Register numbers must be literals: GCC pastes them into assembler text. With TS_EMULATE_TILES
// the same code runs on any processor of the AVX-512 level with BF16, so that tests reach it; on
// emulated AVX-512 (emulated/avx512.h), on any with AVX2.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear/number.h"

#ifndef TS_EMULATE_TILES
#include <immintrin.h>
#endif

namespace ts {

/// The 64 bytes that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

/// All eight registers as 16 rows of 64 bytes.
inline TileConfig full_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.num_rows[tile] = 16;
  }
  return config;
}

#ifdef TS_EMULATE_TILES

struct TileRegisters {
  bool configured = false;
  TileConfig config;
  alignas(64) uint8_t tiles[8][1024];  // rows 64 bytes apart
};

/// One set a thread, like the real ones.
inline TileRegisters& tile_registers() {
  static thread_local TileRegisters registers;
  return registers;
}

/// A tile that is touched before its configuration is loaded faults, here as there.
inline uint8_t* emulated_tile(int tile) {
  TileRegisters& registers = tile_registers();
  if (!registers.configured) __builtin_trap();
  return registers.tiles[tile];
}

inline int tile_rows(int tile) { return tile_registers().config.num_rows[tile]; }
inline int tile_row_bytes(int tile) { return tile_registers().config.row_bytes[tile]; }

inline void emulated_load(int tile, const void* source, int64_t stride) {
  uint8_t* destination = emulated_tile(tile);
  std::memset(destination, 0, 1024);
  for (int row = 0; row < tile_rows(tile); ++row) {
    std::memcpy(destination + 64 * row, static_cast<const uint8_t*>(source) + row * stride,
                static_cast<size_t>(tile_row_bytes(tile)));
  }
}

inline void emulated_store(int tile, void* destination, int64_t stride) {
  const uint8_t* source = emulated_tile(tile);
  for (int row = 0; row < tile_rows(tile); ++row) {
    std::memcpy(static_cast<uint8_t*>(destination) + row * stride, source + 64 * row,
                static_cast<size_t>(tile_row_bytes(tile)));
  }
}

/// Shapes that do not fit each other fault.
inline void check_shapes(int tile_c, int tile_a, int tile_b) {
  const bool fits = tile_rows(tile_c) == tile_rows(tile_a) &&
                    tile_row_bytes(tile_c) == tile_row_bytes(tile_b) &&
                    tile_row_bytes(tile_a) == 4 * tile_rows(tile_b);
  if (!fits) __builtin_trap();
}

/// Denormals count as zero, going in and coming out.
inline float flush(float value) {
  const uint32_t bits = bits_from_float(value);
  return (bits & 0x7f800000U) == 0 ? float_from_bits(bits & 0x80000000U) : value;
}

/// TDPBF16PS as Intel's manual defines it: even and odd products are summed apart by fused
/// multiply-adds over the tile's depth, their sum is added to the destination.
inline void emulated_dot(int tile_c, int tile_a, int tile_b) {
  check_shapes(tile_c, tile_a, tile_b);
  float c[16][16];
  uint16_t a[16][32];
  uint16_t b[16][32];
  std::memcpy(c, emulated_tile(tile_c), sizeof c);
  std::memcpy(a, emulated_tile(tile_a), sizeof a);
  std::memcpy(b, emulated_tile(tile_b), sizeof b);
  for (int row = 0; row < 16; ++row) {
    float even[16] = {};
    float odd[16] = {};
    for (int pair = 0; pair < 16; ++pair) {
      const float x0 = flush(float_from_bfloat16(a[row][2 * pair]));
      const float x1 = flush(float_from_bfloat16(a[row][2 * pair + 1]));
      for (int n = 0; n < 16; ++n) {
        const float w0 = flush(float_from_bfloat16(b[pair][2 * n]));
        const float w1 = flush(float_from_bfloat16(b[pair][2 * n + 1]));
        even[n] = flush(__builtin_fmaf(x0, w0, even[n]));
        odd[n] = flush(__builtin_fmaf(x1, w1, odd[n]));
      }
    }
    for (int n = 0; n < 16; ++n) c[row][n] = flush(c[row][n] + flush(even[n] + odd[n]));
  }
  std::memcpy(emulated_tile(tile_c), c, sizeof c);
}

/// TDPBSUD: signed bytes x unsigned bytes; what a shape leaves of a tile is zero.
inline void emulated_dot_bytes(int tile_c, int tile_a, int tile_b) {
  check_shapes(tile_c, tile_a, tile_b);
  int32_t c[16][16];
  int8_t a[16][64];
  uint8_t b[16][64];
  std::memcpy(c, emulated_tile(tile_c), sizeof c);
  std::memcpy(a, emulated_tile(tile_a), sizeof a);
  std::memcpy(b, emulated_tile(tile_b), sizeof b);
  for (int row = 0; row < tile_rows(tile_c); ++row) {
    for (int quad = 0; quad < tile_rows(tile_b); ++quad) {
      for (int n = 0; n < 16; ++n) {
        for (int i = 0; i < 4; ++i) c[row][n] += a[row][4 * quad + i] * b[quad][4 * n + i];
      }
    }
  }
  std::memcpy(emulated_tile(tile_c), c, sizeof c);
}

#define TS_TILE_ZERO(tile) std::memset(emulated_tile(tile), 0, 1024)
#define TS_TILE_LOAD(tile, source, stride) emulated_load(tile, source, stride)
#define TS_TILE_STORE(tile, destination, stride) emulated_store(tile, destination, stride)
#define TS_TILE_DOT(c, a, b) emulated_dot(c, a, b)
#define TS_TILE_DOT_BYTES(c, a, b) emulated_dot_bytes(c, a, b)

inline void load_tile_config(const TileConfig& config) {
  tile_registers().configured = true;
  tile_registers().config = config;
}
inline void release_tiles() { tile_registers().configured = false; }

#else

/// GCC 12 does not know that a tile load reads memory, and may move stores after it. Some versions
/// cast the address without parentheses.
#define TS_TILE_LOAD(tile, source, stride) \
  do {                                     \
    asm volatile("" : : : "memory");       \
    _tile_loadd(tile, (source), (stride)); \
  } while (false)
#define TS_TILE_ZERO(tile) _tile_zero(tile)
#define TS_TILE_STORE(tile, destination, stride) _tile_stored(tile, (destination), (stride))
#define TS_TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TS_TILE_DOT_BYTES(c, a, b) _tile_dpbsud(c, a, b)

inline void load_tile_config(const TileConfig& config) {
  // GCC 12 believes that LDTILECFG reads 8 bytes and may drop the stores of the other 56.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void release_tiles() { _tile_release(); }

#endif

/// The calling thread's tiles, configured for as long as this lives.
class TileSession {
 public:
  explicit TileSession(const TileConfig& config) { load_tile_config(config); }
  ~TileSession() { release_tiles(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
};

}  // namespace ts
