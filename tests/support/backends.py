"""What the tests of backends share, on every device: the operators that have kernels of the project's own, what a call
launches, values made again in backward, and a training step whose tensors stay where they are, as a CUDA graph wants.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import patchconv_native as pc

lf = pc.functional
SERVED = ("auto", "aten") + (("native",) if pc.build_info()["cuda"] else ())
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


class Leaves:
    """Arguments of an operator. Parameters and statistics are float32, as mixed precision has them; but group norm's
    have the input's type, since stock's kernel on CUDA takes no other.
    """

    def __init__(self, device: str, dtype: torch.dtype = torch.float32, layout: str = "NCHW") -> None:
        torch.manual_seed(41)
        ramp = torch.linspace(-2, 2, 13, device=device)  # not noise alone

        def image() -> Tensor:
            x = (torch.randn(3, 8, 11, 13, device=device) + ramp).to(dtype)
            return x.contiguous(memory_format=FORMATS[layout]).requires_grad_()

        self.x, self.other, self.grad = image(), image(), image().detach()
        self.weight = (torch.rand(8, device=device) + 0.5).requires_grad_()
        self.bias = torch.randn(8, device=device).requires_grad_()
        weights = (t.detach().to(dtype, copy=True).requires_grad_() for t in (self.weight, self.bias))
        self.group_weight, self.group_bias = weights
        self.mean, self.var = torch.randn(8, device=device), torch.rand(8, device=device) + 0.5

    def gradient(self, y: Tensor) -> Tensor:
        """Of an output."""
        return self.grad if y.shape == self.grad.shape else torch.ones_like(y)


# ----------------------------------------------------------------------------------------------------------------------
# Which code runs

OWN = re.compile(r"patchconv(::|\d+)kernels")  # the namespace, as written or as mangled


@dataclass(frozen=True)
class Operator:
    """One of pc.functional's on CUDA under backend "native". Each pair is of forward and backward."""

    call: Callable[[Leaves], Tensor]
    pieces: tuple[str, str]  # this package's operators that it is made of, on every device
    kernels: tuple[str, str]  # the project's kernels; "": none
    beside: tuple[str, str] = ("", "")  # a pattern of what of stock's may run too
    wanted: tuple[str, ...] = ("x",)

    def forward(self, leaves: Leaves) -> Tensor:
        if "weight" not in self.wanted:
            leaves.weight.requires_grad_(False)
        return self.call(leaves)

    def backward(self, y: Tensor, leaves: Leaves, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, [getattr(leaves, name) for name in self.wanted], grad)


def _training(a: Leaves) -> tuple[Tensor, ...]:
    return a.x, a.mean.clone(), a.var.clone(), a.weight, a.bias, True


def _constants(a: Leaves) -> tuple[Tensor, ...]:
    return a.x, a.mean, a.var, a.weight, a.bias


_MASK = {"pieces": ("_mask_forward", "_mask_backward"), "kernels": ("mask_forward_kernel", "mask_backward_kernel")}
_ALL = ("x", "weight", "bias")
_SUMS = "norm_sums_ finish_sums_kernel norm_gradient_"
# A frozen norm scales its gradient by stock's product, with numbers a channel that stock makes too.
_SCALED = r"^(?!.*(batch_norm|threshold|clamp)).*elementwise"
_BATCH = {"wanted": _ALL, "kernels": ("moments_ finish_moments_kernel norm_map_", _SUMS),
          "pieces": ("_batch_statistics _normalize", "_norm_backward")}  # fmt: skip
# Parameters in half precision are turned to float32 and their gradients back, by stock's copies.
_CAST = r"^(?!.*(GroupNorm|group_norm|silu|sigmoid)).*elementwise"
_GROUP = {
    "wanted": ("x", "group_weight", "group_bias"),
    "pieces": ("_group_norm", "_norm_backward"),
    "kernels": (_BATCH["kernels"][0], f"{_SUMS} parameter_sums_kernel group_sums_kernel"),
    "beside": (_CAST, _CAST),
}
_EVAL = {"wanted": _ALL, "pieces": ("_normalize", "_norm_backward"), "kernels": ("norm_map_", _SUMS)}

OPERATORS: dict[str, Operator] = {
    "relu": Operator(lambda a: lf.relu(a.x), **_MASK),
    "relu_": Operator(lambda a: lf.relu(a.x * 1, inplace=True), ("_mask_forward_", "_mask_backward"),
                      _MASK["kernels"], ("MulFunctor", "MulFunctor")),
    "leaky_relu": Operator(lambda a: lf.leaky_relu(a.x, 0.1), **_MASK),
    "relu6": Operator(lambda a: lf.relu6(a.x), **_MASK),
    "hardtanh": Operator(lambda a: lf.hardtanh(a.x, -0.5, 0.75), **_MASK),
    "threshold": Operator(lambda a: lf.threshold(a.x, 0.125, 2.0), **_MASK),
    "hardsigmoid": Operator(lambda a: lf.hardsigmoid(a.x), **_MASK),
    "add_relu": Operator(lambda a: lf.add_relu(a.x, a.other), ("_add_mask_forward", "_mask_backward"),
                         _MASK["kernels"], wanted=("x", "other")),
    "dropout": Operator(lambda a: lf.dropout(a.x, 0.3), ("_dropout", "_dropout"), ("dropout_kernel",) * 2,
                        (r"distribution|random", "")),  # of the seed
    "max_pool2d": Operator(lambda a: lf.max_pool2d(a.x, 3, 2, 1), ("_max_pool", "_max_pool_backward"),
                           ("max_pool_kernel", "max_pool_backward_kernel")),
    "adaptive_max_pool2d": Operator(lambda a: lf.adaptive_max_pool2d(a.x, (4, 5)),
                                    ("_max_pool", "_max_pool_backward"),
                                    ("max_pool_kernel", "max_pool_backward_kernel")),
    "batch_norm": Operator(lambda a: lf.batch_norm(*_training(a)), **_BATCH),
    "batch_norm_relu": Operator(lambda a: lf.batch_norm_relu(*_training(a)), **_BATCH),
    "batch_norm eval": Operator(lambda a: lf.batch_norm(*_constants(a)), **_EVAL),
    "batch_norm_relu eval": Operator(lambda a: lf.batch_norm_relu(*_constants(a)), **_EVAL),
    "batch_norm eval frozen": Operator(lambda a: lf.batch_norm(*_constants(a)), ("_normalize", ""),
                                       ("norm_map_", ""), ("", _SCALED)),
    "batch_norm_relu eval frozen": Operator(lambda a: lf.batch_norm_relu(*_constants(a)),
                                            ("_normalize_masked", "_mask_backward"),
                                            ("norm_scales_kernel norm_mask_kernel", "mask_backward_kernel"),
                                            ("", _SCALED)),
    "group_norm": Operator(lambda a: lf.group_norm(a.x, 4, a.group_weight, a.group_bias), **_GROUP),
    "group_norm_silu": Operator(lambda a: lf.group_norm_silu(a.x, 4, a.group_weight, a.group_bias), **_GROUP),
}  # fmt: skip


def ran(call: Callable[[], object], device: str) -> list[str]:
    """The names of the kernels that a call launched; on the CPU, of the operators that it called."""
    cuda = device == "cuda"
    activities = [getattr(torch.profiler.ProfilerActivity, "CUDA" if cuda else "CPU")]
    with torch.profiler.profile(activities=activities) as profile:
        result = call()
        if cuda:
            torch.cuda.synchronize()
    del result
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    return [event.name for event in profile.events() if event.device_type == kind]


def not_ours(names: Sequence[str], kernels: str, beside: str = "") -> list[str]:
    """What is wrong with the kernels that ran: those that should have and did not, and others than the project's."""
    own = [name for name in names if OWN.search(name)]
    missing = [f"{part} did not run" for part in kernels.split() if not any(part in name for name in own)]
    others = [name for name in names if not OWN.search(name) and not name.startswith(("Memcpy", "Memset"))]
    return missing + [name for name in others if not (beside and re.search(beside, name))]


# ----------------------------------------------------------------------------------------------------------------------
# Values made again


def _norm(a: Leaves) -> Tensor:
    return lf.batch_norm(*_training(a))


def _behind_norms(operator: Operator) -> Callable[[Leaves], Tensor]:
    """Of what can be made again itself: some operators keep nothing of their inputs."""

    def call(a: Leaves) -> Tensor:
        inner = copy.copy(a)
        inner.x, inner.other = _norm(a), lf.group_norm(a.other, 2, a.group_weight, a.group_bias)
        return operator.forward(inner)

    return call


REBUILT: dict[str, Callable[[Leaves], Tensor]] = {
    **{name: _behind_norms(operator) for name, operator in OPERATORS.items() if name != "relu_"},
    "batch_norm relu_": lambda a: lf.relu(_norm(a), inplace=True),
    "batch_norm relu dropout": lambda a: lf.dropout(lf.relu(_norm(a)), 0.3),
    "batch_norm_relu dropout2d": lambda a: lf.dropout2d(lf.batch_norm_relu(*_training(a)), 0.4),
    "batch_norm relu6 max_pool": lambda a: lf.max_pool2d(lf.relu6(_norm(a)), 3, 1, 1),
    "group_norm_silu dropout": lambda a: lf.dropout(lf.group_norm_silu(a.x, 2, a.group_weight, a.group_bias), 0.3),
    "instance_norm leaky_relu": lambda a: lf.leaky_relu(lf.instance_norm(a.x, weight=a.weight, bias=a.bias)),
    "cat": lambda a: lf.cat([lf.batch_norm_relu(*_training(a)), lf.silu(a.other)], 1),
}


def made_again(name: str, leaves: Leaves, made: str, later: str) -> tuple[Tensor, Tensor]:
    """A value, and that value as backward makes it again under backend `later`: as the gradient of a factor of ones."""
    with pc.backend(made):
        middle = REBUILT[name](leaves)
        original = middle.detach().clone()
    factor = torch.ones_like(middle, requires_grad=True)
    with pc.backend(later):
        product = lf.mul(middle, factor)
        reference = StorageWeakRef(middle.untyped_storage())
        del middle
        lf.relu(factor * 1)  # whatever was held for the next call is let go
        assert reference.expired(), "the value was kept, and not made again"
        (again,) = torch.autograd.grad(product, factor, torch.ones_like(product))
    return original, again


# ----------------------------------------------------------------------------------------------------------------------
# A training step


class Small(nn.Module):
    """A ResNet in little: a stem with a max pool, a residual block, dropout, a classifier."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.relu, self.pool, self.dropout = nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Dropout(p)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norms[0](self.stem(x))))
        y = self.relu(self.norms[1](self.convs[0](x)))
        x = F.relu(x + self.norms[2](self.convs[1](y)))
        return self.classifier(self.dropout(x).mean((2, 3)))


class Step:
    """Forward, backward and SGD of a small network, on a batch that stays where it is."""

    def __init__(self, device: str, p: float = 0.0, lr: float = 0.1, convert: bool = True) -> None:
        torch.manual_seed(43)
        model = Small(p).to(device).train()
        self.model = pc.convert(model) if convert else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr, momentum=0.9)
        self.x = torch.zeros(4, 3, 18, 22, device=device)
        self.target = torch.zeros(4, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)

    def load(self, number: int) -> None:
        """Batch `number`."""
        generator = torch.Generator().manual_seed(number)
        self.x.copy_(torch.randn(self.x.shape, generator=generator))
        self.target.copy_(torch.randint(5, (4,), generator=generator))

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.target)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()  # whoever held the graph would hold nodes that belong to this step's stream

    def state(self) -> dict[str, Tensor]:
        """Parameters, buffers, gradients and loss, as they are now."""
        found = {"loss": self.loss, **self.model.state_dict()}
        found |= {f"gradient of {name}": p.grad for name, p in self.model.named_parameters()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def differences(got: dict[str, Tensor], want: dict[str, Tensor], eps: float = 1e-4) -> list[str]:
    """What is not the same to `eps` of its largest number."""
    assert got.keys() == want.keys()
    return [name for name, tensor in got.items()
            if not float((tensor - want[name]).abs().max()) <= eps * float(want[name].abs().max() + 1e-3)]  # fmt: skip


WARM = 3  # steps before a graph is captured


def replayed(step: Step, replay: Callable[[], object], numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """The states after each of these batches, which `replay` steps through after the first WARM."""
    states = []
    for number in numbers:
        step.load(number)
        replay()
        states.append(step.state())
    return states


def captured(call: Callable[[], Any], warm: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, and what that gives, after what PyTorch wants to have run before, on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result
