// Cuts a step's attention into tasks.
#include "executor/schedule.h"

#include <algorithm>

namespace ts {

namespace {

constexpr int64_t kSmallestSplit = 2;  // pieces
constexpr int64_t kFewestHeads = 32;   // of a part: each converts the keys for itself
// Shares of a step: 64 MB. With many rows far into a long context they would take gigabytes.
constexpr int64_t kMostShareFloats = 16 << 20;

}  // namespace

void AttentionSchedule::make(const StepRecord& step, int64_t row_begin, int64_t row_end,
                             int num_threads) {
  tasks_.clear();
  splits_.clear();
  rows_.clear();
  share_floats_ = 0;
  double total = 0;
  for (int32_t i = 0; i < step.num_slices; ++i) {
    const SliceRecord& slice = step.slices[i];
    const auto begin = static_cast<int32_t>(std::max<int64_t>(row_begin - slice.row, 0));
    const auto end = static_cast<int32_t>(std::min<int64_t>(row_end - slice.row, slice.num_rows));
    if (begin >= end) continue;
    rows_.push_back({i, begin, end, int64_t{slice.position} + begin});
    const int64_t middle = rows_.back().position + (end - begin) / 2;
    total += static_cast<double>(end - begin) *
             static_cast<double>(num_pieces(middle + 1) - first_piece(middle, window_));
  }
  const double target = num_threads == 1 ? total + 1
                                         : total * static_cast<double>(num_kv_heads_) /
                                               static_cast<double>(num_threads * kTasksPerThread);
  for (const SliceRows& rows : rows_) cut_slice(rows, target);
  std::sort(tasks_.begin(), tasks_.end(),
            [](const AttentionTask& a, const AttentionTask& b) { return a.cost() > b.cost(); });
  reserve_shares();
}

void AttentionSchedule::cut_slice(const SliceRows& rows, double target_cost) {
  const auto most_rows = static_cast<int32_t>(std::max<int64_t>(1, kQueriesPerTask / group_));
  for (int32_t row = rows.begin; row < rows.end; row += most_rows) {
    const int32_t num_rows = std::min(most_rows, rows.end - row);
    const int64_t position = rows.position + row - rows.begin;
    const auto begin = static_cast<int32_t>(first_piece(position, window_));
    const auto end = static_cast<int32_t>(num_pieces(position + num_rows));
    const int32_t pieces = end - begin;
    AttentionTask task{rows.index, row, num_rows, begin, end, kNone};
    const int64_t wanted = 1 + static_cast<int64_t>(static_cast<double>(task.cost()) / target_cost);
    const auto parts = static_cast<int32_t>(std::min<int64_t>(wanted, pieces / kSmallestSplit));
    if (parts < 2 || !has_room(num_rows, pieces)) {
      // Parts of the heads read all keys each, and need no shares.
      task.num_parts = static_cast<int32_t>(std::clamp<int64_t>(group_ / kFewestHeads, 1, wanted));
      for (; task.part < task.num_parts; ++task.part) tasks_.push_back(task);
      continue;
    }
    const int64_t floats = pieces * PieceShares::num_floats(num_rows * group_, head_dim_);
    task.split = static_cast<int32_t>(splits_.size());
    splits_.push_back({parts, share_floats_, floats, begin});
    share_floats_ += floats * num_kv_heads_;
    for (int32_t part = 0; part < parts; ++part) {
      task.piece_begin = begin + pieces * part / parts;
      task.piece_end = begin + pieces * (part + 1) / parts;
      tasks_.push_back(task);
    }
  }
}

/// Whether shares may take memory: the step's do not exceed a limit, or, of a single row, they are
/// small beside the keys and values that it reads.
bool AttentionSchedule::has_room(int64_t num_rows, int64_t num_pieces) const {
  const int64_t floats = PieceShares::num_floats(num_rows * group_, head_dim_);
  const bool are_small =
      num_rows == 1 && floats * static_cast<int64_t>(sizeof(float)) <= piece_bytes_;
  return are_small || share_floats_ + num_pieces * floats * num_kv_heads_ <= kMostShareFloats;
}

void AttentionSchedule::reserve_shares() {
  memory_.fit(share_floats_ * static_cast<int64_t>(sizeof(float)));
  const size_t size = splits_.size() * static_cast<size_t>(num_kv_heads_);
  if (size > num_left_size_) {
    num_left_ = std::make_unique<std::atomic<int32_t>[]>(size);
    num_left_size_ = size;
  }
  for (size_t i = 0; i < size; ++i) {
    num_left_[i].store(splits_[i / static_cast<size_t>(num_kv_heads_)].num_tasks);
  }
}

bool AttentionSchedule::finish(const AttentionTask& task, int64_t head) {
  std::atomic<int32_t>& left = num_left_[static_cast<size_t>(task.split * num_kv_heads_ + head)];
  if (left.fetch_sub(1, std::memory_order_acq_rel) > 1) return false;
  // The next layer starts from the full count again; a barrier lies in between.
  left.store(splits_[static_cast<size_t>(task.split)].num_tasks, std::memory_order_relaxed);
  return true;
}

}  // namespace ts
