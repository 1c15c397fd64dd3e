// Products of heads: small ones, of which a thread takes some rows and outputs of one at a time.
#include "executor/heads.h"

#include <algorithm>

#include "executor/products.h"
#include "kernels/rows.h"
#include "linear/layout.h"

namespace ts {

namespace {

constexpr int64_t kMostRows = 64;  // of a task: a thread prepares them for itself

/// Rows of one kind, in tasks of up to `kMostRows`.
struct HeadRows {
  RowKind kind;
  int64_t begin;
  int64_t count;

  int64_t num_tasks() const { return round_up(count, kMostRows) / kMostRows; }
};

const PackedWeight& weight_of(const Plan& plan, const OpRecord& op, int64_t head) {
  return plan.weights[static_cast<size_t>(op.outputs[0].weight + head)];
}

/// Multiplies rows [begin, end) of one kind with groups [group_begin, group_end) of a head.
void multiply_head(Worker& worker, const OpRecord& op, int64_t head, RowKind kind, int64_t begin,
                   int64_t end, int64_t group_begin, int64_t group_end) {
  const PackedWeight& weight = weight_of(worker.plan, op, head);
  const int64_t stride = worker.stride(op.x);
  const float* x = worker.buffer(op.x) + begin * stride + head * op.x_head + op.x_first;
  void* prepared = worker.memory.prepared.bytes();
  float* gathered = worker.memory.rows.floats();
  for (int64_t i = 0; i < end - begin && weight.order != nullptr; ++i) {
    gather_row(x + i * stride, weight.order, op.x_width, gathered + i * op.x_width);
  }
  const bool is_gathered = weight.order != nullptr;
  prepare_rows(weight.type, kind, is_gathered ? gathered : x, is_gathered ? op.x_width : stride,
               op.x_width, 0, end - begin, prepared);
  const OutputRecord& output = op.outputs[0];
  const int64_t out_stride = worker.stride(output.buffer);
  float* out =
      worker.buffer(output.buffer) + begin * out_stride + head * (output.width / op.num_heads);
  multiply({weight, kind, prepared, end - begin}, group_begin, group_end, out, out_stride, false);
}

}  // namespace

void run_head_products(Worker& worker, const OpRecord& op) {
  const int64_t first = worker.step.row_begin;
  const int64_t last = worker.step.row_end;
  const int64_t middle = std::clamp(num_generated_in(worker.step.record), first, last);
  const HeadRows kinds[2] = {{row_kind(op.precision, false), first, middle - first},
                             {row_kind(op.precision, true), middle, last - middle}};
  const int64_t num_tasks = kinds[0].num_tasks() + kinds[1].num_tasks();
  const int64_t groups = num_groups(op.outputs[0].width / op.num_heads);
  const int64_t wanted = kChunksPerThread * worker.num_threads;
  const int64_t num_cuts =
      std::clamp<int64_t>(wanted / std::max<int64_t>(1, num_tasks * op.num_heads), 1, groups);
  worker.share_out(num_tasks * op.num_heads * num_cuts, [&](int64_t ticket) {
    const int64_t cut = ticket % num_cuts;
    const int64_t head = ticket / num_cuts % op.num_heads;
    int64_t task = ticket / num_cuts / op.num_heads;
    const bool is_later = task >= kinds[0].num_tasks();
    if (is_later) task -= kinds[0].num_tasks();
    const HeadRows& rows = kinds[is_later];
    const int64_t begin = rows.begin + task * kMostRows;
    multiply_head(worker, op, head, rows.kind, begin,
                  std::min(begin + kMostRows, rows.begin + rows.count), groups * cut / num_cuts,
                  groups * (cut + 1) / num_cuts);
  });
  worker.finish();
}

void make_room_for_heads(Plan& plan, const StepRecord& step) {
  const int64_t num_rows = std::min<int64_t>(step.num_rows, kMostRows);
  for (const OpRecord& op : plan.ops) {
    if (op.kind != OpKind::HeadProducts) continue;
    int64_t bytes = 0;
    for (int64_t head = 0; head < op.num_heads; ++head) {
      for (const bool is_prompt : {false, true}) {
        bytes = std::max(
            bytes, prepared_bytes(weight_of(plan, op, head).type, row_kind(op.precision, is_prompt),
                                  op.x_width, num_rows));
      }
    }
    for (ThreadMemory& memory : plan.threads) {
      memory.prepared.fit(bytes);
      memory.rows.fit(num_rows * op.x_width * static_cast<int64_t>(sizeof(float)));
    }
  }
}

}  // namespace ts
