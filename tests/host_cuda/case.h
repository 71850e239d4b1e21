// A case that main.cpp has read: the numbers and buffers of one call of a launch function.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "cuda/kernels/stream.h"

namespace host_cuda {

// Memory of exactly this many bytes, so that the sanitizer sees an access beside it. A buffer of which only
// the end is given is reserved but not filled, so that it may be larger than the machine's memory.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t off, int64_t window) : bytes_(bytes), window_(window) {
    if (bytes < 0) return;
    if (window < bytes) {
      reserved_ = static_cast<size_t>(bytes + off);
      void* p = mmap(nullptr, reserved_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                     -1, 0);
      if (p == MAP_FAILED) throw std::bad_alloc();
      room_ = p;
    } else {
      const auto size = static_cast<size_t>(bytes + off);
      if (posix_memalign(&room_, 256, size) != 0) throw std::bad_alloc();
    }
    data_ = static_cast<char*>(room_) + off;
  }
  Buffer(Buffer&& other) noexcept
      : bytes_(other.bytes_),
        window_(other.window_),
        reserved_(other.reserved_),
        room_(other.room_),
        data_(other.data_) {
    other.room_ = nullptr;
  }
  ~Buffer() {
    if (room_ == nullptr) return;
    if (reserved_ > 0) {
      munmap(room_, reserved_);
    } else {
      std::free(room_);
    }
  }
  char* data() const { return data_; }
  char* window_begin() const { return data_ == nullptr ? nullptr : data_ + (bytes_ - window_); }
  int64_t window() const { return bytes_ < 0 ? 0 : window_; }

 private:
  int64_t bytes_, window_;
  size_t reserved_ = 0;
  void* room_ = nullptr;
  char* data_ = nullptr;
};

struct Case {
  patchconv::kernels::Type type;
  int64_t last_blocks;
  std::vector<double> numbers;
  std::vector<Buffer> buffers;

  double number(size_t i) const { return numbers.at(i); }
  float real(size_t i) const { return static_cast<float>(numbers.at(i)); }
  int64_t integer(size_t i) const { return static_cast<int64_t>(numbers.at(i)); }
  template <typename T = void>
  T* buffer(size_t i) const {
    return reinterpret_cast<T*>(buffers.at(i).data());
  }
};

// Memory of exactly this many floats. They are NaN, so that one that was not written shows in any sum; or
// zeros if not all blocks run, since then not all parts are written.
struct Floats {
  Floats(int64_t floats, const Case& c)
      : data(static_cast<float*>(std::malloc(static_cast<size_t>(floats) * 4))) {
    std::fill(data, data + floats, c.last_blocks > 0 ? 0.0F : std::numeric_limits<float>::quiet_NaN());
  }
  ~Floats() { std::free(data); }
  Floats(const Floats&) = delete;
  float* data;
};

// The kernels of conv_cases.cpp, by name.
const std::map<std::string, std::function<void(const Case&)>>& conv_kernels();

}  // namespace host_cuda
