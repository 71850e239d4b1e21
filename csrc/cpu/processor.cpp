#include "cpu/processor.h"

#include <ATen/Version.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace patchconv {

namespace {

bool ask(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  return op.has_value() && op->typed<bool()>().call();
}

}  // namespace

bool multiplies_half(c10::ScalarType dtype) {
  static const bool bfloat16 = ask("mkldnn::_is_mkldnn_bf16_supported");
  static const bool float16 = ask("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == c10::kBFloat16 ? bfloat16 : float16;
}

bool has_avx512() {
  static const bool has = at::get_cpu_capability() == "AVX512";
  return has;
}

}  // namespace patchconv
