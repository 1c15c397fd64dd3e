// How the ranks of a Program reach each other: shared memory with barriers, or functions that move
// bytes. Each wait ends when a rank is lost.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ts {

/// Given by the caller. Functions return 0, or not 0 once a rank is lost; with `shared` memory they
/// are not called. src/twostroke/backends/cpu/records.py mirrors this layout.
struct LinkRecord {
  void* context;
  int32_t rank;
  int32_t num_ranks;
  uint8_t* shared;  // memory that all ranks map, zeroed; null: they share none
  int64_t shared_bytes;
  /// Member i of the team gives bytes[i]; all get all of them, one after another.
  int32_t (*all_gather)(void* context, const int32_t* team, int32_t size, const void* own,
                        void* all, const int64_t* bytes);
  int32_t (*send)(void* context, int32_t to, const void* data, int64_t bytes);
  int32_t (*receive)(void* context, int32_t from, void* data, int64_t bytes);
};

constexpr int kMostBarriers = 255;
constexpr int kMostChannels = 256;
constexpr uint32_t kChannelSlots = 4;

/// A number in shared memory that processes wait on: they spin briefly, then sleep.
struct SharedSignal {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_sleepers;

  /// Returns true once the value is no longer `old`, false once a rank is lost.
  bool wait_beyond(uint32_t old, const std::atomic<uint32_t>& aborted);
  void set(uint32_t new_value);
};

/// Where the ranks of a team meet.
struct alignas(128) SharedBarrier {
  SharedSignal round;
  alignas(64) std::atomic<uint32_t> num_arrived;
};

/// How many of a channel's slots were filled, and how many of these were emptied.
struct alignas(128) SharedChannel {
  SharedSignal filled;
  alignas(64) SharedSignal emptied;
};

/// The beginning of the shared memory. All zero is its first state.
struct SharedHead {
  alignas(128) std::atomic<uint32_t> aborted;
  SharedBarrier barriers[kMostBarriers];
  SharedChannel channels[kMostChannels];

  /// Returns true once all `size` members have called it: then each sees what the others wrote
  /// before. False once a rank is lost.
  bool meet(int32_t barrier, int32_t size);

  /// Before writing to slot `*slot`; only the sender calls these.
  bool begin_send(int32_t channel, uint32_t* slot);
  void end_send(int32_t channel);

  /// Before reading slot `*slot`; only the receiver calls these.
  bool begin_receive(int32_t channel, uint32_t* slot);
  void end_receive(int32_t channel);

  /// Ends all waits, now and from now on.
  void abort() { aborted.store(1); }
  /// Back to the first state. Only while no rank is in a step.
  void reset();
};

/// Lets all ranks compute alike and then meet, `count` times; writes how long each of both took, in
/// seconds. Without shared memory each gives `bytes` to all others. False once a rank is lost.
bool measure_link(const LinkRecord& link, int64_t count, int64_t work, int64_t bytes,
                  double* computing, double* meeting);

constexpr int64_t kHeadBytes = 65536;
static_assert(sizeof(SharedHead) == kHeadBytes);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

}  // namespace ts
