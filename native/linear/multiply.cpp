// A matrix product: chooses the kernels of the weights' format.
#include "linear/kernels.h"
#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/product.h"
#include "linear/tiles.h"

namespace ts {
namespace {

template <int Planes>
void multiply_type(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                   int64_t group_end) {
  multiply_plain(product, num_rows, group_begin, group_end) ||
      multiply_super(product, num_rows, group_begin, group_end) ||
      multiply_published(product, num_rows, group_begin, group_end) ||
      multiply_codebook(product, num_rows, group_begin, group_end);
}

}  // namespace

int rows_together() {
  return has_kernel<WeightType::Q4_0, 3, 1>() ? 1 : max_kernel_rows<WeightType::Q4_0>();
}

void multiply(const PackedWeight& weight, RowKind kind, const void* prepared, int64_t num_rows,
              int64_t group_begin, int64_t group_end, float* out, int64_t out_stride,
              bool accumulate) {
  const auto* bytes = static_cast<const uint8_t*>(prepared);
  const Preparation form = preparation(weight.type, kind);
#if TS_LEVEL == 3
  if (form == Preparation::Tiles || form == Preparation::SplitTiles) {
    multiply_tiles(
        {weight, bytes, form == Preparation::SplitTiles, num_rows, out, out_stride, accumulate},
        group_begin, group_end);
    return;
  }
#endif
  const bool is_mixed = form == Preparation::MixedBlocks || form == Preparation::MixedPairs;
  if (form == Preparation::CoarseBlocks || form == Preparation::MixedBlocks) {
    const Product<1> product = {weight, bytes, out, out_stride, accumulate, is_mixed};
    multiply_type(product, num_rows, group_begin, group_end);
  } else {
    const Product<2> product = {weight, bytes, out, out_stride, accumulate, is_mixed};
    multiply_type(product, num_rows, group_begin, group_end);
  }
}

}  // namespace ts
