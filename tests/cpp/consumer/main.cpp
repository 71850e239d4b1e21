// A C++ program without Python: loads a TorchScript module that calls torch.ops.patchconv.*, runs it forward
// and backward, and compares with what Python computed and stored in the module: `input`, `output`,
// `grad_input` and, as `grad_<parameter>`, the gradients of output.square().sum(). Then calls the operator
// through <patchconv/ops.h>.
//
//   consumer MODULE.pt
#include <patchconv/ops.h>
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <string>

namespace {

int failures = 0;

void compare(const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  const bool same =
      got.defined() && got.sizes() == expected.sizes() && at::allclose(got, expected, 1e-4, 1e-5);
  const double error = got.defined() && got.sizes() == expected.sizes() && got.numel() > 0
                           ? (got - expected).abs().max().item<double>()
                           : -1;
  std::printf("%-16s %s, largest difference %.3g\n", what.c_str(), same ? "as in Python" : "DIFFERS", error);
  failures += !same;
}

int run(const char* path) {
  torch::jit::Module module = torch::jit::load(path);
  at::Tensor input = module.attr("input").toTensor().clone().requires_grad_();
  const at::Tensor output = module.forward({input}).toTensor();
  output.square().sum().backward();

  compare("output", output, module.attr("output").toTensor());
  compare("grad_input", input.grad(), module.attr("grad_input").toTensor());
  for (const auto& parameter : module.named_parameters()) {
    compare("grad_" + parameter.name, parameter.value.grad(),
            module.attr("grad_" + parameter.name).toTensor());
  }

  // The same through the typed entry point. The module's convolution is padded by one on every side.
  at::NoGradGuard no_grad;
  const at::Tensor weight = module.attr("weight").toTensor();
  const at::Tensor bias = module.attr("bias").toTensor();
  compare("patchconv::conv2d", patchconv::conv2d(input, weight, bias, {1, 1}, {1, 1}), output);
  try {
    patchconv::conv2d(input, weight.select(0, 0), bias);
    std::printf("a weight of three dimensions was taken\n");
    ++failures;
  } catch (const c10::Error& error) {
    std::printf("refused as it should: %s\n", error.what_without_backtrace());
  }
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s MODULE.pt\n", argv[0]);
    return 2;
  }
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
