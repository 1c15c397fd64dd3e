// Gathers, sends and receives: done by the last of a rank's threads, while the others wait.
#include "executor/collectives.h"

#include <algorithm>

#include "executor/worker.h"
#include "kernels/rows.h"

namespace ts {

namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));

/// Neighbouring values of a row.
struct Piece {
  int64_t row;
  int64_t column;
  int64_t width;
};

/// A value that a team gathers.
struct Gathered {
  Worker& worker;
  const OpRecord& op;
  const TeamRecord& team;
  const int32_t* cuts;
  float* whole;  // row 0
  int64_t stride;

  Gathered(Worker& w, const OpRecord& gather)
      : worker(w),
        op(gather),
        team(w.plan.link.team_of(gather)),
        cuts(gather.first_cut == kNone ? nullptr : &w.plan.link.cuts[gather.first_cut]),
        whole(w.buffer(gather.outputs[0].buffer)),
        stride(w.stride(gather.outputs[0].buffer)) {}

  /// Calls `body(piece)` for what a member of the team has of rows [begin, end).
  template <class Body>
  void for_pieces(int32_t member, int64_t begin, int64_t end, Body body) const {
    if (op.parts == Parts::Columns) {
      const int64_t width = cuts[member + 1] - cuts[member];
      for (int64_t row = begin; row < end && width > 0; ++row) body({row, cuts[member], width});
      return;
    }
    if (op.parts == Parts::Rows) {
      const int64_t num_rows = worker.step.record.num_rows;
      begin = std::max(begin, num_rows * member / team.size);
      end = std::min(end, num_rows * (member + 1) / team.size);
      for (int64_t row = begin; row < end; ++row) body({row, 0, op.width});
      return;
    }
    const auto has = [&](int32_t i) { return cuts[member] <= i && i < cuts[member + 1]; };
    if (op.parts == Parts::Tokens) {
      for (int64_t row = begin; row < end; ++row) {
        if (has(worker.step.record.tokens[row])) body({row, 0, op.width});
      }
      return;
    }
    const int64_t hidden = op.width / op.num_used;
    std::vector<int32_t>& chosen = worker.memory.experts.chosen;
    chosen.resize(static_cast<size_t>(op.num_used));
    worker.memory.experts.shares.resize(chosen.size());
    for (int64_t row = begin; row < end; ++row) {
      const float* scores = worker.buffer(op.y) + row * worker.stride(op.y);
      choose_experts(scores, op.num_experts, op.num_used, Shares::All, chosen.data(),
                     worker.memory.experts.shares.data());
      for (int32_t i = 0; i < op.num_used; ++i) {
        if (has(chosen[static_cast<size_t>(i)])) body({row, i * hidden, hidden});
      }
    }
  }

  /// The rows that are gathered: all, or those that this rank computes.
  int64_t row_begin() const { return has_all_rows() ? 0 : worker.step.row_begin; }
  int64_t row_end() const {
    return has_all_rows() ? worker.step.record.num_rows : worker.step.row_end;
  }
  bool has_all_rows() const { return op.parts == Parts::Rows || op.parts == Parts::Tokens; }

  float* at(const Piece& piece) const { return whole + piece.row * stride + piece.column; }
};

/// Puts this rank's part, which lies elsewhere, in its place. By one thread of several: its part.
void place_own(const Gathered& value) {
  const Worker& worker = value.worker;
  const int64_t begin = value.row_begin();
  const int64_t count = value.row_end() - begin;
  const int64_t first = value.op.parts == Parts::Columns ? value.cuts[value.team.place] : 0;
  const float* x = worker.buffer(value.op.x) - first;
  const int64_t x_stride = worker.stride(value.op.x);
  value.for_pieces(value.team.place, begin + worker.part_begin(count),
                   begin + worker.part_end(count), [&](const Piece& piece) {
                     std::copy_n(x + piece.row * x_stride + piece.column, piece.width,
                                 value.at(piece));
                   });
}

/// Gives this rank's part to the others through the link, and takes theirs.
bool exchange(const Gathered& value) {
  PlanLink& link = value.worker.plan.link;
  int64_t* bytes = link.part_bytes.data();
  float* packed = link.sent.floats();
  for (int32_t member = 0; member < value.team.size; ++member) {
    bytes[member] = 0;
    value.for_pieces(member, value.row_begin(), value.row_end(), [&](const Piece& piece) {
      bytes[member] += piece.width * kFloatBytes;
      if (member == value.team.place) {
        packed = std::copy_n(value.at(piece), piece.width, packed);
      }
    });
  }
  const int32_t outcome =
      link.record.all_gather(link.record.context, link.ranks_of(value.team), value.team.size,
                             link.sent.bytes(), link.received.bytes(), bytes);
  if (outcome != 0) return false;
  const float* received = link.received.floats();
  for (int32_t member = 0; member < value.team.size; ++member) {
    if (member == value.team.place) {
      received += bytes[member] / kFloatBytes;
      continue;
    }
    value.for_pieces(member, value.row_begin(), value.row_end(), [&](const Piece& piece) {
      std::copy_n(received, piece.width, value.at(piece));
      received += piece.width;
    });
  }
  return true;
}

/// Copies rows between memory with a stride and dense memory.
void pack(const float* x, int64_t stride, int64_t num_rows, int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(x + row * stride, width, out + row * width);
  }
}

void unpack(const float* x, int64_t stride, int64_t num_rows, int64_t width, float* out) {
  for (int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(x + row * width, width, out + row * stride);
  }
}

/// The slots of a channel: `slot` holds up to the most rows that a step may have.
float* slot_of(const Plan& plan, const ChannelRecord& channel, int64_t width, uint32_t slot) {
  float* slots = reinterpret_cast<float*>(plan.link.record.shared + channel.offset);
  return slots + slot * plan.link.max_rows * width;
}

}  // namespace

void meet_ranks(Worker& worker) {
  const PlanLink& link = worker.plan.link;
  if (link.teams.empty() || link.shared() == nullptr) return;
  worker.meet_and_move([&] {
    return std::all_of(link.teams.begin(), link.teams.end(), [&](const TeamRecord& team) {
      return link.shared()->meet(team.barrier, team.size);
    });
  });
}

void meet_team(Worker& worker, const TeamRecord& team) {
  worker.meet_and_move([&] { return worker.plan.link.shared()->meet(team.barrier, team.size); });
}

bool begins_with_barrier(const OpRecord& op) {
  return op.kind == OpKind::Send || op.kind == OpKind::Receive ||
         (op.kind == OpKind::Gather && op.x == kNone);
}

void run_gather(Worker& worker, const OpRecord& op) {
  const Gathered value(worker, op);
  if (op.x != kNone) place_own(value);
  SharedHead* shared = worker.plan.link.shared();
  worker.meet_and_move([&] {
    return shared == nullptr ? exchange(value) : shared->meet(value.team.barrier, value.team.size);
  });
}

void run_send(Worker& worker, const OpRecord& op) {
  PlanLink& link = worker.plan.link;
  const ChannelRecord& channel = link.channels[static_cast<size_t>(op.channel)];
  const int64_t num_rows = worker.step.row_end - worker.step.row_begin;
  const int64_t stride = worker.stride(op.x);
  const float* x = worker.buffer(op.x) + worker.step.row_begin * stride;
  worker.meet_and_move([&] {
    if (link.shared() == nullptr) {
      pack(x, stride, num_rows, op.width, link.sent.floats());
      return link.record.send(link.record.context, channel.peer, link.sent.bytes(),
                              num_rows * op.width * kFloatBytes) == 0;
    }
    uint32_t slot = 0;
    if (!link.shared()->begin_send(channel.number, &slot)) return false;
    pack(x, stride, num_rows, op.width, slot_of(worker.plan, channel, op.width, slot));
    link.shared()->end_send(channel.number);
    return true;
  });
}

void run_receive(Worker& worker, const OpRecord& op) {
  PlanLink& link = worker.plan.link;
  const ChannelRecord& channel = link.channels[static_cast<size_t>(op.channel)];
  const int64_t num_rows = worker.step.row_end - worker.step.row_begin;
  const int64_t stride = worker.stride(op.outputs[0].buffer);
  float* out = worker.buffer(op.outputs[0].buffer) + worker.step.row_begin * stride;
  worker.meet_and_move([&] {
    if (link.shared() == nullptr) {
      const int64_t bytes = num_rows * op.width * kFloatBytes;
      float* received = link.received.floats();
      if (link.record.receive(link.record.context, channel.peer, received, bytes) != 0) {
        return false;
      }
      unpack(received, stride, num_rows, op.width, out);
      return true;
    }
    uint32_t slot = 0;
    if (!link.shared()->begin_receive(channel.number, &slot)) return false;
    unpack(slot_of(worker.plan, channel, op.width, slot), stride, num_rows, op.width, out);
    link.shared()->end_receive(channel.number);
    return true;
  });
}

void make_room_for_collectives(Plan& plan, const StepRecord& step) {
  PlanLink& link = plan.link;
  if (link.record.all_gather == nullptr || link.shared() != nullptr) return;
  int64_t most = 0;
  for (const OpRecord& op : plan.ops) {
    const bool is_gather = op.kind == OpKind::Gather || (op.kind == OpKind::Logits && op.team >= 0);
    if (!is_gather && op.kind != OpKind::Send && op.kind != OpKind::Receive) continue;
    const int32_t buffer = op.kind == OpKind::Send ? op.x : op.outputs[0].buffer;
    const PlanMemory& memory =
        plan.memories[static_cast<size_t>(plan.buffers[static_cast<size_t>(buffer)].memory)];
    most = std::max(most, memory.bytes(step.num_rows));
  }
  link.sent.fit(most);
  link.received.fit(most);
  link.part_bytes.resize(link.team_ranks.size());
  link.best.resize(link.team_ranks.size() * kLogitRows);
}

}  // namespace ts
