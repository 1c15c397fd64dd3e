// Products of heads, each of which has its own weight.
#pragma once

#include "executor/worker.h"

namespace ts {

void run_head_products(Worker& worker, const OpRecord& op);

/// Makes room for what these need in a step; throws std::bad_alloc.
void make_room_for_heads(Plan& plan, const StepRecord& step);

}  // namespace ts
