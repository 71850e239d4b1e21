"""Modules with a forward of their own, converted: whatever they are written like, they do what they did."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.modules import Made
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import patchconv_native as pc

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
NUMBER = torch.tensor(0.3)


def net(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Made(lambda _, x: function(x))


class OwnNames(nn.Module):
    """Attributes that a kind of forward could have, too."""

    def __init__(self) -> None:
        super().__init__()
        self._rank, self._inner = nn.Parameter(torch.full((8,), 2.0)), nn.Linear(8, 8)
        self._names, self._budget, self._chunks, self._dim = 3, 9, 5, 7

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self._inner(x) + self._rank) * self._names + self._budget * self._chunks * self._dim


@pytest.mark.parametrize(
    "change",
    [
        pc.convert, pc.tile_modules, lambda m: pc.checkpoint_modules(m, ""), lambda m: pc.microbatch_modules(m, "", 2),
    ],
)  # fmt: skip
def test_attributes_of_any_name_are_the_modules_own(change: Any) -> None:
    torch.manual_seed(0)
    model = OwnNames()
    expected = model(X)
    torch.testing.assert_close(change(model)(X), expected)
    assert "_rank" in dict(model.named_parameters())


class Closed(nn.Module):
    """Takes no attributes after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.closed = nn.Linear(8, 8), True

    def __setattr__(self, name: str, value: Any) -> None:
        if vars(self).get("closed"):
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.inner(x))


def test_a_module_that_takes_no_attributes() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), Closed())
    expected = model(X)
    torch.testing.assert_close(pc.convert(model)(X), expected)
    assert "1" in pc.convert_report(model).converted
    assert type(pc.revert(model)[1]) is Closed


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class ByClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super(self.__class__, self).forward(x)


class ByType(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super(type(self), self).forward(x)


class Once(type):
    """Allows one class of a name."""

    known: ClassVar[set[str]] = set()

    def __new__(mcs, name: str, bases: Any, body: Any) -> Any:
        if name in mcs.known:
            raise ValueError(f"{name} exists")
        mcs.known.add(name)
        return super().__new__(mcs, name, bases, body)


class Only(nn.Module, metaclass=Once):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(ByClass, "super() look at"), (ByType, "super() look at"), (Only, "derived from its own (Only exists)")],
)
def test_classes_that_cannot_be_derived_from_are_left_alone(cls: type[nn.Module], reason: str) -> None:
    model = pc.convert(nn.Sequential(nn.Conv2d(4, 4, 1), cls()))
    assert type(model[1]) is cls and type(model[0]) is pc.Conv2d and model(X).shape == X.shape
    assert reason in pc.convert_report(model).left["1"]


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor, *, scale: float = 2.0) -> Tensor:
        return F.relu(x) * scale


def test_a_static_forward() -> None:
    assert torch.equal(pc.convert(Static())(X, scale=3.0), F.relu(X) * 3.0)


def test_classes_end_with_their_last_module() -> None:
    def made() -> weakref.ref[type]:
        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return F.relu(x)

        pc.revert(pc.convert(Local()))(X)
        return weakref.ref(Local)

    reference = made()
    gc.collect()
    assert reference() is None


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda x: F.leaky_relu(x, NUMBER),
    "elu": lambda x: F.elu(x, NUMBER),
    "celu": lambda x: F.celu(x, NUMBER),
    "hardtanh": lambda x: F.hardtanh(x, -NUMBER, NUMBER),
    "threshold": lambda x: F.threshold(x, NUMBER, NUMBER),
    "softplus": lambda x: F.softplus(x, NUMBER),
    "softshrink": lambda x: F.softshrink(x, NUMBER),
    "hardshrink": lambda x: F.hardshrink(x, NUMBER),
    "add": lambda x: torch.add(x, x, alpha=NUMBER),
    "avg_pool2d": lambda x: F.avg_pool2d(x, torch.tensor(2)),
    "max_pool2d": lambda x: F.max_pool2d(x, torch.tensor(2)),
    "linear": lambda x: F.linear(x[0, 0], torch.ones(5, 8), torch.ones(8, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_are_tensors(name: str) -> None:
    outcomes = []
    for change in (lambda m: m, pc.convert):
        x = X.clone().requires_grad_()
        try:
            y = change(net(CALLS[name]))(x)
            outcomes.append([y, *torch.autograd.grad(y.square().sum(), x)])
        except RuntimeError as error:
            outcomes.append([type(error)])
    stock, ours = outcomes
    assert stock == ours if isinstance(stock[0], type) else torch.equal(stock[0], ours[0]), (stock, ours)
    torch.testing.assert_close(ours[1:], stock[1:])


SIZES: dict[str, Callable[[Tensor], Tensor]] = {
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, x.shape[3] // 2)),
    "average": lambda x: F.avg_pool2d(x, x.size()[2:]),
    "one number": lambda x: F.avg_pool2d(x, x.size(2)),
    "max": lambda x: F.max_pool2d(x, (x.shape[2], x.shape[3])),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "sum": lambda x: torch.add(x, x, alpha=x.shape[2]),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*")
def test_sizes_stay_symbols_in_traces(name: str) -> None:
    model, wide = pc.convert(net(SIZES[name])), torch.randn(2, 4, 12, 12 if name != "norm" else 8)
    traced = torch.jit.trace(model, (X.clone().requires_grad_(),))
    assert "patchconv::" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(wide), torch.jit.trace(net(SIZES[name]), (X,))(wide))
    found = make_fx(model, tracing_mode="symbolic")(X.clone().requires_grad_())
    torch.testing.assert_close(found(X), SIZES[name](X))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients_torch_takes_its_fast_ways(without: Any) -> None:
    model, x = Encoder().eval(), torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 3 + [True] * 2] * 2)
    with without():
        expected = model(x, padding)
        assert not expected[:, 3:].any()
        assert torch.equal(pc.convert(model)(x, padding), expected)


def test_convolutions_need_less_without_gradients_too() -> None:
    weight = torch.randn(8, 4, 3, 3, dtype=torch.float64)

    class Direct(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, weight)

    with torch.no_grad(), pc.workspace_limit(2**16), pc.record_paths() as paths:
        pc.convert(Direct()).eval()(torch.randn(1, 4, 128, 128, dtype=torch.float64))
    assert [path["path"] for path in paths] == ["tiled"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_eval_mode_under_a_checkpoint(reentrant: bool) -> None:
    """Its first run, without gradients, drops the same elements as the second."""
    model = pc.convert(net(lambda x: F.dropout(x * 1.0, 0.5, training=True))).eval()
    x = X.clone().requires_grad_()
    y = checkpoint(model, x, use_reentrant=reentrant)
    (gradient,) = torch.autograd.grad(y.sum(), x) if not reentrant else (y.sum().backward(), x.grad)[1:]
    torch.testing.assert_close(gradient, torch.where(y == 0, 0.0, 2.0))


def test_memory_that_was_freed_is_not_read() -> None:
    """FSDP frees parameters between the passes."""
    weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward() -> Tensor:
        return net(lambda x: F.silu(x * x + weight))(X.clone().requires_grad_()).sum()

    with pc.lean():
        y = forward()
    kept = weight.data.clone()
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"got memory that was freed .* in patchconv_native.recompute\(False\)"):
        y.backward()
    weight.untyped_storage().resize_(kept.nbytes)
    weight.data.copy_(kept)
    with pc.lean(), pc.recompute(False):
        y = forward()
    weight.untyped_storage().resize_(0)
    y.backward()


def test_a_slice_does_not_keep_all_that_it_is_of() -> None:
    big = torch.randn(1024, 256, requires_grad=True) * 1.0
    with pc.lean():
        y = F.silu(torch.cat([big[:, :8], big[:, 8:16]], 1))
    storage = StorageWeakRef(big.untyped_storage())
    del big
    assert storage.expired()
    y.sum().backward()
