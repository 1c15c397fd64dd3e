// Runs recurrent operations: threads share out columns, or heads and requests, never a sum.
#include "executor/recurrent.h"

#include <algorithm>

#include "kernels/recurrent.h"

namespace ts {

namespace {

constexpr int64_t kColumnUnit = 16;  // of a convolution, in one cache line
constexpr int64_t kHeadsPerThread = 4;

/// Where a slice's state of an operation lies before it, or null for zeros, and where the states
/// after its rows go: from number `first_value` of the state on.
struct StatePlaces {
  const float* read;
  StateTarget target;
};

StatePlaces places_of(const Plan& plan, const StepRecord& step, const OpRecord& op, int32_t slice,
                      int64_t first_value) {
  const StateRecord& slots = step.states[slice];
  float* states = plan.states + plan.state_offsets[static_cast<size_t>(op.layer)] + first_value;
  static_assert(StateTarget::kNoSlot == kNone);
  return {slots.read == kNone ? nullptr : states + slots.read * plan.state_stride,
          {states + slots.write * plan.state_stride,
           step.row_states == nullptr ? nullptr : step.row_states + step.slices[slice].row, states,
           plan.state_stride}};
}

/// Calls body(slice, its record) for the slices that a run has, in the order of their tokens.
template <class Body>
void for_slices(const StepState& step, const StateRun& run, Body body) {
  body(run.first, step.record.slices[run.first]);
  if (run.second != kNone) body(run.second, step.record.slices[run.second]);
}

}  // namespace

void order_state_slices(StepState& step) {
  const StepRecord& record = step.record;
  if (record.states == nullptr) return;
  const StateRecord* begin = record.states;
  const StateRecord* end = begin + record.num_slices;
  const auto continues = [](const StateRecord& slots) { return slots.read == slots.write; };
  // A request's generated rows lie before its prompt rows, and continue their state in place.
  const auto find_other = [&](const StateRecord* own, bool is_second) {
    return std::find_if(begin, end, [&](const StateRecord& other) {
      return &other != own && other.write == own->write && continues(other) == is_second;
    });
  };
  for (const StateRecord* slots = begin; slots != end; ++slots) {
    if (continues(*slots) && find_other(slots, false) != end) continue;
    step.state_runs.push_back({static_cast<int32_t>(slots - begin), kNone});
  }
  if (step.state_runs.size() == static_cast<size_t>(record.num_slices)) return;
  for (StateRun& run : step.state_runs) {
    const StateRecord* second = find_other(begin + run.first, true);
    if (second != end) run.second = static_cast<int32_t>(second - begin);
  }
}

void run_convolution(Worker& worker, const OpRecord& op) {
  const OutputRecord& output = op.outputs[0];
  const Convolution convolution{op.width, op.kernel, worker.vector(op.norm),
                                output.bias == kNone ? nullptr : worker.vector(output.bias),
                                op.activation};
  const int64_t num_units = (op.width + kColumnUnit - 1) / kColumnUnit;
  const int64_t begin = worker.part_begin(num_units) * kColumnUnit;
  const int64_t end = std::min<int64_t>(worker.part_end(num_units) * kColumnUnit, op.width);
  for (const StateRun& run : worker.step.state_runs) {
    for_slices(worker.step, run, [&](int32_t index, const SliceRecord& slice) {
      const StatePlaces places = places_of(worker.plan, worker.step.record, op, index, 0);
      const int64_t x_stride = worker.stride(op.x);
      const int64_t out_stride = worker.stride(output.buffer);
      const ConvolutionRows rows{worker.buffer(op.x) + slice.row * x_stride,
                                 x_stride,
                                 worker.buffer(output.buffer) + slice.row * out_stride,
                                 out_stride,
                                 slice.num_rows,
                                 places.read,
                                 places.target};
      convolve(convolution, rows, begin, end);
    });
  }
  worker.finish();
}

namespace {

/// Where the parts of a row of x begin, for one head.
struct HeadColumns {
  int64_t queries;
  int64_t keys;
  int64_t values;
};

HeadColumns columns_of(const OpRecord& op, int64_t head) {
  const int64_t key_dim = op.x_head;
  const int64_t value_dim = op.outputs[0].head_dim;
  const int64_t num_key_heads = op.num_groups;
  const int64_t key_head = op.is_tiled != 0 ? head % num_key_heads : head / op.group;
  if (op.kind == OpKind::DeltaRule) {
    return {key_head * key_dim, (num_key_heads + key_head) * key_dim,
            2 * num_key_heads * key_dim + head * value_dim};
  }
  const int64_t keys = num_key_heads * op.group * value_dim + key_head * key_dim;
  return {keys + num_key_heads * key_dim, keys, head * value_dim};
}

StateHead head_of(const Worker& worker, const OpRecord& op, int64_t head) {
  const OutputRecord& output = op.outputs[0];
  return {op.x_head,
          output.head_dim,
          op.epsilon,
          worker.vector(op.norm)[head],
          op.gates_channels != 0 ? 0.0F : worker.vector(output.bias)[head],
          op.gates_channels != 0 ? worker.vector(output.bias) + head * op.x_head : nullptr,
          op.kind == OpKind::Mamba2 ? worker.vector(output.norm)[head] : 0.0F,
          op.scale,
          op.factor};
}

}  // namespace

void run_state_heads(Worker& worker, const OpRecord& op) {
  const OutputRecord& output = op.outputs[0];
  const int64_t value_dim = output.head_dim;
  const std::vector<StateRun>& runs = worker.step.state_runs;
  const int64_t num_heads = static_cast<int64_t>(runs.size()) * op.num_heads;
  // Where heads are few, threads compute parts of their columns.
  const int64_t num_blocks = (value_dim + kStateColumns - 1) / kStateColumns;
  const int64_t num_parts = num_heads < kHeadsPerThread * worker.num_threads ? num_blocks : 1;
  worker.share_out(num_heads * num_parts, [&](int64_t ticket) {
    const int64_t part = ticket % num_parts;
    const int64_t head = ticket / num_parts % op.num_heads;
    const int64_t whole_head = op.first_head + head;  // among the heads of all ranks
    const int64_t begin = num_blocks * part / num_parts * kStateColumns;
    const int64_t end = std::min(num_blocks * (part + 1) / num_parts * kStateColumns, value_dim);
    const HeadColumns columns = columns_of(op, whole_head);
    const StateHead sizes = head_of(worker, op, whole_head);
    const StateRun& run = runs[static_cast<size_t>(ticket / num_parts / op.num_heads)];
    for_slices(worker.step, run, [&](int32_t index, const SliceRecord& slice) {
      const int64_t first_value = head * op.x_head * value_dim;
      const StatePlaces places = places_of(worker.plan, worker.step.record, op, index, first_value);
      const auto row_of = [&](int32_t buffer) {
        return worker.buffer(buffer) + slice.row * worker.stride(buffer);
      };
      const float* x = row_of(op.x);
      const bool has_strength = op.kind == OpKind::DeltaRule;
      const StateHeadRows rows{x + columns.queries,
                               x + columns.keys,
                               x + columns.values,
                               worker.stride(op.x),
                               row_of(op.y) + head * (op.gates_channels != 0 ? op.x_head : 1),
                               worker.stride(op.y),
                               has_strength ? row_of(op.z) + head : nullptr,
                               has_strength ? worker.stride(op.z) : 0,
                               row_of(output.buffer) + head * value_dim,
                               worker.stride(output.buffer),
                               slice.num_rows,
                               places.read,
                               places.target};
      const auto compute = op.kind == OpKind::DeltaRule ? delta_rule : mamba2;
      compute(sizes, rows, begin, end, worker.memory.states.floats());
    });
  });
  worker.finish();
}

void make_room_for_states(Plan& plan) {
  int64_t most = 0;
  for (const OpRecord& op : plan.ops) {
    if (op.kind == OpKind::DeltaRule || op.kind == OpKind::Mamba2) {
      most = std::max(most, state_scratch_floats(op.x_head));
    }
  }
  for (ThreadMemory& memory : plan.threads) {
    memory.states.fit(most * static_cast<int64_t>(sizeof(float)));
  }
}

}  // namespace ts
