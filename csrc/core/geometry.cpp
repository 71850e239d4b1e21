#include "core/geometry.h"

#include <algorithm>

namespace patchconv {

namespace {

// Division that rounds towards minus infinity, and towards plus infinity. `b` is positive.
int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }

constexpr std::string_view kNames[] = {"zeros", "reflect", "replicate", "circular"};

}  // namespace

bool parse_padding_mode(std::string_view name, PaddingMode* mode) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) {
      *mode = static_cast<PaddingMode>(i);
      return true;
    }
  }
  return false;
}

const char* padding_mode_name(PaddingMode mode) { return kNames[static_cast<int>(mode)].data(); }

Range intersect(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

Range piece_of(int64_t size, int64_t pieces, int64_t index) {
  // The first size % pieces ranges are one longer.
  const int64_t length = size / pieces;
  const int64_t longer = size % pieces;
  const int64_t begin = index * length + std::min(index, longer);
  return {begin, begin + length + (index < longer ? 1 : 0)};
}

Range ConvDim::big_range(Range range) const {
  if (range.empty()) return {0, 0};
  const int64_t begin = range.begin * stride - pad_before;
  return {begin, begin + (range.size() - 1) * stride + reach()};
}

Range ConvDim::small_range(Range range) const {
  if (range.empty()) return {0, 0};
  const int64_t first = ceil_div(range.begin + pad_before - (reach() - 1), stride);
  const int64_t last = floor_div(range.end - 1 + pad_before, stride);
  return intersect({first, last + 1}, {0, small});
}

bool ConvDim::reads_only_padding() const {
  auto misses = [this](int64_t p) {
    for (int64_t r = 0; r < kernel; ++r) {
      const int64_t i = p * stride + r * dilation - pad_before;
      if (i >= 0 && i < big) return false;
    }
    return true;
  };
  // Only kernels that overlap an edge can miss the grid, unless their holes are wider than the grid.
  for (int64_t p = 0; p < small && p * stride < pad_before; ++p) {
    if (misses(p)) return true;
  }
  for (int64_t p = small - 1; p >= 0 && p * stride + reach() - 1 - pad_before >= big; --p) {
    if (misses(p)) return true;
  }
  return false;
}

std::vector<int64_t> source_indices(PaddingMode mode, Range range, int64_t size) {
  std::vector<int64_t> indices(range.size());
  for (int64_t i = 0; i < range.size(); ++i) indices[i] = source_index(mode, range.begin + i, size);
  return indices;
}

std::vector<Range> shown_at(PaddingMode mode, Range range, const ConvDim& dim) {
  const Range front{-dim.pad_before, 0};
  const Range back{dim.big, dim.big + dim.pad_after};
  const auto [a, b] = range;
  std::vector<Range> stretches;
  switch (mode) {
    case PaddingMode::kZeros:
      break;
    case PaddingMode::kReflect:  // coordinate 0 and the last one are not shown again
      stretches = {
          intersect({1 - b, 1 - std::max<int64_t>(a, 1)}, front),
          intersect({2 * (dim.big - 1) - std::min(b, dim.big - 1) + 1, 2 * (dim.big - 1) - a + 1}, back)};
      break;
    case PaddingMode::kReplicate:
      if (a == 0) stretches.push_back(front);
      if (b == dim.big) stretches.push_back(back);
      break;
    case PaddingMode::kCircular:
      stretches = {intersect({a - dim.big, b - dim.big}, front), intersect({a + dim.big, b + dim.big}, back)};
      break;
  }
  std::vector<Range> places{range};
  for (Range rest : stretches) {
    if (rest.empty()) continue;
    Range& whole = places.front();
    if ((rest.end == whole.begin || rest.begin == whole.end) &&
        whole.size() + rest.size() <= 3 * range.size() / 2) {
      whole = {std::min(whole.begin, rest.begin), std::max(whole.end, rest.end)};
      continue;
    }
    for (; !rest.empty(); rest.begin += range.size()) {
      places.push_back({rest.begin, std::min(rest.end, rest.begin + range.size())});
    }
  }
  return places;
}

}  // namespace patchconv
