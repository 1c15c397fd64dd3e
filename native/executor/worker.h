// One thread's view of the step that is running.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "executor/plan.h"

namespace ts {

#if TS_LEVEL == 3
constexpr bool kOneArithmetic = false;  // prompt rows use bfloat16 tiles
#else
constexpr bool kOneArithmetic = true;
#endif

/// How many of the step's rows, from the first on, take the arithmetic of generated rows.
inline int64_t num_generated_in(const StepRecord& step) {
  return kOneArithmetic ? step.num_rows : step.num_generated;
}

constexpr int64_t kLogitRows = 32;  // logits of this many rows are held at once
constexpr int64_t kFewRows = 64;    // up to this many, reading the weights takes most of the time
constexpr int64_t kChunksPerThread = 4;

/// Up to this many values, each thread prepares all rows itself: cheaper than a barrier.
constexpr int64_t kFewValues = 8192;

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

/// The rows of a step that are drawn from, as a step of their own: those that run to its end.
struct DrawnRows {
  bool are_apart = false;  // the others stop once their keys and values are stored
  std::vector<int32_t> sampled;
  std::vector<SliceRecord> slices;
  StepRecord record;
};

/// The slices of one request, as indices; `second`, which may be kNone, continues the state of
/// `first`.
struct StateRun {
  int32_t first;
  int32_t second;
};

/// What the threads of one step share.
struct StepState {
  Plan& plan;
  StepRecord record;
  DrawnRows drawn;
  std::vector<int32_t> slice_of_row;
  std::vector<int32_t> first_store;  // of each row, and after the last; empty if there are none
  std::vector<double> waiting_s;     // of each thread
  std::vector<StateRun> state_runs;  // of all slices; empty without recurrent states
  int64_t row_begin = 0;             // rows that this rank computes
  int64_t row_end = 0;
  double collective_s = 0;
  bool is_lost = false;  // a rank is; written only while all threads wait
  alignas(64) std::atomic<int64_t> next_ticket{0};
};

struct Worker {
  StepState& step;
  Plan& plan;
  ThreadMemory& memory;
  const int thread;
  const int num_threads;
  int64_t ticket_base = 0;
  double waiting_s = 0;
  Clock::time_point now;     // when the last barrier was left
  bool meets_next = false;   // whether the next operation begins with a barrier
  int32_t num_together = 0;  // operations of which ranks prepared the rows together
  int32_t num_tiles = 0;     // of attention that ranks exchanged

  /// Waits for the others.
  void meet() {
    meet([] {});
  }

  /// The same; the last thread to arrive calls `last` before it lets the others go.
  template <class Last>
  void meet(const Last& last) {
    const Clock::time_point arrived = Clock::now();
    plan.pool.meet(thread, num_threads, last);
    now = Clock::now();
    waiting_s += seconds_between(arrived, now);
  }

  /// The same; the last one calls `move()`, which reaches other ranks and is false once one is
  /// lost.
  template <class Move>
  void meet_and_move(const Move& move) {
    meet([&] {
      const Clock::time_point begin = Clock::now();
      if (!move()) step.is_lost = true;
      step.collective_s += seconds_between(begin, Clock::now());
    });
  }

  /// The end of an operation: others read what it wrote. A gather that follows waits anyway.
  void finish() {
    if (!meets_next) return meet();
    now = Clock::now();
  }

  /// Calls body(i) for the tickets 0 to count - 1 that this thread draws. All threads must pass
  /// here, and meet before they pass again: each draws exactly one ticket beyond the last.
  template <class Body>
  void share_out(int64_t count, Body body) {
    for (;;) {
      const int64_t ticket = step.next_ticket.fetch_add(1, std::memory_order_relaxed) - ticket_base;
      if (ticket >= count) break;
      body(ticket);
    }
    ticket_base += count + num_threads;
  }

  /// This thread's equal part of the rows that this rank computes: [begin, end).
  int64_t rows_begin() const { return step.row_begin + part_begin(step.row_end - step.row_begin); }
  int64_t rows_end() const { return step.row_begin + part_end(step.row_end - step.row_begin); }

  /// This thread's equal part of `count` things: [begin, end).
  int64_t part_begin(int64_t count) const { return count * thread / num_threads; }
  int64_t part_end(int64_t count) const { return count * (thread + 1) / num_threads; }

  float* buffer(int32_t index) const { return plan.buffers[static_cast<size_t>(index)].data; }
  int64_t stride(int32_t index) const { return plan.buffers[static_cast<size_t>(index)].stride; }
  const float* vector(int32_t index) const { return plan.vectors[static_cast<size_t>(index)]; }

  const SliceRecord& slice_of(int64_t row) const {
    return step.record.slices[step.slice_of_row[static_cast<size_t>(row)]];
  }
  const int32_t* page_table(int32_t table, int32_t layer) const {
    return plan.page_table(step.record, table, plan.group_of[static_cast<size_t>(layer)]);
  }

  /// Calls body(page table) for each table through which a row's keys and values are stored.
  template <class Body>
  void for_tables(int64_t row, int32_t layer, Body body) const {
    body(page_table(slice_of(row).table, layer));
    if (step.first_store.empty()) return;
    const int32_t end = step.first_store[static_cast<size_t>(row) + 1];
    for (int32_t i = step.first_store[static_cast<size_t>(row)]; i < end; ++i) {
      body(page_table(step.record.stores[i].table, layer));
    }
  }

  static int64_t position(const SliceRecord& slice, int64_t row) {
    return slice.position + row - slice.row;
  }
};

}  // namespace ts
