// What the tests call: the sampler on rows and logits of their own, and the sizes of its structs.
#include <cstdint>
#include <vector>

#include "sample/passes.h"
#include "sample/sample.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

using ts::SampleRow;

TS_EXPORT int64_t ts_sample_row_size() { return sizeof(SampleRow); }

TS_EXPORT int64_t ts_sample_result_size() { return sizeof(ts::SampleResult); }

// `logits` is (num_rows, vocab_size), as it was on return.
TS_EXPORT void ts_sample_test(const SampleRow* rows, float* logits, int64_t num_rows,
                              int64_t vocab_size, ts::SampleResult* results) {
  ts::SamplerScratch scratch;
  for (int64_t i = 0; i < num_rows; ++i)
    ts::sample_row(rows[i], logits + i * vocab_size, vocab_size, scratch, results + i);
}

// `weights` has room for whole blocks of 64.
TS_EXPORT void ts_sample_weights_test(const float* logits, int64_t count, float top,
                                      double temperature, float* weights) {
  std::vector<uint64_t> masses(ts::sampling::num_blocks(count));
  ts::sampling::weigh(logits, count, top, ts::sampling::scale_of(temperature), 0.0f, weights,
                      masses.data());
}
