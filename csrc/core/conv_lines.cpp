#include "core/conv_lines.h"

#include <algorithm>
#include <numeric>

namespace patchconv {

ConvLine ConvLine::cut(Range range) const {
  const auto first_from = [this](int64_t place) {
    return std::clamp<int64_t>((place - out_first + out_step - 1) / out_step, 0, count);
  };
  const int64_t begin = range.begin <= out_first ? 0 : first_from(range.begin);
  const int64_t end = range.end <= out_first ? 0 : first_from(range.end);
  ConvLine line = *this;
  line.count = std::max<int64_t>(0, end - begin);
  line.first += begin * step;
  line.out_first += begin * out_step;
  return line;
}

ConvLine small_line(const ConvDim& dim) {
  ConvLine line;
  line.source = dim.big;
  line.count = dim.small;
  line.step = dim.stride;
  line.first = -dim.pad_before;
  line.distance = dim.dilation;
  line.taps = static_cast<int>(dim.kernel);
  return line;
}

std::vector<ConvLine> big_lines(const ConvDim& dim) {
  // big = p * stride + r * dilation - pad_before. With big = u * stride + residue, tap r contributes where
  // residue + pad_before - r * dilation is a multiple m * stride, and it reads small coordinate p = u + m.
  const int64_t common = std::gcd(dim.stride, dim.dilation);
  const int64_t period = dim.stride / common;  // between taps that contribute
  std::vector<ConvLine> lines;
  for (int64_t residue = 0; residue < std::min(dim.stride, dim.big); ++residue) {
    ConvLine line;
    line.source = dim.small;
    line.count = (dim.big - residue + dim.stride - 1) / dim.stride;
    line.out_first = residue;
    line.out_step = dim.stride;
    line.distance = dim.dilation / common;
    line.tap_step = -static_cast<int>(period);
    line.taps = 0;
    for (int64_t r = 0; r < std::min(period, dim.kernel); ++r) {
      if ((residue + dim.pad_before - r * dim.dilation) % dim.stride != 0) continue;
      // The last tap reads the lowest coordinate: the line begins with it.
      line.taps = static_cast<int>((dim.kernel - 1 - r) / period + 1);
      line.tap_first = static_cast<int>(r + (line.taps - 1) * period);
      line.first = (residue + dim.pad_before - line.tap_first * dim.dilation) / dim.stride;
    }
    lines.push_back(line);
  }
  return lines;
}

}  // namespace patchconv
