// Barriers and channels of processes that share memory: a bounded spin, then a futex.
#include "executor/link.h"

#include <chrono>
#include <cstring>
#include <ctime>
#include <numeric>
#include <vector>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "spin.h"

namespace ts {

namespace {

constexpr auto kSpin = std::chrono::microseconds(80);
/// The longest sleep: a rank that ends between a store and its wake-up, or an abort, wakes nobody.
constexpr long kSleepNs = 10'000'000;

void sleep_while(std::atomic<uint32_t>& value, uint32_t old) {
#ifdef __linux__
  const timespec most{0, kSleepNs};
  // Not FUTEX_WAIT_PRIVATE: the sleepers are in several processes.
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAIT, old, &most, nullptr, 0);
#else
  if (value.load() != old) return;
  const timespec most{0, 50'000};
  nanosleep(&most, nullptr);
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
#ifdef __linux__
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
          0);
#else
  static_cast<void>(value);
#endif
}

}  // namespace

bool SharedSignal::wait_beyond(uint32_t old, const std::atomic<uint32_t>& aborted) {
  const auto begin = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (value.load(std::memory_order_acquire) != old) return true;
      if (aborted.load(std::memory_order_relaxed) != 0) return false;
      relax();
    }
  } while (std::chrono::steady_clock::now() - begin < kSpin);
  // Sequentially consistent with `set`: either the sleeper is counted there, or the value is new.
  num_sleepers.fetch_add(1);
  bool is_new = false;
  while (!(is_new = value.load() != old) && aborted.load() == 0) sleep_while(value, old);
  num_sleepers.fetch_sub(1);
  return is_new;
}

void SharedSignal::set(uint32_t new_value) {
  value.exchange(new_value);  // as in Signal::set (pool.cpp)
  if (num_sleepers.load() != 0) wake_all(value);
}

bool SharedHead::meet(int32_t barrier, int32_t size) {
  SharedBarrier& here = barriers[barrier];
  // The round cannot end before this member arrives, and it has seen the end of the last one.
  const uint32_t round = here.round.value.load(std::memory_order_relaxed);
  const uint32_t num_before = here.num_arrived.fetch_add(1, std::memory_order_acq_rel);
  if (num_before + 1 < static_cast<uint32_t>(size)) return here.round.wait_beyond(round, aborted);
  here.num_arrived.store(0, std::memory_order_relaxed);  // seen by all who see the new round
  here.round.set(round + 1);
  return aborted.load(std::memory_order_relaxed) == 0;
}

bool SharedHead::begin_send(int32_t channel, uint32_t* slot) {
  SharedChannel& here = channels[channel];
  const uint32_t filled = here.filled.value.load(std::memory_order_relaxed);
  *slot = filled % kChannelSlots;
  for (;;) {
    const uint32_t emptied = here.emptied.value.load(std::memory_order_acquire);
    if (filled - emptied < kChannelSlots) return aborted.load(std::memory_order_relaxed) == 0;
    if (!here.emptied.wait_beyond(emptied, aborted)) return false;
  }
}

void SharedHead::end_send(int32_t channel) {
  SharedSignal& filled = channels[channel].filled;
  filled.set(filled.value.load(std::memory_order_relaxed) + 1);
}

bool SharedHead::begin_receive(int32_t channel, uint32_t* slot) {
  SharedChannel& here = channels[channel];
  const uint32_t emptied = here.emptied.value.load(std::memory_order_relaxed);
  *slot = emptied % kChannelSlots;
  return here.filled.wait_beyond(emptied, aborted);
}

void SharedHead::end_receive(int32_t channel) {
  SharedSignal& emptied = channels[channel].emptied;
  emptied.set(emptied.value.load(std::memory_order_relaxed) + 1);
}

bool measure_link(const LinkRecord& link, int64_t count, int64_t work, int64_t bytes,
                  double* computing, double* meeting) {
  using Clock = std::chrono::steady_clock;
  std::vector<int32_t> team(static_cast<size_t>(link.num_ranks));
  std::iota(team.begin(), team.end(), 0);
  const std::vector<int64_t> parts(team.size(), bytes);
  const std::vector<uint8_t> own(static_cast<size_t>(bytes));
  std::vector<uint8_t> all(own.size() * team.size());
  auto* shared = reinterpret_cast<SharedHead*>(link.shared);
  Clock::time_point begin = Clock::now();
  for (int64_t i = 0; i < count; ++i) {
    volatile uint64_t value = 1;
    for (int64_t part = 0; part < work; ++part) value = value * 3 + 1;
    const Clock::time_point arrived = Clock::now();
    const bool met = shared != nullptr ? shared->meet(0, link.num_ranks)
                                       : link.all_gather(link.context, team.data(), link.num_ranks,
                                                         own.data(), all.data(), parts.data()) == 0;
    if (!met) return false;
    const Clock::time_point left = Clock::now();
    computing[i] = std::chrono::duration<double>(arrived - begin).count();
    meeting[i] = std::chrono::duration<double>(left - arrived).count();
    begin = left;
  }
  return true;
}

void SharedHead::reset() { std::memset(static_cast<void*>(this), 0, sizeof *this); }

}  // namespace ts
