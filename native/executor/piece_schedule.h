// A step's attention where the ranks of a team store pieces in turn: in which tiles they exchange
// what they computed, and what a thread does at once.
#pragma once

#include <cstdint>
#include <vector>

#include "executor/memory.h"
#include "executor/records.h"
#include "kernels/attention.h"

namespace ts {

/// Attention over pieces, and which of it this member of the team does.
struct PieceShape {
  int64_t num_heads;  // query heads
  int64_t num_kv_heads;
  int64_t head_dim;
  Window window;
  int64_t num_places;
  int64_t first_head;  // this member merges the query heads from here on
  int64_t end_head;
  int64_t tile_bytes;   // of what is exchanged at once
  int64_t piece_bytes;  // of keys and values of a piece

  int64_t group() const { return num_heads / num_kv_heads; }
  bool operator==(const PieceShape& other) const;
};

/// Some rows of a slice, and pieces of their context. Members give each other the shares of these
/// rows that their pieces have; or, where that would be more, the pieces' keys and values.
struct PieceSpan {
  int32_t slice;
  int64_t row;  // the first, in the step
  int64_t num_rows;
  int64_t position;
  Pieces pieces;
  bool gives_keys;
  int64_t offset;  // bytes, in the tile
};

/// What a thread does at once. Giving: of pieces [begin, end) those stored here; their shares for
/// key-value head `head`, or keys and values of all. Taking: rows [begin, end) of the step, of the
/// query heads [head, end_head); their shares, or keys and values of the one head that they read.
struct PieceTask {
  int32_t span;
  int64_t begin;
  int64_t end;
  int64_t head;
  int64_t end_head;
};

/// What is exchanged at once.
struct PieceTile {
  std::vector<PieceSpan> spans;
  std::vector<PieceTask> gives;  // before the exchange
  std::vector<PieceTask> takes;  // after it
  int64_t num_bytes = 0;
};

/// The tiles of one step; those of all members are the same, except for the tasks.
class PieceSchedule {
 public:
  explicit PieceSchedule(const PieceShape& shape) : shape_(shape) {}

  const PieceShape& shape() const { return shape_; }
  const std::vector<PieceTile>& tiles() const { return tiles_; }

  /// This member merges the queries of rows [row_begin, row_end) of the step.
  void make(const StepRecord& step, int64_t row_begin, int64_t row_end, int num_threads);

  /// Peaks and sums of a row's query heads from `head` on, where its pieces are in several tiles.
  Merged merged(int64_t row, int64_t head) const;

 private:
  void add_slice(int32_t index, const SliceRecord& slice);
  void add_span(const PieceSpan& span, int64_t num_bytes, bool continues);
  void add_gives(PieceTile& tile, int32_t span, int64_t num_wanted) const;
  void add_takes(PieceTile& tile, int32_t span, int64_t num_wanted) const;
  int64_t share_bytes(int64_t num_rows) const;

  PieceShape shape_;
  std::vector<PieceTile> tiles_;
  int64_t row_begin_ = 0;
  int64_t row_end_ = 0;
  bool is_in_parts_ = false;  // some rows' pieces are in several tiles
  Block merged_;              // peaks (rows, heads), then sums
};

}  // namespace ts
