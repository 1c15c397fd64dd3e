// Logits of the sampled rows: a few rows at once, drawn from as soon as they are there.
#include <algorithm>

#include "executor/collectives.h"
#include "executor/products.h"

namespace ts {

namespace {

/// A few rows of logits: all tokens, and from where on those that this rank computes lie.
struct LogitRows {
  float* whole;
  float* own;
  int64_t vocab_size;
};

/// Where the logits of sampled rows from `begin` on go.
LogitRows logit_rows(const Worker& worker, const OpRecord& op, int64_t begin) {
  const OutputRecord& output = op.outputs[0];
  if (op.team != kNone) {
    // Of two places in turn: rank 0 may still draw from the rows before these.
    const int64_t row = begin % (2 * kLogitRows);
    float* own = worker.buffer(output.buffer) + row * worker.stride(output.buffer);
    return {own - worker.plan.link.own_cuts(op)[0], own, worker.stride(output.buffer)};
  }
  const StepRecord& record = worker.step.record;
  float* logits =
      record.logits == nullptr ? worker.plan.logits.floats() : record.logits + begin * output.width;
  return {logits, logits, output.width};
}

/// Draws from whole rows of logits, and copies them where they are wanted: on rank 0.
void use_logits(Worker& worker, const OpRecord& op, const LogitRows& logits, int64_t begin,
                int64_t num_rows) {
  const StepRecord& record = worker.step.record;
  const int64_t size = logits.vocab_size;
  if (op.team != kNone && record.logits != nullptr) {
    const int64_t first = worker.part_begin(num_rows);
    const int64_t count = worker.part_end(num_rows) - first;
    std::copy_n(logits.whole + first * size, count * size, record.logits + (begin + first) * size);
  }
  if (record.samples == nullptr) return;
  worker.share_out(num_rows, [&](int64_t i) {
    sample_row(record.samples[begin + i], logits.whole + i * size, size, worker.memory.sampler,
               record.results + begin + i);
  });
  worker.meet();
}

}  // namespace

void run_logits(Worker& worker, size_t index) {
  const OpRecord& op = worker.plan.ops[index];
  const int64_t num_sampled = worker.step.record.num_sampled;
  for (int64_t begin = 0; begin < num_sampled; begin += kLogitRows) {
    const int64_t end = std::min(begin + kLogitRows, num_sampled);
    const LogitRows logits = logit_rows(worker, op, begin);
    if (op.num_outputs > 0) {
      multiply_logits(worker, index, begin, end, logits.own, logits.vocab_size);
    }
    if (op.team == kNone) {
      worker.meet();
    } else {
      gather_logits(worker, op, logits.whole, end - begin);
      if (worker.step.is_lost) return;
    }
    use_logits(worker, op, logits, begin, end - begin);
  }
}

}  // namespace ts
