// A buffer that is kept from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace ts {

/// Aligned to 64 bytes; grows, and never shrinks.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch(Scratch&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}

  /// At least `num_bytes` bytes; their content is lost when the memory grows.
  uint8_t* reserve(int64_t bytes) {
    if (bytes > capacity_) {
      release();
      data_ = static_cast<uint8_t*>(::operator new(static_cast<size_t>(bytes), kAlignment));
      capacity_ = bytes;
    }
    return data_;
  }

  uint8_t* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};

  void release() {
    if (data_ != nullptr) ::operator delete(data_, kAlignment);
    data_ = nullptr;
    capacity_ = 0;
  }

  uint8_t* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace ts
