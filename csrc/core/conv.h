// The description of a convolution, the same from the dispatcher to the kernels. The operators check a
// caller's arguments and pack them into a ConvSpec once (ops/conv.h); with the sizes of tensors it becomes a
// ConvProblem. Nothing here knows of tensors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <vector>

#include "core/geometry.h"

namespace patchconv {

// Up to three values, one per spatial dimension.
template <typename T>
class PerDim {
 public:
  PerDim() = default;
  PerDim(std::initializer_list<T> values) {
    for (const T& value : values) push_back(value);
  }
  void push_back(const T& value) { values_.at(size_++) = value; }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](size_t d) { return values_[d]; }
  const T& operator[](size_t d) const { return values_[d]; }
  const T& back() const { return values_[size_ - 1]; }
  T* begin() { return values_.data(); }
  T* end() { return values_.data() + size_; }
  const T* begin() const { return values_.data(); }
  const T* end() const { return values_.data() + size_; }

 private:
  std::array<T, 3> values_ = {};
  size_t size_ = 0;
};

// The arguments of a convolution or of a transposed one, checked.
struct ConvSpec {
  const char* op = "";  // the operator's name, for messages
  bool transposed = false;
  PaddingMode mode = PaddingMode::kZeros;
  int64_t groups = 1;
  PerDim<ConvDim> dims;            // without sizes and kernel
  PerDim<int64_t> output_padding;  // transposed only
  PerDim<int64_t> splits;          // pieces of the output; empty: automatic
};

// The three passes, by what they compute (core/geometry.h).
enum class ConvPass { kSmall, kBig, kWeight };

// A convolution with sizes. 1-D operators are lifted to 2-D (height 1), so there are 2 or 3 dimensions.
struct ConvProblem : ConvSpec {
  bool lifted = false;  // 1-D
  int64_t batch = 0;
  int64_t big_channels = 0;
  int64_t small_channels = 0;
  bool tiles_only = false;  // never computed by one stock call

  // Set if the written grid was padded with its own values: the gradient of an element then also gathers
  // those of its copies in the padding.
  struct Gather {
    PaddingMode mode;
    PerDim<ConvDim> dims;  // geometry of that padding, with the written grid as the big one
  };
  std::optional<Gather> gather;

  ConvProblem() = default;
  // Sizes are those of the tensors, of a batch, checked.
  ConvProblem(const ConvSpec& spec, const std::vector<int64_t>& input, const std::vector<int64_t>& weight);

  bool unsplit() const;       // no splits, or one piece
  bool stock_serves() const;  // in one call without a padded copy: zero padding, the same before and after
  std::vector<int64_t> big_sizes(int64_t batch_size) const;
  std::vector<int64_t> small_sizes(int64_t batch_size) const;
  std::vector<int64_t> weight_sizes() const;
  int64_t kernel_volume() const;
};

}  // namespace patchconv
