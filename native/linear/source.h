// GGUF's quantized blocks, taken apart into codes and scales: the layouts of ggml-common.h; groups
// with float32 scales: those of model/quant/grouped.py; and codes of codebook formats:
// model/quant/iq_quants.py.
#pragma once

#include <cstdint>

#include "linear/linear.h"

namespace ts {

/// Inputs and bytes of one block in its source.
struct SourceSize {
  int64_t inputs;
  int64_t bytes;
};

/// Of block formats alone.
constexpr SourceSize source_size(WeightType type) {
  switch (type) {
    case WeightType::Q4_0:
    case WeightType::IQ4_NL:
      return {32, 18};
    case WeightType::Q4_1:
      return {32, 20};
    case WeightType::Q5_0:
      return {32, 22};
    case WeightType::Q5_1:
      return {32, 24};
    case WeightType::Q8_0:
      return {32, 34};
    case WeightType::Q2_K:
      return {256, 84};
    case WeightType::Q3_K:
      return {256, 110};
    case WeightType::Q4_K:
      return {256, 144};
    case WeightType::Q5_K:
      return {256, 176};
    case WeightType::Q6_K:
      return {256, 210};
    case WeightType::IQ4_XS:
      return {256, 136};
    case WeightType::TQ2_0:
      return {256, 66};
    case WeightType::IQ1G16:
    case WeightType::IQ2G16:
      return {256, 274};
    case WeightType::IQ2G32:
    case WeightType::IQ3XXS:
    case WeightType::IQ3S:
      return {256, 266};
    case WeightType::Int4G32:
    case WeightType::E2M1G32:
      return {32, 20};
    case WeightType::Int4G128:
      return {128, 68};
    case WeightType::Int4G32Z:
      return {32, 21};
    case WeightType::Int4G128Z:
      return {128, 69};
    case WeightType::Int8G32:
      return {32, 36};
    case WeightType::Int8G128:
      return {128, 132};
    case WeightType::E2M1G16:
      return {32, 24};  // two groups
    case WeightType::F32:
    case WeightType::F16:
    case WeightType::BF16:
      break;
  }
  return {0, 0};
}

/// A block's parts; which of them a format has, BlockFormat says, and others are not set. `scale`
/// and `minimum` are float16; the steps are those of its sub-blocks, in formats with two steps of
/// scales.
struct SourceBlock {
  uint8_t codes[256];  // Q8_0: weight + 128
  int8_t scale_steps[16];
  int8_t minimum_steps[16];
  uint16_t scale;
  uint16_t minimum;
  float float_scales[2];  // of formats with float32 scales
  uint8_t zero;
};

/// Reads the block at `p` (any alignment).
void read_block(WeightType type, const uint8_t* p, SourceBlock* block);

}  // namespace ts
