#include "cuda/kernel_call.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <string>

namespace patchconv {

kernels::Type kernel_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::Type::kFloat;
    case at::kHalf:
      return kernels::Type::kHalf;
    case at::kBFloat16:
      return kernels::Type::kBFloat16;
    case at::kDouble:
      return kernels::Type::kDouble;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for ", tensor.scalar_type());
  }
}

kernels::Stream current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

DeviceLimits device_limits() {
  constexpr int kDevices = 64;
  if (c10::cuda::device_count() == 0) return {};
  static std::array<DeviceLimits, kDevices> limits;
  static std::array<std::once_flag, kDevices> asked;
  const int device = c10::cuda::current_device();
  TORCH_CHECK(device < kDevices, "patchconv_native: expected at most ", kDevices, " GPUs, got number ",
              device);
  std::call_once(asked[device], [device] {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      kernels::check(static_cast<int>(cudaDeviceGetAttribute(&value, which, device)));
      return value;
    };
    limits[device] = {
        attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin), attribute(cudaDevAttrMultiProcessorCount),
        attribute(cudaDevAttrComputeCapabilityMajor) * 10 + attribute(cudaDevAttrComputeCapabilityMinor)};
  });
  return limits[device];
}

namespace kernels {

void check(int error) {
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // cleared, so that the next launch does not report it again
  throw LaunchError(std::string("patchconv_native, CUDA: ") + cudaGetErrorString(code));
}

}  // namespace kernels

}  // namespace patchconv
