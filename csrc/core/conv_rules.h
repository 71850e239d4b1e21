// Where backend "auto" uses this project's convolution kernels on a GPU: one table of rules per architecture,
// made from measurements (bench/tune.py). Without a table for the architecture, and where no rule matches,
// the convolution goes to cuDNN in row strips, which always works.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace patchconv {

// One pass of a convolution, named as in an ordinary convolution: the forward pass of a transposed
// convolution is "dgrad", its input gradient "fprop".
struct ConvQuery {
  std::string_view pass;       // "fprop", "dgrad" or "wgrad"
  std::string_view dtype;      // "float32", "tf32" (float32 where TF32 is allowed), "float16" or "bfloat16"
  bool channels_last = false;  // of the tensor that is read with a halo
  int64_t groups = 1;
  int64_t sources = 0;  // channels per group of the convolution's input
  int64_t outputs = 0;  // channels per group of its output
  int64_t taps = 1;     // of the kernel, over all dimensions
  int64_t stride = 1;   // the largest over all dimensions
  int64_t places = 0;   // positions of the output, over all images
};

// A closed range; -1 means no limit.
struct ConvRange {
  int64_t least = -1;
  int64_t most = -1;
  bool holds(int64_t value) const { return (least < 0 || value >= least) && (most < 0 || value <= most); }
};

// The conditions on a query. A field that is left out matches everything.
struct ConvRule {
  std::string pass;
  std::string dtype;
  std::optional<bool> channels_last;
  ConvRange groups, sources, outputs, taps, stride, places;
  bool native = false;  // the decision: this project's kernel, or cuDNN

  bool matches(const ConvQuery& query) const;
};

// `arch` is 90 for sm_90. The first rule that matches decides.
bool prefers_native_kernel(int arch, const ConvQuery& query);
bool has_conv_rules(int arch);

// Replaces an architecture's table; std::nullopt removes it. A table may be empty: measured, and none of this
// project's kernels is to be used. Throws std::invalid_argument that names a rule which is not valid. Calls
// on other threads never wait: they see the old table or the new one, and old tables stay in memory.
void set_conv_rules(int arch, std::optional<std::vector<ConvRule>> rules);

}  // namespace patchconv
