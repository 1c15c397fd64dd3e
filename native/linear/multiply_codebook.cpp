// Products with codebook formats.
#include "linear/loops.h"

namespace ts {

template <int Planes>
bool multiply_codebook(const Product<Planes>& product, int64_t num_rows, int64_t group_begin,
                       int64_t group_end) {
  return with_codebook_type(product.weight.type,
                            multiply_with(product, num_rows, group_begin, group_end));
}

template bool multiply_codebook(const Product<1>&, int64_t, int64_t, int64_t);
template bool multiply_codebook(const Product<2>&, int64_t, int64_t, int64_t);

}  // namespace ts
