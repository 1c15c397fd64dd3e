// Chooses the experts of each row by itself.
#include "executor/route.h"

#include "kernels/rows.h"

namespace ts {

void run_route(Worker& worker, const OpRecord& op) {
  const int32_t factors = op.outputs[0].bias;
  const Routing routing{op.num_experts,
                        op.num_used,
                        op.num_groups,
                        op.num_used_groups,
                        op.group_best,
                        op.is_sigmoid != 0,
                        op.shares == Shares::Chosen,
                        op.factor,
                        op.norm == kNone ? nullptr : worker.vector(op.norm),
                        factors == kNone ? nullptr : worker.vector(factors)};
  ExpertGroups& memory = worker.memory.experts;
  memory.chosen.resize(static_cast<size_t>(op.num_experts));
  memory.shares.resize(static_cast<size_t>(3 * op.num_experts));
  const int32_t out = op.outputs[0].buffer;
  for (int64_t row = worker.rows_begin(); row < worker.rows_end(); ++row) {
    route_row(worker.buffer(op.x) + row * worker.stride(op.x), routing, memory.chosen.data(),
              memory.shares.data(), worker.buffer(out) + row * worker.stride(out));
  }
  worker.finish();
}

void make_room_for_routes(Plan& plan) {
  for (const OpRecord& op : plan.ops) {
    if (op.kind != OpKind::Route) continue;
    for (ThreadMemory& memory : plan.threads) {
      memory.experts.reserve(3 * int64_t{op.num_experts}, op.num_experts);
    }
  }
}

}  // namespace ts
