// A step's attention, divided into tasks of similar size.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "executor/memory.h"
#include "executor/records.h"
#include "kernels/attention.h"

namespace ts {

// Enough to pay for converting a piece: to bfloat16 on AMX, else to float32.
constexpr int64_t kQueriesPerTask = TS_LEVEL == 3 ? 192 : 96;
constexpr int64_t kTasksPerThread = 4;

/// Some rows of one slice and the pieces of their context; done once for each key-value head.
struct AttentionTask {
  int32_t slice;
  int32_t first_row;  // within the slice
  int32_t num_rows;
  int32_t piece_begin;
  int32_t piece_end;
  int32_t split;  // index into splits, or kNone if the task covers the whole context
  // Which of how many parts of the query heads that read the key-value head; one of one if split.
  int32_t part = 0;
  int32_t num_parts = 1;

  int64_t cost() const { return int64_t{num_rows} * (piece_end - piece_begin); }
};

/// Rows whose context is divided among several tasks: the task that ends last merges.
struct AttentionSplit {
  int32_t num_tasks;
  int64_t share_offset;  // floats, of the first head
  int64_t share_floats;  // of one head
  int64_t first_piece;
};

/// Rows [begin, end) of slice `index`, the first of them at `position`.
struct SliceRows {
  int32_t index;
  int32_t begin;
  int32_t end;
  int64_t position;
};

/// The tasks of one step, largest first. Results do not depend on how the cut is made.
class AttentionSchedule {
 public:
  /// `group` is how many query heads read one key-value head.
  AttentionSchedule(int64_t group, const Window& window, const LayerPages& pages)
      : group_(group),
        window_(window),
        num_kv_heads_(pages.num_kv_heads),
        head_dim_(pages.head_dim),
        piece_bytes_(piece_bytes(pages)) {}

  bool fits(int64_t group, const Window& window, const LayerPages& pages) const {
    return group == group_ && window == window_ && pages.num_kv_heads == num_kv_heads_ &&
           pages.head_dim == head_dim_ && piece_bytes(pages) == piece_bytes_;
  }

  /// Of rows [row_begin, row_end) of the step.
  void make(const StepRecord& step, int64_t row_begin, int64_t row_end, int num_threads);

  const std::vector<AttentionTask>& tasks() const { return tasks_; }

  /// The shares of `num_heads` query heads, which read the key-value head.
  PieceShares shares(const AttentionTask& task, int64_t head, int64_t num_heads) const {
    const AttentionSplit& split = splits_[static_cast<size_t>(task.split)];
    float* data = memory_.floats() + split.share_offset + head * split.share_floats;
    return {data, split.first_piece, task.num_rows, num_heads, 0, 0};
  }

  /// Says that a task of a split is done for `head`; true if it was the last one.
  bool finish(const AttentionTask& task, int64_t head);

 private:
  static int64_t piece_bytes(const LayerPages& pages) {
    return kPieceTokens / kBlockTokens * pages.block_bytes();
  }

  void cut_slice(const SliceRows& rows, double target_cost);
  bool has_room(int64_t num_rows, int64_t num_pieces) const;
  void reserve_shares();

  int64_t group_;
  Window window_;
  int64_t num_kv_heads_;
  int64_t head_dim_;
  int64_t piece_bytes_;  // of keys and values of a head
  std::vector<SliceRows> rows_;
  std::vector<AttentionTask> tasks_;
  std::vector<AttentionSplit> splits_;
  std::unique_ptr<std::atomic<int32_t>[]> num_left_;  // (splits, heads)
  size_t num_left_size_ = 0;
  Block memory_;
  int64_t share_floats_ = 0;
};

}  // namespace ts
