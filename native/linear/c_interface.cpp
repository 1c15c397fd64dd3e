// The C face of the matrix products, for tests and measurements; its names start with ts_linear_.
#include "linear/layout.h"
#include "linear/linear.h"
#include "linear/tuning.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ts {

const char* level_name() { return TS_LEVEL_NAME; }

}  // namespace ts

using ts::PackedWeight;
using ts::RowKind;
using ts::WeightType;

TS_EXPORT const char* ts_linear_level() { return ts::level_name(); }

TS_EXPORT int32_t ts_linear_request_tiles() { return ts::request_tiles() ? 1 : 0; }

TS_EXPORT int32_t ts_linear_has_half_ports() { return ts::tuning().has_half_ports ? 1 : 0; }

TS_EXPORT void ts_linear_assume_half_ports(int32_t half) { ts::assume_half_ports(half != 0); }

TS_EXPORT int32_t ts_linear_rows_together() { return ts::rows_together(); }

TS_EXPORT int64_t ts_linear_packed_bytes(int32_t type, int64_t num_outputs, int64_t num_inputs) {
  return ts::packed_bytes(static_cast<WeightType>(type), num_outputs, num_inputs);
}

TS_EXPORT void ts_linear_pack(int32_t type, int64_t num_outputs, int64_t num_inputs,
                              const void* source, void* packed, int64_t group_begin,
                              int64_t group_end) {
  ts::pack_groups(static_cast<WeightType>(type), num_outputs, num_inputs, source, packed,
                  group_begin, group_end);
}

TS_EXPORT void ts_linear_unpack_row(int32_t type, int64_t num_outputs, int64_t num_inputs,
                                    const void* packed, int64_t row, float* out) {
  const PackedWeight weight = {static_cast<WeightType>(type), num_outputs, num_inputs,
                               static_cast<const uint8_t*>(packed), nullptr};
  ts::unpack_row(weight, row, out);
}

TS_EXPORT int64_t ts_linear_prepared_bytes(int32_t type, int32_t kind, int64_t num_inputs,
                                           int64_t num_rows) {
  return ts::prepared_bytes(static_cast<WeightType>(type), static_cast<RowKind>(kind), num_inputs,
                            num_rows);
}

TS_EXPORT int32_t ts_linear_same_preparation(int32_t a, int32_t b, int32_t may_be_mixed) {
  return ts::same_preparation(static_cast<WeightType>(a), static_cast<WeightType>(b),
                              may_be_mixed != 0)
             ? 1
             : 0;
}

TS_EXPORT void ts_linear_prepare(int32_t type, int32_t kind, const float* x, int64_t x_stride,
                                 int64_t num_inputs, int64_t row_begin, int64_t row_end,
                                 void* prepared) {
  ts::prepare_rows(static_cast<WeightType>(type), static_cast<RowKind>(kind), x, x_stride,
                   num_inputs, row_begin, row_end, prepared);
}

TS_EXPORT void ts_linear_multiply(int32_t type, int64_t num_outputs, int64_t num_inputs,
                                  const void* packed, int32_t kind, const void* prepared,
                                  int64_t num_rows, int64_t group_begin, int64_t group_end,
                                  float* out, int64_t out_stride, int32_t accumulate) {
  const PackedWeight weight = {static_cast<WeightType>(type), num_outputs, num_inputs,
                               static_cast<const uint8_t*>(packed), nullptr};
  ts::multiply(weight, static_cast<RowKind>(kind), prepared, num_rows, group_begin, group_end, out,
               out_stride, accumulate != 0);
}
