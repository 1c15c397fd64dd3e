// Writes keys and values to their pages as float16, saturated to its largest finite number, NaN
// too.
#include "kernels/kv.h"

#include "kernels/lane_math.h"

namespace ts {

namespace {

constexpr float kLargestHalf = 65504.0F;

// An infinity or a NaN stored for a later position would turn a masked product, times 0, into NaN.
Lanes load_saturated(const float* p) {
  return larger(smaller(load_lanes(p), broadcast(kLargestHalf)), broadcast(-kLargestHalf));
}

}  // namespace

void store_keys(const LayerPages& pages, const int32_t* page_table, int64_t position,
                const float* row, int64_t begin, int64_t end) {
  const int64_t first = position / kBlockTokens * kBlockTokens;
  for (int64_t i = begin; i < end; i += kLanes) {
    uint16_t* block = pages.block(page_table, i / pages.head_dim, first);
    uint16_t* column = block + i % pages.head_dim * kBlockTokens + position % kBlockTokens;
    uint16_t halves[kLanes];
    store_halves(halves, load_saturated(row + i));
    for (int lane = 0; lane < kLanes; ++lane) column[lane * kBlockTokens] = halves[lane];
  }
}

void store_values(const LayerPages& pages, const int32_t* page_table, int64_t position,
                  const float* row, int64_t begin, int64_t end) {
  const int64_t first = position / kBlockTokens * kBlockTokens;
  for (int64_t i = begin; i < end; i += kLanes) {
    uint16_t* values = pages.block(page_table, i / pages.head_dim, first) +
                       kBlockTokens * pages.head_dim + position % kBlockTokens * pages.head_dim;
    store_halves(values + i % pages.head_dim, load_saturated(row + i));
  }
}

}  // namespace ts
