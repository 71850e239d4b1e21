#include "cpu/conv_copy.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace patchconv {

using at::Tensor;
using c10::irange;

namespace {

// A tile of n x c x d x h x w elements (d = 1 in two dimensions) seen from both sides. Strides in elements.
struct Move {
  int64_t n, c;
  std::array<int64_t, 3> size;                 // d, h, w
  std::array<std::vector<int64_t>, 3> index;   // tile coordinate -> tensor coordinate, -1: zero
  int64_t tensor_n, tensor_c, tile_n, tile_c;  // strides
  std::array<int64_t, 3> tensor_stride, tile_stride;
  int64_t first_image;
  Range run;  // tile columns whose tensor columns are consecutive: those without padding
};

constexpr int64_t kBlock = 32;     // a block of 32 x 32 floats stays in the first-level cache on both sides
constexpr int64_t kGrain = 32768;  // elements below which another thread does not pay

// Moves a row of c x w elements. On each side, the dimension that is dense there (channel or column) is the
// inner loop.
template <TileMove kMove, typename Outer, typename Inner>
inline void assign(Outer* tensor, Inner* tile) {
  if constexpr (kMove == TileMove::kLoad) {
    *tile = static_cast<Inner>(*tensor);
  } else {
    *tensor = static_cast<Outer>(*tile);
  }
}

template <TileMove kMove, typename Outer, typename Inner>
void move_block(Outer* tensor, Inner* tile, int64_t channels, int64_t columns, int64_t tensor_c,
                int64_t tensor_w, int64_t tile_c, int64_t tile_w) {
  if (tensor_c == 1 && tile_c == 1) {
    for (int64_t w = 0; w < columns; ++w) {
      Outer* a = tensor + w * tensor_w;
      Inner* b = tile + w * tile_w;
      for (int64_t c = 0; c < channels; ++c) assign<kMove>(a + c, b + c);
    }
  } else if (tensor_w == 1 && tile_w == 1) {
    for (int64_t c = 0; c < channels; ++c) {
      Outer* a = tensor + c * tensor_c;
      Inner* b = tile + c * tile_c;
      for (int64_t w = 0; w < columns; ++w) assign<kMove>(a + w, b + w);
    }
  } else {
    for (int64_t w0 = 0; w0 < columns; w0 += kBlock) {
      const int64_t w1 = std::min(columns, w0 + kBlock);
      for (int64_t c0 = 0; c0 < channels; c0 += kBlock) {
        const int64_t c1 = std::min(channels, c0 + kBlock);
        for (int64_t c = c0; c < c1; ++c) {
          Outer* a = tensor + c * tensor_c;
          Inner* b = tile + c * tile_c;
          for (int64_t w = w0; w < w1; ++w) assign<kMove>(a + w * tensor_w, b + w * tile_w);
        }
      }
    }
  }
}

// Rows [begin, end) of the tile's (n, d, h) rows.
template <TileMove kMove, typename Outer, typename Inner>
void move_rows(const Move& m, Outer* tensor, Inner* tile, int64_t begin, int64_t end) {
  const int64_t tensor_w = m.tensor_stride[2];
  const int64_t tile_w = m.tile_stride[2];
  auto zero = [&](Inner* row, int64_t w0, int64_t w1) {
    for (int64_t w = w0; w < w1; ++w) {
      for (int64_t c = 0; c < m.c; ++c) row[w * tile_w + c * m.tile_c] = Inner(0);
    }
  };
  for (int64_t row = begin; row < end; ++row) {
    const int64_t h = row % m.size[1];
    const int64_t d = row / m.size[1] % m.size[0];
    const int64_t n = row / m.size[1] / m.size[0];
    Inner* to = tile + n * m.tile_n + d * m.tile_stride[0] + h * m.tile_stride[1];
    const int64_t tensor_d = m.index[0][d];
    const int64_t tensor_h = m.index[1][h];
    if (tensor_d < 0 || tensor_h < 0) {
      if constexpr (kMove == TileMove::kLoad) zero(to, 0, m.size[2]);
      continue;
    }
    Outer* from = tensor + (m.first_image + n) * m.tensor_n + tensor_d * m.tensor_stride[0] +
                  tensor_h * m.tensor_stride[1];
    auto edge = [&](int64_t w0, int64_t w1) {
      for (int64_t w = w0; w < w1; ++w) {
        if (m.index[2][w] >= 0) {
          move_block<kMove>(from + m.index[2][w] * tensor_w, to + w * tile_w, m.c, 1, m.tensor_c, tensor_w,
                            m.tile_c, tile_w);
        } else if constexpr (kMove == TileMove::kLoad) {
          zero(to, w, w + 1);
        }
      }
    };
    edge(0, m.run.begin);
    if (!m.run.empty()) {
      move_block<kMove>(from + m.index[2][m.run.begin] * tensor_w, to + m.run.begin * tile_w, m.c,
                        m.run.size(), m.tensor_c, tensor_w, m.tile_c, tile_w);
    }
    edge(std::max(m.run.begin, m.run.end), m.size[2]);
  }
}

template <TileMove kMove, typename Outer, typename Inner>
void move_all(const Move& m, Outer* tensor, Inner* tile) {
  const int64_t rows = m.n * m.size[0] * m.size[1];
  const int64_t row_elements = std::max<int64_t>(1, m.c * m.size[2]);
  at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / row_elements),
                   [&](int64_t begin, int64_t end) { move_rows<kMove>(m, tensor, tile, begin, end); });
}

}  // namespace

void move_tile(TileMove move, const Tensor& tensor, const Region& region, PaddingMode mode,
               const Tensor& tile) {
  const int64_t spatial = static_cast<int64_t>(region.ranges.size());
  Move m;
  m.n = region.batch.size();
  m.c = tensor.size(1);
  m.first_image = region.batch.begin;
  m.tensor_n = tensor.stride(0);
  m.tensor_c = tensor.stride(1);
  m.tile_n = tile.stride(0);
  m.tile_c = tile.stride(1);
  for (const auto d : irange<int64_t>(3)) {
    const int64_t spatial_d = d - (3 - spatial);  // two dimensions: h and w, after a depth of one
    if (spatial_d < 0) {
      m.size[d] = 1;
      m.index[d] = {0};
      m.tensor_stride[d] = m.tile_stride[d] = 0;
      continue;
    }
    m.size[d] = region.ranges[spatial_d].size();
    m.index[d] = source_indices(mode, region.ranges[spatial_d], tensor.size(2 + spatial_d));
    m.tensor_stride[d] = tensor.stride(2 + spatial_d);
    m.tile_stride[d] = tile.stride(2 + spatial_d);
  }
  const Range columns = region.ranges.back();
  const Range inside = intersect(columns, {0, tensor.size(-1)});
  if (!inside.empty()) m.run = {inside.begin - columns.begin, inside.end - columns.begin};

  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "move_tile", [&] {
    auto run = [&](auto* data) {
      auto* base = const_cast<scalar_t*>(tensor.const_data_ptr<scalar_t>());
      switch (move) {
        case TileMove::kLoad:
          return move_all<TileMove::kLoad>(m, base, data);
        case TileMove::kStore:
          return move_all<TileMove::kStore>(m, base, data);
      }
    };
    if (tile.scalar_type() == tensor.scalar_type()) {
      run(const_cast<scalar_t*>(tile.const_data_ptr<scalar_t>()));
    } else {
      TORCH_INTERNAL_ASSERT(tile.scalar_type() == at::kFloat);
      run(const_cast<float*>(tile.const_data_ptr<float>()));
    }
  });
}

}  // namespace patchconv
