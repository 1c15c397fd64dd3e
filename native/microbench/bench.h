// What the parts of the microbenchmark share: time, memory, the machine's limits, a library.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

/// CPU time of this thread: others on the same core do not count.
inline double now_s() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The shortest of several runs, in seconds: the least disturbed one.
template <typename Work>
double best_time_s(const Work& work) {
  double best = 1e9;
  const double end = now_s() + 0.4;
  for (int run = 0; run < 5 || now_s() < end; ++run) {
    const double start = now_s();
    work();
    const double time_s = now_s() - start;
    if (time_s > 0) best = std::min(best, time_s);  // some virtual machines' clocks stop
  }
  return best;
}

/// Zeroed memory on huge pages where the system grants them; never freed.
inline uint8_t* allocate(int64_t bytes) {
  constexpr size_t page = size_t{2} << 20;
  const size_t size = (static_cast<size_t>(bytes) + page - 1) / page * page;
  void* data = std::aligned_alloc(page, size);
  if (data == nullptr) std::abort();
  madvise(data, size, MADV_HUGEPAGE);
  std::memset(data, 0, size);
  return static_cast<uint8_t*>(data);
}

/// What one thread can do at best, measured in this run; what it has no way to measure counts as
/// unbounded, so that it sets no floor.
struct Peaks {
  bool are_measured = false;
  double read_bytes_s = 1e15;      // of the chosen footprint
  double near_bytes_s = 1e15;      // of 16 KB, which the first-level cache holds
  double quantized_macs_s = 1e18;  // dpbusd, two planes an activation; without it, pairs of int16
  double float_macs_s = 1e18;
  double tile_macs_s = 0;  // of bfloat16 tiles, which do two planes of int8 as fast; 0: no tiles
};

/// Measures all but tiles; streams are of `footprint` bytes.
Peaks measure_peaks(int64_t footprint);

/// Ends a line: the time, the rates, and the share of the floor that was reached.
inline void print_rates(double time_s, double bytes, double macs, double floor_s) {
  std::printf("  %9.1f us  %6.1f GB/s  %6.1f GMAC/s  %3.0f%% of floor", time_s * 1e6,
              bytes / time_s / 1e9, macs / time_s / 1e9, 100 * floor_s / time_s);
}

/// Points `function` at what a library exports under `name`, or ends the program.
template <typename Function>
void find(void* handle, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(handle, name));
  if (*function == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
}

/// Prints how attention and the kernels between products do on a library.
void measure_kernels(void* library, int64_t footprint, const Peaks& peaks);
