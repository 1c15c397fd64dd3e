// Four rows against an unpacked group on AVX2, as bytes: what the kernels for few rows (dot_avx2.h)
// compute, without unpacking codes and scales anew for every four rows. Rows have one plane; on
// AVX-VNNI also two.
#pragma once

#include "linear/wide_block.h"

#if TS_LEVEL == 1

namespace ts {

/// One 32-block of a group as the kernel reads it: codes in VNNI order, float32 scales, and
/// minimums and zero points where the format has them.
template <WeightType T>
struct alignas(64) ByteBlock {
  static constexpr int kNumSubs = block_format(T).num_subs;

  uint8_t lines[kQuads][64];
  float scale[kNumSubs][kGroupSize];
  float minimum[kNumSubs][kGroupSize];
  int32_t zeros[kGroupSize];
};

/// Unpacks blocks [begin, end) of a group.
template <WeightType T, int G>
void unpack_wide(const uint8_t* group, int64_t /*num_inputs*/, int64_t begin, int64_t end,
                 ByteBlock<T>* blocks) {
  static_assert(G == 1);
  constexpr BlockFormat format = block_format(T);
  ScaleReader<T> reader;
  for (int64_t index = begin; index < end; ++index) {
    ByteBlock<T>& block = blocks[index - begin];
    const uint8_t* quants = group + format.quant_offset(index);
    TS_UNROLL
    for (int quad = 0; quad < kQuads; ++quad) {
      auto* line = reinterpret_cast<__m256i*>(block.lines[quad]);
      _mm256_store_si256(line, load_byte_quad<T>(quants, quad, 0));
      _mm256_store_si256(line + 1, load_byte_quad<T>(quants, quad, 1));
    }
    reader.enter(group, index);
    TS_UNROLL
    for (int sub = 0; sub < format.num_subs; ++sub) {
      Lanes scale;
      Lanes minimum;
      reader.read(sub, &scale, &minimum);
      store_lanes(block.scale[sub], scale);
      if constexpr (format.has_minimum) store_lanes(block.minimum[sub], minimum);
    }
    if constexpr (format.has_zero) {
      auto* zeros = reinterpret_cast<__m256i*>(block.zeros);
      _mm256_store_si256(zeros, reader.zeros.v[0]);
      _mm256_store_si256(zeros + 1, reader.zeros.v[1]);
    }
  }
}

/// The codes of a sub-block where they lie unpacked, from its first quad on.
struct UnpackedLines {
  const uint8_t* quads;

  TS_INLINE __m256i load(int quad, int part) const {
    return load_pairs(quads + 64 * quad + 32 * part);
  }
};

/// Adds one sub-block's part to the sums of R rows.
template <int R, int NumSubs, bool HasMinimum, int G, WeightType T, int Planes>
TS_INLINE void add_wide_sub(const ByteBlock<T>& block, const PanelBlock<Planes>& panel, int row,
                            int sub, Lanes sums[R][1]) {
  constexpr BlockFormat format = block_format(T);
  constexpr int count = format.quads_per_sub();
  UnpackedLines codes = {block.lines[sub * count]};
  asm("" : "+r"(codes.quads));  // GCC would keep a pointer for each line
  __m256i totals[R][2];
  TS_UNROLL
  for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = start_of<T>(panel, row + r, sub);
  // As many rows as have their sums in the registers.
  constexpr int step = std::min(R, 4 / Planes);
  const uint8_t* lines = row_bytes(panel, row) + 4 * sub * count;
  TS_UNROLL
  for (int r = 0; r < R; r += step) {
    dot_rows<T, step, Planes>(codes, lines + Planes * kBlockSize * r, totals + r);
    if (R != step) asm("" : "+r"(lines) : : "memory");
  }
  const Lanes scale = load_lanes(block.scale[sub]);
  const float* scaled_sum = panel.scaled_sum[sum_index(format.num_subs, sub)] + row;
  TS_UNROLL
  for (int r = 0; r < R; ++r) {
    Integers dots = {{totals[r][0], totals[r][1]}};
    if constexpr (format.has_zero) {
      const auto* zeros = reinterpret_cast<const __m256i*>(block.zeros);
      const Integers points = {{_mm256_load_si256(zeros), _mm256_load_si256(zeros + 1)}};
      dots = add_multiple(dots, points, minus_sums<T>(panel, row, sub)[r]);
    }
    const Lanes factor = multiply(scale, broadcast(panel.scale[row + r]));
    sums[r][0] = multiply_add(to_lanes(dots), factor, sums[r][0]);
    if constexpr (format.has_minimum) {
      const Lanes minimum = load_lanes(block.minimum[sub]);
      sums[r][0] = multiply_add(minimum, broadcast(scaled_sum[r]), sums[r][0]);
    }
  }
}

/// Adds unpacked blocks to the sums of a panel's rows from `row` on, or writes them if these are
/// the first blocks. Meanwhile the next ones are fetched into the second-level cache.
template <int NumSubs, bool HasMinimum, int G, WeightType T, int Planes>
void multiply_wide(const ByteBlock<T>* blocks, const PanelBlock<Planes>* panel, int row,
                   int64_t num_blocks, const NextBlocks& next, bool is_first,
                   Lanes in_out[kWideRows][1]) {
  Lanes sums[kWideRows][1];
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) sums[r][0] = is_first ? zero_lanes() : in_out[r][0];
  for (int64_t index = 0; index < num_blocks; ++index) {
    next.fetch<1>(index);
    TS_UNROLL
    for (int sub = 0; sub < NumSubs; ++sub) {
      add_wide_sub<kWideRows, NumSubs, HasMinimum, G>(blocks[index], panel[index], row, sub, sums);
    }
  }
  TS_UNROLL
  for (int r = 0; r < kWideRows; ++r) in_out[r][0] = sums[r][0];
}

}  // namespace ts

#endif
