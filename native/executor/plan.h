// A lowered Program with everything that it needs between steps: weights, pages, buffers, tables.
#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "executor/experts.h"
#include "executor/link.h"
#include "executor/memory.h"
#include "executor/piece_schedule.h"
#include "executor/records.h"
#include "executor/schedule.h"
#include "kernels/attention.h"
#include "kernels/rope.h"
#include "pool.h"

namespace ts {

/// Facts derived from an operation once: how its inputs are prepared and its outputs are cut.
struct ProductFacts {
  int num_preparations = 0;
  WeightType prepared_for[kMaxOutputs] = {};
  const int32_t* order_of[kMaxOutputs] = {};  // of the inputs of each preparation, or null
  int preparation_of[kMaxOutputs] = {};       // for each output
  int64_t slot_groups = 1;                    // groups of outputs that stay together
  int64_t first_slot[kMaxOutputs + 1] = {};
  std::vector<ExpertRecord> experts;  // of each combination of types that a mixture has, one
};

/// Working memory of one thread.
struct ThreadMemory {
  Block prepared;
  Block rows;
  Block gated;
  ExpertGroups experts;
  AttentionScratch attention;
  Block states;  // of some columns, while a thread computes several rows
  SamplerScratch sampler;
  std::vector<double> waiting_s;  // for each operation, since times were last taken
};

/// Rows of values, of this rank or shared with others.
struct PlanMemory {
  MemoryRecord record;
  uint8_t* shared;  // null: this rank's own
  Block own;

  int64_t bytes(int64_t step_rows) const {
    const int64_t rows = record.num_rows == 0 ? step_rows : record.num_rows;
    return rows * record.width * static_cast<int64_t>(sizeof(float));
  }
};

/// Where a value lies: some columns of a memory.
struct PlanBuffer {
  int32_t memory;
  int32_t first_column;
  int64_t stride;
  float* data;  // in row 0; of the step that is running
};

/// The largest logit of a row among those of one rank, and its place there; kNoToken: all are minus
/// infinity or NaN.
struct BestLogit {
  int32_t place;
  float logit;
};

/// The link between ranks, and who gathers with whom.
struct PlanLink {
  LinkRecord record{};
  std::vector<TeamRecord> teams;
  std::vector<int32_t> team_ranks;
  std::vector<int32_t> cuts;
  std::vector<ChannelRecord> channels;
  int64_t max_rows = 0;
  int64_t row_part = 0;
  int64_t num_row_parts = 1;
  Block sent;                       // this rank's part of a value, packed
  Block received;                   // all parts
  Block tiles;                      // of attention: two, where ranks share no memory
  std::vector<int64_t> part_bytes;  // of each member of a team
  std::vector<BestLogit> best;      // of each member, for each of the rows held at once

  explicit PlanLink(const PlanRecord& record);

  SharedHead* shared() const { return reinterpret_cast<SharedHead*>(record.shared); }
  const TeamRecord& team_of(const OpRecord& op) const {
    return teams[static_cast<size_t>(op.team)];
  }
  /// Where this rank's part of an operation begins and ends.
  const int32_t* own_cuts(const OpRecord& op) const {
    return &cuts[static_cast<size_t>(op.first_cut + team_of(op).place)];
  }
  /// Where the last part ends.
  int32_t cuts_end(const OpRecord& op) const {
    return cuts[static_cast<size_t>(op.first_cut + team_of(op).size)];
  }
  const int32_t* ranks_of(const TeamRecord& team) const { return &team_ranks[team.first_rank]; }
};

struct Plan {
  /// `record` must be consistent: Python's lowering is its only author.
  Plan(Pool& pool, const PlanRecord& record);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  /// Writes what each operation has taken in all steps since the last call, in seconds: from
  /// barrier to barrier, and of that waiting for each other (mean of the threads).
  void take_times(double* pairs);

  /// Lets one page hold what another does: part `part` of `num_parts` of it.
  void copy_page(const CopyRecord& copy, int64_t part, int64_t num_parts) const;

  const int32_t* page_table(const StepRecord& step, int64_t table, int64_t group) const {
    const auto num_groups = static_cast<int64_t>(group_windows.size());
    return step.page_tables + (table * num_groups + group) * step.table_stride;
  }

  Pool& pool;
  std::vector<OpRecord> ops;
  size_t first_late = 0;  // operation after the last that stores keys or values; none: the end
  std::vector<ProductFacts> facts;  // one an operation
  std::vector<PackedWeight> weights;
  std::vector<const float*> vectors;
  std::vector<ExpertRecord> experts;
  std::vector<RopeTable> ropes;
  PlanLink link;
  std::vector<PlanMemory> memories;
  std::vector<PlanBuffer> buffers;
  std::vector<LayerPages> layers;
  std::vector<int32_t> group_of;             // for each layer
  std::vector<int64_t> group_windows;        // for each group of layers: the widest of its rows
  std::vector<int32_t> schedule_of;          // for each operation: index into its kind's schedules
  std::vector<AttentionSchedule> schedules;  // one for each shape of attention
  std::vector<bool> is_late;                 // whether it is of operations after the last store
  std::vector<PieceSchedule> piece_schedules;  // the same where ranks store pieces in turn
  int64_t page_size = 0;                       // tokens
  int64_t num_pages = 0;
  int64_t cache_bytes = 0;
  void* cache = nullptr;
  float* states = nullptr;             // recurrent ones: (num_states, state_stride)
  std::vector<int64_t> state_offsets;  // of each state layer in a slot
  int64_t state_stride = 0;
  int64_t num_states = 0;
  Block prepared;  // shared by the threads
  Block mixed;     // of a mixture of experts: gated products, a row for each choice
  Block choices;   // experts (rows, num_used), then their shares
  Block logits;
  std::vector<ThreadMemory> threads;
  std::vector<double> elapsed_s;  // for each operation, of the calling thread: as waiting_s

 private:
  void lay_out_pages(const PlanRecord& record);
  void lay_out_states(const PlanRecord& record);
  int64_t states_bytes() const {
    return num_states * state_stride * static_cast<int64_t>(sizeof(float));
  }
  int32_t schedule_for(const OpRecord& op, bool is_late);
  int32_t piece_schedule_for(const OpRecord& op);
};

/// Another rank is lost; the step was given up.
struct RankLost : std::exception {};

/// Computes one step; throws std::bad_alloc, std::out_of_range for a token or page that does not
/// exist, or RankLost.
void run_step(Plan& plan, StepRecord& record);

}  // namespace ts
