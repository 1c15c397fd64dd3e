// From one row of logits to one token: the interface of the native sampler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts {

constexpr int kMaxLogprobs = 20;
// The token of a row in which nothing may be drawn; its request fails, its batch does not.
constexpr int32_t kNoToken = -1;

// What one row is to be sampled with. src/twostroke/backends/sampling/rows.py mirrors this layout,
// and src/twostroke/backends/sampling/reference.py defines what it means. The caller owns what
// pointers refer to; a pointer whose length is 0 is not read. Ids outside the vocabulary are
// ignored.
struct SampleRow {
  const int32_t* tokens;  // prompt, then output; read only with a penalty
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* barred_ids;  // never drawn: end tokens while min_tokens is not reached
  const uint32_t* mask;       // a bit a token, lowest first: those that may be drawn; null: all
  uint64_t seed;
  uint64_t counter;  // index of the output token that is drawn
  int64_t num_tokens;
  int64_t num_prompt;
  double temperature;  // 0: greedy
  double top_p;        // 1: all
  double min_p;        // 0: all
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  int32_t top_k;  // 0: all
  int32_t num_bias;
  int32_t num_barred;
  int32_t num_logprobs;  // -1: none; 0: the token's alone; at most kMaxLogprobs
  int32_t given;         // a token to report on, as if it were drawn; kNoToken: draw one
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
