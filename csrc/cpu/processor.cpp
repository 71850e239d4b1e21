#include "cpu/processor.h"

#include <ATen/Version.h>
#include <ATen/core/dispatch/Dispatcher.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

bool has_amx() {
#if defined(__x86_64__)
  constexpr unsigned kTiles = 1u << 24;  // of EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  static const bool has = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kTiles) != 0;
  return has;
#else
  return false;
#endif
}

bool has_avx512() {
  static const bool has = at::get_cpu_capability() == "AVX512";
  return has;
}

}  // namespace patchconv
