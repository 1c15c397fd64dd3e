// Mapped and aligned memory.
#include "executor/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace ts {

namespace {

constexpr uintptr_t kHugePage = uintptr_t{1} << 21;

size_t whole_pages(int64_t num_bytes) {
  constexpr size_t kPage = 65536;  // no platform's pages are larger
  return (static_cast<size_t>(num_bytes) + kPage - 1) / kPage * kPage;
}

}  // namespace

void* map_memory(int64_t num_bytes) {
  const size_t size = whole_pages(num_bytes);
  void* mapped = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // Keep the part that starts on a huge page, give the rest back.
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(mapped, aligned - begin);
  const uintptr_t rest = begin + kHugePage - aligned;
  auto* memory = reinterpret_cast<uint8_t*>(aligned);
  if (rest > 0) munmap(memory + size, rest);
#ifdef MADV_HUGEPAGE
  madvise(memory, size, MADV_HUGEPAGE);
#endif
  return memory;
}

void unmap_memory(void* memory, int64_t num_bytes) { munmap(memory, whole_pages(num_bytes)); }

void touch_parts(Pool& pool, void* memory, int64_t count, int64_t piece_bytes) {
  if (pool.nodes().none()) return;
  struct Context {
    uint8_t* memory;
    int64_t count;
    int64_t piece_bytes;
  } context{static_cast<uint8_t*>(memory), count, piece_bytes};
  pool.run(
      [](void* data, int thread, int num_threads) {
        constexpr auto kPage = static_cast<int64_t>(kHugePage);
        const auto& [memory, count, piece_bytes] = *static_cast<const Context*>(data);
        const int64_t size = count * piece_bytes;
        const int64_t part_begin = count * thread / num_threads * piece_bytes;
        const int64_t part_end = count * (thread + 1) / num_threads * piece_bytes;
        const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
        for (int64_t page = begin / kPage; page * kPage < begin + size; ++page) {
          const int64_t middle = page * kPage + kPage / 2 - begin;
          bool is_mine = part_begin <= middle && middle < part_end;
          if (middle >= size) is_mine = thread == 0;  // the next block begins within it
          if (size < kPage) is_mine = thread == page % num_threads;
          if (is_mine)
            *const_cast<volatile uint8_t*>(memory + std::max<int64_t>(middle - kPage / 2, 0)) = 0;
        }
      },
      &context);
}

Block::~Block() { std::free(data_); }

Block::Block(Block&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

void Block::fit(int64_t num_bytes) {
  if (num_bytes <= size_) return;
  std::free(data_);
  data_ = nullptr;
  size_ = 0;
  const int64_t size = (num_bytes + 4095) / 4096 * 4096;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>(size)));
  if (data_ == nullptr) throw std::bad_alloc();
  size_ = size;
}

}  // namespace ts
