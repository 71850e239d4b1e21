"""The ways to compute a convolution with bias and ReLU that bench.conv_gpu times beside ours, and both gradients.

All of them start from the same tensors in the same layout and make a new result. One that is not installed raises
Absent. One that cannot compute a case raises its own error, and that error is its result.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import patchconv_native as pc

from . import cases, measure
from .conv_cases import AUTO, DTYPES, NATIVE, ConvJob

Call = Callable[[], Any]
STOCK, CUDNN, FRONT_END, PATCH_CONV, CUTLASS = (
    "stock", "cudnn_convolution_relu", "cudnn front end", "patch_conv", "CUTLASS",
)  # fmt: skip
OURS = {NATIVE: "native", AUTO: "auto"}


class Absent(RuntimeError):
    """Why an implementation is not there."""


def fused(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.patchconv.conv2d_fused(
        x, weight, bias, [job.stride] * 2, [job.padding] * 2, [1, 1], job.groups, relu=True
    )


def under(backend: str, call: Call, device: str) -> Call:
    def run() -> Any:
        with cases.backend(backend, device):
            return call()

    return run


def stock(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, job.stride, job.padding, 1, job.groups).relu_()


def _cudnn(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    """cuDNN's convolution with bias and ReLU in one call, as torch ships it."""
    if not x.is_cuda:
        raise Absent("no CUDA device")
    call = torch.ops.aten.cudnn_convolution_relu
    return lambda: call(x, weight, bias, [job.stride] * 2, [job.padding] * 2, [1, 1], job.groups)


def _front_end(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    """The same as a graph of cuDNN's Python front end, of which cuDNN's heuristics choose the plan."""
    if importlib.util.find_spec("cudnn") is None:
        raise Absent("not installed")
    if not x.is_cuda:
        raise Absent("no CUDA device")
    import cudnn

    half = job.dtype == "bfloat16"
    kind = cudnn.data_type.BFLOAT16 if half else cudnn.data_type.FLOAT
    # TF32 is what cuDNN computes float32 in here, unless NVIDIA_TF32_OVERRIDE=0 forbids it.
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT,
                          compute_data_type=cudnn.data_type.FLOAT, handle=handle)  # fmt: skip
    wide_bias = bias.view(1, -1, 1, 1)

    def tensor(name: str, of: Tensor) -> Any:
        return graph.tensor(name=name, dim=list(of.shape), stride=list(of.stride()), data_type=kind)

    image, kernel, shift = tensor("x", x), tensor("w", weight), tensor("b", wide_bias)
    y = torch.empty(job.output_size, dtype=x.dtype, device=x.device,
                    memory_format=format_of(x))  # fmt: skip
    pads, strides = [job.padding] * 2, [job.stride] * 2
    sums = graph.conv_fprop(image=image, weight=kernel, padding=pads, stride=strides, dilation=[1, 1])
    out = graph.relu(input=graph.bias(name="bias", input=sums, bias=shift))
    out.set_output(True).set_data_type(kind).set_dim(list(y.shape)).set_stride(list(y.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    room = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=x.device)

    def run() -> Tensor:
        result = torch.empty_like(y)
        graph.execute({image: x, kernel: weight, shift: wide_bias, out: result}, room, handle=handle)
        return result

    return run


def format_of(x: Tensor) -> torch.memory_format:
    """channels_last only where it is not NCHW as well."""
    last = torch.channels_last
    return last if x.is_contiguous(memory_format=last) and not x.is_contiguous() else torch.contiguous_format


def _module(job: ConvJob, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    conv = nn.Conv2d(job.channels, job.outputs, job.kernel, job.stride, job.padding, groups=job.groups)
    conv.weight, conv.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    return conv


def _patch_conv(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    """It splits inputs of 2^30 elements and more, and makes the stock call for others."""
    if measure.installed("patch_conv") is None:
        raise Absent("not installed")
    import patch_conv

    module = patch_conv.convert_model(_module(job, weight, bias), splits=4)  # 4 is its default

    def run() -> Tensor:
        with torch.no_grad():
            return module(x).relu_()

    return run


def _cutlass(job: ConvJob, x: Tensor, weight: Tensor, bias: Tensor) -> Call:
    if importlib.util.find_spec("cutlass_cppgen") is None:
        raise Absent("not installed")
    raise Absent("installed, not timed: its Python interface adds no bias per channel")


RIVALS: dict[str, Callable[[ConvJob, Tensor, Tensor, Tensor], Call]] = {
    STOCK: lambda job, x, weight, bias: lambda: stock(job, x, weight, bias),
    CUDNN: _cudnn,
    FRONT_END: _front_end,
    PATCH_CONV: _patch_conv,
    CUTLASS: _cutlass,
}


def forward_calls(job: ConvJob, tensors: tuple[Tensor, Tensor, Tensor], device: str) -> dict[str, Callable[[], Call]]:
    """Ways by name; each is made when it is asked for, and may then raise what keeps it from running."""
    assert all(tensor.dtype == DTYPES[job.dtype] for tensor in tensors)
    ours: dict[str, Callable[[], Call]] = {
        side: partial(under, backend, lambda: fused(job, *tensors), device) for side, backend in OURS.items()
    }
    return ours | {name: partial(make, job, *tensors) for name, make in RIVALS.items()}


def gradient_calls(
    job: ConvJob, pass_: str, tensors: tuple[Tensor, Tensor, Tensor], grad: Tensor, device: str
) -> dict[str, Callable[[], Call]]:
    """Of the convolution alone, by autograd from a forward pass in which only this gradient was asked for."""
    x, weight, _ = tensors

    def made(backend: str, convolve: Callable[..., Tensor]) -> Call:
        leaf = (x if pass_ == "dgrad" else weight).detach().requires_grad_()
        pair = (leaf, weight) if pass_ == "dgrad" else (x, leaf)

        def edge() -> Any:
            y = convolve(*pair, None, job.stride, job.padding, 1, job.groups)
            return torch.autograd.graph.get_gradient_edge(y)

        node = under(backend, edge, device)()
        return under(backend, lambda: torch.autograd.grad([node], [leaf], [grad], retain_graph=True), device)

    ours: dict[str, Callable[[], Call]] = {
        side: partial(made, backend, pc.functional.conv2d) for side, backend in OURS.items()
    }
    return ours | {STOCK: partial(made, "auto", F.conv2d)}
