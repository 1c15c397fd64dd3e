// Threads that wait cheaply: a bounded spin, then a condition variable.
#include "pool.h"

#include <unistd.h>

#include <chrono>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ts {

namespace {

constexpr auto kSpin = std::chrono::microseconds(60);

/// Tells the core that the thread is waiting: some 40 to 140 cycles on x86.
void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Sets the default rounding and denormal modes for as long as it lives: a step's bits must not
/// depend on what another library did to the calling thread.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace

void Signal::wait_beyond(uint32_t old) {
  for (int i = 0; i < 64; ++i) {
    if (value() != old) return;
    relax();
  }
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (value() != old) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  std::unique_lock lock(mutex_);
  num_sleepers_.fetch_add(1);
  changed_.wait(lock, [&] { return value_.load() != old; });
  num_sleepers_.fetch_sub(1);
}

void Signal::set(uint32_t value) {
  // Sequentially consistent with the sleepers' count: either the sleeper sees the new value
  // before it sleeps, or it is counted here.
  value_.store(value);
  if (num_sleepers_.load() == 0) return;
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

void Barrier::meet(int num_threads) {
  if (num_threads == 1) return;
  const uint32_t round = round_.value();
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
    num_arrived_.store(0, std::memory_order_relaxed);
    round_.set(round + 1);
  } else {
    round_.wait_beyond(round);
  }
}

Pool::Pool(int num_threads) : num_threads_(num_threads), owner_(getpid()) {
  for (int thread = 1; thread < num_threads; ++thread) {
    threads_.emplace_back([this, thread] { work(thread); });
  }
}

bool Pool::is_ours() const { return getpid() == owner_; }

Pool::~Pool() {
  stopping_ = true;
  start_.set(start_.value() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(Task task, void* context) {
  const FloatMode mode;
  if (num_threads_ == 1 || !is_ours()) {
    task(context, 0, 1);
    return;
  }
  task_ = task;
  context_ = context;
  start_.set(start_.value() + 1);
  task(context, 0, num_threads_);
  barrier_.meet(num_threads_);
}

void Pool::work(int thread) {
  const FloatMode mode;
  for (uint32_t seen = 0;;) {
    start_.wait_beyond(seen);
    seen = start_.value();
    if (stopping_) return;
    task_(context_, thread, num_threads_);
    barrier_.meet(num_threads_);
  }
}

}  // namespace ts
