// The C face of the executor: what src/twostroke/backends/cpu/library.py loads.
#include <exception>
#include <stdexcept>

#include "executor/plan.h"
#include "linear/linear.h"

#define TS_EXPORT extern "C" __attribute__((visibility("default")))

using ts::Plan;
using ts::Pool;
using ts::WeightType;

namespace {

// Raised whenever a struct or a function that crosses this interface changes.
constexpr int32_t kInterfaceVersion = 36;

}  // namespace

TS_EXPORT int32_t ts_interface_version() { return kInterfaceVersion; }

TS_EXPORT const char* ts_level() { return ts::level_name(); }

/// Whether prompt rows and generated rows are computed alike, bit for bit.
TS_EXPORT int32_t ts_one_arithmetic() { return TS_LEVEL == 3 ? 0 : 1; }

/// Sizes of the records, so that the other side of the interface can be checked against them.
TS_EXPORT int64_t ts_record_size(int32_t index) {
  constexpr int64_t sizes[] = {
      sizeof(ts::OpRecord),     sizeof(ts::RopeRecord),  sizeof(ts::LayerRecord),
      sizeof(ts::PlanRecord),   sizeof(ts::SliceRecord), sizeof(ts::StepRecord),
      sizeof(ts::PackedWeight), sizeof(ts::StoreRecord), sizeof(ts::CopyRecord),
      sizeof(ts::NodeRecord),   sizeof(ts::SampleRow),   sizeof(ts::SampleResult),
      sizeof(ts::LinkRecord),   sizeof(ts::SharedHead),  sizeof(ts::StateRecord)};
  constexpr int32_t count = sizeof sizes / sizeof sizes[0];
  return index >= 0 && index < count ? sizes[index] : -1;
}

TS_EXPORT void* ts_map_memory(int64_t num_bytes) { return ts::map_memory(num_bytes); }

TS_EXPORT void ts_unmap_memory(void* memory, int64_t num_bytes) {
  ts::unmap_memory(memory, num_bytes);
}

/// Null if the threads cannot be made. With nodes, their threads add up to `num_threads`.
TS_EXPORT Pool* ts_pool_create(int32_t num_threads, const ts::NodeRecord* nodes,
                               int32_t num_nodes) {
  if (num_threads < 1) return nullptr;
  ts::request_tiles();
  try {
    return new Pool(num_threads, ts::Nodes(nodes, num_nodes));
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// How many threads the next step will have: fewer than all while the machine is crowded.
TS_EXPORT int32_t ts_pool_num_active(const Pool* pool) { return pool->num_active(); }

/// Fixes that number; 0 lets it adapt again. Not while a step runs.
TS_EXPORT void ts_pool_fix_num_active(Pool* pool, int32_t num_active) {
  pool->fix_num_active(num_active);
}

/// For tests: what `Crowding` decides after each of `count` steps.
TS_EXPORT void ts_crowding(int32_t num_threads, int64_t count, const double* elapsed_s,
                           const double* longest_wait_s, int32_t* num_active) {
  ts::Crowding crowding(num_threads);
  for (int64_t i = 0; i < count; ++i) {
    crowding.see(elapsed_s[i], longest_wait_s[i]);
    num_active[i] = crowding.num_active();
  }
}

TS_EXPORT void ts_pool_destroy(Pool* pool) {
  if (pool->is_ours()) delete pool;
}

/// Packs a whole matrix with all threads; `source` as in its file, `packed` aligned to 64 bytes. On
/// several nodes each thread packs what it will read in steps with few rows; only queries, keys and
/// values, which are cut together, and gates and ups of experts are cut otherwise there.
TS_EXPORT void ts_pack(Pool* pool, int32_t type, int64_t num_outputs, int64_t num_inputs,
                       const void* source, void* packed) {
  const auto weight_type = static_cast<WeightType>(type);
  constexpr int64_t kGrain = 8;
  const int64_t groups = ts::num_groups(num_outputs);
  const int64_t bytes = ts::packed_bytes(weight_type, num_outputs, num_inputs);
  ts::touch_parts(*pool, packed, groups, bytes / groups);
  ts::parallel_for(*pool, groups, kGrain, [&](int64_t group) {
    ts::pack_groups(weight_type, num_outputs, num_inputs, source, packed, group, group + 1);
  });
}

/// Null if there is not enough memory.
TS_EXPORT Plan* ts_plan_create(Pool* pool, const ts::PlanRecord* record) {
  try {
    return new Plan(*pool, *record);
  } catch (const std::exception&) {
    return nullptr;
  }
}

/// Before its pool is destroyed.
TS_EXPORT void ts_plan_destroy(Plan* plan) { delete plan; }

/// 0; 1 if there is not enough memory for a step of this size; 2 if it names a token or a page that
/// does not exist; 3 if another rank is lost.
TS_EXPORT int32_t ts_step(Plan* plan, ts::StepRecord* step) {
  try {
    ts::run_step(*plan, *step);
    return 0;
  } catch (const std::out_of_range&) {
    return 2;
  } catch (const ts::RankLost&) {
    return 3;
  } catch (const std::exception&) {
    return 1;
  }
}

/// Seconds of each operation since the last call: (elapsed, of it waiting) pairs.
TS_EXPORT void ts_plan_times(Plan* plan, double* pairs) { plan->take_times(pairs); }

/// Lets one of the plan's pages hold what another does; no step may be running.
TS_EXPORT void ts_plan_copy_page(Plan* plan, int32_t from, int32_t to) {
  plan->copy_page({from, to}, 0, 1);
}

/// The plan's pages, one after another; null if it has none. Sets the bytes of all of them.
TS_EXPORT void* ts_plan_pages(Plan* plan, int64_t* num_bytes) {
  *num_bytes = plan->cache_bytes;
  return plan->cache;
}

/// The plan's slots for recurrent states, one after another; null if it has none. Sets the bytes of
/// all of them.
TS_EXPORT void* ts_plan_states(Plan* plan, int64_t* num_bytes) {
  *num_bytes = plan->num_states * plan->state_stride * static_cast<int64_t>(sizeof(float));
  return plan->states;
}

/// Ends the waits of all ranks that share this memory, now and until it is reset. From any process.
TS_EXPORT void ts_link_abort(void* shared) { static_cast<ts::SharedHead*>(shared)->abort(); }

TS_EXPORT int32_t ts_link_is_aborted(void* shared) {
  return static_cast<ts::SharedHead*>(shared)->aborted.load() != 0;
}

/// Returns 3 once a rank is lost; see `measure_link`.
TS_EXPORT int32_t ts_link_measure(const ts::LinkRecord* link, int64_t count, int64_t work,
                                  int64_t bytes, double* computing, double* meeting) {
  return ts::measure_link(*link, count, work, bytes, computing, meeting) ? 0 : 3;
}

/// Lets ranks meet again after an abort. Only while none of them is in a step.
TS_EXPORT void ts_link_reset(void* shared) { static_cast<ts::SharedHead*>(shared)->reset(); }
