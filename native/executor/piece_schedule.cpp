// Cuts a step's attention over pieces into tiles and tasks.
#include "executor/piece_schedule.h"

#include <algorithm>
#include <tuple>

#include "executor/schedule.h"

namespace ts {

namespace {

constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kFewestQueries = 24;  // of a task, where a piece must be converted to float32

}  // namespace

bool PieceShape::operator==(const PieceShape& other) const {
  const auto facts = [](const PieceShape& s) {
    return std::tie(s.num_heads, s.num_kv_heads, s.head_dim, s.window, s.num_places, s.first_head,
                    s.end_head, s.tile_bytes, s.piece_bytes);
  };
  return facts(*this) == facts(other);
}

int64_t PieceSchedule::share_bytes(int64_t num_rows) const {
  return PieceShares::num_floats(num_rows * shape_.num_heads, shape_.head_dim) * kFloatBytes;
}

Merged PieceSchedule::merged(int64_t row, int64_t head) const {
  if (!is_in_parts_) return {};
  float* peaks = merged_.floats() + (row - row_begin_) * shape_.num_heads + head;
  return {peaks, peaks + (row_end_ - row_begin_) * shape_.num_heads, shape_.num_heads};
}

void PieceSchedule::make(const StepRecord& step, int64_t row_begin, int64_t row_end,
                         int num_threads) {
  row_begin_ = row_begin;
  row_end_ = row_end;
  is_in_parts_ = false;
  tiles_.assign(1, {});
  for (int32_t i = 0; i < step.num_slices; ++i) add_slice(i, step.slices[i]);
  const int64_t num_wanted = num_threads == 1 ? 1 : kTasksPerThread * num_threads;
  for (PieceTile& tile : tiles_) {
    for (size_t i = 0; i < tile.spans.size(); ++i) {
      add_gives(tile, static_cast<int32_t>(i), num_wanted);
      add_takes(tile, static_cast<int32_t>(i), num_wanted);
    }
  }
  if (is_in_parts_) merged_.fit(2 * (row_end - row_begin) * shape_.num_heads * kFloatBytes);
}

void PieceSchedule::add_slice(int32_t index, const SliceRecord& slice) {
  const auto pieces_of = [&](int64_t row, int64_t num_rows) {
    const int64_t position = slice.position + row;
    return Pieces{first_piece(position, shape_.window), num_pieces(position + num_rows)};
  };
  const Pieces all = pieces_of(0, slice.num_rows);
  const bool gives_keys = share_bytes(slice.num_rows) > shape_.piece_bytes;
  int64_t most_rows = slice.num_rows;
  if (!gives_keys) {
    const int64_t fitting = shape_.tile_bytes / ((all.end - all.begin) * share_bytes(1));
    most_rows = std::clamp<int64_t>(fitting, 1, slice.num_rows);
  }
  for (int64_t row = 0; row < slice.num_rows; row += most_rows) {
    const int64_t num_rows = std::min(most_rows, slice.num_rows - row);
    const int64_t bytes = gives_keys ? shape_.piece_bytes : share_bytes(num_rows);
    const int64_t fitting = shape_.tile_bytes / bytes;
    const int64_t rounds = fitting / shape_.num_places;  // each member has a piece in each
    const int64_t most = rounds > 0 ? rounds * shape_.num_places : fitting;
    const Pieces pieces = pieces_of(row, num_rows);
    for (int64_t begin = pieces.begin; begin < pieces.end; begin += most) {
      const int64_t end = std::min(begin + most, pieces.end);
      if (end < pieces.end) is_in_parts_ = true;
      add_span(
          {index, slice.row + row, num_rows, slice.position + row, {begin, end}, gives_keys, 0},
          (end - begin) * bytes, begin > pieces.begin);
    }
  }
}

void PieceSchedule::add_span(const PieceSpan& span, int64_t num_bytes, bool continues) {
  if (continues || tiles_.back().num_bytes + num_bytes > shape_.tile_bytes) tiles_.emplace_back();
  PieceTile& tile = tiles_.back();
  tile.spans.push_back(span);
  tile.spans.back().offset = tile.num_bytes;
  tile.num_bytes += round_up(num_bytes, 64);
}

void PieceSchedule::add_gives(PieceTile& tile, int32_t index, int64_t num_wanted) const {
  const PieceSpan& span = tile.spans[static_cast<size_t>(index)];
  const int64_t num_heads = span.gives_keys ? 1 : shape_.num_kv_heads;
  const int64_t num_spans = static_cast<int64_t>(tile.spans.size());
  const int64_t pieces = span.pieces.end - span.pieces.begin;
  const int64_t rounds = (pieces + shape_.num_places - 1) / shape_.num_places;
  const int64_t parts = std::clamp<int64_t>(num_wanted / (num_heads * num_spans), 1, rounds);
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = span.pieces.begin + rounds * part / parts * shape_.num_places;
      const int64_t end = span.pieces.begin + rounds * (part + 1) / parts * shape_.num_places;
      tile.gives.push_back({index, begin, std::min(end, span.pieces.end), head, head + 1});
    }
  }
}

void PieceSchedule::add_takes(PieceTile& tile, int32_t index, int64_t num_wanted) const {
  const PieceSpan& span = tile.spans[static_cast<size_t>(index)];
  const int64_t begin = std::max(span.row, row_begin_);
  const int64_t end = std::min(span.row + span.num_rows, row_end_);
  const int64_t num_heads = shape_.end_head - shape_.first_head;
  if (begin >= end || num_heads == 0) return;
  if (!span.gives_keys) {
    const int64_t num_spans = static_cast<int64_t>(tile.spans.size());
    const int64_t parts = std::clamp<int64_t>(num_wanted / num_spans, 1, num_heads);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t head = shape_.first_head + num_heads * part / parts;
      tile.takes.push_back(
          {index, begin, end, head, shape_.first_head + num_heads * (part + 1) / parts});
    }
    return;
  }
  const int64_t group = shape_.group();
  const int64_t first = shape_.first_head / group;
  const int64_t last = (shape_.end_head - 1) / group;
  const int64_t most = std::max<int64_t>(1, kQueriesPerTask / group);
  const int64_t fewest = std::min(most, (kFewestQueries + group - 1) / group);
  const int64_t wanted = num_wanted == 1 ? most : (end - begin) * (last - first + 1) / num_wanted;
  const int64_t num_rows = std::clamp(wanted, fewest, most);
  const int64_t num_takes = (end - begin + num_rows - 1) / num_rows * (last - first + 1);
  const int64_t most_parts = std::max<int64_t>(1, group / kFewestQueries);
  const int64_t parts = std::clamp<int64_t>(num_wanted / num_takes, 1, most_parts);
  // The last rows first: they see the most.
  for (int64_t row = end; row > begin; row -= num_rows) {
    for (int64_t kv_head = first; kv_head <= last; ++kv_head) {
      const int64_t head = std::max(kv_head * group, shape_.first_head);
      const int64_t count = std::min((kv_head + 1) * group, shape_.end_head) - head;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t part_head = head + count * part / parts;
        const int64_t part_end = head + count * (part + 1) / parts;
        if (part_head == part_end) continue;
        tile.takes.push_back({index, std::max(row - num_rows, begin), row, part_head, part_end});
      }
    }
  }
}

}  // namespace ts
