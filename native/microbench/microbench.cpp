// Measures one level's kernels on one thread beside what the machine could do at best.
//
//   make bench WHAT=kernels                          (LEVEL=avx2 for another one)
//   make bench WHAT=kernels ARGS="1536 768 84 Q4_1,kernels"
//
// The arguments are outputs, inputs, megabytes and formats.
// Few rows, generated ones, read weights of the given footprint (default 84 MB); 512 prompt rows
// take one matrix of outputs x inputs (default 1536 x 768); `formats` such as Q4_1,Q8_0 chooses
// some, and `kernels` among them attention and the kernels between products. The floor is the
// longer of two times: reading the weights, or the keys and values, at the streaming bandwidth, and
// multiplying at the peak of tiles, of dpbusd (two planes an activation, or one) or, on processors
// without it, of pairs of int16, or of float32 multiply-adds; for the kernels between products,
// reading and writing rows at the first-level cache's bandwidth. All are measured first, in the
// same run.
#include <string>
#include <vector>

#include "bench.h"

namespace {

struct Format {
  const char* name;
  int32_t type;
  bool blocks;
  int64_t block_bytes;  // of 256 weights in GGUF
};

constexpr Format kFormats[] = {
    {"Q4_0", 2, true, 144},      {"Q4_1", 3, true, 160},      {"Q5_0", 6, true, 176},
    {"Q5_1", 7, true, 192},      {"Q8_0", 8, true, 272},      {"IQ4_NL", 20, true, 144},
    {"Q2_K", 10, true, 84},      {"Q3_K", 11, true, 110},     {"Q4_K", 12, true, 144},
    {"Q5_K", 13, true, 176},     {"Q6_K", 14, true, 210},     {"IQ4_XS", 23, true, 136},
    {"TQ2_0", 35, true, 66},     {"IQ1", 264, true, 274},     {"IQ2_XS", 265, true, 274},
    {"IQ2_XXS", 266, true, 266}, {"IQ3_XXS", 267, true, 266}, {"IQ3_S", 268, true, 266},
    {"F16", 1, false, 512},      {"BF16", 30, false, 512},    {"F32", 0, false, 1024}};
constexpr int32_t kGenerated = 0;
constexpr int32_t kPrompt = 1;
constexpr int32_t kCoarse = 3;
constexpr int32_t kMixed = 4;

/// The functions of one library.
struct Library {
  void* handle;
  const char* (*level)();
  int32_t (*request_tiles)();
  int64_t (*packed_bytes)(int32_t, int64_t, int64_t);
  void (*pack)(int32_t, int64_t, int64_t, const void*, void*, int64_t, int64_t);
  int64_t (*prepared_bytes)(int32_t, int32_t, int64_t, int64_t);
  void (*prepare)(int32_t, int32_t, const float*, int64_t, int64_t, int64_t, int64_t, void*);
  void (*multiply)(int32_t, int64_t, int64_t, const void*, int32_t, const void*, int64_t, int64_t,
                   int64_t, float*, int64_t, int32_t);
};

Library open_library(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  Library library;
  library.handle = handle;
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
  int32_t kind;          // of the rows
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

/// How many times as fast as with 15 bits of activations a product can be: 1 where the rows have
/// as many against such weights, or take as much room.
double most_gain(const Library& library, const Case& c) {
  if (c.kind != kCoarse && c.kind != kMixed) return 1;
  const auto bytes = [&](int32_t kind) {
    return library.prepared_bytes(c.format.type, kind, c.num_inputs, c.num_rows);
  };
  if (bytes(c.kind) >= bytes(kGenerated)) return 1;
  return c.kind == kCoarse ? 2 : 16.0 / 9;
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
      allocate(library.prepared_bytes(c.format.type, c.kind, c.num_inputs, c.num_rows));
  const double prepare_s = best_time_s([&] {
    library.prepare(c.format.type, c.kind, x.data(), c.num_inputs, c.num_inputs, 0, c.num_rows,
                    prepared);
  });
  std::vector<float> out(static_cast<size_t>(c.num_rows * c.num_outputs));
  const double time = best_time_s([&] {
    for (int64_t i = 0; i < c.num_matrices; ++i) {
      library.multiply(c.format.type, c.num_outputs, c.num_inputs, packed + i * matrix_bytes,
                       c.kind, prepared, c.num_rows, 0, num_groups, out.data(), c.num_outputs, 0);
    }
  });
  std::free(packed);
  std::free(prepared);

  const double macs = static_cast<double>(c.num_rows) *
                      static_cast<double>(c.num_matrices * c.num_outputs * c.num_inputs);
  double peak = c.format.blocks ? peaks.quantized_macs_s : peaks.float_macs_s;
  peak *= most_gain(library, c);
  if (c.format.blocks || c.kind == kPrompt) peak = std::max(peak, peaks.tile_macs_s);
  std::printf("%-6s %4ld %s rows  %6.2f MB", c.format.name, c.num_rows,
              c.kind == kCoarse  ? "coarse"
              : c.kind == kMixed ? "mixed "
                                 : "      ",
              static_cast<double>(bytes) / 1e6);
  print_rates(time, static_cast<double>(bytes), macs,
              std::max(static_cast<double>(bytes) / peaks.read_bytes_s, macs / peak));
  std::printf("  prepare %.1f us\n", prepare_s * 1e6);
}

/// What the level's tiles do at best, in multiply-adds a second; 0 if it has none.
double measure_tiles(const Library& library) {
  if (std::strcmp(library.level(), "amx") != 0) return 0;
  void* (*create)(int32_t, const void*, int32_t);
  double (*measure_peak)(void*);
  void (*destroy)(void*);
  find(library.handle, "ts_pool_create", &create);
  find(library.handle, "ts_measure_peak", &measure_peak);
  find(library.handle, "ts_pool_destroy", &destroy);
  void* pool = create(1, nullptr, 0);
  if (pool == nullptr) return 0;
  const double operations_s = measure_peak(pool);
  destroy(pool);
  return operations_s / 2;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: microbench LIBRARY [outputs inputs megabytes formats [full|half]]\n");
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
  if (argc > 6) {  // the ports of another processor, in place of this one's
    void (*assume_half_ports)(int32_t);
    find(library.handle, "ts_linear_assume_half_ports", &assume_half_ports);
    assume_half_ports(std::strcmp(argv[6], "half") == 0 ? 1 : 0);
  }
  Peaks peaks = measure_peaks(footprint);
  peaks.tile_macs_s = measure_tiles(library);
  if (peaks.are_measured) {
    std::printf(
        "%s: reads %.1f GB/s, %.0f from the first-level cache; GMAC/s: integers %.0f (activations "
        "of 15 bits), float %.0f, tiles %.0f\n",
        library.level(), peaks.read_bytes_s / 1e9, peaks.near_bytes_s / 1e9,
        peaks.quantized_macs_s / 1e9, peaks.float_macs_s / 1e9, peaks.tile_macs_s / 1e9);
  } else {
    std::printf("%s: the limits of such a processor are not known, so floors are 0\n",
                library.level());
  }
  for (const Format& format : kFormats) {
    if (argc > 5 && std::strstr(argv[5], format.name) == nullptr) continue;
    const int64_t one = library.packed_bytes(format.type, num_outputs, num_inputs);
    if (one < 0) continue;  // rows of num_inputs do not fill its blocks
    const int64_t copies = std::max(int64_t{1}, footprint / one);
    for (const int64_t num_rows : {1, 2, 3, 4, 8, 16, 32}) {
      measure(library, {format, num_outputs, num_inputs, num_rows, copies, kGenerated}, peaks);
    }
    measure(library, {format, num_outputs, num_inputs, 512, 1, kPrompt}, peaks);
    if (!format.blocks) continue;
    for (const int32_t kind : {kMixed, kCoarse}) {
      for (const int64_t num_rows : {1, 2, 3, 4, 8, 16, 32}) {
        measure(library, {format, num_outputs, num_inputs, num_rows, copies, kind}, peaks);
      }
      measure(library, {format, num_outputs, num_inputs, 512, 1, kind}, peaks);
    }
  }
  if (argc <= 5 || std::strstr(argv[5], "kernels") != nullptr)
    measure_kernels(library.handle, footprint, peaks);
  return 0;
}
