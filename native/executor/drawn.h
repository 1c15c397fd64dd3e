// Rows that are drawn from: in the last layers the others have nothing more to do.
#pragma once

#include "executor/worker.h"

namespace ts {

/// Finds them, and what their step is from the operation after the last store on. Where a value
/// leaves the step all rows run to its end.
void find_drawn_rows(StepState& step);

/// Brings them together, in place; the step goes on with them alone.
void keep_drawn_rows(Worker& worker);

}  // namespace ts
