// Attention over pieces that the ranks of a team store in turn.
#include "executor/pieces.h"

#include <algorithm>
#include <cstring>

#include "executor/worker.h"

namespace ts {

namespace {

/// Rows and query heads that a member of the team merges.
struct Part {
  int64_t row_begin;
  int64_t row_end;
  int64_t first_head;
  int64_t end_head;
};

/// An operation, and the memory of the tile at hand.
struct Attended {
  Worker& worker;
  const OpRecord& op;
  const PieceShape& shape;
  const LayerPages& pages;
  const TeamRecord& team;

  /// Of two places in turn: others may still read the tile before.
  uint8_t* memory(int64_t turn) const {
    const PlanLink& link = worker.plan.link;
    uint8_t* tiles =
        link.shared() == nullptr ? link.tiles.bytes() : link.record.shared + team.tiles_offset;
    return tiles + turn % 2 * team.tile_bytes;
  }

  Part part_of(int64_t member) const {
    const int32_t* cuts = &worker.plan.link.cuts[static_cast<size_t>(op.first_cut)];
    const int64_t num_row_parts = team.size / op.num_parts;
    const int64_t row_part = member / op.num_parts;
    const int64_t num_rows = worker.step.record.num_rows;
    return {num_rows * row_part / num_row_parts, num_rows * (row_part + 1) / num_row_parts,
            cuts[member % op.num_parts], cuts[member % op.num_parts + 1]};
  }

  /// Rows [begin, end) of the step, in a span; query heads [head, end_head).
  AttentionRows rows(const PieceSpan& span, int64_t begin, int64_t end, int64_t head,
                     int64_t end_head) const {
    const int32_t out = op.outputs[0].buffer;
    const int64_t own_head = std::max(head - shape.first_head, int64_t{0});
    const int32_t table = worker.step.record.slices[span.slice].table;
    return {worker.buffer(op.x) + begin * worker.stride(op.x) + head * shape.head_dim,
            worker.stride(op.x),
            worker.buffer(out) + begin * worker.stride(out) + own_head * shape.head_dim,
            worker.stride(out),
            end - begin,
            span.position + begin - span.row,
            worker.page_table(table, op.layer),
            end_head - head,
            head / shape.group(),
            shape.window,
            op.scale,
            op.soft_cap,
            begin >= worker.step.record.num_generated && op.precision != Precision::Precise,
            op.norm == kNone ? nullptr : worker.vector(op.norm) + head};
  }

  PieceShares shares(const PieceSpan& span, uint8_t* tile, int64_t row, int64_t head) const {
    auto* data = reinterpret_cast<float*>(tile + span.offset);
    return {data, span.pieces.begin, span.num_rows, shape.num_heads, row - span.row, head};
  }

  /// The keys and values of a span's pieces, as pages that follow one another from piece 0 on.
  LayerPages given_pages(const PieceSpan& span, uint8_t* tile) const {
    return {tile + span.offset - span.pieces.begin * shape.piece_bytes,
            shape.piece_bytes,
            kPieceTokens,
            shape.num_kv_heads,
            shape.head_dim,
            pages.format,
            1,
            0,
            pages.balance,
            pages.values_are_keys};
  }
};

void store_rows(const Attended& attended) {
  Worker& worker = attended.worker;
  const OpRecord& op = attended.op;
  const LayerPages& pages = attended.pages;
  const int64_t width = pages.num_kv_heads * pages.head_dim;
  const int64_t num_rows = worker.step.record.num_rows;
  for (int64_t row = worker.part_begin(num_rows); row < worker.part_end(num_rows); ++row) {
    const int64_t position = Worker::position(worker.slice_of(row), row);
    if (!pages.has(position)) continue;
    const float* keys = worker.buffer(op.y) + row * worker.stride(op.y);
    const float* values = worker.buffer(op.z) + row * worker.stride(op.z);
    worker.for_tables(row, op.layer, [&](const int32_t* table) {
      store_keys(pages, table, position, keys, 0, width);
      store_values(pages, table, position, values, 0, width);
    });
  }
  worker.meet();
}

void give(const Attended& attended, const PieceTile& tile, const PieceTask& task, uint8_t* memory) {
  const PieceSpan& span = tile.spans[static_cast<size_t>(task.span)];
  const PieceShape& shape = attended.shape;
  const LayerPages& pages = attended.pages;
  if (!span.gives_keys) {
    const int64_t head = task.head * shape.group();
    const AttentionRows rows =
        attended.rows(span, span.row, span.row + span.num_rows, head, head + shape.group());
    attend_pieces(rows, pages, {task.begin, task.end}, attended.worker.memory.attention,
                  attended.shares(span, memory, span.row, head));
    return;
  }
  const LayerPages given = attended.given_pages(span, memory);
  const int32_t slice_table = attended.worker.step.record.slices[span.slice].table;
  const int32_t* table = attended.worker.page_table(slice_table, attended.op.layer);
  const auto bytes = static_cast<size_t>(shape.piece_bytes / shape.num_kv_heads);
  int64_t piece = pages.first_stored(task.begin);
  for (; piece < task.end; piece += pages.num_places) {
    for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
      const int64_t position = piece * kPieceTokens;
      std::memcpy(given.block(nullptr, head, position), pages.block(table, head, position), bytes);
    }
  }
}

void take(const Attended& attended, const PieceSchedule& schedule, const PieceTile& tile,
          const PieceTask& task, uint8_t* memory) {
  const PieceSpan& span = tile.spans[static_cast<size_t>(task.span)];
  const PieceShape& shape = attended.shape;
  AttentionScratch& scratch = attended.worker.memory.attention;
  AttentionRows rows = attended.rows(span, task.begin, task.end, task.head, task.end_head);
  const Merged merged = schedule.merged(task.begin, task.head - shape.first_head);
  if (span.gives_keys) {
    rows.page_table = nullptr;
    attend(rows, attended.given_pages(span, memory), span.pieces, scratch, merged);
  } else {
    merge_pieces(rows, shape.head_dim, span.pieces, scratch,
                 attended.shares(span, memory, task.begin, task.head), merged);
  }
}

/// Calls `body(bytes, how many)` for what the member `owner` has in a tile that `reader` needs.
template <class Body>
void for_given(const Attended& attended, const PieceTile& tile, uint8_t* memory, int64_t owner,
               int64_t reader, Body body) {
  const PieceShape& shape = attended.shape;
  const Part part = attended.part_of(reader);
  const int64_t num_heads = part.end_head - part.first_head;
  const int64_t group = shape.group();
  LayerPages owned = attended.pages;
  owned.place = owner;
  for (const PieceSpan& span : tile.spans) {
    const int64_t begin = std::max(span.row, part.row_begin);
    const int64_t end = std::min(span.row + span.num_rows, part.row_end);
    if (begin >= end || num_heads == 0) continue;
    const PieceShares shares = attended.shares(span, memory, span.row, 0);
    const LayerPages given = attended.given_pages(span, memory);
    const int64_t num_queries = shares.num_queries();
    const int64_t last = std::min(span.pieces.end, num_pieces(span.position + end - span.row));
    int64_t piece = owned.first_stored(span.pieces.begin);
    for (; piece < last; piece += owned.num_places) {
      if (span.gives_keys) {
        const int64_t first = part.first_head / group;
        const int64_t count = (part.end_head - 1) / group + 1 - first;
        body(given.block(nullptr, first, piece * kPieceTokens),
             count * (shape.piece_bytes / shape.num_kv_heads));
        continue;
      }
      float* out = shares.of_piece(piece, shape.head_dim);
      float* peak = out + num_queries * shape.head_dim;
      for (int64_t row = begin - span.row; row < end - span.row; ++row) {
        const int64_t query = row * shape.num_heads + part.first_head;
        const auto floats = [&](float* data, int64_t count) {
          body(reinterpret_cast<uint8_t*>(data), count * static_cast<int64_t>(sizeof(float)));
        };
        floats(out + query * shape.head_dim, num_heads * shape.head_dim);
        floats(peak + query, num_heads);
        floats(peak + num_queries + query, num_heads);
      }
    }
  }
}

/// Exchanges with each other member what it needs: in round k those pairs whose sum is k.
bool exchange(const Attended& attended, const PieceTile& tile, uint8_t* memory) {
  PlanLink& link = attended.worker.plan.link;
  const TeamRecord& team = attended.team;
  const int32_t own = team.place;
  for (int32_t round = 0; round < team.size; ++round) {
    const int32_t other = (round - own + team.size) % team.size;
    if (other == own) continue;
    int64_t sent = 0;
    for_given(attended, tile, memory, own, other, [&](uint8_t* data, int64_t count) {
      std::memcpy(link.sent.bytes() + sent, data, static_cast<size_t>(count));
      sent += count;
    });
    int64_t received = 0;
    for_given(attended, tile, memory, other, own,
              [&](uint8_t*, int64_t count) { received += count; });
    if (sent + received == 0) continue;
    const bool is_first = own < other;
    const int32_t ranks[] = {link.ranks_of(team)[std::min(own, other)],
                             link.ranks_of(team)[std::max(own, other)]};
    const int64_t bytes[] = {is_first ? sent : received, is_first ? received : sent};
    if (link.record.all_gather(link.record.context, ranks, 2, link.sent.bytes(),
                               link.received.bytes(), bytes) != 0) {
      return false;
    }
    const uint8_t* data = link.received.bytes() + (is_first ? sent : 0);
    for_given(attended, tile, memory, other, own, [&](uint8_t* place, int64_t count) {
      std::memcpy(place, data, static_cast<size_t>(count));
      data += count;
    });
  }
  return true;
}

}  // namespace

void run_pieces(Worker& worker, size_t index) {
  const OpRecord& op = worker.plan.ops[index];
  const PieceSchedule& schedule =
      worker.plan.piece_schedules[static_cast<size_t>(worker.plan.schedule_of[index])];
  const Attended attended{worker, op, schedule.shape(),
                          worker.plan.layers[static_cast<size_t>(op.layer)],
                          worker.plan.link.team_of(op)};
  SharedHead* shared = worker.plan.link.shared();
  if (op.is_stored == 0) store_rows(attended);
  const std::vector<PieceTile>& tiles = schedule.tiles();
  const PieceTile nothing;
  for (size_t i = 0; i <= tiles.size(); ++i) {
    // What came with the tile before, then this rank's part of the next.
    const PieceTile& last = i == 0 ? nothing : tiles[i - 1];
    const PieceTile& next = i == tiles.size() ? nothing : tiles[i];
    uint8_t* last_memory = attended.memory(worker.num_tiles + 1);
    uint8_t* next_memory = attended.memory(worker.num_tiles);
    const auto num_takes = static_cast<int64_t>(last.takes.size());
    const auto count = num_takes + static_cast<int64_t>(next.gives.size());
    worker.share_out(count, [&](int64_t ticket) {
      if (ticket < num_takes) {
        take(attended, schedule, last, last.takes[static_cast<size_t>(ticket)], last_memory);
      } else {
        const auto task = static_cast<size_t>(ticket - num_takes);
        give(attended, next, next.gives[task], next_memory);
      }
    });
    if (i == tiles.size()) break;
    worker.meet_and_move([&] {
      return shared == nullptr ? exchange(attended, next, next_memory)
                               : shared->meet(attended.team.barrier, attended.team.size);
    });
    if (worker.step.is_lost) return;
    ++worker.num_tiles;
  }
  worker.finish();
}

void make_room_for_pieces(Plan& plan) {
  PlanLink& link = plan.link;
  if (link.shared() != nullptr) return;
  int64_t bytes = 0;
  for (const TeamRecord& team : link.teams) bytes = std::max(bytes, team.tile_bytes);
  link.tiles.fit(2 * bytes);
  link.sent.fit(bytes);
  link.received.fit(bytes);
}

}  // namespace ts
