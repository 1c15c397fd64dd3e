// The choice of experts where shares are not a softmax of the scores.
#pragma once

#include "executor/worker.h"

namespace ts {

void run_route(Worker& worker, const OpRecord& op);

/// Makes room for what it needs; throws std::bad_alloc.
void make_room_for_routes(Plan& plan);

}  // namespace ts
