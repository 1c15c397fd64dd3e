// The hash of the sampler's columns, and what tests call: the sampler on given rows and logits, and
// the sizes of its structs.
#include <cstdint>
#include <type_traits>
#include <vector>

#include "sample/passes.h"
#include "sample/sample.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

using ts::SampleRow;

namespace {

// NumPy's name of a column's type; a pointer is an address.
template <typename Type>
constexpr const char* type_name() {
  if constexpr (std::is_pointer_v<Type> || std::is_same_v<Type, uint64_t>) return "uint64";
  if constexpr (std::is_same_v<Type, int64_t>) return "int64";
  if constexpr (std::is_same_v<Type, int32_t>) return "int32";
  if constexpr (std::is_same_v<Type, double>) return "float64";
  if constexpr (std::is_same_v<Type, float>) return "float32";
}

constexpr uint64_t kFnvBasis = 0xcbf29ce484222325;
constexpr uint64_t kFnvPrime = 0x100000001b3;

// FNV-1a, 64 bits, of a text that continues the text of `hash`.
constexpr uint64_t continue_hash(uint64_t hash, const char* text) {
  for (; *text != '\0'; ++text) hash = (hash ^ static_cast<unsigned char>(*text)) * kFnvPrime;
  return hash;
}

// The hash of "tokens uint64;bias_ids uint64;" and so on.
constexpr uint64_t hash_columns() {
  uint64_t hash = kFnvBasis;
#define TS_COLUMN(type, name)                    \
  hash = continue_hash(hash, #name " ");         \
  hash = continue_hash(hash, type_name<type>()); \
  hash = continue_hash(hash, ";")
#include "sample/columns.h"
#undef TS_COLUMN
  return hash;
}

constexpr uint64_t kColumnsHash = hash_columns();

}  // namespace

TS_EXPORT uint64_t ts_sample_columns_hash() { return kColumnsHash; }

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
