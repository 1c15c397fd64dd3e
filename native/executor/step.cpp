// Runs a step: every thread walks through the operations and meets the others between them.
#include <algorithm>
#include <stdexcept>

#include "executor/collectives.h"
#include "executor/drawn.h"
#include "executor/heads.h"
#include "executor/pieces.h"
#include "executor/products.h"
#include "executor/recurrent.h"
#include "executor/route.h"
#include "executor/worker.h"
#include "kernels/rows.h"
#include "linear/linear.h"

namespace ts {

namespace {

/// Tokens that this rank embeds: all, or those of its part of the table.
void run_embed(Worker& worker, const OpRecord& op) {
  const OutputRecord& output = op.outputs[0];
  const PackedWeight& table = worker.plan.weights[static_cast<size_t>(output.weight)];
  const bool is_part = op.first_cut != kNone;
  const int64_t num_rows = worker.step.record.num_rows;
  const int64_t first = is_part ? worker.plan.link.own_cuts(op)[0] : 0;
  const int64_t begin = is_part ? worker.part_begin(num_rows) : worker.rows_begin();
  const int64_t end = is_part ? worker.part_end(num_rows) : worker.rows_end();
  for (int64_t row = begin; row < end; ++row) {
    const int64_t id = worker.step.record.tokens[row] - first;
    if (id < 0 || id >= table.num_outputs) continue;
    float* out = worker.buffer(output.buffer) + row * worker.stride(output.buffer);
    unpack_row(table, id, out);
    if (op.factor != 1.0F) scale_row(out, op.factor, op.width, out);
  }
  worker.finish();
}

/// Calls `body(x row, output row, row)` for this thread's rows.
template <class Body>
void for_rows(Worker& worker, const OpRecord& op, Body body) {
  const int32_t out = op.outputs[0].buffer;
  for (int64_t row = worker.rows_begin(); row < worker.rows_end(); ++row) {
    body(worker.buffer(op.x) + row * worker.stride(op.x),
         worker.buffer(out) + row * worker.stride(out), row);
  }
  worker.finish();
}

void run_norm(Worker& worker, const OpRecord& op) {
  const int64_t width = op.width / op.num_groups;
  for_rows(worker, op, [&](const float* x, float* out, int64_t row) {
    float* normed = op.y == kNone ? out : worker.memory.rows.floats();
    for (int64_t i = 0; i < op.width; i += width) {
      const float* weight = worker.vector(op.norm) + (op.is_wide != 0 ? i : 0);
      rms_norm(x + i, weight, width, op.epsilon, normed + i);
    }
    if (op.y == kNone) return;
    add_rows(worker.buffer(op.y) + row * worker.stride(op.y), normed, op.width, out);
  });
}

void run_tap(Worker& worker, const OpRecord& op) {
  if (worker.step.record.taps == nullptr) return;  // no value is wanted in this step
  float* values = worker.step.record.taps[op.tap];
  const int64_t num_rows = worker.step.record.num_rows;
  for (int64_t row = worker.part_begin(num_rows); row < worker.part_end(num_rows); ++row) {
    std::copy_n(worker.buffer(op.x) + row * worker.stride(op.x), op.width, values + row * op.width);
  }
  worker.finish();
}

void run_given(Worker& worker, const OpRecord& op) {
  const float* values = worker.step.record.external;
  const OutputRecord& output = op.outputs[0];
  for (int64_t row = worker.rows_begin(); row < worker.rows_end(); ++row) {
    float* out = worker.buffer(output.buffer) + row * worker.stride(output.buffer);
    std::copy_n(values + row * output.width, output.width, out);
  }
  worker.finish();
}

void run_rope(Worker& worker, const OpRecord& op) {
  const RopeTable& rope = worker.plan.ropes[static_cast<size_t>(op.outputs[0].rope)];
  for_rows(worker, op, [&](const float* x, float* out, int64_t row) {
    if (x != out) std::copy_n(x, op.width, out);
    rope.rotate(Worker::position(worker.slice_of(row), row), out, 0, op.width);
  });
}

/// For Activation and Add: two rows in, one out.
template <class Kernel>
void run_pair(Worker& worker, const OpRecord& op, Kernel kernel) {
  for_rows(worker, op, [&](const float* x, float* out, int64_t row) {
    kernel(x, worker.buffer(op.y) + row * worker.stride(op.y), op.width, out);
  });
}

void store_rows(Worker& worker, const OpRecord& op) {
  const LayerPages& pages = worker.plan.layers[static_cast<size_t>(op.layer)];
  const int64_t width = pages.num_kv_heads * pages.head_dim;
  const int64_t num_rows = worker.step.record.num_rows;
  for (int64_t row = worker.part_begin(num_rows); row < worker.part_end(num_rows); ++row) {
    const int64_t position = Worker::position(worker.slice_of(row), row);
    const float* keys = worker.buffer(op.y) + row * worker.stride(op.y);
    const float* values = worker.buffer(op.z) + row * worker.stride(op.z);
    worker.for_tables(row, op.layer, [&](const int32_t* table) {
      store_keys(pages, table, position, keys, 0, width);
      store_values(pages, table, position, values, 0, width);
    });
  }
  worker.meet();
}

void run_attention(Worker& worker, size_t index) {
  const OpRecord& op = worker.plan.ops[index];
  AttentionSchedule& schedule =
      worker.plan.schedules[static_cast<size_t>(worker.plan.schedule_of[index])];
  if (op.is_stored == 0) store_rows(worker, op);
  const LayerPages& pages = worker.plan.layers[static_cast<size_t>(op.layer)];
  const int32_t out = op.outputs[0].buffer;
  const auto num_tickets = static_cast<int64_t>(schedule.tasks().size()) * pages.num_kv_heads;
  worker.share_out(num_tickets, [&](int64_t ticket) {
    const AttentionTask& task = schedule.tasks()[static_cast<size_t>(ticket / pages.num_kv_heads)];
    const int64_t head = ticket % pages.num_kv_heads;
    // This rank's query heads that read the key-value head, and of them the task's.
    const int64_t all = std::max<int64_t>(head * op.group - op.first_head, 0);
    const int64_t count =
        std::min<int64_t>((head + 1) * op.group - op.first_head, op.num_heads) - all;
    const int64_t first = all + count * task.part / task.num_parts;
    const int64_t end = all + count * (task.part + 1) / task.num_parts;
    if (first == end) return;
    const int64_t column = first * pages.head_dim;
    const SliceRecord& slice = worker.step.record.slices[task.slice];
    const int64_t row = slice.row + task.first_row;
    const AttentionRows rows{
        worker.buffer(op.x) + row * worker.stride(op.x) + column,
        worker.stride(op.x),
        worker.buffer(out) + row * worker.stride(out) + column,
        worker.stride(out),
        task.num_rows,
        slice.position + task.first_row,
        worker.page_table(slice.table, op.layer),
        end - first,
        head,
        window_of(op),
        op.scale,
        op.soft_cap,
        row >= worker.step.record.num_generated && op.precision != Precision::Precise,
        op.norm == kNone ? nullptr : worker.vector(op.norm) + first};
    if (task.split == kNone) {
      attend(rows, pages, worker.memory.attention);
      return;
    }
    const PieceShares shares = schedule.shares(task, head, end - first);
    AttentionScratch& scratch = worker.memory.attention;
    attend_pieces(rows, pages, {task.piece_begin, task.piece_end}, scratch, shares);
    if (schedule.finish(task, head)) {
      merge_pieces(rows, pages.head_dim, rows.pieces(), scratch, shares, {});
    }
  });
  worker.finish();
}

void run_join(Worker& worker, const OpRecord& op) {
  const OutputRecord& output = op.outputs[0];
  const int64_t head = output.width / op.num_heads;
  const int64_t rest = head - op.x_width;
  for_rows(worker, op, [&](const float* x, float* out, int64_t row) {
    const float* y = worker.buffer(op.y) + row * worker.stride(op.y);
    for (int64_t i = 0; i < op.num_heads; ++i) {
      std::copy_n(x + i * op.x_head + op.x_first, op.x_width, out + i * head);
      std::copy_n(y + i * rest, rest, out + i * head + op.x_width);
    }
    if (output.rope == kNone) return;
    const RopeTable& rope = worker.plan.ropes[static_cast<size_t>(output.rope)];
    rope.rotate(Worker::position(worker.slice_of(row), row), out, 0, output.width);
  });
}

void run_scale(Worker& worker, const OpRecord& op) {
  const float factor = op.norm == kNone ? op.factor : op.factor * worker.vector(op.norm)[0];
  for_rows(worker, op,
           [&](const float* x, float* out, int64_t) { scale_row(x, factor, op.width, out); });
}

void run_copy(Worker& worker, const OpRecord& op) {
  for_rows(worker, op, [&](const float* x, float* out, int64_t) {
    if (x != out) std::copy_n(x, op.width, out);
  });
}

void run_op(Worker& worker, size_t index) {
  const OpRecord& op = worker.plan.ops[index];
  switch (op.kind) {
    case OpKind::Embed:
      return run_embed(worker, op);
    case OpKind::Norm:
      return run_norm(worker, op);
    case OpKind::Linear:
      return run_linear(worker, index);
    case OpKind::Gated:
      return run_gated(worker, index);
    case OpKind::Rope:
      return run_rope(worker, op);
    case OpKind::Attention:
      return run_attention(worker, index);
    case OpKind::Activation:
      return run_pair(worker, op, [&](const float* x, const float* y, int64_t width, float* out) {
        gate_activation(op.activation, x, y, width, out);
      });
    case OpKind::Add:
      return run_pair(worker, op, add_rows);
    case OpKind::Logits:
      return run_logits(worker, index);
    case OpKind::Scale:
      return run_scale(worker, op);
    case OpKind::Experts:
      return run_experts(worker, op);
    case OpKind::Tap:
      return run_tap(worker, op);
    case OpKind::ExternalInput:
      return run_given(worker, op);
    case OpKind::Gather:
      return run_gather(worker, op);
    case OpKind::Send:
      return run_send(worker, op);
    case OpKind::Receive:
      return run_receive(worker, op);
    case OpKind::Terms:
      return run_expert_terms(worker, op);
    case OpKind::SumTerms:
      return run_sum_terms(worker, op);
    case OpKind::Pieces:
      return run_pieces(worker, index);
    case OpKind::HeadProducts:
      return run_head_products(worker, op);
    case OpKind::Join:
      return run_join(worker, op);
    case OpKind::Route:
      return run_route(worker, op);
    case OpKind::GateRows:
      return run_pair(worker, op, gate_row);
    case OpKind::Convolution:
      return run_convolution(worker, op);
    case OpKind::DeltaRule:
    case OpKind::Mamba2:
      return run_state_heads(worker, op);
    case OpKind::Copy:
      return run_copy(worker, op);
  }
}

/// A thread that gave up half-way would leave the others waiting: if the little that attention,
/// samplers and unpacked weights take in a thread is refused, the process ends.
void run_thread(void* context, int thread, int num_threads) noexcept {
  auto& step = *static_cast<StepState*>(context);
  Worker worker{step,   step.plan,   step.plan.threads[static_cast<size_t>(thread)],
                thread, num_threads, 0,
                0,      Clock::now()};
  // No thread stores anything before all have met after the first operation.
  for (int32_t i = 0; i < step.record.num_copies; ++i) {
    step.plan.copy_page(step.record.copies[i], thread, num_threads);
  }
  const std::vector<OpRecord>& ops = step.plan.ops;
  meet_ranks(worker);
  for (size_t i = 0; i < ops.size() && !step.is_lost; ++i) {
    const Clock::time_point begin = worker.now;
    const double waited = worker.waiting_s;
    if (i == step.plan.first_late && step.drawn.are_apart) {
      if (step.drawn.sampled.empty()) break;
      keep_drawn_rows(worker);
    }
    worker.meets_next = i + 1 < ops.size() && begins_with_barrier(ops[i + 1]);
    run_op(worker, i);
    worker.memory.waiting_s[i] += worker.waiting_s - waited;
    if (thread == 0) step.plan.elapsed_s[i] += seconds_between(begin, worker.now);
  }
  step.waiting_s[static_cast<size_t>(thread)] = worker.waiting_s;
}

/// Whether the slots of a slice's recurrent states exist.
bool is_inside(const Plan& plan, const StateRecord& slots) {
  const bool is_read = slots.read == kNone || (slots.read >= 0 && slots.read < plan.num_states);
  return is_read && slots.write >= 0 && slots.write < plan.num_states;
}

/// Refuses slots of single rows that do not exist; the last row of a slice must have one.
void check_row_states(const Plan& plan, const StepRecord& record) {
  if (record.row_states == nullptr) return;
  const auto is_slot = [&](int32_t slot) { return slot >= 0 && slot < plan.num_states; };
  const auto is_known = [&](int32_t slot) { return slot == kNone || is_slot(slot); };
  bool are_known = std::all_of(record.row_states, record.row_states + record.num_rows, is_known);
  for (int32_t i = 0; i < record.num_slices; ++i) {
    const SliceRecord& slice = record.slices[i];
    are_known = are_known && is_slot(record.row_states[slice.row + slice.num_rows - 1]);
  }
  if (!are_known) throw std::out_of_range("state");
}

bool is_page(const Plan& plan, int32_t page) { return page >= 0 && page < plan.num_pages; }

/// Whether every page that the slice's rows see exists; those before their window need not.
bool is_inside(const Plan& plan, const StepRecord& record, const SliceRecord& slice) {
  const int64_t end = (slice.position + slice.num_rows + plan.page_size - 1) / plan.page_size;
  if (slice.position < 0 || end > record.table_stride) return false;
  for (size_t group = 0; group < plan.group_windows.size(); ++group) {
    const int32_t* table = plan.page_table(record, slice.table, static_cast<int64_t>(group));
    const int64_t begin = first_seen(slice.position, {plan.group_windows[group]}) / plan.page_size;
    const auto exists = [&](int32_t page) { return is_page(plan, page); };
    if (!std::all_of(table + begin, table + end, exists)) return false;
  }
  return true;
}

/// Whether the pages exist to which a row is stored besides its own.
bool is_inside(const Plan& plan, const StepRecord& record, const StoreRecord& store) {
  if (store.row < 0 || store.row >= record.num_rows) return false;
  const auto has_row = [&](const SliceRecord& slice) {
    return slice.row <= store.row && store.row < slice.row + slice.num_rows;
  };
  const SliceRecord* end = record.slices + record.num_slices;
  const SliceRecord* slice = std::find_if(record.slices, end, has_row);
  if (slice == end) return false;
  const int64_t place = Worker::position(*slice, store.row) / plan.page_size;
  for (size_t group = 0; group < plan.group_windows.size(); ++group) {
    const auto index = static_cast<int64_t>(group);
    if (!is_page(plan, plan.page_table(record, store.table, index)[place])) return false;
  }
  return true;
}

/// Refuses tokens and pages that do not exist, even if callers have checked them.
void check(const Plan& plan, const StepRecord& record) {
  for (const OpRecord& op : plan.ops) {
    if (op.kind != OpKind::Embed) continue;
    const int64_t count = op.first_cut == kNone
                              ? plan.weights[static_cast<size_t>(op.outputs[0].weight)].num_outputs
                              : plan.link.cuts_end(op);
    const auto is_known = [&](int32_t token) { return token >= 0 && token < count; };
    if (!std::all_of(record.tokens, record.tokens + record.num_rows, is_known)) {
      throw std::out_of_range("token");
    }
  }
  for (int32_t i = 0; i < record.num_slices; ++i) {
    if (!is_inside(plan, record, record.slices[i])) throw std::out_of_range("page");
  }
  if (plan.state_stride > 0) {
    if (record.states == nullptr) throw std::out_of_range("state");
    for (int32_t i = 0; i < record.num_slices; ++i) {
      if (!is_inside(plan, record.states[i])) throw std::out_of_range("state");
    }
    check_row_states(plan, record);
  }
  for (int32_t i = 0; i < record.num_stores; ++i) {
    if (!is_inside(plan, record, record.stores[i])) throw std::out_of_range("page");
  }
  for (int32_t i = 0; i < record.num_copies; ++i) {
    const CopyRecord& copy = record.copies[i];
    if (!is_page(plan, copy.from) || !is_page(plan, copy.to)) throw std::out_of_range("page");
  }
}

void make_room(Plan& plan, const StepRecord& record) {
  make_room_for_products(plan, record);
  make_room_for_experts(plan, record);
  make_room_for_heads(plan, record);
  make_room_for_routes(plan);
  make_room_for_collectives(plan, record);
  make_room_for_pieces(plan);
  make_room_for_states(plan);
}

/// Makes room and tables before the threads start, because threads do not allocate shared memory.
void get_ready(StepState& step) {
  Plan& plan = step.plan;
  const StepRecord& record = step.record;
  const auto float_bytes = static_cast<int64_t>(sizeof(float));
  for (PlanMemory& memory : plan.memories) {
    if (memory.shared == nullptr) memory.own.fit(memory.bytes(record.num_rows));
    if (memory.shared != nullptr && record.num_rows > plan.link.max_rows) throw std::bad_alloc();
  }
  for (PlanBuffer& buffer : plan.buffers) {
    const PlanMemory& memory = plan.memories[static_cast<size_t>(buffer.memory)];
    uint8_t* rows = memory.shared == nullptr ? memory.own.bytes() : memory.shared;
    buffer.data = reinterpret_cast<float*>(rows) + buffer.first_column;
  }
  step.slice_of_row.resize(static_cast<size_t>(record.num_rows));
  int64_t num_positions = 0;
  for (int32_t i = 0; i < record.num_slices; ++i) {
    const SliceRecord& slice = record.slices[i];
    std::fill_n(step.slice_of_row.begin() + slice.row, slice.num_rows, i);
    num_positions = std::max<int64_t>(num_positions, slice.position + slice.num_rows);
  }
  if (record.num_stores > 0) {
    step.first_store.assign(static_cast<size_t>(record.num_rows) + 1, record.num_stores);
    for (int32_t i = record.num_stores - 1, row = record.num_rows; row >= 0; --row) {
      while (i >= 0 && record.stores[i].row >= row) --i;
      step.first_store[static_cast<size_t>(row)] = i + 1;
    }
  }
  for (RopeTable& rope : plan.ropes) rope.cover(num_positions);
  for (const OpRecord& op : plan.ops) {
    if (op.kind == OpKind::Logits && op.team == kNone && record.logits == nullptr) {
      const int64_t rows = std::min<int64_t>(record.num_sampled, kLogitRows);
      plan.logits.fit(rows * op.outputs[0].width * float_bytes);
    }
  }
  order_state_slices(step);
  find_drawn_rows(step);
  make_room(plan, record);
  if (!step.drawn.sampled.empty()) make_room(plan, step.drawn.record);  // few rows may need more
  for (size_t i = 0; i < plan.schedules.size(); ++i) {
    const bool is_apart = step.drawn.are_apart && plan.is_late[i];
    const StepRecord& own = is_apart ? step.drawn.record : record;
    const int64_t end = is_apart ? own.num_rows : step.row_end;
    plan.schedules[i].make(own, step.row_begin, end, plan.pool.num_active());
  }
  for (PieceSchedule& schedule : plan.piece_schedules) {
    schedule.make(record, step.row_begin, step.row_end, plan.pool.num_active());
  }
}

}  // namespace

void run_step(Plan& plan, StepRecord& record) {
  const Clock::time_point begin = Clock::now();
  check(plan, record);
  plan.pool.begin_step(record.num_rows > kFewRows);
  StepState step{plan, record, {}, {}, {}, {}, {}};
  step.row_begin = record.num_rows * plan.link.row_part / plan.link.num_row_parts;
  step.row_end = record.num_rows * (plan.link.row_part + 1) / plan.link.num_row_parts;
  step.waiting_s.assign(static_cast<size_t>(plan.pool.num_active()), 0);
  get_ready(step);
  plan.pool.run(run_thread, &step);
  record.elapsed_s = seconds_between(begin, Clock::now());
  double waiting_s = 0;
  double longest_wait_s = 0;
  for (const double wait_s : step.waiting_s) {
    waiting_s += wait_s;
    longest_wait_s = std::max(longest_wait_s, wait_s);
  }
  record.kernel_s = record.elapsed_s - waiting_s / static_cast<double>(step.waiting_s.size());
  record.collective_s = step.collective_s;
  plan.pool.end_step(record.elapsed_s, longest_wait_s - step.collective_s);
  if (step.is_lost) throw RankLost();
}

}  // namespace ts
