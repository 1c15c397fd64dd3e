// Memory of the executor: aligned, growing, never cleared.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace ts {

/// Maps zeroed memory that takes room only where it is touched, in huge pages where the kernel has
/// them. Null if there is not enough.
void* map_memory(int64_t num_bytes);
void unmap_memory(void* memory, int64_t num_bytes);

/// On several nodes, touches mapped memory before the threads write `count` pieces of it in equal
/// parts (`parallel_for`): a huge page goes to the thread in whose part its middle lies. Otherwise
/// it would go to the later of two neighbours, which begins with it while the other ends with it.
/// The pages of memory smaller than one go to all threads in turn.
void touch_parts(Pool& pool, void* memory, int64_t count, int64_t piece_bytes);

/// A block aligned to 64 bytes whose content is lost when it grows.
class Block {
 public:
  Block() = default;
  ~Block();
  Block(Block&& other) noexcept;
  Block& operator=(Block&&) = delete;

  /// Makes room for `num_bytes`; throws std::bad_alloc.
  void fit(int64_t num_bytes);

  uint8_t* bytes() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }

 private:
  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace ts
