// Builds a plan from its record: facts of products, pages, buffers.
#include "executor/plan.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

namespace ts {

namespace {

bool is_product(const OpRecord& op) {
  return op.kind == OpKind::Linear || op.kind == OpKind::Gated || op.kind == OpKind::Logits;
}

ProductFacts product_facts(const Plan& plan, const OpRecord& op) {
  ProductFacts facts;
  for (int i = 0; i < op.num_outputs; ++i) {
    const OutputRecord& output = op.outputs[i];
    const PackedWeight& weight = plan.weights[static_cast<size_t>(output.weight)];
    const bool may_be_mixed = op.precision == Precision::Mixed;
    int index = 0;
    while (index < facts.num_preparations &&
           (facts.order_of[index] != weight.order ||
            !same_preparation(facts.prepared_for[index], weight.type, may_be_mixed))) {
      ++index;
    }
    if (index == facts.num_preparations) {
      facts.prepared_for[index] = weight.type;
      facts.order_of[index] = weight.order;
      ++facts.num_preparations;
    }
    facts.preparation_of[i] = index;
    if (output.rope != kNone) {
      const int64_t unit = plan.ropes[static_cast<size_t>(output.rope)].unit();
      facts.slot_groups = std::lcm(facts.slot_groups, unit / kGroupSize);
    }
    if (output.norm != kNone) {
      facts.slot_groups = std::lcm(facts.slot_groups, output.head_dim / kGroupSize);
    }
    if (output.store != Store::Nothing) {
      const int64_t unit = plan.layers[static_cast<size_t>(op.layer)].unit();
      facts.slot_groups = std::lcm(facts.slot_groups, unit / kGroupSize);
    }
  }
  for (int i = 0; i < op.num_outputs; ++i) {
    const int64_t groups = num_groups(op.outputs[i].width);
    const int64_t slots = (groups + facts.slot_groups - 1) / facts.slot_groups;
    // The second product of a gate goes with the first.
    const bool counts = op.kind != OpKind::Gated || i == 0;
    facts.first_slot[i + 1] = facts.first_slot[i] + (counts ? slots : 0);
  }
  return facts;
}

bool stores(const OpRecord& op) {
  if (op.kind == OpKind::Attention || op.kind == OpKind::Pieces) return op.is_stored == 0;
  if (op.kind == OpKind::Convolution || op.kind == OpKind::DeltaRule || op.kind == OpKind::Mamba2) {
    return true;
  }
  const auto is_stored = [](const OutputRecord& output) { return output.store != Store::Nothing; };
  return op.kind == OpKind::Linear &&
         std::any_of(op.outputs, op.outputs + op.num_outputs, is_stored);
}

/// The operation after the last one that stores; the end if there is none, or if others of the
/// step's inputs than rows are read there.
size_t end_of_stores(const std::vector<OpRecord>& ops) {
  const auto last = std::find_if(ops.rbegin(), ops.rend(), stores);
  const auto reads_inputs = [](const OpRecord& op) {
    return op.kind == OpKind::Embed || op.kind == OpKind::ExternalInput;
  };
  if (last == ops.rend() || std::any_of(ops.rbegin(), last, reads_inputs)) return ops.size();
  return static_cast<size_t>(ops.rend() - last);
}

/// Adds the experts with a combination of weight types that is not there yet.
void add_experts(const Plan& plan, const OpRecord& op, ProductFacts& facts) {
  const auto type = [&](int32_t index) { return plan.weights[static_cast<size_t>(index)].type; };
  for (int32_t i = 0; i < op.num_own; ++i) {
    const ExpertRecord& expert = plan.experts[static_cast<size_t>(op.first_expert + i)];
    const auto is_alike = [&](const ExpertRecord& other) {
      return type(expert.gate) == type(other.gate) && type(expert.up) == type(other.up) &&
             type(expert.down) == type(other.down);
    };
    if (std::none_of(facts.experts.begin(), facts.experts.end(), is_alike)) {
      facts.experts.push_back(expert);
    }
  }
}

}  // namespace

PlanLink::PlanLink(const PlanRecord& plan)
    : teams(plan.teams, plan.teams + plan.num_teams),
      team_ranks(plan.team_ranks, plan.team_ranks + plan.num_team_ranks),
      cuts(plan.cuts, plan.cuts + plan.num_cuts),
      channels(plan.channels, plan.channels + plan.num_channels),
      max_rows(plan.max_rows),
      row_part(plan.row_part),
      num_row_parts(plan.num_row_parts) {
  if (plan.link != nullptr) record = *plan.link;
}

Plan::Plan(Pool& team, const PlanRecord& record)
    : pool(team),
      ops(record.ops, record.ops + record.num_ops),
      weights(record.weights, record.weights + record.num_weights),
      vectors(record.vectors, record.vectors + record.num_vectors),
      experts(record.experts, record.experts + record.num_experts),
      link(record),
      threads(static_cast<size_t>(team.num_threads())),
      elapsed_s(ops.size()) {
  for (ThreadMemory& memory : threads) memory.waiting_s.resize(ops.size());
  for (int32_t i = 0; i < record.num_ropes; ++i) {
    const RopeRecord& rope = record.ropes[i];
    ropes.emplace_back(rope.inverse_frequencies, rope.num_pairs, rope.is_interleaved != 0,
                       rope.magnitude, rope.temperature, rope.head_dim);
  }
  for (int32_t i = 0; i < record.num_memories; ++i) {
    const MemoryRecord& memory = record.memories[i];
    const bool is_shared = memory.offset >= 0 && link.record.shared != nullptr;
    memories.push_back({memory, is_shared ? link.record.shared + memory.offset : nullptr, {}});
  }
  for (int32_t i = 0; i < record.num_buffers; ++i) {
    const BufferRecord& buffer = record.buffers[i];
    const int64_t stride = record.memories[buffer.memory].width;
    buffers.push_back({buffer.memory, buffer.first_column, stride, nullptr});
  }
  lay_out_pages(record);
  lay_out_states(record);
  for (const OpRecord& op : ops) {
    facts.push_back(is_product(op) ? product_facts(*this, op) : ProductFacts());
    if (op.kind == OpKind::Experts || op.kind == OpKind::Terms)
      add_experts(*this, op, facts.back());
  }
  first_late = record.link == nullptr ? end_of_stores(ops) : ops.size();
  for (size_t i = 0; i < ops.size(); ++i) {
    schedule_of.push_back(schedule_for(ops[i], i >= first_late));
  }
}

void Plan::lay_out_pages(const PlanRecord& record) {
  page_size = record.page_size;
  num_pages = record.num_pages;
  std::vector<int64_t> offsets;  // of each layer within a page of its group
  std::vector<int64_t> sizes(static_cast<size_t>(record.num_groups));
  for (int32_t i = 0; i < record.num_layers; ++i) {
    const LayerRecord& layer = record.layers[i];
    layers.push_back({nullptr, 0, page_size / layer.num_places, layer.num_kv_heads, layer.head_dim,
                      record.cache_format, layer.num_places, layer.place, layer.balance,
                      layer.values_are_keys != 0});
    group_of.push_back(layer.group);
    int64_t& size = sizes[static_cast<size_t>(layer.group)];
    offsets.push_back(size);
    size += layers.back().page_bytes();
  }
  group_windows.resize(sizes.size());
  for (const OpRecord& op : ops) {
    if (op.kind != OpKind::Attention && op.kind != OpKind::Pieces) continue;
    const int32_t group = group_of[static_cast<size_t>(op.layer)];
    int64_t& window = group_windows[static_cast<size_t>(group)];
    window = std::max(window, window_of(op).size);
  }
  if (layers.empty() || num_pages == 0) return;
  const int64_t page_stride = *std::max_element(sizes.begin(), sizes.end());
  cache_bytes = num_pages * page_stride;
  cache = map_memory(cache_bytes);
  if (cache == nullptr) throw std::bad_alloc();
  pool.nodes().interleave(cache, cache_bytes);  // any thread may draw the task that reads a page
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].data = static_cast<uint8_t*>(cache) + offsets[i];
    layers[i].page_stride = page_stride;
  }
}

void Plan::lay_out_states(const PlanRecord& record) {
  constexpr int64_t kLineFloats = 16;
  for (int32_t i = 0; i < record.num_state_layers; ++i) {
    state_offsets.push_back(state_stride);
    state_stride += (record.state_layers[i] + kLineFloats - 1) / kLineFloats * kLineFloats;
  }
  num_states = record.num_states;
  if (states_bytes() == 0) return;
  states = static_cast<float*>(map_memory(states_bytes()));
  if (states == nullptr) throw std::bad_alloc();
  pool.nodes().interleave(states, states_bytes());  // any thread may draw a head of any request
}

int32_t Plan::schedule_for(const OpRecord& op, bool is_late_one) {
  if (op.kind == OpKind::Pieces) return piece_schedule_for(op);
  if (op.kind != OpKind::Attention) return kNone;
  const LayerPages& pages = layers[static_cast<size_t>(op.layer)];
  const int64_t group = op.group;
  const Window window = window_of(op);
  for (size_t i = 0; i < schedules.size(); ++i) {
    const bool is_alike = is_late[i] == is_late_one && schedules[i].fits(group, window, pages);
    if (is_alike) return static_cast<int32_t>(i);
  }
  schedules.emplace_back(group, window, pages);
  is_late.push_back(is_late_one);
  return static_cast<int32_t>(schedules.size() - 1);
}

int32_t Plan::piece_schedule_for(const OpRecord& op) {
  const LayerPages& pages = layers[static_cast<size_t>(op.layer)];
  const TeamRecord& team = link.team_of(op);
  const int32_t* heads = &link.cuts[static_cast<size_t>(op.first_cut + team.place % op.num_parts)];
  const PieceShape shape{op.num_heads,
                         pages.num_kv_heads,
                         pages.head_dim,
                         window_of(op),
                         pages.num_places,
                         heads[0],
                         heads[1],
                         team.tile_bytes,
                         pages.num_kv_heads * kPieceTokens / kBlockTokens * pages.block_bytes()};
  const auto found =
      std::find_if(piece_schedules.begin(), piece_schedules.end(),
                   [&](const PieceSchedule& schedule) { return schedule.shape() == shape; });
  const auto index = static_cast<int32_t>(found - piece_schedules.begin());
  if (found == piece_schedules.end()) piece_schedules.emplace_back(shape);
  return index;
}

void Plan::take_times(double* pairs) {
  for (size_t i = 0; i < ops.size(); ++i) {
    pairs[2 * i] = std::exchange(elapsed_s[i], 0);
    double waiting_s = 0;
    for (ThreadMemory& memory : threads) waiting_s += std::exchange(memory.waiting_s[i], 0);
    pairs[2 * i + 1] = waiting_s / static_cast<double>(threads.size());
  }
}

void Plan::copy_page(const CopyRecord& copy, int64_t part, int64_t num_parts) const {
  const int64_t page_bytes = cache_bytes / num_pages;
  const int64_t begin = page_bytes * part / num_parts;
  const int64_t end = page_bytes * (part + 1) / num_parts;
  auto* pages = static_cast<uint8_t*>(cache);
  std::copy_n(pages + copy.from * page_bytes + begin, end - begin,
              pages + copy.to * page_bytes + begin);
}

Plan::~Plan() {
  if (cache != nullptr) unmap_memory(cache, cache_bytes);
  if (states != nullptr) unmap_memory(states, states_bytes());
}

}  // namespace ts
