// Attention over pages and the kernels between products, beside their floors.
#include <cmath>
#include <vector>

#include "bench.h"

namespace {

/// As in native/kernels/c_interface.cpp.
struct Attention {
  uint8_t* pages;
  const int32_t* page_table;
  int64_t page_size;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t group;
  int64_t position;
  int64_t num_rows;
  int64_t split;
  int64_t window;
  int64_t format;
  float scale;
  float soft_cap;
  const float* balance;
  int64_t is_prompt;
  const float* sinks;
  int64_t is_chunked;
};

struct Kernels {
  void (*store)(const Attention*, const float*, const float*);
  void (*attend)(const Attention*, const float*, float*);
  void (*rms_norm)(const float*, const float*, int64_t, float, float*);
  void (*gate)(int32_t, const float*, const float*, int64_t, float*);
};

constexpr int64_t kPageSize = 16;
constexpr const char* kCacheFormats[] = {"f16", "bf16", "int8", "int16"};

std::vector<float> random_floats(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(std::rand() % 2001 - 1000) * 1e-3F;
  return values;
}

/// Rows after a context, over as many caches one after the other as fill the footprint: those of
/// a model's layers. The floor reads keys and values once, or multiplies at the float32 peak.
void measure_attention(const Kernels& kernels, Attention a, int64_t footprint, const Peaks& peaks) {
  const int64_t context = a.position + a.num_rows;
  const int64_t num_pages = (context + kPageSize - 1) / kPageSize;
  const int64_t value_bytes = a.format == 2 ? 1 : 2;
  const int64_t scale_bytes = a.format >= 2 ? 4 : 0;  // of a token's keys and values
  const int64_t token_bytes = a.num_kv_heads * (2 * a.head_dim * value_bytes + scale_bytes);
  const int64_t cache_bytes = num_pages * kPageSize * token_bytes;
  const int64_t copies = std::max<int64_t>(1, footprint / cache_bytes);
  uint8_t* caches = allocate(copies * cache_bytes);
  std::vector<int32_t> table(static_cast<size_t>(num_pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  a.page_table = table.data();
  const std::vector<float> stored = random_floats(context * a.num_kv_heads * a.head_dim);
  const int64_t width = a.num_kv_heads * a.group * a.head_dim;
  const std::vector<float> q = random_floats(a.num_rows * width);
  std::vector<float> out(q.size());
  Attention whole = a;
  whole.position = 0;
  whole.num_rows = context;
  for (int64_t i = 0; i < copies; ++i) {
    whole.pages = caches + i * cache_bytes;
    kernels.store(&whole, stored.data(), stored.data());
  }
  const double time_s = best_time_s([&] {
    for (int64_t i = 0; i < copies; ++i) {
      a.pages = caches + i * cache_bytes;
      kernels.attend(&a, q.data(), out.data());
    }
  });
  std::free(caches);
  const auto seen =
      static_cast<double>(a.num_rows * a.position + a.num_rows * (a.num_rows + 1) / 2);
  const double macs = 2 * seen * static_cast<double>(width * copies);
  const auto bytes = static_cast<double>(copies * cache_bytes);
  std::printf("attention %-5s %ld x %3ld wide, %4ld rows after %5ld", kCacheFormats[a.format],
              a.group, a.head_dim, a.num_rows, a.position);
  print_rates(time_s, bytes, macs, std::max(bytes / peaks.read_bytes_s, macs / peaks.float_macs_s));
  std::printf("\n");
}

/// Prints a line for a kernel that reads and writes that many bytes of the nearest cache.
template <typename Work>
void measure_row(const char* name, int64_t width, int64_t bytes, const Peaks& peaks,
                 const Work& work) {
  constexpr int kRows = 1000;
  const double time_s = best_time_s([&] {
    for (int i = 0; i < kRows; ++i) work();
  });
  const double near_s = static_cast<double>(bytes) / peaks.near_bytes_s;
  std::printf("%-10s %5ld wide  %28.3f us  %6.1f GB/s  %17.0f%% of floor\n", name, width,
              time_s / kRows * 1e6, static_cast<double>(bytes) * kRows / time_s / 1e9,
              100 * near_s * kRows / time_s);
}

void measure_rows(const Kernels& kernels, const Peaks& peaks) {
  for (const int64_t width : {576, 1536, 8960}) {
    const std::vector<float> x = random_floats(width);
    const std::vector<float> y = random_floats(width);
    std::vector<float> out(x.size());
    const int64_t bytes = 3 * 4 * width;  // two rows are read, one is written
    measure_row("rms_norm", width, bytes, peaks,
                [&] { kernels.rms_norm(x.data(), y.data(), width, 1e-5F, out.data()); });
    measure_row("silu", width, bytes, peaks,
                [&] { kernels.gate(0, x.data(), y.data(), width, out.data()); });
    measure_row("gelu_tanh", width, bytes, peaks,
                [&] { kernels.gate(1, x.data(), y.data(), width, out.data()); });
  }
}

}  // namespace

void measure_kernels(void* library, int64_t footprint, const Peaks& peaks) {
  Kernels kernels;
  find(library, "ts_kernel_store", &kernels.store);
  find(library, "ts_kernel_attention", &kernels.attend);
  find(library, "ts_kernel_rms_norm", &kernels.rms_norm);
  find(library, "ts_kernel_gate", &kernels.gate);
  for (const int64_t format : {0, 1, 2, 3}) {
    for (const auto& [group, head_dim] : {std::pair{3, 64}, {6, 128}, {4, 256}}) {
      Attention a{};
      a.page_size = kPageSize;
      a.num_kv_heads = 2;
      a.head_dim = head_dim;
      a.group = group;
      a.format = format;
      a.scale = 1 / std::sqrt(static_cast<float>(head_dim));
      for (const auto& [rows, position] : {std::pair{1, 511}, {1, 7999}, {256, 0}, {256, 1792}}) {
        a.num_rows = rows;
        a.is_prompt = rows > 1;
        a.position = position;
        measure_attention(kernels, a, rows == 1 ? footprint : 0, peaks);
      }
    }
  }
  measure_rows(kernels, peaks);
}
