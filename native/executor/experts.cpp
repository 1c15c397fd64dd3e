// Mixture of experts: rows are grouped by expert, multiplied, and summed in the order of their
// choices. What a row gets depends on that row alone.
#include "executor/experts.h"

#include <algorithm>
#include <numeric>

#include "executor/products.h"
#include "executor/worker.h"
#include "kernels/rows.h"
#include "linear/layout.h"

namespace ts {

namespace {

constexpr int64_t kFewScores = 2048;     // up to this many, each thread chooses for all rows
constexpr int64_t kMixFloats = 1 << 20;  // of products that wait to be summed, in a thread

enum Part { kGate, kUp, kDown };

/// Groups of outputs with one barrier after their products.
int64_t mixed_slots(int64_t num_pairs) {
  return std::max<int64_t>(1, kMixFloats / (std::max<int64_t>(1, num_pairs) * kGroupSize));
}

class Mixture {
 public:
  Mixture(Worker& worker, const OpRecord& op)
      : worker_(worker),
        op_(op),
        first_row_(worker.step.row_begin),
        num_rows_(worker.step.row_end - first_row_),
        num_generated_(
            std::clamp<int64_t>(num_generated_in(worker.step.record) - first_row_, 0, num_rows_)),
        num_pairs_(num_rows_ * op.num_used),
        ffn_width_(weight(op.own_expert, kDown).num_inputs),
        groups_(worker.memory.experts) {}

  void run() {
    choose();
    num_places_ = groups_.make(op_, chosen_, num_rows_, num_generated_);
    if (op_.shares == Shares::OfInputs) find_scales();
    const int64_t stride = worker_.stride(op_.x);
    const float* x = worker_.buffer(op_.x) + first_row_ * stride;
    prepare(kGate, kUp, op_.width,
            [&](int64_t place) { return x + groups_.row_at[static_cast<size_t>(place)] * stride; });
    gate();
    worker_.meet();
    const float* mixed = worker_.plan.mixed.floats();
    prepare(kDown, kDown, ffn_width_, [&](int64_t place) { return mixed + place * ffn_width_; });
    mix();
    worker_.finish();
  }

 private:
  const ExpertRecord& record(int32_t expert) const {
    return worker_.plan.experts[static_cast<size_t>(op_.first_expert + expert - op_.own_expert)];
  }

  const PackedWeight& weight(int32_t expert, Part part) const {
    const ExpertRecord& own = record(expert);
    const int32_t index = part == kGate ? own.gate : part == kUp ? own.up : own.down;
    return worker_.plan.weights[static_cast<size_t>(index)];
  }

  /// The bias of an expert's matrix, or null.
  const float* bias(int32_t expert, Part part) const {
    const ExpertRecord& own = record(expert);
    const int32_t index = part == kGate ? own.gate_bias : part == kUp ? own.up_bias : own.down_bias;
    return index == kNone ? nullptr : worker_.vector(index);
  }

  /// Finds `chosen_` and `shares_` of all rows.
  void choose() {
    const auto count = static_cast<size_t>(num_pairs_);
    const bool alone = num_rows_ * op_.num_experts <= kFewScores;
    if (alone) {
      groups_.chosen.resize(count);
      groups_.shares.resize(count);
    }
    int32_t* chosen =
        alone ? groups_.chosen.data() : reinterpret_cast<int32_t*>(worker_.plan.choices.bytes());
    float* shares = alone ? groups_.shares.data() : worker_.plan.choices.floats() + num_pairs_;
    const int64_t end = alone ? num_rows_ : worker_.part_end(num_rows_);
    for (int64_t row = alone ? 0 : worker_.part_begin(num_rows_); row < end; ++row) {
      choose_experts(worker_.buffer(op_.y) + (first_row_ + row) * worker_.stride(op_.y),
                     op_.num_experts, op_.num_used, op_.shares, chosen + row * op_.num_used,
                     shares + row * op_.num_used);
    }
    if (!alone) worker_.meet();
    chosen_ = chosen;
    shares_ = shares;
  }

  /// Finds by what the rows of all places are multiplied.
  void find_scales() {
    groups_.scale_at.resize(static_cast<size_t>(num_places_));
    groups_.ones.assign(static_cast<size_t>(op_.num_used), 1.0F);
    for (int64_t pair = 0; pair < num_pairs_; ++pair) {
      const int32_t place = groups_.place_of[static_cast<size_t>(pair)];
      if (place != kNone) groups_.scale_at[static_cast<size_t>(place)] = shares_[pair];
    }
  }

  /// The factors of the panel's rows, or null.
  const float* scales(const ExpertPanel& panel) const {
    if (op_.shares != Shares::OfInputs) return nullptr;
    return groups_.scale_at.data() + panel.group->begin + panel.begin;
  }

  /// Whether two weights meet the same prepared rows.
  bool are_shared(const PackedWeight& a, const PackedWeight& b) const {
    return a.order == b.order &&
           same_preparation(a.type, b.type, op_.precision == Precision::Mixed);
  }

  /// Lays out the groups' prepared rows for their `first` and `second` weight.
  void lay_out(Part first, Part second, int64_t width) {
    int64_t bytes = 0;
    for (ExpertGroup& group : groups_.groups) {
      const PackedWeight& one = weight(group.expert, first);
      const PackedWeight& other = weight(group.expert, second);
      const ExpertGroup& earliest = groups_.groups.front();
      // A single row is prepared once for all its experts.
      group.is_shared = first != kDown && num_rows_ == 1 && &group != &earliest &&
                        are_shared(one, weight(earliest.expert, first)) &&
                        are_shared(other, weight(earliest.expert, second));
      group.serves_both = are_shared(one, other);
      if (group.is_shared) {
        std::copy_n(earliest.prepared, 2, group.prepared);
        continue;
      }
      group.prepared[0] = bytes;
      bytes += prepared_bytes(one.type, group.kind, width, group.count);
      if (group.serves_both) {
        group.prepared[1] = group.prepared[0];
        continue;
      }
      group.prepared[1] = bytes;
      bytes += prepared_bytes(other.type, group.kind, width, group.count);
    }
  }

  /// Prepares `row(place)` of every place for the weights that read it.
  template <class Row>
  void prepare(Part first, Part second, int64_t width, Row row) {
    lay_out(first, second, width);
    const int64_t num_prepared = first != kDown && num_rows_ == 1 ? 1 : num_pairs_;
    const bool alone = num_prepared * width <= kFewValues;
    prepared_ = alone ? worker_.memory.prepared.bytes() : worker_.plan.prepared.bytes();
    const int64_t part_begin = alone ? 0 : worker_.part_begin(num_places_);
    const int64_t part_end = alone ? num_places_ : worker_.part_end(num_places_);
    for (const ExpertGroup& group : groups_.groups) {
      const int64_t begin = std::max(part_begin, group.begin);
      const int64_t end = std::min(part_end, group.begin + group.count);
      for (int64_t place = begin; place < end && !group.is_shared; ++place) {
        const int64_t i = place - group.begin;
        for (int product = 0; product < 2; ++product) {
          if (product == 1 && group.serves_both) continue;
          const PackedWeight& matrix = weight(group.expert, product == 0 ? first : second);
          const float* values = row(place);
          if (matrix.order != nullptr) {
            float* gathered = worker_.memory.rows.floats();
            gather_row(values, matrix.order, width, gathered);
            values = gathered;
          }
          prepare_rows(matrix.type, group.kind, values, 0, width, i, i + 1,
                       prepared_ + group.prepared[product]);
        }
      }
    }
    if (!alone) worker_.meet();
  }

  /// Cuts the groups into panels that stay in the cache while the weights pass by.
  void cut(Part part, int64_t width) {
    groups_.panels.clear();
    for (const ExpertGroup& group : groups_.groups) {
      const int64_t rows = panel_rows(weight(group.expert, part).type, group.kind, width);
      for (int64_t begin = 0; begin < group.count; begin += rows) {
        groups_.panels.push_back({&group, begin, std::min(rows, group.count - begin)});
      }
    }
  }

  Factor factor(const ExpertPanel& panel, Part part, int product, int64_t width) const {
    const PackedWeight& matrix = weight(panel.group->expert, part);
    const int64_t offset =
        panel.begin == 0 ? 0 : prepared_bytes(matrix.type, panel.group->kind, width, panel.begin);
    return {matrix, panel.group->kind, prepared_ + panel.group->prepared[product] + offset,
            panel.count};
  }

  /// The gated products of all places.
  void gate() {
    cut(kGate, op_.width);
    const int64_t num_slots = num_groups(ffn_width_);
    const auto body = [&](const ExpertPanel& panel, int64_t begin, int64_t end) {
      float* out = worker_.plan.mixed.floats() + (panel.group->begin + panel.begin) * ffn_width_;
      multiply_gated(
          worker_, op_.activation, factor(panel, kGate, 0, op_.width),
          factor(panel, kUp, 1, op_.width),
          {scales(panel), bias(panel.group->expert, kGate), bias(panel.group->expert, kUp)}, begin,
          end, out, ffn_width_);
    };
    const auto num_panels = static_cast<int64_t>(groups_.panels.size());
    if (num_panels == 0) return;
    const auto panel_at = [&](int64_t i) { return groups_.panels[static_cast<size_t>(i)]; };
    if (num_rows_ <= kFewRows) {
      // The weights are what costs: each thread streams through its own equal part of them.
      const int64_t end = worker_.part_end(num_panels * num_slots);
      for (int64_t slot = worker_.part_begin(num_panels * num_slots); slot < end;) {
        const int64_t panel = slot / num_slots;
        const int64_t stop = std::min(end, (panel + 1) * num_slots);
        body(panel_at(panel), slot - panel * num_slots, stop - panel * num_slots);
        slot = stop;
      }
      return;
    }
    const int64_t wanted = kChunksPerThread * worker_.num_threads;
    const int64_t chunks = std::clamp<int64_t>(wanted / num_panels + 1, 1, num_slots);
    worker_.share_out(num_panels * chunks, [&](int64_t ticket) {
      const int64_t chunk = ticket % chunks;
      body(panel_at(ticket / chunks), num_slots * chunk / chunks, num_slots * (chunk + 1) / chunks);
    });
  }

  /// The last products, then the sums of each row's choices: a thread that computes some columns
  /// of the products does so for all experts, and so can add them up.
  void mix() {
    cut(kDown, ffn_width_);
    const int64_t num_slots = num_groups(op_.width);
    const int64_t most = mixed_slots(num_places_);
    if (num_rows_ <= kFewRows) {
      const int64_t end = worker_.part_end(num_slots);
      for (int64_t slot = worker_.part_begin(num_slots); slot < end; slot += most) {
        mix_columns(slot, std::min(slot + most, end));
      }
      return;
    }
    const int64_t wanted =
        std::max<int64_t>(kChunksPerThread * worker_.num_threads, (num_slots + most - 1) / most);
    const int64_t chunks = std::min(wanted, num_slots);
    worker_.share_out(chunks, [&](int64_t chunk) {
      mix_columns(num_slots * chunk / chunks, num_slots * (chunk + 1) / chunks);
    });
  }

  void mix_columns(int64_t slot_begin, int64_t slot_end) {
    const int64_t first = slot_begin * kGroupSize;
    const int64_t width = std::min<int64_t>(slot_end * kGroupSize, op_.width) - first;
    float* products = worker_.memory.gated.floats();
    for (const ExpertPanel& panel : groups_.panels) {
      float* out = products + (panel.group->begin + panel.begin) * width;
      const Factor down = factor(panel, kDown, 0, ffn_width_);
      multiply(down, slot_begin, slot_end, out - first, width, false);
      add_bias(bias(panel.group->expert, kDown), first, panel.count, width, out);
    }
    const int32_t target = op_.outputs[0].buffer;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const int64_t pair = row * op_.num_used;
      float* out = worker_.buffer(target) + (first_row_ + row) * worker_.stride(target) + first;
      const int32_t* places = groups_.place_of.data() + pair;
      if (op_.kind == OpKind::Experts) {
        const float* weights =
            op_.shares == Shares::OfInputs ? groups_.ones.data() : shares_ + pair;
        weighted_sum(products, width, places, weights, op_.num_used, width, op_.accumulate != 0,
                     out);
        continue;
      }
      for (int64_t i = 0; i < op_.num_used; ++i) {
        if (places[i] != kNone) {
          std::copy_n(products + places[i] * width, width, out + i * op_.width);
        }
      }
    }
  }

  Worker& worker_;
  const OpRecord& op_;
  const int64_t first_row_;  // of those that this rank computes
  const int64_t num_rows_;
  const int64_t num_generated_;
  const int64_t num_pairs_;
  const int64_t ffn_width_;
  int64_t num_places_ = 0;  // pairs whose expert this rank has
  ExpertGroups& groups_;
  const int32_t* chosen_ = nullptr;
  const float* shares_ = nullptr;
  uint8_t* prepared_ = nullptr;
};

/// Bytes of the prepared rows of a mixture, in memory that threads share and in their own.
struct MixtureBytes {
  int64_t prepared;
  int64_t alone;
  int64_t ffn_width;
};

MixtureBytes mixture_bytes(const Plan& plan, size_t index, const StepRecord& step) {
  const OpRecord& op = plan.ops[index];
  const int64_t num_generated = num_generated_in(step);
  // Each group is padded to whole tiles.
  const auto padded = [&](int64_t rows) {
    const int64_t pairs = rows * op.num_used;
    return pairs + std::min<int64_t>(pairs, op.num_experts) * (kTileRows - 1);
  };
  const auto bytes_for = [&](int32_t weight) {
    const PackedWeight& matrix = plan.weights[static_cast<size_t>(weight)];
    return prepared_bytes(matrix.type, row_kind(op.precision, false), matrix.num_inputs,
                          padded(num_generated)) +
           prepared_bytes(matrix.type, row_kind(op.precision, true), matrix.num_inputs,
                          padded(step.num_rows - num_generated));
  };
  MixtureBytes bytes{0, 0, 0};
  for (const ExpertRecord& expert : plan.facts[index].experts) {
    const int64_t inputs = bytes_for(expert.gate) + bytes_for(expert.up);
    bytes.prepared = std::max({bytes.prepared, inputs, bytes_for(expert.down)});
    bytes.ffn_width = plan.weights[static_cast<size_t>(expert.down)].num_inputs;
  }
  const int64_t fewest_rows = step.num_rows / plan.link.num_row_parts;  // of any rank
  if (fewest_rows * std::min<int64_t>(op.width, bytes.ffn_width) <= kFewValues) {
    bytes.alone = bytes.prepared;
  }
  return bytes;
}

}  // namespace

int64_t ExpertGroups::make(const OpRecord& op, const int32_t* choices, int64_t num_rows,
                           int64_t num_generated) {
  const int64_t num_used = op.num_used;
  const int64_t num_experts = op.num_experts;
  const auto is_own = [&](int64_t row, int64_t rank) {
    const int32_t expert = choices[row * num_used + rank] - op.own_expert;
    return expert >= 0 && expert < op.num_own;
  };
  const auto key = [&](int64_t row, int64_t rank) {
    const int64_t kind = row < num_generated ? 0 : num_experts;
    return static_cast<size_t>(kind + choices[row * num_used + rank]);
  };
  next_.assign(static_cast<size_t>(2 * num_experts), 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t rank = 0; rank < num_used; ++rank) next_[key(row, rank)] += is_own(row, rank);
  }
  groups.clear();
  int64_t begin = 0;
  for (int64_t i = 0; i < 2 * num_experts; ++i) {
    const int64_t count = next_[static_cast<size_t>(i)];
    next_[static_cast<size_t>(i)] = begin;
    if (count == 0) continue;
    const RowKind kind = row_kind(op.precision, i >= num_experts);
    groups.push_back(
        {kind, static_cast<int32_t>(i % num_experts), begin, count, {0, 0}, false, false});
    begin += count;
  }
  row_at.resize(static_cast<size_t>(num_rows * num_used));
  place_of.resize(row_at.size());
  for (int64_t row = 0; row < num_rows; ++row) {
    for (int64_t rank = 0; rank < num_used; ++rank) {
      int32_t& place = place_of[static_cast<size_t>(row * num_used + rank)];
      place = kNone;
      if (!is_own(row, rank)) continue;
      place = static_cast<int32_t>(next_[key(row, rank)]++);
      row_at[static_cast<size_t>(place)] = static_cast<int32_t>(row);
    }
  }
  return begin;
}

void ExpertGroups::reserve(int64_t num_pairs, int64_t num_experts) {
  const auto pairs = static_cast<size_t>(num_pairs);
  const auto most_groups = std::min(pairs, static_cast<size_t>(2 * num_experts));
  groups.reserve(most_groups);
  panels.reserve(most_groups + pairs / static_cast<size_t>(kFewestPanelRows));
  row_at.reserve(pairs);
  place_of.reserve(pairs);
  chosen.reserve(pairs);
  shares.reserve(pairs);
  scale_at.reserve(pairs);
  ones.reserve(pairs);
  next_.reserve(static_cast<size_t>(2 * num_experts));
}

void run_experts(Worker& worker, const OpRecord& op) { Mixture(worker, op).run(); }

void run_expert_terms(Worker& worker, const OpRecord& op) { Mixture(worker, op).run(); }

void run_sum_terms(Worker& worker, const OpRecord& op) {
  ExpertGroups& memory = worker.memory.experts;
  const auto count = static_cast<size_t>(op.num_used);
  memory.chosen.resize(count);
  memory.shares.resize(count);
  memory.place_of.resize(count);
  std::iota(memory.place_of.begin(), memory.place_of.end(), 0);
  const OutputRecord& output = op.outputs[0];
  for (int64_t row = worker.rows_begin(); row < worker.rows_end(); ++row) {
    choose_experts(worker.buffer(op.y) + row * worker.stride(op.y), op.num_experts, op.num_used,
                   op.shares, memory.chosen.data(), memory.shares.data());
    if (op.shares == Shares::OfInputs) std::fill(memory.shares.begin(), memory.shares.end(), 1.0F);
    weighted_sum(worker.buffer(op.x) + row * worker.stride(op.x), output.width,
                 memory.place_of.data(), memory.shares.data(), op.num_used, output.width,
                 op.accumulate != 0,
                 worker.buffer(output.buffer) + row * worker.stride(output.buffer));
  }
  worker.finish();
}

void make_room_for_experts(Plan& plan, const StepRecord& step) {
  constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const OpRecord& op = plan.ops[i];
    const int64_t num_pairs = int64_t{step.num_rows} * op.num_used;
    if (op.kind == OpKind::SumTerms || op.kind == OpKind::Gather) {
      for (ThreadMemory& memory : plan.threads) memory.experts.reserve(op.num_used, op.num_experts);
    }
    if (op.kind != OpKind::Experts && op.kind != OpKind::Terms) continue;
    // Of these pairs, or of some: this rank's, whose columns are then cut into fewer parts.
    const int64_t most_slots =
        std::min(num_pairs * num_groups(op.width), std::max(num_pairs, kMixFloats / kGroupSize));
    const MixtureBytes bytes = mixture_bytes(plan, i, step);
    plan.prepared.fit(bytes.prepared);
    plan.mixed.fit(num_pairs * bytes.ffn_width * kFloatBytes);
    plan.choices.fit(2 * num_pairs * kFloatBytes);
    for (ThreadMemory& memory : plan.threads) {
      memory.prepared.fit(bytes.alone);
      memory.rows.fit(bytes.ffn_width * kFloatBytes);
      memory.gated.fit(std::max(kGatedBytes, most_slots * kGroupSize * kFloatBytes));
      memory.experts.reserve(num_pairs, op.num_experts);
    }
  }
}

}  // namespace ts
