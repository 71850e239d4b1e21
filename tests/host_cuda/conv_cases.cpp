// The convolution kernels by name. tests/support/conv_kernels.py writes their cases.
//
// Numbers: the pass (0: small grid from the big one, 1: big from small, 2: weight), padding mode, images,
// groups, channels per group of the big and of the small grid, strict, relu, workspace limit; then for each
// of three dimensions big, small, kernel, stride, dilation, padding before and after, begin and end of the
// range that is written; then strides: big (image, channel, 3 places), small, weight (small channel, big
// channel, 3 taps). Buffers: big, small, weight, bits of what is read (of the small grid for the weight),
// scale, bias, residual, bits written.
#include <vector>

#include "case.h"
#include "cuda/kernels/conv.h"
#include "executor.h"

namespace host_cuda {

using namespace patchconv;
using namespace patchconv::kernels;

namespace {

constexpr int kMultiprocessors = 4;
enum Buffers { kBig, kSmall, kWeight, kBitsRead, kScale, kBias, kResidual, kBitsWritten };

struct Problem {
  explicit Problem(const Case& c) : c(c) {
    for (size_t d = 0; d < 3; ++d) {
      const auto number = [&](size_t i) { return c.integer(9 + 9 * d + i); };
      dims[d] = {number(0), number(1), number(2), number(3), number(4), number(5), number(6)};
      ranges[d] = {number(7), number(8)};
    }
  }

  const Case& c;
  ConvDim dims[3];
  Range ranges[3];

  int pass() const { return static_cast<int>(c.integer(0)); }
  PaddingMode mode() const { return static_cast<PaddingMode>(c.integer(1)); }
  int groups() const { return static_cast<int>(c.integer(3)); }
  int big_channels() const { return static_cast<int>(c.integer(4)); }
  int small_channels() const { return static_cast<int>(c.integer(5)); }
  bool strict() const { return c.integer(6) != 0; }

  ConvTensor tensor(size_t buffer) const {
    const auto stride = [&](size_t i) { return c.integer(36 + 5 * buffer + i); };
    return {c.buffer(buffer), stride(0), stride(1), {stride(2), stride(3), stride(4)}};
  }
  ConvWeight weight(bool to_big) const {
    const auto stride = [&](size_t i) { return c.integer(46 + i); };
    return {c.buffer(kWeight),
            stride(0) * small_channels(),
            to_big ? stride(1) : stride(0),
            to_big ? stride(0) : stride(1),
            {stride(2), stride(3), stride(4)}};
  }

  // Everything but the lines of sums.
  ConvCall call() const {
    const bool to_big = pass() == 1, products = pass() == 2;
    ConvCall call;
    call.mode = to_big ? PaddingMode::kZeros : mode();
    call.images = c.integer(2);
    call.groups = groups();
    call.sources = to_big ? small_channels() : big_channels();
    call.outputs = to_big ? big_channels() : small_channels();
    call.source = tensor(to_big ? kSmall : kBig);
    call.target = tensor(to_big ? kBig : kSmall);
    (products ? call.target : call.source).bits = c.buffer<const uint8_t>(kBitsRead);
    call.weight = weight(to_big);
    if (products) {
      for (int d = 0; d < 3; ++d) call.lines[d] = small_line(dims[d]);
    } else {
      call.epilogue = {c.buffer(kScale), c.buffer(kBias), c.buffer(kResidual), c.integer(7) != 0,
                       c.buffer<uint8_t>(kBitsWritten)};
    }
    return call;
  }

  // Calls use(whole lines, call) for every combination of lines, cut to the ranges.
  template <typename Use>
  void each_line(Use use) const {
    std::vector<ConvLine> lines[3];
    for (int d = 0; d < 3; ++d) {
      if (pass() == 1) {
        lines[d] = big_lines(dims[d]);
      } else {
        lines[d] = {small_line(dims[d])};
      }
    }
    ConvCall call = this->call();
    for (const ConvLine& z : lines[0]) {
      for (const ConvLine& y : lines[1]) {
        for (const ConvLine& x : lines[2]) {
          const ConvLine whole[3] = {z, y, x};
          for (int d = 0; d < 3; ++d) call.lines[d] = whole[d].cut(ranges[d]);
          use(whole, call);
        }
      }
    }
  }
};

void check_served(bool served) {
  if (!served) throw LaunchError("not served");
}

void plain(const Case& c) {
  const Problem problem(c);
  if (problem.pass() == 2) return launch_conv_plain_weight(c.type, problem.call(), nullptr);
  if (problem.pass() == 1 && problem.mode() != PaddingMode::kZeros) {
    return launch_conv_plain_gather(c.type, problem.dims, problem.mode(), problem.call(), nullptr);
  }
  problem.each_line([&](const auto&, const ConvCall& call) { launch_conv_plain(c.type, call, nullptr); });
}

void tiles(const Case& c) {
  const Problem problem(c);
  std::vector<char> packed;
  problem.each_line([&](const auto& whole, ConvCall call) {
    const ConvTilePlan plan = plan_conv_tiles(c.type, problem.strict(), whole, call.outputs, shared_limit());
    check_served(plan.buffers > 0);
    check_served(call.epilogue.bits == nullptr || conv_writes_bits(call, /*depthwise=*/false));
    if (!conv_reads_weight(c.type, problem.strict(), call)) {
      const std::array<int64_t, 3> kernel{problem.dims[0].kernel, problem.dims[1].kernel,
                                          problem.dims[2].kernel};
      const int64_t bytes = conv_packed_elements(c.type, call, kernel) * (c.type == Type::kFloat ? 4 : 2);
      packed.assign(static_cast<size_t>(bytes), 0x7f);
      call.weight = launch_conv_pack(c.type, problem.strict(), call, kernel, packed.data(), nullptr);
    }
    launch_conv_tiles(c.type, problem.strict(), plan, call, nullptr);
  });
}

void depthwise(const Case& c) {
  const Problem problem(c);
  if (problem.pass() == 2) {
    const ConvCall call = problem.call();
    const int64_t floats = conv_depthwise_weight_workspace(c.type, call, c.integer(8));
    check_served(floats >= 0);
    const Floats workspace(floats, c);
    return launch_conv_depthwise_weight(c.type, call, c.integer(8), workspace.data, nullptr);
  }
  problem.each_line([&](const auto&, const ConvCall& call) {
    check_served(conv_depthwise_serves(c.type, call, shared_limit()));
    check_served(call.epilogue.bits == nullptr || conv_writes_bits(call, /*depthwise=*/true));
    launch_conv_depthwise(c.type, call, nullptr);
  });
}

void stem(const Case& c) {
  const Problem problem(c);
  problem.each_line([&](const auto&, const ConvCall& call) {
    check_served(conv_stem_serves(c.type, call, shared_limit()));
    const int64_t elements = conv_stem_packed_elements(c.type, call);
    check_served(call.epilogue.bits == nullptr || conv_writes_bits(call, /*depthwise=*/false));
    const Floats packed(c.type == Type::kFloat ? elements : elements / 2, c);
    launch_conv_stem(c.type, problem.strict(), call, packed.data, nullptr);
  });
}

// Writes nothing if no plan serves the case. Bits of the big grid come in the buffer to which other kernels
// write theirs.
void weight(const Case& c) {
  const Problem problem(c);
  ConvCall call = problem.call();
  call.source.bits = c.buffer<const uint8_t>(kBitsWritten);
  const ConvWeightPlan plan =
      plan_conv_weight(c.type, problem.strict(), call, kMultiprocessors, c.integer(8));
  if (plan.parts == 0) return;
  const Floats workspace(plan.workspace, c);
  launch_conv_weight(c.type, problem.strict(), plan, call, workspace.data, nullptr);
}

// Sums over the small grid, written to the bias.
void channel_sums(const Case& c) {
  const Problem problem(c);
  const ConvCall products = problem.call();
  ConvChannelSums call;
  call.images = products.images;
  for (int d = 0; d < 3; ++d) call.sizes[d] = products.lines[d].count;
  call.channels = products.groups * products.outputs;
  call.source = products.target;
  call.target = c.buffer(kBias);
  const Floats workspace(conv_channel_sums_workspace(c.type, call), c);
  launch_conv_channel_sums(c.type, call, workspace.data, nullptr);
}

}  // namespace

const std::map<std::string, std::function<void(const Case&)>>& conv_kernels() {
  static const std::map<std::string, std::function<void(const Case&)>> kernels{
      {"conv_depthwise", depthwise}, {"conv_plain", plain},   {"conv_tiles", tiles},
      {"conv_stem", stem},           {"conv_weight", weight}, {"conv_channel_sums", channel_sums},
  };
  return kernels;
}

}  // namespace host_cuda
