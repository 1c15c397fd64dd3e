// Operations with a recurrent state: what a request keeps in place of keys and values.
#pragma once

#include "executor/worker.h"

namespace ts {

void run_convolution(Worker& worker, const OpRecord& op);

/// Computes the gated delta rule or Mamba-2.
void run_state_heads(Worker& worker, const OpRecord& op);

/// Finds the slices that continue the states of others; slots must exist.
void order_state_slices(StepState& step);

/// Makes room for what the operations need; throws std::bad_alloc.
void make_room_for_states(Plan& plan);

}  // namespace ts
