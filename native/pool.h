// The native code's own threads: the calling one works too, the others spin briefly, then sleep.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "nodes.h"

namespace ts {

/// A number that threads wait on: they spin briefly, then sleep. Two cores must not be starved by
/// spinning while others have work.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  /// Returns once the value is no longer `old`; sleeps once it has spun for so long.
  void wait_beyond(uint32_t old, std::chrono::microseconds spin_for);

  /// Sets the value and wakes the threads that sleep.
  void set(uint32_t value);

 private:
  bool spin(uint32_t old, std::chrono::microseconds spin_for) const;

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<int32_t> num_sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

/// Which core each thread of a team runs on. A busy system may wake two of them on one core and
/// leave them there, each spinning while the other waits for the core: a step then takes ten times
/// as long (measured: 64 microseconds a barrier instead of 0.3). Whoever notices moves away.
class Places {
 public:
  explicit Places(int num_threads);

  /// Says where `thread`, the caller, is now. If a thread before it is on the same core, moves to
  /// a core without any, if there is one that it may use; which these are stays as it was.
  void settle(int thread);

  /// Whether another thread was last seen on the core of `thread`.
  bool is_shared(int thread) const;

  /// Says that `thread` has no core, as it rests.
  void leave(int thread);

 private:
  struct alignas(64) Place {
    std::atomic<int> core{-1};
  };

  void move_away(int thread);

  const int num_threads_;
  std::unique_ptr<Place[]> places_;
};

/// Where all threads of a team meet.
class Barrier {
 public:
  /// Returns once all `num_threads` threads have called it; the last of them calls `last` first.
  template <class Last>
  void meet(int thread, int num_threads, Places& places, const Last& last) {
    if (num_threads == 1) return last();
    const uint32_t round = round_.value();
    places.settle(thread);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads) {
      return wait(round, thread, places);
    }
    last();
    num_arrived_.store(0, std::memory_order_relaxed);
    round_.set(round + 1);
  }

 private:
  void wait(uint32_t round, int thread, const Places& places);

  alignas(64) std::atomic<int32_t> num_arrived_{0};
  Signal round_;
};

/// Decides how many threads of a team compute. Beside other programs, threads that share a core
/// come late to every barrier, and each wait may last until the system's next turn: two threads
/// were then ten times as slow as one. So a thread rests while the others lose too much time, and
/// is tried again later. The number of threads changes no result.
class Crowding {
 public:
  explicit Crowding(int num_threads) : num_threads_(num_threads), num_active_(num_threads) {}

  /// How many threads the next task should have.
  int num_active() const { return num_active_; }

  /// Takes a task's time, and the longest of its threads' waits for others.
  void see(double elapsed_s, double longest_wait_s);

  /// Forgets what it has seen: all threads compute.
  void begin_again();

 private:
  bool loses_too_much() const;

  const int num_threads_;
  int num_active_;
  double elapsed_s_ = 0;       // of the window
  double longest_wait_s_ = 0;  // in it
  double rested_s_ = 0;        // since the number of threads changed, while one rests
  double rest_s_ = 0;          // until it is tried again
  double sound_s_ = 0;         // since too much was lost
};

/// A team of threads. One call of `run` at a time, from any thread.
class Pool {
 public:
  /// Throws std::exception if the threads cannot be made. Each keeps to its node's cores, the
  /// calling one for as long as a task runs; with `nodes` there are as many threads as these have.
  Pool(int num_threads, Nodes nodes);
  /// Only in the process that made it: elsewhere the threads to wait for do not exist.
  ~Pool();
  bool is_ours() const;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return num_threads_; }
  /// How many of them a task has: the first ones.
  int num_active() const { return num_active_.load(std::memory_order_relaxed); }
  /// Chooses that number before a step, for how crowded steps of this kind were: threads share the
  /// work of many rows out as they come, and lose less.
  void begin_step(bool has_many_rows);
  /// After a step: how long it took, and the longest of its threads' waits for others.
  void end_step(double elapsed_s, double longest_wait_s);
  /// Fixes the number of threads of a task; with 0 it adapts again. Not while a task runs.
  void fix_num_active(int num_active);
  const Nodes& nodes() const { return nodes_; }

  using Task = void (*)(void* context, int thread, int num_threads);

  /// Calls `task` on every thread at once, the caller being thread 0; returns when all are done.
  /// In a forked child, where the other threads do not exist, the caller is the only one.
  void run(Task task, void* context);

  /// Within a task: waits until all threads are here; the last to arrive calls `last` first.
  template <class Last>
  void meet(int thread, int num_threads, const Last& last) {
    barrier_.meet(thread, num_threads, places_, last);
  }

 private:
  void work(int thread);
  void stop();
  void set_num_active(int num_active);

  const int num_threads_;
  const Nodes nodes_;
  const pid_t owner_;
  std::vector<std::thread> threads_;
  Places places_;
  Signal start_;
  Signal resumed_;                          // threads that rest wait for it
  std::atomic<uint32_t> resumed_after_{0};  // the value of start_ before the task that they join
  std::atomic<int> num_active_;
  Crowding few_rows_;
  Crowding many_rows_;
  bool has_many_rows_ = false;
  bool is_fixed_ = false;
  Barrier barrier_;
  Task task_ = nullptr;
  void* context_ = nullptr;
  std::atomic<bool> stopping_{false};
};

/// Calls body(index) for 0 to count - 1, the threads taking `grain` indices at a time. On several
/// nodes each takes its own equal part instead, as in a step with few rows: memory lies on the node
/// whose thread touched it first, so that what is written here is near the thread that will read
/// it.
template <class Body>
void parallel_for(Pool& pool, int64_t count, int64_t grain, const Body& body) {
  struct Context {
    const Body& body;
    int64_t count;
    int64_t grain;
    bool has_parts;
    std::atomic<int64_t> next{0};
  } context{body, count, grain, !pool.nodes().none()};
  pool.run(
      [](void* data, int thread, int num_threads) {
        auto& shared = *static_cast<Context*>(data);
        if (shared.has_parts) {
          const int64_t part_end = shared.count * (thread + 1) / num_threads;
          for (int64_t i = shared.count * thread / num_threads; i < part_end; ++i) shared.body(i);
          return;
        }
        for (;;) {
          const int64_t begin = shared.next.fetch_add(shared.grain);
          if (begin >= shared.count) return;
          const int64_t end = begin + shared.grain;
          for (int64_t i = begin; i < shared.count && i < end; ++i) shared.body(i);
        }
      },
      &context);
}

}  // namespace ts
