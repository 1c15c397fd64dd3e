// Finds the rows that are drawn from, and goes on with them alone.
#include "executor/drawn.h"

#include <algorithm>
#include <numeric>

namespace ts {

void find_drawn_rows(StepState& step) {
  const StepRecord& record = step.record;
  DrawnRows& drawn = step.drawn;
  const int32_t* end = record.sampled_rows + record.num_sampled;
  drawn.are_apart = step.plan.first_late < step.plan.ops.size() && record.taps == nullptr &&
                    record.num_sampled < record.num_rows;
  if (!drawn.are_apart) return;
  drawn.sampled.assign(record.sampled_rows, end);
  int32_t last_slice = kNone;
  for (int32_t i = 0; i < record.num_sampled; ++i) {
    const int32_t row = drawn.sampled[static_cast<size_t>(i)];
    const int32_t index = step.slice_of_row[static_cast<size_t>(row)];
    const bool is_next = i > 0 && index == last_slice && row == record.sampled_rows[i - 1] + 1;
    if (is_next) {
      ++drawn.slices.back().num_rows;
      continue;
    }
    const SliceRecord& slice = record.slices[index];
    const auto position = static_cast<int32_t>(Worker::position(slice, row));
    drawn.slices.push_back({i, 1, position, slice.table});
    last_slice = index;
  }
  drawn.record = record;
  drawn.record.num_rows = record.num_sampled;
  drawn.record.sampled_rows = drawn.sampled.data();
  drawn.record.slices = drawn.slices.data();
  drawn.record.num_slices = static_cast<int32_t>(drawn.slices.size());
  drawn.record.num_generated = static_cast<int32_t>(
      std::lower_bound(record.sampled_rows, end, record.num_generated) - record.sampled_rows);
}

void keep_drawn_rows(Worker& worker) {
  const std::vector<int32_t>& sampled = worker.step.drawn.sampled;
  for (const PlanMemory& memory : worker.plan.memories) {
    if (memory.record.num_rows != 0) continue;  // not of the step's rows
    const int64_t width = memory.record.width;
    const int64_t begin = worker.part_begin(width);
    const int64_t count = worker.part_end(width) - begin;
    for (size_t i = 0; i < sampled.size(); ++i) {
      if (sampled[i] == static_cast<int32_t>(i)) continue;
      float* to = memory.own.floats() + static_cast<int64_t>(i) * width + begin;
      std::copy_n(memory.own.floats() + sampled[i] * width + begin, count, to);
    }
  }
  worker.meet([&] {
    StepState& step = worker.step;
    step.record = step.drawn.record;
    step.row_end = step.record.num_rows;
    for (int32_t i = 0; i < step.record.num_slices; ++i) {
      const SliceRecord& slice = step.record.slices[i];
      std::fill_n(step.slice_of_row.begin() + slice.row, slice.num_rows, i);
    }
    std::iota(step.drawn.sampled.begin(), step.drawn.sampled.end(), 0);
  });
}

}  // namespace ts
