// Memory of the executor: aligned, growing, never cleared.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

/// Maps zeroed memory that takes room only where it is touched, in huge pages where the kernel has
/// them. Null if there is not enough.
void* map_memory(int64_t num_bytes);
void unmap_memory(void* memory, int64_t num_bytes);

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
