// Threads that wait cheaply: a bounded spin, then a condition variable.
#include "pool.h"

#include <unistd.h>

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <chrono>
#include <utility>

#include "spin.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ts {

namespace {

/// Within a task, where all threads come at about the same time.
constexpr auto kBarrierSpin = std::chrono::microseconds(60);
/// Between tasks. The engine takes half a millisecond from one step to the next, and a thread that
/// slept meanwhile comes some 200 microseconds late (measured in a virtual machine): 3% of a step
/// of 5 ms.
constexpr auto kTaskSpin = std::chrono::microseconds(800);

/// Time of tasks after which `Crowding` decides: some steps of a small model, one of a slow one.
constexpr double kWindowS = 0.04;
constexpr double kShortestRestS = 0.25;
constexpr double kLongestRestS = 4;
/// Shares of their time that threads may wait, beyond what they wait for each other undisturbed.
constexpr double kLeastBearable = 0.4;
constexpr double kMargin = 0.1;

#if defined(__x86_64__)

using Mode = unsigned;
constexpr Mode kDefaultMode = 0x1f80;
Mode float_mode() { return _mm_getcsr(); }
void set_float_mode(Mode mode) { _mm_setcsr(mode); }

#elif defined(__aarch64__)

using Mode = uint64_t;
constexpr Mode kDefaultMode = 0;
Mode float_mode() {
  Mode mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void set_float_mode(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }

#else

using Mode = int;
constexpr Mode kDefaultMode = 0;
Mode float_mode() { return kDefaultMode; }
void set_float_mode(Mode) {}

#endif

/// Sets the default rounding and denormal modes for as long as it lives: a step's bits must not
/// depend on what another library did to the calling thread.
class FloatMode {
 public:
  FloatMode() : saved_(float_mode()) { set_float_mode(kDefaultMode); }
  ~FloatMode() { set_float_mode(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  const Mode saved_;
};

}  // namespace

void Signal::wait_beyond(uint32_t old, std::chrono::microseconds spin_for) {
  if (spin_for.count() > 0 && spin(old, spin_for)) return;
  std::unique_lock lock(mutex_);
  num_sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != old; });
  num_sleepers_.fetch_sub(1);
}

bool Signal::spin(uint32_t old, std::chrono::microseconds spin_for) const {
  const auto begin = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (value() != old) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() - begin < spin_for);
  return false;
}

void Signal::set(uint32_t value) {
  // Sequentially consistent with the sleepers' count: either the sleeper sees the new value
  // before it sleeps, or it is counted here. An exchange and not a store: once, under QEMU 7.2, all
  // threads slept for ever. The supposed cause is that this emulator lets the load pass a store.
  value_.exchange(value);
  if (num_sleepers_.load() == 0) return;
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

Places::Places(int num_threads) : num_threads_(num_threads), places_(new Place[num_threads]) {}

bool Places::is_shared(int thread) const {
  const int core = places_[thread].core.load(std::memory_order_relaxed);
  for (int other = 0; other < num_threads_; ++other) {
    if (other != thread && places_[other].core.load(std::memory_order_relaxed) == core) return true;
  }
  return false;
}

void Places::leave(int thread) { places_[thread].core.store(-1, std::memory_order_relaxed); }

#ifdef __linux__

void Places::settle(int thread) {
  std::atomic<int>& core = places_[thread].core;
  const int now = sched_getcpu();
  if (core.load(std::memory_order_relaxed) != now) core.store(now, std::memory_order_relaxed);
  for (int before = 0; before < thread; ++before) {
    if (places_[before].core.load(std::memory_order_relaxed) == now) return move_away(thread);
  }
}

void Places::move_away(int thread) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t free_cores = allowed;
  for (int other = 0; other < num_threads_; ++other) {
    const int core = places_[other].core.load(std::memory_order_relaxed);
    if (core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &free_cores);
  }
  if (CPU_COUNT(&free_cores) == 0) return;
  if (sched_setaffinity(0, sizeof free_cores, &free_cores) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
  places_[thread].core.store(sched_getcpu(), std::memory_order_relaxed);
}

#else

void Places::settle(int) {}

void Places::move_away(int) {}

#endif

void Barrier::wait(uint32_t round, int thread, const Places& places) {
  using std::chrono::microseconds;
  round_.wait_beyond(round, places.is_shared(thread) ? microseconds(0) : kBarrierSpin);
}

void Crowding::see(double elapsed_s, double longest_wait_s) {
  elapsed_s_ += elapsed_s;
  longest_wait_s_ += longest_wait_s;
  const bool is_resting = num_active_ < num_threads_;
  if (is_resting) rested_s_ += elapsed_s;
  if (elapsed_s_ < kWindowS) return;
  const bool is_crowded = loses_too_much();
  sound_s_ = is_crowded ? 0 : sound_s_ + elapsed_s_;
  elapsed_s_ = longest_wait_s_ = 0;
  if (is_crowded) {
    --num_active_;
    rested_s_ = 0;
    rest_s_ = std::min(std::max(kShortestRestS, 2 * rest_s_), kLongestRestS);
  } else if (is_resting && rested_s_ >= rest_s_) {
    ++num_active_;
    rested_s_ = 0;
  } else if (!is_resting && sound_s_ > kLongestRestS) {
    rest_s_ = 0;
  }
}

void Crowding::begin_again() {
  num_active_ = num_threads_;
  elapsed_s_ = longest_wait_s_ = rested_s_ = rest_s_ = sound_s_ = 0;
}

bool Crowding::loses_too_much() const {
  // Without one of n threads, the others have 1/n more work.
  const double bearable = std::max(kLeastBearable, 1.0 / num_active_ + kMargin);
  return num_active_ > 1 && longest_wait_s_ > bearable * elapsed_s_;
}

Pool::Pool(int num_threads, Nodes nodes)
    : num_threads_(num_threads),
      nodes_(std::move(nodes)),
      owner_(getpid()),
      places_(num_threads),
      num_active_(num_threads),
      few_rows_(num_threads),
      many_rows_(num_threads) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      threads_.emplace_back([this, thread] { work(thread); });
    }
  } catch (...) {
    stop();  // those that were made wait on members that would be gone
    throw;
  }
}

bool Pool::is_ours() const { return getpid() == owner_; }

Pool::~Pool() { stop(); }

void Pool::stop() {
  stopping_ = true;
  start_.set(start_.value() + 1);
  resumed_.set(resumed_.value() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(Task task, void* context) {
  const FloatMode mode;
  const int num_active = is_ours() ? num_active_.load(std::memory_order_relaxed) : 1;
  if (num_active == 1) {
    task(context, 0, 1);
    return;
  }
  const Stay stay(nodes_, 0);
  task_ = task;
  context_ = context;
  places_.settle(0);
  start_.set(start_.value() + 1);
  task(context, 0, num_active);
  meet(0, num_active, [] {});
}

void Pool::set_num_active(int num_active) {
  const int before = num_active_.load();
  if (num_active == before || num_active < 1 || num_active > num_threads_) return;
  for (int thread = num_active; thread < before; ++thread) places_.leave(thread);
  resumed_after_.store(start_.value());
  num_active_.store(num_active);
  if (num_active > before) resumed_.set(resumed_.value() + 1);
}

void Pool::fix_num_active(int num_active) {
  is_fixed_ = num_active > 0;
  set_num_active(is_fixed_ ? num_active : num_threads_);
  few_rows_.begin_again();
  many_rows_.begin_again();
}

void Pool::begin_step(bool has_many_rows) {
  has_many_rows_ = has_many_rows;
  if (!is_fixed_) set_num_active((has_many_rows ? many_rows_ : few_rows_).num_active());
}

void Pool::end_step(double elapsed_s, double longest_wait_s) {
  if (is_fixed_ || num_threads_ == 1) return;
  (has_many_rows_ ? many_rows_ : few_rows_).see(elapsed_s, longest_wait_s);
}

void Pool::work(int thread) {
  const FloatMode mode;
  const Stay stay(nodes_, thread);
  for (uint32_t seen = 0;;) {
    start_.wait_beyond(seen, kTaskSpin);
    seen = start_.value();
    // In this order: who sees the new number also sees after which task it holds, and whoever
    // rests because of the old number is woken by a later signal. So is whoever does not see yet
    // that the pool stops.
    const uint32_t resumed = resumed_.value();
    if (stopping_) return;
    const int num_active = num_active_.load();
    if (thread >= num_active) {
      resumed_.wait_beyond(resumed, std::chrono::microseconds(0));
      continue;
    }
    // A thread that wakes late sees the end of a task that ran without it.
    if (static_cast<int32_t>(seen - resumed_after_.load()) <= 0) continue;
    places_.settle(thread);
    task_(context_, thread, num_active);
    meet(thread, num_active, [] {});
  }
}

}  // namespace ts
