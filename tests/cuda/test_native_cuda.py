"""The project's own kernels on a GPU: they run where they should, on the current stream, and again in backward; a step
of training can be captured in a CUDA graph. What can be asked without a GPU is in test_backends.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.backends import OPERATORS, WARM, Leaves, Step, captured, differences, not_ours, ran, replayed
from torch import Tensor

import patchconv_native as pc

lf = pc.functional
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not pc.build_info()["cuda"], reason="this build has no CUDA kernels"),
]
KINDS = pytest.mark.parametrize(
    ("dtype", "layout"),
    [(torch.float32, "NCHW"), (torch.float16, "NCHW"), (torch.bfloat16, "channels_last")],
    ids=lambda kind: str(kind).removeprefix("torch."),
)
GRAPHS = pytest.mark.parametrize("backend", ["auto", "native"])


@pytest.fixture(autouse=True)
def the_same_convolutions_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that eager steps and replays differ by nothing else."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@KINDS
@pytest.mark.parametrize("name", OPERATORS)
def test_cuda_kernels_that_run_are_the_projects(name, layout, dtype):
    operator = OPERATORS[name]
    with pc.backend("native"):
        leaves = Leaves("cuda", dtype, layout)
        operator.backward(first := operator.forward(leaves), leaves, leaves.gradient(first))  # whatever is set up once
        leaves = Leaves("cuda", dtype, layout)
        y: list[Tensor] = []
        forward = ran(lambda: y.append(operator.forward(leaves)), "cuda")
        grad = leaves.gradient(y[0])
        backward = ran(lambda: operator.backward(y[0], leaves, grad), "cuda")
    assert forward and backward, "the profiler saw no kernels: can it read the GPU's counters here?"
    for names, kernels, beside in zip((forward, backward), operator.kernels, operator.beside, strict=True):
        assert not_ours(names, kernels, beside) == []


@pytest.mark.parametrize("backend", ["auto", "aten"])
@pytest.mark.parametrize("name", OPERATORS)
def test_cuda_kernels_of_the_project_run_where_they_are_asked_for_only(name, backend):
    operator, leaves = OPERATORS[name], Leaves("cuda")

    def call() -> None:
        y = operator.forward(leaves)
        operator.backward(y, leaves, leaves.gradient(y))

    with pc.backend(backend):
        names = ran(call, "cuda")
    assert names and not [name for name in names if "patchconv" in name]


def outcome(name: str, leaves: Leaves) -> list[Tensor]:
    torch.manual_seed(5)  # for dropout
    y = OPERATORS[name].forward(leaves)
    return [y.detach(), *OPERATORS[name].backward(y, leaves, leaves.gradient(y))]


@pytest.mark.parametrize("name", OPERATORS)
def test_cuda_kernels_run_on_the_current_stream(name):
    """Behind a long wait on it, after which alone their arguments are there."""
    with pc.backend("native"):
        want = outcome(name, Leaves("cuda"))
        leaves, given = Leaves("cuda"), Leaves("cuda")
        with torch.no_grad():
            for tensor in vars(leaves).values():
                tensor.zero_()
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            with torch.no_grad():
                for name_of, tensor in vars(leaves).items():
                    tensor.copy_(getattr(given, name_of))
            got = outcome(name, leaves)
        side.synchronize()
    assert any(one.count_nonzero() for one in want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_cuda_kernels_make_again_what_they_made():
    """Also when the backend is another one by then."""
    leaves = Leaves("cuda")
    with pc.backend("native"):
        middle = lf.batch_norm_relu(leaves.x, None, None, leaves.weight, leaves.bias, True)
        factor = torch.ones_like(middle, requires_grad=True)
        product = lf.mul(middle, factor)
    del middle
    grad = torch.ones_like(product)
    with pc.backend("aten"):
        names = ran(lambda: torch.autograd.grad(product, factor, grad, retain_graph=True), "cuda")
        assert not_ours(names, "norm_map_", "MulFunctor") == []
        names = ran(lambda: torch.autograd.grad(product, (leaves.x, leaves.weight), grad), "cuda")
        assert not_ours(names, "norm_sums_ finish_sums_kernel norm_gradient_", "MulFunctor") == []


# ----------------------------------------------------------------------------------------------------------------------
# CUDA graphs


def graph_of(step: Step) -> torch.cuda.CUDAGraph:
    return captured(step, lambda: replayed(step, step, range(WARM)))[0]


@GRAPHS
def test_cuda_graph_of_a_step(backend):
    """Replays on other batches are the steps that eager code makes of them."""
    eager, step = Step("cuda"), Step("cuda")
    with pc.backend(backend):
        want = replayed(eager, eager, range(WARM + 4))[WARM:]
        graph = graph_of(step)
    got = replayed(step, graph.replay, range(WARM, WARM + 4))
    assert [differences(one, other) for one, other in zip(got, want, strict=True)] == [[]] * 4
    moved = differences(got[3], got[2])
    assert set(moved) >= {name for name in got[0] if "running" in name or "weight" in name or "loss" in name}


@GRAPHS
def test_cuda_graph_of_a_step_with_dropout(backend):
    """With a learning rate of 0 nothing but the masks can move the loss."""
    with pc.backend(backend):
        step = Step("cuda", p=0.5, lr=0.0)
        graph = graph_of(step)
    states = replayed(step, graph.replay, [7] * 4)
    assert all(bool(state["loss"].isfinite()) for state in states)
    assert len({float(state["loss"]) for state in states}) == 4


@GRAPHS
def test_cuda_graph_of_dropout(backend):
    """Each replay draws another mask, backward uses that one, and the mean stays."""
    p, count = 0.25, 1 << 18
    x = torch.ones(count, device="cuda", requires_grad=True)
    ones = torch.ones_like(x)

    def call() -> tuple[Tensor, Tensor]:
        y = lf.dropout(x, p)
        return y.detach(), torch.autograd.grad(y, x, ones)[0]

    with pc.backend(backend):
        graph, (y, back) = captured(call, lambda: [call() for _ in range(WARM)])
    masks = []
    for _ in range(6):
        graph.replay()
        assert torch.equal(y, back)
        masks.append(y != 0)
        torch.testing.assert_close(y, masks[-1] / (1 - p))
    deviation = (p * (1 - p) / count) ** 0.5
    for mask in masks:
        assert abs(float(mask.double().mean()) - (1 - p)) <= 6 * deviation
    for one, other in itertools.combinations(masks, 2):  # of independent masks these agree
        alike = float((one == other).double().mean())
        assert abs(alike - (p**2 + (1 - p) ** 2)) <= 6 * (0.25 / count) ** 0.5
