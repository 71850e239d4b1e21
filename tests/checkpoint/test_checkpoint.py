"""checkpoint: the numbers of the model without one, and running statistics that move once, whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.counts import Hooked
from support.errors import raises
from torch import Tensor, nn
from torch.utils import checkpoint as stock
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import patchconv_native as pc

lf = pc.functional


def torchs(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return stock.checkpoint(fn, *args, use_reentrant=False, **kwargs)


def nested(model: nn.Sequential, x: Tensor) -> Tensor:
    return pc.checkpoint(lambda z: model[3:](pc.checkpoint(model[:3], z)), x)


# How a model can be run with checkpoints.
WAYS: dict[str, Callable[[nn.Sequential, Tensor], Tensor]] = {
    "whole": lambda model, x: pc.checkpoint(model, x),
    "nested": nested,
    "inner nested in whole": lambda model, x: pc.checkpoint(nested, model, x),
    "sequential": lambda model, x: pc.checkpoint_sequential(model, 3, x),
    "each": lambda model, x: pc.checkpoint_modules(model, lambda name, module: name != "")(x),
    "forward of each": lambda model, x: pc.checkpoint_sequential([m.forward for m in model], len(model), x),
    "no early stop": lambda model, x: pc.checkpoint(model, x, early_stop=False),
    "closure": lambda model, x: pc.CheckpointFunction.apply(model, 1, x, *model.parameters()),
}
NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(4),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "lean BatchNorm": lambda: pc.convert(nn.BatchNorm2d(4)),
    "lean cumulative": lambda: pc.convert(nn.BatchNorm2d(4, momentum=None)),
    "lean InstanceNorm": lambda: pc.convert(nn.InstanceNorm2d(4, track_running_stats=True)),
}


def network(norm: str = "BatchNorm", dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), NORMS[norm](), nn.Tanh(), nn.Conv2d(4, 4, 3), NORMS[norm](), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 1)).to(dtype)


def image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 3, 9, 9, dtype=dtype, generator=torch.Generator().manual_seed(1), requires_grad=True)


def everything(model: nn.Module, run: Callable[[Any, Tensor], Tensor], steps: int = 2) -> list[Tensor]:
    """Output, gradients and buffers after some steps."""
    torch.manual_seed(5)
    found: list[Tensor] = []
    for _ in range(steps):
        x = image(next(model.parameters()).dtype)
        model.zero_grad()
        y = run(model, x)
        y.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found += [y.detach(), x.grad, *(g.clone() for g in gradients), *(b.clone() for b in model.buffers())]
    return found


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def alike(body: Callable[[Any], list[Tensor]]) -> list[Tensor]:
    """body(run) gives the same bits where run calls a function and where it is a checkpoint."""
    expected = body(plainly)
    assert equal(body(pc.checkpoint), expected)
    return expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("way", WAYS)
def test_values_gradients_and_statistics_are_those_without_a_checkpoint(way, norm, dtype):
    expected = everything(network(norm, dtype), plainly)
    assert equal(everything(network(norm, dtype), WAYS[way]), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_torchs_own_checkpoint_moves_statistics_twice(norm):
    """What the test above would notice."""
    expected = everything(network(norm), plainly)
    found = everything(network(norm), lambda model, x: torchs(model, x))
    assert not equal(found, expected)
    model = network(norm)
    torchs(model, image()).sum().backward()
    assert int(model[1].num_batches_tracked) == (0 if "Instance" in norm else 2)


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("kind", ["BatchNorm", "InstanceNorm"])
def test_norms_of_other_dimensions(kind, dims):
    def model() -> nn.Module:
        torch.manual_seed(0)
        norm = getattr(nn, f"{kind}{dims}d")(3, affine=True, track_running_stats=True)
        return nn.Sequential(norm, nn.Tanh()).double()

    def body(run: Any) -> list[Tensor]:
        net, x = model(), torch.ones(2, 3, *[4] * dims, dtype=torch.float64).cumsum(-1)
        run(net, x).square().sum().backward()
        return [net[0].weight.grad, *net.buffers()]

    assert int(alike(body)[-1]) == (kind == "BatchNorm")


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_passes_without_backward_move_statistics_once(no_grad):
    """Neither never (a flag taken from the grad mode) nor twice."""
    for run in (plainly, *WAYS.values()):
        model, plain = network("cumulative"), network("cumulative")
        with no_grad():
            run(model, image())
            plain(image())
        run(model, image())  # a graph that no backward pass is made of
        plain(image())
        assert equal(list(model.buffers()), list(plain.buffers())) and int(model[1].num_batches_tracked) == 2


def test_eval_mode():
    models = [network().eval() for _ in range(2)]
    found = [everything(m, run) for m, run in zip(models, (WAYS["whole"], plainly), strict=True)]
    assert equal(*found)
    before = list(network().buffers())
    assert equal(list(models[0].buffers()), before)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("lean", [False, True])
def test_an_exception_in_the_recomputation(lean):
    model, plain = network(), network()
    if lean:
        pc.convert(model)
    calls = []

    def fn(x: Tensor) -> Tensor:
        y = model[:2](x)
        calls.append(1)
        if len(calls) == 2:
            raise Stopped
        return model[2:](y)

    y = pc.checkpoint(fn, image())
    with pytest.raises(Stopped):
        y.sum().backward()
    plain(image())
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))
    # And nothing of it is left in force.
    torch.testing.assert_close(everything(model, WAYS["whole"]), everything(plain, plainly))


def test_an_exception_in_the_forward_pass():
    model = network()
    with pytest.raises(RuntimeError, match="channels"):
        pc.checkpoint(model, torch.ones(1, 1, 9, 9, dtype=torch.float64))
    assert equal(everything(model, WAYS["whole"]), everything(network(), plainly))


def test_early_stop_in_the_middle_of_a_norm():
    """What the norm's own code saves last is the end of the recomputation."""

    class Norm(nn.BatchNorm2d):
        ends = 0

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            Norm.ends += 1
            return y

    norm, plain = Norm(3).double(), nn.BatchNorm2d(3).double()
    pc.checkpoint(norm, image()).square().sum().backward()
    assert Norm.ends == 1, "the second run was not stopped inside"
    plain(image())
    assert equal(list(norm.buffers()), list(plain.buffers()))


def test_backward_twice_and_backward_inside():
    model, plain = network(), network()
    y = pc.checkpoint(model, image())
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    plain(image())
    assert equal(list(model.buffers()), list(plain.buffers()))

    def fn(net: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        y = net(x)
        return torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0], y

    def body(run: Any) -> list[Tensor]:
        model, x = network(), image()
        inside, y = run(fn, model, x) if run is plainly else run(fn, model, x, early_stop=False)
        y.sum().backward()
        return [inside, x.grad, *model.buffers()]

    alike(body)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "F.batch_norm": lambda x, m, v: F.batch_norm(x, m, v, training=True),
    "F.batch_norm by name": lambda x, m, v: F.batch_norm(input=x, running_mean=m, running_var=v, training=True),
    "torch.batch_norm": lambda x, m, v: torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    "torch.native_batch_norm": lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[0],
    "F.instance_norm": lambda x, m, v: F.instance_norm(x, m, v),
    "torch.instance_norm": lambda x, m, v: torch.instance_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    "aten.batch_norm": lambda x, m, v: torch.ops.aten.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, False),
    "aten.native_batch_norm.default": lambda x, m, v: torch.ops.aten.native_batch_norm.default(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "aten._native_batch_norm_legit": lambda x, m, v: torch.ops.aten._native_batch_norm_legit(
        x, None, None, m, v, True, 0.1, 1e-5
    )[0],
    "lean batch_norm": lambda x, m, v: lf.batch_norm(x, m, v, training=True),
    "lean batch_norm_relu": lambda x, m, v: lf.batch_norm_relu(x, m, v, training=True),
    "lean instance_norm": lambda x, m, v: lf.instance_norm(x, m, v),
    "patchconv.batch_norm": lambda x, m, v: torch.ops.patchconv.batch_norm(x, None, None, m, v, True, 0.1, 1e-5),
    "under lean()": pc.lean()(lambda x, m, v: F.batch_norm(x, m, v, training=True)),
    "by hand": lambda x, m, v: F.batch_norm(x * 2, None, None, training=True) + F.batch_norm(x, m, v, training=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functional_norms(name):
    def body(run: Any) -> list[Tensor]:
        x, mean, var = image(), torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        y = run(lambda x: FUNCTIONS[name](x.tanh(), mean, var).sin(), x)
        y.square().sum().backward()
        return [y, x.grad, mean, var]

    assert not torch.equal(body(torchs)[2], alike(body)[2]), "torch's checkpoint moves them twice"


@pytest.mark.parametrize("rebinds", [False, True])
def test_statistics_of_other_modules(rebinds):
    """Whatever a module does with buffers of these names, by functions or in place."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("num_batches_tracked", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            mean = x.detach().mean((0, 2, 3))
            self.num_batches_tracked += 1
            if rebinds:
                self.running_mean = 0.9 * self.running_mean + 0.1 * mean
            else:
                self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
            return (x - mean[:, None, None]).tanh().sin()

    own = Own()
    y = pc.checkpoint(own, image())
    before = own.running_mean, own.num_batches_tracked
    y.sum().backward()
    assert own.num_batches_tracked is before[1] and own.running_mean is before[0], "the buffers stay the same tensors"
    expected = image().detach().mean((0, 2, 3)) * 0.1
    assert int(own.num_batches_tracked) == 1
    torch.testing.assert_close(own.running_mean, expected)


def test_two_threads_recompute_one_module():
    """And a third trains it meanwhile: its forward passes move the statistics."""
    model = network("cumulative")
    barrier = threading.Barrier(3)
    errors: list[BaseException] = []
    inside = threading.local()

    def fn(x: Tensor) -> Tensor:
        y = model[:2](x)
        if getattr(inside, "again", False):
            barrier.wait(30)  # both are in the middle of a recomputation ...
            barrier.wait(30)  # ... until the third has run
        return model[2:](y)

    def work() -> None:
        try:
            y = pc.checkpoint(fn, image())
            inside.again = True
            y.sum().backward()
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    barrier.wait(30)
    model(image())
    barrier.wait(30)
    for thread in threads:
        thread.join()
    assert not errors and [int(m.num_batches_tracked) for m in (model[1], model[4])] == [3, 3]
    assert not torch.nn.modules.module._global_forward_pre_hooks and not torch.nn.modules.module._global_forward_hooks


def test_torchscript():
    plain, model = network("cumulative"), torch.jit.script(network("cumulative"))
    with torch.jit.optimized_execution(False):
        found = everything(model, lambda m, x: pc.checkpoint(lambda z: m(z.sin()), x, early_stop=False))
    torch.testing.assert_close(found, everything(plain, lambda m, x: m(x.sin())))
    assert [int(b) for b in model.buffers() if b.dim() == 0] == [2, 2]


def test_statistics_written_back_count_as_no_change():
    """A norm in eval mode saves its running statistics, and backward checks that they are what they were."""
    norm = torch.jit.script(nn.BatchNorm2d(3).double().eval())
    x = image()
    y = pc.checkpoint(norm, x.tanh(), early_stop=False)
    z = norm(x)
    y.sum().backward()
    z.sum().backward()


def test_saved_by_policy():
    """A selective policy counts operators: ours must not be among them."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = (torch.ops.aten.convolution.default, torch.ops.aten.clone.default)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    calls: list[bool] = []

    def context_fn() -> Any:
        calls.append(True)
        return create_selective_checkpoint_contexts(policy)

    found = everything(network(), lambda m, x: pc.checkpoint(m, x, context_fn=context_fn))
    assert equal(found, everything(network(), plainly)) and len(calls) == 2


@pytest.mark.parametrize("convert", [False, True])
def test_save_on_cpu(convert):
    def run(model: nn.Sequential, x: Tensor) -> Tensor:
        if convert:
            pc.convert(model)
        with torch.autograd.graph.save_on_cpu():
            return pc.checkpoint(model[3:], model[:3](x))

    torch.testing.assert_close(everything(network(), run), everything(network(), plainly))


def test_arguments_and_results_of_every_kind():
    def fn(pair: tuple[Tensor, Tensor], text: str, *, scale: Tensor, name: str = "") -> dict[str, Any]:
        a, b = pair
        return {"sum": (a * b).sin() * scale, "text": text + name, "list": [a.exp(), None, 3]}

    def body(run: Any) -> list[Tensor]:
        a, b, scale = image(), image(), image()
        out = run(fn, (a, b), "x", scale=scale, name="y")
        assert out["text"] == "xy" and out["list"][1:] == [None, 3]
        (out["sum"].sum() + out["list"][0].sum()).backward()
        return [a.grad, b.grad, scale.grad]

    alike(body)
    assert pc.checkpoint(lambda: 7) == 7


def test_debug():
    """Torch refuses to trace operators where contexts are given; none of ours are."""
    found = everything(network(), lambda model, x: pc.checkpoint(model, x, debug=True), 1)
    assert equal(found, everything(network(), plainly, 1))


def test_double_backward():
    def body(run: Any) -> list[Tensor]:
        model, x = network(), image()
        (grad,) = torch.autograd.grad(run(model, x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        return [grad, x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]

    assert len(alike(body)) > 8


class Around(nn.Module):
    def __init__(self, call: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.call = network(), call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("way", ["whole", "sequential", "each", "forward of each", "no early stop", "lean"])
def test_functional_call(way: str, train: bool):
    """The second run has the parameters and buffers that functional_call had put in, and has taken out by then."""

    def found(call: Callable[[nn.Sequential, Tensor], Tensor]) -> list[Tensor]:
        model, x = Around(call).train(train), image()
        own = [t.clone() for t in model.state_dict().values()]
        given = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        buffers = {name: b + 1 for name, b in model.named_buffers()}
        y = torch.func.functional_call(model, (given, buffers), x)
        y.square().sum().backward()
        assert equal(own, [*model.state_dict().values()]) and all(p.grad is None for p in model.parameters())
        return [y.detach(), x.grad, *(p.grad for p in given.values()), *buffers.values()]

    ways = WAYS | {"lean": pc.lean()(pc.checkpoint)}
    assert equal(found(ways[way]), found(pc.lean()(plainly) if way == "lean" else plainly))


def test_less_is_kept():
    """A checkpoint keeps the input alone."""
    with Hooked() as hooked:
        pc.checkpoint(network(), x := image())
    assert sum(t.nbytes for t in hooked.packed) <= x.nbytes


def test_data_parallel():
    model = nn.DataParallel(network(), device_ids=[])
    plain = network()
    expected = everything(plain, plainly)
    assert equal(everything(model, lambda m, x: pc.checkpoint(m, x)), expected)
    assert equal(everything(nn.DataParallel(pc.checkpoint_modules(network(), ("1", "4"))), plainly), expected)


def test_errors():
    model, x = network(), image()
    sequential, apply = pc.checkpoint_sequential, pc.CheckpointFunction.apply
    few = r"^checkpoint_sequential: expected segments to be between 1 and 7 \(functions\), got "
    raises(ValueError, {
        "^checkpoint: expected use_reentrant to be False .* got True$":
            lambda: pc.checkpoint(model, x, use_reentrant=True),
        "^checkpoint_sequential: expected use_reentrant to be False .* got": lambda: sequential(model, 2, x, True),
        "determinism_check": lambda: pc.checkpoint(model, x, determinism_check="strict"),
        **{few + str(n): lambda n=n: sequential(model, n, x) for n in (0, -1, 8)},
        **{f"^CheckpointFunction.apply: expected n to be between 0 and 2 .* got {n}$":
           lambda n=n: apply(torch.sin, n, x, x) for n in (-1, 3)},
    })  # fmt: skip
    raises(TypeError, {
        "^checkpoint: expected fn to be callable, got int$": lambda: pc.checkpoint(3, x),
        "^checkpoint_sequential: expected segments to be an int, got str$": lambda: sequential(model, "2", x),
        "^checkpoint_sequential: expected functions to be an nn.Sequential or a list":
            lambda: sequential(nn.ReLU(), 1, x),
        r"^checkpoint_sequential: expected functions\[1\] to be callable, got int$":
            lambda: sequential([torch.sin, 3], 1, x),
        "^checkpoint_sequential: expected options among .* got preserve$":
            lambda: sequential(model, 2, x, preserve=True),
        **{f"^CheckpointFunction.apply: expected n to be an int .* got {n}$":
           lambda n=n: apply(torch.sin, n, x, x) for n in (1.0, True, None)},
    })  # fmt: skip
    assert pc.checkpoint(torch.sin, x, use_reentrant=False).requires_grad


def test_sequential_checkpoints_all_segments_but_the_last():
    runs: list[int] = []

    def layer(i: int) -> Callable[[Tensor], Tensor]:
        return lambda x: runs.append(i) or x.sin().cos()

    for segments, again in ((1, []), (2, [0, 1]), (3, [0, 1])):
        runs.clear()
        functions = [layer(i) for i in range(5 if segments < 3 else 3)]
        pc.checkpoint_sequential(functions, segments, image(), preserve_rng_state=False).sum().backward()
        assert sorted(runs[len(functions) :]) == again


def test_checkpoint_function_does_not_need_the_parameters():
    weight = image()
    for more in ((), (weight,)):
        x, weight.grad = image(), None
        y, z = pc.CheckpointFunction.apply(lambda x: (x * weight, x.sin()), 1, x, *more)
        (y + z).sum().backward()
        assert torch.equal(weight.grad, x) and torch.equal(x.grad, weight + x.cos())
    assert pc.CheckpointFunction.apply(lambda: [1, 2], 0, weight) == [1, 2]
