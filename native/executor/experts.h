// Mixture of experts: which rows of a step meet which expert, and what becomes of them.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/linear.h"

namespace ts {

struct OpRecord;
struct Plan;
struct StepRecord;
struct Worker;

void run_experts(Worker& worker, const OpRecord& op);

/// The same in two operations, with a gather between them: the products of each row's choices, as
/// far as this rank has the experts, and their sum.
void run_expert_terms(Worker& worker, const OpRecord& op);
void run_sum_terms(Worker& worker, const OpRecord& op);

/// Makes room for what the mixtures of a plan need in a step; throws std::bad_alloc.
void make_room_for_experts(Plan& plan, const StepRecord& step);

/// Rows of one kind that chose one expert: places [begin, begin + count) in the order of groups.
struct ExpertGroup {
  RowKind kind;
  int32_t expert;
  int64_t begin;
  int64_t count;
  int64_t prepared[2];  // where its prepared rows begin, for each of two products
  bool is_shared;       // these are an earlier group's
  bool serves_both;     // the first product's prepared rows are the second's, too
};

/// Up to a panel of a group's rows, multiplied at once.
struct ExpertPanel {
  const ExpertGroup* group;
  int64_t begin;  // within the group
  int64_t count;
};

/// The rows of a step in the order of (kind, expert, row). A pair is a row and one of its choices;
/// pairs whose expert another rank has are left out.
struct ExpertGroups {
  /// Makes room for that many pairs; throws std::bad_alloc.
  void reserve(int64_t num_pairs, int64_t num_experts);

  /// `chosen` is (num_rows, num_used); rows from `num_generated` on are prompt. Returns the number
  /// of places.
  int64_t make(const OpRecord& op, const int32_t* chosen, int64_t num_rows, int64_t num_generated);

  std::vector<ExpertGroup> groups;
  std::vector<int32_t> row_at;    // for each place
  std::vector<int32_t> place_of;  // for each pair (row * num_used + rank), or kNone
  std::vector<ExpertPanel> panels;
  std::vector<int32_t> chosen;  // what `make` was given, where a thread chooses for itself
  std::vector<float> shares;
  std::vector<float> scale_at;  // for each place, if shares multiply what experts read
  std::vector<float> ones;      // their weights in the sum, for each choice of a row

 private:
  std::vector<int64_t> next_;  // for each (kind, expert): the next free place
};

}  // namespace ts
