// What a device contributes to convolutions that are computed tile by tile: the form of a tile, what stock
// operators cost, kernels of this project. The loop over tiles is in tiled/passes.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"
#include "core/settings.h"

namespace patchconv {

// The form in which a device wants the tiles of a pass, and what they cost.
struct TileStyle {
  at::ScalarType dtype = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
  TileCost cost;
  int64_t max_padding = std::numeric_limits<int64_t>::max();  // wider zero padding is copied into the tile

  at::Tensor apply(const at::Tensor& tensor) const;  // in this dtype and format
};

// A rectangle of a grid: images [batch.begin, batch.end) and one range per spatial dimension. Ranges of the
// big grid may reach into its padding.
struct Region {
  Range batch;
  std::vector<Range> ranges;

  std::vector<int64_t> sizes(int64_t channels) const;
  at::Tensor view(const at::Tensor& tensor) const;  // of a region that lies inside
};

// What is applied to the sums of a pass before they are written: relu(sums * scale + bias + residual), each
// part optional.
struct Epilogue {
  std::optional<at::Tensor> bias;      // (channels)
  std::optional<at::Tensor> scale;     // (channels), float32
  std::optional<at::Tensor> residual;  // of the result's shape
  bool relu = false;
  at::Tensor bits;  // written, if defined: which elements ReLU passes (core/mask.h)
};

// One of this project's kernels on a device. It computes a pass, or a piece of it, in one go.
struct NativeKernel {
  const char* name = nullptr;  // null: stock operators are used
  int64_t workspace = 0;       // transient bytes, at most

  explicit operator bool() const { return name != nullptr; }
};

// What a device contributes to the loop. The base class uses stock operators, on any device.
class ConvEngine {
 public:
  virtual ~ConvEngine() = default;

  // Transient bytes of a single stock call for the whole problem. If they are at most `enough`, the answer
  // may be any number from there up to `enough`: it then does not matter. `format` is that of the problem's
  // tensors.
  virtual int64_t stock_bytes(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                              at::MemoryFormat format, int64_t enough) const = 0;
  virtual TileStyle tile_style(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype) const = 0;

  // A loop over [0, count) on this many threads. Operators that are called within it run on one thread.
  virtual void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& range) const;

  // Whether a stock call is known to fail on this problem.
  virtual bool stock_fails(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                           at::MemoryFormat format) const;

  // Whether tiles are known to be much faster than a stock call that fits.
  virtual bool stock_is_slow(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype) const;

  // Copies a region of `source`, with its padding, into a new tile.
  virtual at::Tensor load(const at::Tensor& source, const Region& region, PaddingMode mode,
                          const TileStyle& style) const;
  // Writes a tile over a region that lies inside `target`.
  virtual void store(const at::Tensor& tile, const Region& region, const at::Tensor& target) const;
  // Computes a tile of the small grid straight into a view of the result; false where this is not possible.
  virtual bool convolve_into(const at::Tensor& tile, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const ConvProblem& problem,
                             at::IntArrayRef padding, const at::Tensor& target) const;
  virtual at::Tensor convolve(const at::Tensor& tile, const at::Tensor& weight,
                              const std::optional<at::Tensor>& bias, const ConvProblem& problem,
                              at::IntArrayRef padding) const;
  // Adds the weight gradient of a pair of tiles to `sum`.
  virtual void correlate(const at::Tensor& big, const at::Tensor& small, const ConvProblem& problem,
                         at::IntArrayRef padding, const at::Tensor& sum) const;
  // Whether a transposed convolution of stride 1 is better computed as a convolution.
  virtual bool prefers_convolution() const;

  // The kernel of this project to use for the pass, if any; `format` is that of the tensor that is written.
  virtual NativeKernel native_kernel(const ConvProblem& problem, ConvPass pass, at::ScalarType dtype,
                                     at::MemoryFormat format) const;
  // Whether native_grid() can write the bits of an epilogue to a grid of this form.
  virtual bool native_bits(const ConvProblem& problem, ConvPass pass, const at::Tensor& target) const;
  // Writes the grid that `pass` computes. `bits`, if defined, are in the memory order of the source: elements
  // whose bit is 0 count as zero. The grid is cut if the problem asks for it, without changing a bit of the
  // result.
  virtual void native_grid(const ConvProblem& problem, ConvPass pass, const at::Tensor& source,
                           const at::Tensor& bits, const at::Tensor& weight, const Epilogue& epilogue,
                           const at::Tensor& target) const;
  // The weight's gradient; `bits` belong to the gradient of the operator's output.
  virtual at::Tensor native_weight(const ConvProblem& problem, const at::Tensor& big, const at::Tensor& small,
                                   const at::Tensor& bits) const;
  // The bias's gradient (C) from the output's gradient, of which elements count whose bit is 1.
  virtual at::Tensor native_bias(const at::Tensor& grad, const at::Tensor& bits) const;
};

// Engines by device type ("cpu", "cuda"); null for a device this build does not serve. Each registers itself.
const ConvEngine* find_engine(const std::string& device);
struct RegisterEngine {
  RegisterEngine(const char* device, const ConvEngine& engine);
};

// What a plan needs to know about the tensors of a pass.
struct TensorFacts {
  at::ScalarType dtype;
  at::MemoryFormat format;   // of the result
  int64_t copied_bytes = 0;  // of the dense copies that a stock call would make
  bool exact_bytes = false;  // estimate the bytes of a stock call even if they are few
};

// The plan that a pass over this problem would follow.
TilePlan plan_conv(const ConvEngine& engine, const ConvProblem& problem, ConvPass pass,
                   const TensorFacts& facts);

// Stock computes a weight gradient only if it is given a weight, whose values it does not read.
at::Tensor weight_stand_in(const ConvProblem& problem, const at::Tensor& like);

}  // namespace patchconv
