// Operations made of matrix products: inputs prepared once, outputs shared out in groups of 16.
#include "executor/products.h"

#include <algorithm>
#include <numeric>

#include "executor/collectives.h"
#include "kernels/rows.h"
#include "linear/layout.h"

namespace ts {

RowKind row_kind(Precision precision, bool is_prompt) {
  // Tiles are worth more than what fewer bits would save.
  if (!(is_prompt && TS_LEVEL == 3)) {
    if (precision == Precision::Coarse) return RowKind::Coarse;
    if (precision == Precision::Mixed) return RowKind::Mixed;
  }
  if (!is_prompt) return RowKind::Generated;
  return precision == Precision::Precise ? RowKind::PrecisePrompt : RowKind::Prompt;
}

namespace {

constexpr int64_t kRowTile = 16;               // rows that are prepared together: at most
constexpr int64_t kSmallTile = kPanelRows;     // where there are few rows
constexpr int64_t kPreparedBytes = 512 << 10;  // of a panel: a part of the second-level cache
constexpr int64_t kMostPanelRows = 256;
constexpr int64_t kGatedFloats = kGatedBytes / 2 / 4;  // of one product in a thread's scratch
static_assert(kMostPanelRows * kGroupSize <= kGatedFloats);

/// Rows of one kind, in the order in which an operation sees them.
struct Run {
  RowKind kind;
  int64_t begin;
  int64_t count;
};

/// Where an operation's input rows come from.
struct Input {
  const OpRecord& op;
  const ProductFacts& facts;
  const int32_t* rows;  // rows of the step, or null: 0, 1, ...
  Run runs[2];
};

/// Rows of one kind that are multiplied at once.
struct Panel {
  int run;
  int64_t begin;  // within the run
  int64_t count;
};

/// The prepared rows of an operation: for each preparation, for each run.
struct Prepared {
  uint8_t* data[kMaxOutputs][2];
};

int64_t run_bytes(const Input& input, int preparation, const Run& run) {
  if (run.count == 0) return 0;
  return prepared_bytes(input.facts.prepared_for[preparation], run.kind, input.op.width, run.count);
}

/// Bytes of all the prepared rows.
int64_t input_bytes(const Input& input) {
  int64_t bytes = 0;
  for (int i = 0; i < input.facts.num_preparations; ++i) {
    for (const Run& run : input.runs) bytes += run_bytes(input, i, run);
  }
  return bytes;
}

/// Gives all the prepared rows their places in `memory`.
Prepared place(const Input& input, uint8_t* memory) {
  Prepared prepared;
  for (int i = 0; i < input.facts.num_preparations; ++i) {
    for (int run = 0; run < 2; ++run) {
      prepared.data[i][run] = memory;
      memory += run_bytes(input, i, input.runs[run]);
    }
  }
  return prepared;
}

/// Rows of the step from `begin` on, and how many of them are of each kind.
Input input_of(const Plan& plan, size_t index, int64_t begin, int64_t num_generated,
               int64_t num_prompt) {
  return {plan.ops[index],
          plan.facts[index],
          nullptr,
          {{row_kind(plan.ops[index].precision, false), begin, num_generated},
           {row_kind(plan.ops[index].precision, true), begin + num_generated, num_prompt}}};
}

/// Normalizes or collects up to 16 rows and gathers their values if need be, and prepares them.
void prepare_tile(Worker& worker, const Input& input, int run_index, int64_t begin, int64_t end,
                  const Prepared& prepared) {
  const OpRecord& op = input.op;
  const Run& run = input.runs[run_index];
  const float* x = worker.buffer(op.x);
  int64_t stride = worker.stride(op.x);
  const float* first = x + run.begin * stride;
  if (op.norm != kNone || input.rows != nullptr) {
    float* rows = worker.memory.rows.floats();
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = input.rows == nullptr ? run.begin + i : input.rows[run.begin + i];
      float* out = rows + (i - begin) * op.width;
      if (op.norm != kNone) {
        rms_norm(x + row * stride, worker.vector(op.norm), op.width, op.epsilon, out);
      } else {
        std::copy_n(x + row * stride, op.width, out);
      }
    }
    stride = op.width;
    first = rows - begin * stride;
  }
  float* gathered = worker.memory.rows.floats() + kRowTile * op.width;
  for (int i = 0; i < input.facts.num_preparations; ++i) {
    const int32_t* order = input.facts.order_of[i];
    for (int64_t row = begin; row < end && order != nullptr; ++row) {
      gather_row(first + row * stride, order, op.width, gathered + (row - begin) * op.width);
    }
    const bool is_gathered = order != nullptr;
    prepare_rows(input.facts.prepared_for[i], run.kind,
                 is_gathered ? gathered - begin * op.width : first, is_gathered ? op.width : stride,
                 op.width, begin, end, prepared.data[i][run_index]);
  }
}

/// Where the ranks of a team prepare rows together, or null: of two places in turn, because others
/// may still read what was prepared before.
uint8_t* prepared_together(Worker& worker, const Input& input) {
  const OpRecord& op = input.op;
  const PlanLink& link = worker.plan.link;
  if (op.kind == OpKind::Logits || op.team == kNone || link.shared() == nullptr) return nullptr;
  const TeamRecord& team = link.team_of(op);
  if (input_bytes(input) > team.prepared_bytes) return nullptr;
  const int64_t turn = worker.num_together++ % 2;
  return link.record.shared + team.prepared_offset + turn * team.prepared_bytes;
}

Prepared prepare(Worker& worker, const Input& input) {
  const int64_t num_rows = input.runs[0].count + input.runs[1].count;
  const bool alone = num_rows * input.op.width <= kFewValues;
  uint8_t* together = alone ? nullptr : prepared_together(worker, input);
  const Block& memory = alone ? worker.memory.prepared : worker.plan.prepared;
  const Prepared prepared = place(input, together == nullptr ? memory.bytes() : together);
  const int64_t tile = num_rows <= kFewRows ? kSmallTile : kRowTile;
  const int64_t first_tiles = round_up(input.runs[0].count, tile) / tile;
  const int64_t tiles = first_tiles + round_up(input.runs[1].count, tile) / tile;
  int64_t own_begin = 0;  // of this rank
  int64_t own_end = tiles;
  if (together != nullptr) {
    const TeamRecord& team = worker.plan.link.team_of(input.op);
    own_begin = tiles * team.place / team.size;
    own_end = tiles * (team.place + 1) / team.size;
  }
  const int64_t tile_begin = own_begin + (alone ? 0 : worker.part_begin(own_end - own_begin));
  const int64_t tile_end = alone ? tiles : own_begin + worker.part_end(own_end - own_begin);
  for (int64_t index = tile_begin; index < tile_end; ++index) {
    const int run = index < first_tiles ? 0 : 1;
    const int64_t begin = (run == 0 ? index : index - first_tiles) * tile;
    const int64_t end = std::min(begin + tile, input.runs[run].count);
    prepare_tile(worker, input, run, begin, end, prepared);
  }
  if (together != nullptr) {
    meet_team(worker, worker.plan.link.team_of(input.op));
  } else if (!alone) {
    worker.meet();
  }
  return prepared;
}

/// Slots in each of the parts that many rows' outputs are cut into: groups that go together stay
/// together where there are parts enough.
int64_t slots_of_chunk(const Worker& worker, int64_t slot_groups, int64_t num_slots,
                       int64_t num_panels) {
  const int64_t chunks = kChunksPerThread * worker.num_threads;
  const int64_t unit = std::lcm(kGroupsTogether, slot_groups) / slot_groups;
  const int64_t size = round_up(round_up(num_slots, chunks) / chunks, unit);
  const bool is_enough = num_panels * (round_up(num_slots, size) / size) >= 2 * worker.num_threads;
  return is_enough ? size : round_up(num_slots, chunks) / chunks;
}

/// Calls `body(panel, slot_begin, slot_end)` for this thread's share of (rows x output slots).
template <class Body>
void share_products(Worker& worker, const Input& input, int64_t num_slots, Body body) {
  int64_t rows[2];
  int64_t panels[2];
  for (int run = 0; run < 2; ++run) {
    rows[run] = panel_rows(input.facts.prepared_for[0], input.runs[run].kind, input.op.width);
    panels[run] = round_up(input.runs[run].count, rows[run]) / rows[run];
  }
  const auto panel_at = [&](int64_t index) {
    const int run = index < panels[0] ? 0 : 1;
    const int64_t begin = (run == 0 ? index : index - panels[0]) * rows[run];
    return Panel{run, begin, std::min(rows[run], input.runs[run].count - begin)};
  };
  const int64_t num_panels = panels[0] + panels[1];
  if (input.runs[0].count + input.runs[1].count <= kFewRows) {
    // The weights are what costs: each thread streams through its own equal part of them.
    const int64_t begin = worker.part_begin(num_slots);
    const int64_t end = worker.part_end(num_slots);
    for (int64_t i = 0; i < num_panels && begin < end; ++i) body(panel_at(i), begin, end);
    return;
  }
  const int64_t size = slots_of_chunk(worker, input.facts.slot_groups, num_slots, num_panels);
  const int64_t chunks = round_up(num_slots, size) / size;
  worker.share_out(num_panels * chunks, [&](int64_t ticket) {
    const int64_t begin = ticket % chunks * size;
    body(panel_at(ticket / chunks), begin, std::min(begin + size, num_slots));
  });
}

Factor factor(const Worker& worker, const Input& input, const Prepared& prepared,
              const Panel& panel, int output) {
  const int preparation = input.facts.preparation_of[output];
  const RowKind kind = input.runs[panel.run].kind;
  const int64_t offset = panel.begin == 0 ? 0
                                          : prepared_bytes(input.facts.prepared_for[preparation],
                                                           kind, input.op.width, panel.begin);
  const PackedWeight& weight =
      worker.plan.weights[static_cast<size_t>(input.op.outputs[output].weight)];
  return {weight, kind, prepared.data[preparation][panel.run] + offset, panel.count};
}

/// What follows the products of outputs [begin, end) in the step's rows [row, row + num_rows).
void finish_outputs(Worker& worker, const OpRecord& op, const OutputRecord& output, int64_t row,
                    int64_t num_rows, int64_t begin, int64_t end) {
  if (output.bias == kNone && output.norm == kNone && output.rope == kNone &&
      output.store == Store::Nothing) {
    return;
  }
  for (int64_t i = row; i < row + num_rows; ++i) {
    float* values = worker.buffer(output.buffer) + i * worker.stride(output.buffer);
    if (output.bias != kNone) {
      add_rows(values + begin, worker.vector(output.bias) + begin, end - begin, values + begin);
    }
    for (int64_t head = begin; output.norm != kNone && head < end; head += output.head_dim) {
      rms_norm(values + head, worker.vector(output.norm), output.head_dim, output.epsilon,
               values + head);
    }
    if (output.rope == kNone && output.store == Store::Nothing) continue;
    const SliceRecord& slice = worker.slice_of(i);
    const int64_t position = Worker::position(slice, i);
    if (output.rope != kNone) {
      worker.plan.ropes[static_cast<size_t>(output.rope)].rotate(position, values, begin, end);
    }
    if (output.store == Store::Nothing) continue;
    const LayerPages& pages = worker.plan.layers[static_cast<size_t>(op.layer)];
    const auto store = output.store == Store::Keys ? store_keys : store_values;
    worker.for_tables(i, op.layer, [&](const int32_t* table) {
      store(pages, table, position, values, begin, end);
    });
  }
}

Input own_rows(const Worker& worker, size_t index) {
  const int64_t begin = worker.step.row_begin;
  const int64_t end = worker.step.row_end;
  const int64_t middle = std::clamp(num_generated_in(worker.step.record), begin, end);
  return input_of(worker.plan, index, begin, middle - begin, end - middle);
}

}  // namespace

int64_t panel_rows(WeightType type, RowKind kind, int64_t width) {
  const Preparation form = preparation(type, kind);
  if (form == Preparation::Tiles || form == Preparation::SplitTiles) return kMostPanelRows;
  const int64_t rows = kPreparedBytes / (width * 5 / 2);
  return std::clamp<int64_t>(rows / kRowTile * kRowTile, kFewestPanelRows, kMostPanelRows);
}

void multiply(const Factor& factor, int64_t group_begin, int64_t group_end, float* out,
              int64_t stride, bool accumulate) {
  multiply(factor.weight, factor.kind, factor.prepared, factor.num_rows, group_begin, group_end,
           out, stride, accumulate);
}

void add_bias(const float* bias, int64_t first, int64_t num_rows, int64_t width, float* products) {
  if (bias == nullptr) return;
  for (int64_t i = 0; i < num_rows; ++i) {
    add_rows(products + i * width, bias + first, width, products + i * width);
  }
}

namespace {

void scale_rows(const float* scales, int64_t num_rows, int64_t width, float* products) {
  if (scales == nullptr) return;
  for (int64_t i = 0; i < num_rows; ++i) {
    scale_row(products + i * width, scales[i], width, products + i * width);
  }
}

}  // namespace

void multiply_gated(Worker& worker, Activation activation, const Factor& gate, const Factor& up,
                    const GatedChanges& changes, int64_t group_begin, int64_t group_end, float* out,
                    int64_t stride) {
  const int64_t num_rows = gate.num_rows;
  const bool is_own_gate = &gate.weight == &up.weight;
  const int64_t most = kGatedFloats / (num_rows * kGroupSize);
  const int64_t step = std::max<int64_t>(1, most / kGroupsTogether * kGroupsTogether);
  for (int64_t begin = group_begin; begin < group_end; begin += step) {
    const int64_t end = std::min(begin + step, group_end);
    const int64_t first = begin * kGroupSize;
    const int64_t width = std::min<int64_t>(end * kGroupSize, gate.weight.num_outputs) - first;
    const int64_t floats = num_rows * width;
    float* gates = worker.memory.gated.floats();
    float* ups = is_own_gate ? gates : gates + floats;
    multiply(gate, begin, end, gates - first, width, false);
    scale_rows(changes.scales, num_rows, width, gates);
    add_bias(changes.gate_bias, first, num_rows, width, gates);
    if (!is_own_gate) {
      multiply(up, begin, end, ups - first, width, false);
      scale_rows(changes.scales, num_rows, width, ups);
      add_bias(changes.up_bias, first, num_rows, width, ups);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      gate_activation(activation, gates + i * width, ups + i * width, width,
                      out + i * stride + first);
    }
  }
}

void make_room_for_products(Plan& plan, const StepRecord& step) {
  int64_t together = 0;
  int64_t alone = 0;
  int64_t width = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const OpRecord& op = plan.ops[i];
    width = std::max<int64_t>(width, op.width);
    if (plan.facts[i].num_preparations == 0) continue;
    const int64_t few = kFewValues / op.width;
    const int64_t num_generated = num_generated_in(step);
    const int64_t num_prompt = step.num_rows - num_generated;
    together = std::max(together, input_bytes(input_of(plan, i, 0, num_generated, num_prompt)));
    alone = std::max(alone, input_bytes(input_of(plan, i, 0, std::min(few, num_generated),
                                                 std::min(few, num_prompt))));
  }
  plan.prepared.fit(together);
  for (ThreadMemory& memory : plan.threads) {
    memory.prepared.fit(alone);
    memory.rows.fit(2 * kRowTile * width * static_cast<int64_t>(sizeof(float)));
    memory.gated.fit(kGatedBytes);
  }
}

void run_linear(Worker& worker, size_t index) {
  const Input input = own_rows(worker, index);
  const Prepared prepared = prepare(worker, input);
  const ProductFacts& facts = input.facts;
  const int num_outputs = input.op.num_outputs;
  const auto body = [&](const Panel& panel, int64_t slot_begin, int64_t slot_end) {
    for (int i = 0; i < num_outputs; ++i) {
      const int64_t first = facts.first_slot[i];
      const int64_t begin = std::max(slot_begin, first) - first;
      const int64_t end = std::min(slot_end, facts.first_slot[i + 1]) - first;
      if (begin >= end) continue;
      const OutputRecord& output = input.op.outputs[i];
      const int64_t groups = num_groups(output.width);
      const int64_t group_end = std::min(groups, end * facts.slot_groups);
      const int64_t row = input.runs[panel.run].begin + panel.begin;
      const int64_t stride = worker.stride(output.buffer);
      multiply(factor(worker, input, prepared, panel, i), begin * facts.slot_groups, group_end,
               worker.buffer(output.buffer) + row * stride, stride, input.op.accumulate != 0);
      finish_outputs(worker, input.op, output, row, panel.count,
                     begin * facts.slot_groups * kGroupSize,
                     std::min<int64_t>(group_end * kGroupSize, output.width));
    }
  };
  share_products(worker, input, facts.first_slot[num_outputs], body);
  worker.finish();
}

void run_gated(Worker& worker, size_t index) {
  const Input input = own_rows(worker, index);
  const Prepared prepared = prepare(worker, input);
  const OutputRecord& output = input.op.outputs[0];
  const auto body = [&](const Panel& panel, int64_t slot_begin, int64_t slot_end) {
    const int64_t row = input.runs[panel.run].begin + panel.begin;
    const int64_t stride = worker.stride(output.buffer);
    multiply_gated(worker, input.op.activation, factor(worker, input, prepared, panel, 0),
                   factor(worker, input, prepared, panel, 1), {}, slot_begin, slot_end,
                   worker.buffer(output.buffer) + row * stride, stride);
  };
  share_products(worker, input, input.facts.first_slot[1], body);
  worker.finish();
}

void multiply_logits(Worker& worker, size_t index, int64_t begin, int64_t end, float* out,
                     int64_t stride) {
  const OpRecord& op = worker.plan.ops[index];
  const int32_t* rows = worker.step.record.sampled_rows;
  const int32_t* first_prompt =
      std::lower_bound(rows + begin, rows + end, num_generated_in(worker.step.record));
  const int64_t middle = first_prompt - rows;
  const Input input{op,
                    worker.plan.facts[index],
                    rows,
                    {{row_kind(op.precision, false), begin, middle - begin},
                     {row_kind(op.precision, true), middle, end - middle}}};
  const Prepared prepared = prepare(worker, input);
  const auto body = [&](const Panel& panel, int64_t slot_begin, int64_t slot_end) {
    const int64_t row = input.runs[panel.run].begin + panel.begin - begin;
    float* logits = out + row * stride;
    multiply(factor(worker, input, prepared, panel, 0), slot_begin, slot_end, logits, stride,
             false);
    if (op.soft_cap == 0) return;
    const int64_t first = slot_begin * kGroupSize;
    const int64_t width = std::min<int64_t>(slot_end * kGroupSize, op.outputs[0].width) - first;
    for (int64_t i = 0; i < panel.count; ++i) {
      soft_cap_row(logits + i * stride + first, op.soft_cap, width);
    }
  };
  share_products(worker, input, input.facts.first_slot[1], body);
}

}  // namespace ts
