// Where backend "auto" takes the project's own convolution kernels on a GPU: a table of rules an
// architecture, made from measurements (bench/tune.py). Without a table for the architecture, and where no
// rule matches, the convolution goes to cuDNN in row strips, which is sound everywhere.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace patchconv {

// One pass of a convolution, in the terms of the ordinary one: the forward pass of a transposed convolution
// is asked for as "dgrad", its input gradient as "fprop".
struct ConvQuery {
  std::string_view pass;       // "fprop", "dgrad" or "wgrad"
  std::string_view dtype;      // "float32", "tf32" (float32 where TF32 is allowed), "float16" or "bfloat16"
  bool channels_last = false;  // of the tensor that is read with a halo
  int64_t groups = 1;
  int64_t sources = 0;  // channels a group of the convolution's input
  int64_t outputs = 0;  // and of its output
  int64_t taps = 1;     // of the kernel, all dimensions together
  int64_t stride = 1;   // the largest of all dimensions
  int64_t places = 0;   // of the output, all images together
};

// Both ends belong to it; -1: no end.
struct ConvRange {
  int64_t least = -1;
  int64_t most = -1;
  bool holds(int64_t value) const { return (least < 0 || value >= least) && (most < 0 || value <= most); }
};

// What a query must be for the rule to decide it. What is left out matches everything.
struct ConvRule {
  std::string pass;
  std::string dtype;
  std::optional<bool> channels_last;
  ConvRange groups, sources, outputs, taps, stride, places;
  bool native = false;  // what the rule decides: the project's kernel, or cuDNN

  bool matches(const ConvQuery& query) const;
};

// `arch` is 90 for sm_90. The first rule that matches decides.
bool prefers_own_kernel(int arch, const ConvQuery& query);
bool has_conv_rules(int arch);

// Replaces an architecture's table; std::nullopt takes it away. A table without rules is one too: measured,
// and nothing to be taken. std::invalid_argument names a rule that means nothing. Calls on other threads see
// the table of before or of after, and never wait: tables that were replaced stay in memory.
void set_conv_rules(int arch, std::optional<std::vector<ConvRule>> rules);

}  // namespace patchconv
