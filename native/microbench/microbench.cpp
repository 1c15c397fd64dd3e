// Measures one level's matrix products on one thread beside what the machine could do at best.
//
//   cmake -S native -B build/native -G Ninja -DTS_MICROBENCH=ON && ninja -C build/native
//   build/native/microbench build/native/libtwostroke_avx512.so [outputs inputs megabytes formats]
//
// Few rows read weights of the given footprint (default 84 MB); 512 rows take one matrix of
// outputs x inputs (default 1536 x 768); `formats` such as Q4_1,Q8_0 chooses some. The floor is the
// longer of two times: reading the weights at the streaming bandwidth, and multiplying at the peak
// of dpbusd (two planes an activation) or of float32 multiply-adds. Both are measured first, in the
// same run.
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct Format {
  const char* name;
  int32_t type;
  bool blocks;
  int64_t block_bytes;  // of 256 weights in GGUF
};

constexpr Format kFormats[] = {
    {"Q4_0", 2, true, 144},  {"Q4_1", 3, true, 160},   {"Q5_0", 6, true, 176},
    {"Q5_1", 7, true, 192},  {"Q8_0", 8, true, 272},   {"IQ4_NL", 20, true, 144},
    {"Q2_K", 10, true, 84},  {"Q3_K", 11, true, 110},  {"Q4_K", 12, true, 144},
    {"Q5_K", 13, true, 176}, {"Q6_K", 14, true, 210},  {"IQ4_XS", 23, true, 136},
    {"F16", 1, false, 512},  {"BF16", 30, false, 512}, {"F32", 0, false, 1024}};
constexpr int32_t kPrompt = 1;

/// CPU time of this thread: others on the same core do not count.
double now_s() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// The shortest of several runs, in seconds: what the machine does when nobody disturbs it.
template <typename Work>
double best_time_s(const Work& work) {
  double best = 1e9;
  const double end = now_s() + 0.4;
  for (int run = 0; run < 5 || now_s() < end; ++run) {
    const double start = now_s();
    work();
    best = std::min(best, now_s() - start);
  }
  return best;
}

/// Zeroed memory on huge pages where the system grants them; never freed.
uint8_t* allocate(int64_t bytes) {
  constexpr size_t page = size_t{2} << 20;
  const size_t size = (static_cast<size_t>(bytes) + page - 1) / page * page;
  void* data = std::aligned_alloc(page, size);
  if (data == nullptr) std::abort();
  madvise(data, size, MADV_HUGEPAGE);
  std::memset(data, 0, size);
  return static_cast<uint8_t*>(data);
}

struct Peaks {
  double read_bytes_s;
  double quantized_macs_s;
  double float_macs_s;
};

#if defined(__x86_64__)

constexpr int64_t kChainSteps = 1000000;
constexpr int kChains = 12;

__attribute__((target("avx512f"))) void read_all(const uint8_t* data, int64_t bytes) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __builtin_prefetch(data + i + 64 * j + 2560);
      sums[j] = _mm512_or_si512(sums[j], _mm512_load_si512(data + i + 64 * j));
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) asm volatile("" : : "v"(sums[j]));
}

__attribute__((target("avx512f,avx512vnni"))) void run_dot_chains() {
  __m512i sums[kChains] = {};
  const __m512i operand = _mm512_set1_epi32(1);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("vpdpbusd %1, %1, %0" : "+v"(sums[j]) : "v"(operand));
    }
  }
}

__attribute__((target("avx512f"))) void run_float_chains() {
  __m512 sums[kChains] = {};
  const __m512 operand = _mm512_set1_ps(1.0F);
  for (int64_t i = 0; i < kChainSteps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      asm volatile("vfmadd231ps %1, %1, %0" : "+v"(sums[j]) : "v"(operand));
    }
  }
}

Peaks measure_peaks(const uint8_t* data, int64_t bytes) {
  if (!__builtin_cpu_supports("avx512vnni")) return {1e12, 1e15, 1e15};
  const double read_s = best_time_s([&] { read_all(data, bytes); });
  const double dot_s = best_time_s(run_dot_chains);
  const double float_s = best_time_s(run_float_chains);
  const double steps = 1.0 * kChains * kChainSteps;
  return {static_cast<double>(bytes) / read_s, 64 * steps / dot_s / 2, 16 * steps / float_s};
}

#else

Peaks measure_peaks(const uint8_t*, int64_t) { return {1e12, 1e15, 1e15}; }

#endif

/// The functions of one library.
struct Library {
  const char* (*level)();
  int32_t (*request_tiles)();
  int64_t (*packed_bytes)(int32_t, int64_t, int64_t);
  void (*pack)(int32_t, int64_t, int64_t, const void*, void*, int64_t, int64_t);
  int64_t (*prepared_bytes)(int32_t, int32_t, int64_t, int64_t);
  void (*prepare)(int32_t, int32_t, const float*, int64_t, int64_t, int64_t, int64_t, void*);
  void (*multiply)(int32_t, int64_t, int64_t, const void*, int32_t, const void*, int64_t, int64_t,
                   int64_t, float*, int64_t, int32_t);
};

template <typename Function>
void find(void* handle, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(handle, name));
  if (*function == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
}

Library open_library(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  Library library;
  find(handle, "ts_linear_level", &library.level);
  find(handle, "ts_linear_request_tiles", &library.request_tiles);
  find(handle, "ts_linear_packed_bytes", &library.packed_bytes);
  find(handle, "ts_linear_pack", &library.pack);
  find(handle, "ts_linear_prepared_bytes", &library.prepared_bytes);
  find(handle, "ts_linear_prepare", &library.prepare);
  find(handle, "ts_linear_multiply", &library.multiply);
  return library;
}

struct Case {
  const Format& format;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t num_rows;
  int64_t num_matrices;  // one after the other, as the layers of a model
};

/// Packs the same random quants as often as there are matrices.
uint8_t* pack_matrices(const Library& library, const Case& c, int64_t matrix_bytes) {
  const int64_t source_bytes = c.num_outputs * c.num_inputs * c.format.block_bytes / 256;
  std::vector<uint8_t> source(static_cast<size_t>(source_bytes));
  for (uint8_t& byte : source) {
    byte = static_cast<uint8_t>(0x30 | (std::rand() & 0x0b));  // normal numbers, in every format
  }
  uint8_t* packed = allocate(c.num_matrices * matrix_bytes);
  for (int64_t i = 0; i < c.num_matrices; ++i) {
    library.pack(c.format.type, c.num_outputs, c.num_inputs, source.data(),
                 packed + i * matrix_bytes, 0, (c.num_outputs + 15) / 16);
  }
  return packed;
}

/// Times products of the given rows with each matrix and prints their line.
void measure(const Library& library, const Case& c, const Peaks& peaks) {
  const int64_t num_groups = (c.num_outputs + 15) / 16;
  const int64_t matrix_bytes = library.packed_bytes(c.format.type, c.num_outputs, c.num_inputs);
  const int64_t bytes = c.num_matrices * matrix_bytes;
  uint8_t* packed = pack_matrices(library, c, matrix_bytes);
  std::vector<float> x(static_cast<size_t>(c.num_rows * c.num_inputs));
  for (float& value : x) value = static_cast<float>(std::rand() % 2001 - 1000);
  uint8_t* prepared =
      allocate(library.prepared_bytes(c.format.type, kPrompt, c.num_inputs, c.num_rows));
  const double prepare_s = best_time_s([&] {
    library.prepare(c.format.type, kPrompt, x.data(), c.num_inputs, c.num_inputs, 0, c.num_rows,
                    prepared);
  });
  std::vector<float> out(static_cast<size_t>(c.num_rows * c.num_outputs));
  const double time = best_time_s([&] {
    for (int64_t i = 0; i < c.num_matrices; ++i) {
      library.multiply(c.format.type, c.num_outputs, c.num_inputs, packed + i * matrix_bytes,
                       kPrompt, prepared, c.num_rows, 0, num_groups, out.data(), c.num_outputs, 0);
    }
  });
  std::free(packed);
  std::free(prepared);

  const double macs = static_cast<double>(c.num_rows) *
                      static_cast<double>(c.num_matrices * c.num_outputs * c.num_inputs);
  const double peak = c.format.blocks ? peaks.quantized_macs_s : peaks.float_macs_s;
  const double floor_s = std::max(static_cast<double>(bytes) / peaks.read_bytes_s, macs / peak);
  std::printf("%-6s %4ld rows  %6.2f MB  %9.1f us  %6.1f GB/s  %6.1f GMAC/s  %3.0f%% of floor",
              c.format.name, c.num_rows, static_cast<double>(bytes) / 1e6, time * 1e6,
              static_cast<double>(bytes) / time / 1e9, macs / time / 1e9, 100 * floor_s / time);
  std::printf("  prepare %.1f us\n", prepare_s * 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: microbench LIBRARY [outputs inputs megabytes formats]\n");
    return 2;
  }
  const Library library = open_library(argv[1]);
  const int64_t num_outputs = argc > 2 ? std::atoll(argv[2]) : 1536;
  const int64_t num_inputs = argc > 3 ? std::atoll(argv[3]) : 768;
  const int64_t footprint = (argc > 4 ? std::atoll(argv[4]) : 84) << 20;
  if (library.request_tiles() == 0) {
    std::fprintf(stderr, "the system does not grant the tile registers\n");
    return 1;
  }
  uint8_t* buffer = allocate(footprint);
  const Peaks peaks = measure_peaks(buffer, footprint);
  std::free(buffer);
  std::printf("%s: reads %.1f GB/s, dpbusd peak %.0f GMAC/s (two planes), float %.0f GMAC/s\n",
              library.level(), peaks.read_bytes_s / 1e9, peaks.quantized_macs_s / 1e9,
              peaks.float_macs_s / 1e9);
  for (const Format& format : kFormats) {
    if (argc > 5 && std::strstr(argv[5], format.name) == nullptr) continue;
    const int64_t one = library.packed_bytes(format.type, num_outputs, num_inputs);
    if (one < 0) continue;  // rows of num_inputs do not fill its blocks
    const int64_t copies = std::max(int64_t{1}, footprint / one);
    for (const int64_t num_rows : {1, 4, 8, 16, 32}) {
      measure(library, {format, num_outputs, num_inputs, num_rows, copies}, peaks);
    }
    measure(library, {format, num_outputs, num_inputs, 512, 1}, peaks);
  }
  return 0;
}
