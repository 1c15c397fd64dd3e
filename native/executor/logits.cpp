// Logits of the sampled rows: a few rows at once, drawn from as soon as they are there.
#include <algorithm>
#include <cstring>

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

/// Logits of this rank's tokens in some sampled rows, which go to rank 0 over the link.
struct SentLogits {
  Worker& worker;
  const PlanLink& link;
  const TeamRecord& team;
  const int32_t* cuts;
  const LogitRows& logits;
  int64_t begin;  // of the sampled rows
  int64_t num_rows;

  SentLogits(Worker& w, const OpRecord& op, const LogitRows& rows, int64_t first, int64_t count)
      : worker(w),
        link(w.plan.link),
        team(link.team_of(op)),
        cuts(&link.cuts[static_cast<size_t>(op.first_cut)]),
        logits(rows),
        begin(first),
        num_rows(count) {}

  int64_t width(int32_t member) const { return int64_t{cuts[member + 1]} - cuts[member]; }
  bool is_only_best(int64_t row) const {
    const int32_t* flags = worker.step.record.only_best;
    return flags != nullptr && flags[begin + row] != 0;
  }
  int64_t row_bytes(int32_t member, int64_t row) const {
    if (is_only_best(row)) return sizeof(BestLogit);
    return width(member) * static_cast<int64_t>(sizeof(float));
  }
  /// Where a row begins in what a member sends; with `num_rows` the size of all.
  int64_t offset(int32_t member, int64_t row) const {
    int64_t bytes = 0;
    for (int64_t i = 0; i < row; ++i) bytes += row_bytes(member, i);
    return bytes;
  }

  BestLogit best_of(int64_t row) const {
    SampleRow greedy{};
    greedy.repetition_penalty = 1.0F;
    greedy.num_logprobs = -1;
    greedy.given = kNoToken;
    SampleResult drawn;
    float* own = logits.own + row * logits.vocab_size;
    sample_row(greedy, own, width(team.place), worker.memory.sampler, &drawn);
    return {drawn.token, drawn.token == kNoToken ? 0.0F : own[drawn.token]};
  }
  BestLogit* best_at(int32_t member) const {
    return &worker.plan.link.best[static_cast<size_t>(member * kLogitRows)];
  }

  void pack(int64_t row) const {
    uint8_t* out = link.sent.bytes() + offset(team.place, row);
    if (is_only_best(row)) {
      const BestLogit best = best_of(row);
      std::memcpy(out, &best, sizeof best);
    } else {
      std::memcpy(out, logits.own + row * logits.vocab_size,
                  static_cast<size_t>(row_bytes(team.place, row)));
    }
  }
  bool send() const {
    return link.record.send(link.record.context, 0, link.sent.bytes(),
                            offset(team.place, num_rows)) == 0;
  }

  /// On rank 0: takes what the others send.
  bool receive() const {
    for (int32_t member = 0; member < team.size; ++member) {
      if (member == team.place) continue;
      const uint8_t* in = link.received.bytes();
      if (link.record.receive(link.record.context, link.ranks_of(team)[member],
                              link.received.bytes(), offset(member, num_rows)) != 0) {
        return false;
      }
      for (int64_t row = 0; row < num_rows; in += row_bytes(member, row++)) {
        void* out = logits.whole + row * logits.vocab_size + cuts[member];
        if (is_only_best(row)) out = best_at(member) + row;
        std::memcpy(out, in, static_cast<size_t>(row_bytes(member, row)));
      }
    }
    return true;
  }

  /// On rank 0: the token of the largest logit of all members, the lowest of equal ones.
  SampleResult draw_best(int64_t row) const {
    best_at(team.place)[row] = best_of(row);
    SampleResult result{};
    result.token = kNoToken;
    float top = 0;
    for (int32_t member = 0; member < team.size; ++member) {
      const BestLogit& best = best_at(member)[row];
      if (best.place == kNoToken || (result.token != kNoToken && best.logit <= top)) continue;
      result.token = cuts[member] + best.place;
      top = best.logit;
    }
    return result;
  }
};

/// Brings logits to rank 0.
void gather_logits(Worker& worker, const SentLogits& sent) {
  if (sent.link.shared() != nullptr) return meet_team(worker, sent.team);
  if (sent.link.record.rank == 0) return worker.meet_and_move([&] { return sent.receive(); });
  worker.meet();
  worker.share_out(sent.num_rows, [&](int64_t row) { sent.pack(row); });
  worker.meet_and_move([&] { return sent.send(); });
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
  const bool over_link = op.team != kNone && worker.plan.link.shared() == nullptr;
  worker.share_out(num_rows, [&](int64_t i) {
    if (over_link) {
      const SentLogits sent(worker, op, logits, begin, num_rows);
      if (sent.is_only_best(i)) {
        record.results[begin + i] = sent.draw_best(i);
        return;
      }
    }
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
      gather_logits(worker, SentLogits(worker, op, logits, begin, end - begin));
      if (worker.step.is_lost) return;
    }
    use_logits(worker, op, logits, begin, end - begin);
  }
}

}  // namespace ts
