// From one row of logits to one token: the interface of the native sampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts {

constexpr int kMaxLogprobs = 20;
// The token of a row in which nothing may be drawn; its request fails, its batch does not.
constexpr int32_t kNoToken = -1;

// The parameters with which one row is sampled, column by column (columns.h).
// src/twostroke/backends/sampling/reference.py defines what they mean. The caller owns what
// pointers refer to; a pointer whose length is 0 is not read. Ids outside the vocabulary are
// ignored.
struct SampleRow {
#define TS_COLUMN(type, name) type name
#include "sample/columns.h"
#undef TS_COLUMN
};

struct SampleResult {
  int32_t token;  // kNoToken if nothing may be drawn, or none can be reported on
  int32_t count;  // entries in top_ids: min(num_logprobs, logits above minus infinity)
  float logprob;  // 0 unless asked for; this and top_logprobs are never below -9999
  int32_t top_ids[kMaxLogprobs];  // likeliest first, lowest id among equals
  float top_logprobs[kMaxLogprobs];
};

// Working memory of one thread: grows to the largest vocabulary seen, then no more.
class SamplerScratch {
 public:
  void fit(int64_t vocab_size);

  // A token that a truncation may keep. Order: larger logit first, lower place among equals.
  struct Candidate {
    float logit;
    float weight;
    int64_t place;
  };
  // A raw logit that bias, penalties or bars wrote over.
  struct Saved {
    int64_t id;
    float logit;
  };

  std::vector<float> peaks;          // largest logit of each block
  std::vector<float> ordered_peaks;  // the same, while being ordered
  std::vector<float> weights;        // see passes.h
  std::vector<float> masked;         // the logits of tokens that a mask allows
  std::vector<uint64_t> masses;      // sum of the weights of each block
  std::vector<uint32_t> seen;        // how a token occurs in the history; all 0 between rows
  std::vector<Saved> saved;          // in the order of writing
  std::vector<Candidate> candidates;
  std::vector<float> kept_logits;  // of the tokens that top-k keeps, ids ascending
  std::vector<int32_t> kept_ids;
};

// Draw a token from `logits` (vocab_size floats), or report on the given one. Bias, penalties and
// bars are applied in place and undone: on return `logits` holds what it held. Reads nothing but
// its arguments: the token depends neither on the batch nor on the thread nor on the instruction
// set.
void sample_row(const SampleRow& row, float* logits, int64_t vocab_size, SamplerScratch& scratch,
                SampleResult* result);

}  // namespace ts
