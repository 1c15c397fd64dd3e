// One row from logits to a token: adjust, choose, put back, report.
#include "sample/sample.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <limits>

#include "sample/passes.h"
#include "sample/philox.h"

namespace ts {

using namespace sampling;

namespace {

using Candidate = SamplerScratch::Candidate;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNoLimit = std::numeric_limits<float>::quiet_NaN();  // no logit is >= NaN
constexpr double kLeastLogprob = -9999.0;                            // JSON knows no infinity

// The tokens still in the running: `ids` is null while they are the whole vocabulary.
// A place is an index into `logits`; places ascend with ids.
struct Field {
  const float* logits;
  const int32_t* ids;
  int64_t count;
  float top;

  int32_t id(int64_t place) const { return ids ? ids[place] : static_cast<int32_t>(place); }
};

bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.place < b.place);
}

bool inside(int32_t id, int64_t vocab_size) { return id >= 0 && id < vocab_size; }

void save(int64_t id, const float* logits, SamplerScratch& scratch) {
  scratch.saved.push_back({id, logits[id]});
}

// In each step the arithmetic is float32's; the product of a count and a penalty is exact in
// double, so that fusing it into the subtraction would change nothing.
void penalize(const SampleRow& row, float* logits, int64_t vocab_size, SamplerScratch& scratch) {
  const bool repeats = row.repetition_penalty != 1.0f;
  if (!repeats && row.frequency_penalty == 0.0f && row.presence_penalty == 0.0f) return;
  const int64_t first = repeats ? 0 : row.num_prompt;
  uint32_t* seen = scratch.seen.data();  // twice the count in the output, plus 1 if in the prompt
  for (int64_t i = first; i < row.num_tokens; ++i) {
    if (!inside(row.tokens[i], vocab_size)) continue;
    if (i < row.num_prompt)
      seen[row.tokens[i]] |= 1;
    else
      seen[row.tokens[i]] += 2;
  }
  for (int64_t i = first; i < row.num_tokens; ++i) {
    const int32_t id = row.tokens[i];
    if (!inside(id, vocab_size) || seen[id] == 0) continue;
    const uint32_t num_output = seen[id] >> 1;
    seen[id] = 0;
    save(id, logits, scratch);
    float logit = logits[id];
    if (repeats) {
      const float penalty = row.repetition_penalty;
      logit = logit > 0.0f ? logit / penalty : logit * penalty;
    }
    if (num_output > 0) {
      double rest = static_cast<double>(logit);
      rest -= static_cast<double>(row.frequency_penalty) * static_cast<double>(num_output);
      rest -= static_cast<double>(row.presence_penalty);
      logit = static_cast<float>(rest);
    }
    logits[id] = logit;
  }
}

void adjust(const SampleRow& row, float* logits, int64_t vocab_size, SamplerScratch& scratch) {
  scratch.saved.clear();
  for (int32_t i = 0; i < row.num_bias; ++i) {
    const int32_t id = row.bias_ids[i];
    if (!inside(id, vocab_size)) continue;
    save(id, logits, scratch);
    logits[id] += row.bias_values[i];
  }
  penalize(row, logits, vocab_size, scratch);
  for (int32_t i = 0; i < row.num_barred; ++i) {
    const int32_t id = row.barred_ids[i];
    if (!inside(id, vocab_size)) continue;
    save(id, logits, scratch);
    logits[id] = -kInfinity;
  }
}

void put_back(float* logits, SamplerScratch& scratch) {
  for (auto last = scratch.saved.rbegin(); last != scratch.saved.rend(); ++last)
    logits[last->id] = last->logit;
}

// The place of the largest logit, the lowest among equals; -1 if all are minus infinity or NaN.
int64_t likeliest(const float* logits, int64_t count, SamplerScratch& scratch) {
  const int64_t block = find_peaks(logits, count, scratch.peaks.data());
  if (block < 0) return -1;
  const float top = scratch.peaks[block];
  int64_t place = block * kBlock;
  while (!(logits[place] == top)) ++place;
  return place;
}

// Collect the tokens from `threshold` up to, not including, `limit`, in the order of places.
void gather(const Field& field, float threshold, float limit, bool weighted,
            SamplerScratch& scratch) {
  scratch.candidates.clear();
  for (int64_t block = 0; block < num_blocks(field.count); ++block) {
    if (!(scratch.peaks[block] >= threshold)) continue;
    const int64_t end = std::min((block + 1) * kBlock, field.count);
    for (int64_t place = block * kBlock; place < end; ++place) {
      const float logit = field.logits[place];
      if (!(logit >= threshold) || logit >= limit) continue;
      const float weight = weighted ? scratch.weights[place] : 0.0f;
      scratch.candidates.push_back({logit, weight, place});
    }
  }
}

// Keep candidates that come before or are `last`; they become a field of their own.
Field keep_until(const Field& field, const Candidate& last, float top, SamplerScratch& scratch) {
  int64_t count = 0;
  for (const Candidate& candidate : scratch.candidates) {
    if (before(last, candidate)) continue;
    scratch.kept_ids[count] = field.id(candidate.place);
    scratch.kept_logits[count] = std::min(candidate.logit, top);
    ++count;
  }
  return {scratch.kept_logits.data(), scratch.kept_ids.data(), count, top};
}

// A logit of plus infinity leaves all others no chance; those that have it are equals.
Field only_infinite(const Field& field, SamplerScratch& scratch) {
  gather(field, kInfinity, kNoLimit, false, scratch);
  const Field kept = keep_until(field, scratch.candidates.back(), 0.0f, scratch);
  find_peaks(kept.logits, kept.count, scratch.peaks.data());
  return kept;
}

// A logit that at least `rank` tokens reach, as high as the block peaks can tell: the rank-th
// largest peak has the peaks above it as witnesses.
float reached_by(const Field& field, int64_t rank, SamplerScratch& scratch) {
  const int64_t blocks = num_blocks(field.count);
  if (rank > blocks) return -kInfinity;
  const auto first = scratch.ordered_peaks.begin();
  std::copy_n(scratch.peaks.begin(), blocks, first);
  std::nth_element(first, first + (rank - 1), first + blocks, std::greater<float>());
  return scratch.ordered_peaks[rank - 1];
}

// The `rank` likeliest tokens above minus infinity, as candidates in no order.
void gather_likeliest(const Field& field, int64_t rank, SamplerScratch& scratch) {
  gather(field, std::max(reached_by(field, rank, scratch), std::numeric_limits<float>::lowest()),
         kNoLimit, false, scratch);
  auto& found = scratch.candidates;
  if (static_cast<int64_t>(found.size()) <= rank) return;
  std::nth_element(found.begin(), found.begin() + (rank - 1), found.end(), before);
  found.resize(rank);
}

Field keep_top_k(const Field& field, int64_t top_k, SamplerScratch& scratch) {
  gather_likeliest(field, top_k, scratch);
  const auto& found = scratch.candidates;
  const Candidate last = *std::max_element(found.begin(), found.end(), before);
  gather(field, last.logit, kNoLimit, false, scratch);  // again, now in the order of places
  const Field kept = keep_until(field, last, field.top, scratch);
  find_peaks(kept.logits, kept.count, scratch.peaks.data());
  return kept;
}

// Among candidates in any order: the one at which the weights, summed from the likeliest on,
// reach `mass`.
Candidate reaching(uint64_t mass, std::vector<Candidate>& candidates) {
  auto low = candidates.begin(), high = candidates.end();
  while (high - low > 32) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high, before);
    uint64_t upper = 0;
    for (auto i = low; i < middle; ++i) upper += static_cast<uint64_t>(i->weight);
    if (upper >= mass) {
      high = middle;
    } else {
      mass -= upper;
      low = middle;
    }
  }
  std::sort(low, high, before);
  while (low + 1 < high && static_cast<uint64_t>(low->weight) < mass) {
    mass -= static_cast<uint64_t>(low->weight);
    ++low;
  }
  return *low;
}

// Find the shortest run of likeliest tokens that weighs at least `top_p` of `total`, and leave
// only them in `scratch.masses`. Returns the smallest logit that stays.
float keep_top_p(const Field& field, double top_p, float scale, uint64_t total,
                 SamplerScratch& scratch) {
  const double share = std::max(1.0, std::ceil(top_p * static_cast<double>(total)));
  const uint64_t mass = std::min(static_cast<uint64_t>(share), total);
  float* weights = scratch.weights.data();
  const auto mass_above = [&](float threshold, uint64_t* masses) {
    return mass_from(field.logits, weights, scratch.peaks.data(), field.count, threshold, masses);
  };
  // Logits at a few powers of 1/2 below the top: most rows end at one of the first.
  uint64_t certain = 0;
  float limit = kNoLimit, threshold = -kInfinity;
  for (const float halvings : {5.0f, 9.0f, 13.0f, 18.0f}) {
    threshold = field.top - halvings / scale;
    const uint64_t reached = mass_above(threshold, nullptr);
    if (reached >= mass) break;
    certain = reached;
    limit = threshold;
    threshold = -kInfinity;
  }
  gather(field, threshold, limit, true, scratch);
  const Candidate last = reaching(mass - certain, scratch.candidates);
  for (int64_t place = last.place + 1; place < field.count; ++place)
    weights[place] = field.logits[place] == last.logit ? 0.0f : weights[place];
  mass_above(last.logit, scratch.masses.data());
  return last.logit;
}

// The place at which the running sum of weights passes `target`, in the order of places.
int64_t place_at(const Field& field, uint64_t target, float threshold,
                 const SamplerScratch& scratch) {
  int64_t block = 0;
  while (target >= scratch.masses[block]) target -= scratch.masses[block++];
  int64_t place = block * kBlock;
  for (;; ++place) {
    if (!(field.logits[place] >= threshold)) continue;
    const uint64_t weight = static_cast<uint64_t>(scratch.weights[place]);
    if (target < weight) return place;
    target -= weight;
  }
}

int32_t drawn(const SampleRow& row, const float* logits, int64_t vocab_size,
              SamplerScratch& scratch) {
  const int64_t block = find_peaks(logits, vocab_size, scratch.peaks.data());
  if (block < 0) return kNoToken;
  Field field{logits, nullptr, vocab_size, scratch.peaks[block]};
  if (field.top == kInfinity) field = only_infinite(field, scratch);
  if (row.top_k > 0 && row.top_k < field.count) field = keep_top_k(field, row.top_k, scratch);

  const float scale = scale_of(row.temperature);
  const double share = row.min_p > 0.0 ? std::min(row.min_p, 1.0) * kUnit : 0.0;
  float least = static_cast<float>(share);
  if (static_cast<double>(least) < share) least = std::nextafter(least, kInfinity);
  uint64_t total = weigh(field.logits, field.count, field.top, scale, least, scratch.weights.data(),
                         scratch.masses.data());
  float threshold = -kInfinity;
  if (row.top_p < 1.0) {
    threshold = keep_top_p(field, row.top_p, scale, total, scratch);
    total = 0;
    for (int64_t i = 0; i < num_blocks(field.count); ++i) total += scratch.masses[i];
  }
  const uint64_t target = below(philox_bits(row.seed, row.counter), total);
  return field.id(place_at(field, target, threshold, scratch));
}

// Log-softmax of the unmodified row: of `result->token` and of the likeliest.
void report(int32_t num_logprobs, const float* logits, int64_t vocab_size, SamplerScratch& scratch,
            SampleResult* result) {
  const int64_t block = find_peaks(logits, vocab_size, scratch.peaks.data());
  assert(block >= 0);  // no adjustment lifts minus infinity or NaN
  const Field field{logits, nullptr, vocab_size, scratch.peaks[block]};
  if (num_logprobs > 0) gather_likeliest(field, num_logprobs, scratch);
  auto& found = scratch.candidates;
  if (num_logprobs == 0) found.clear();
  std::sort(found.begin(), found.end(), before);

  double log_total = 0.0;
  if (field.top == kInfinity) {
    log_total = std::log(static_cast<double>(std::count(logits, logits + vocab_size, kInfinity)));
  } else {
    const uint64_t total = weigh(logits, vocab_size, field.top, scale_of(1.0), 0.0f,
                                 scratch.weights.data(), scratch.masses.data());
    log_total = std::log(static_cast<double>(total) / kUnit);
  }
  const auto logprob = [&](float logit) {
    const double gap = logit == field.top ? 0.0 : static_cast<double>(logit) - field.top;
    return static_cast<float>(gap - log_total > kLeastLogprob ? gap - log_total : kLeastLogprob);
  };
  result->logprob = logprob(logits[result->token]);
  for (const Candidate& candidate : found) {
    result->top_ids[result->count] = static_cast<int32_t>(candidate.place);
    result->top_logprobs[result->count++] = logprob(candidate.logit);
  }
}

void report_given(const SampleRow& row, const float* logits, int64_t vocab_size,
                  SamplerScratch& scratch, SampleResult* result) {
  const bool is_usable = find_peaks(logits, vocab_size, scratch.peaks.data()) >= 0;
  result->token = is_usable && inside(row.given, vocab_size) ? row.given : kNoToken;
  if (row.num_logprobs < 0 || result->token == kNoToken) return;
  report(std::min(row.num_logprobs, kMaxLogprobs), logits, vocab_size, scratch, result);
}

}  // namespace

void SamplerScratch::fit(int64_t vocab_size) {
  if (static_cast<int64_t>(seen.size()) >= vocab_size) return;
  const int64_t blocks = num_blocks(vocab_size);
  peaks.resize(blocks);
  ordered_peaks.resize(blocks);
  masses.resize(blocks);
  weights.resize(blocks * kBlock);
  seen.resize(vocab_size, 0);
  saved.reserve(4096);
  candidates.reserve(vocab_size);
  kept_logits.resize(vocab_size);
  kept_ids.resize(vocab_size);
  masked.resize(vocab_size);
}

void sample_row(const SampleRow& row, float* logits, int64_t vocab_size, SamplerScratch& scratch,
                SampleResult* result) {
  scratch.fit(vocab_size);
  *result = SampleResult{};
  if (row.given != kNoToken) {
    report_given(row, logits, vocab_size, scratch, result);
    return;
  }
  adjust(row, logits, vocab_size, scratch);
  const float* allowed = logits;
  if (row.mask) {
    apply_mask(logits, row.mask, vocab_size, scratch.masked.data());
    allowed = scratch.masked.data();
  }
  if (row.temperature > 0.0)
    result->token = drawn(row, allowed, vocab_size, scratch);
  else
    result->token = static_cast<int32_t>(likeliest(allowed, vocab_size, scratch));
  put_back(logits, scratch);
  if (row.num_logprobs < 0 || result->token == kNoToken) return;
  report(std::min(row.num_logprobs, kMaxLogprobs), logits, vocab_size, scratch, result);
}

}  // namespace ts
