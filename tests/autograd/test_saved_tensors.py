"""What a node keeps and for how long, and that it keeps it where autograd's own rules can see it.

A convolution needs its input only for the weight's gradient and its weight only for the input's. What it does
not need it must not keep alive; what it keeps must go through saved-tensor hooks and the in-place version
check.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import patchconv_native as pc

NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
ALL = pytest.mark.parametrize("name", NAMES)
SPLITS = pytest.mark.parametrize("splits", [None, 2])


def leaves(name: str, device: str, wanted: tuple[bool, bool, bool] = (True, True, True)) -> list[Tensor]:
    dims = int(name[-2])
    shapes = [(2, 4, *[9] * dims), (4, 4, *[3] * dims), (4,)]
    return [
        torch.randn(*s, device=device, dtype=torch.float64).requires_grad_(w)
        for s, w in zip(shapes, wanted, strict=True)
    ]


def call(name: str, splits: int | None, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return getattr(pc.functional, name)(x, w, b, padding=1, splits=splits)


class Saved:
    """Counts what goes through the saved-tensor hooks."""

    def __init__(self) -> None:
        self.packed: list[Tensor] = []
        self.unpacked = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tensor)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        self.unpacked += 1
        return tensor


@ALL
@SPLITS
@pytest.mark.parametrize(
    "wanted,kept",
    [
        ((True, True, True), "xw"),
        ((True, False, False), "w"),
        ((False, True, False), "x"),
        ((False, True, True), "x"),
        ((False, False, True), ""),
        ((True, False, True), "w"),
    ],
)
def test_saves_what_it_needs_and_nothing_else(device, name, splits, wanted, kept):
    x, w, b = leaves(name, device, wanted)
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        y = call(name, splits, x, w, b)
    # The very tensors, not copies: saving costs no memory.
    assert sorted(t.data_ptr() for t in saved.packed) == sorted(
        t.data_ptr() for t, letter in ((x, "x"), (w, "w")) if letter in kept
    )
    y.sum().backward()
    assert saved.unpacked == len(kept)
    for tensor, was_wanted in zip((x, w, b), wanted, strict=True):
        assert (tensor.grad is not None) == was_wanted


@ALL
@SPLITS
def test_nothing_is_saved_without_gradients(device, name, splits):
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        call(name, splits, *leaves(name, device, (False, False, False)))
        with torch.no_grad():
            call(name, splits, *leaves(name, device))
    assert saved.packed == []


@ALL
@SPLITS
def test_an_input_that_is_not_needed_is_freed(device, name, splits):
    """Frozen weights: the input of the layer dies as soon as its owner drops it, though the graph lives
    on.
    """
    x, w, b = leaves(name, device, (True, False, True))
    middle = x * 2
    reference = StorageWeakRef(middle.untyped_storage())
    y = call(name, splits, middle, w, b)
    assert not reference.expired()
    del middle
    assert reference.expired()
    y.sum().backward()
    assert x.grad is not None


@ALL
@SPLITS
def test_a_weight_that_is_not_needed_is_freed(device, name, splits):
    x, w, b = leaves(name, device, (False, True, True))
    scaled = w * 2
    reference = StorageWeakRef(scaled.untyped_storage())
    y = call(name, splits, x, scaled, b)
    del scaled
    assert reference.expired()
    y.sum().backward()
    assert w.grad is not None


@ALL
@SPLITS
def test_what_is_saved_is_freed_by_backward(device, name, splits):
    x, w, b = leaves(name, device)
    middle, scaled = x * 2, w * 2
    references = [StorageWeakRef(t.untyped_storage()) for t in (middle, scaled)]
    y = call(name, splits, middle, scaled, b)
    del middle, scaled
    assert not any(r.expired() for r in references)
    y.sum().backward()
    assert all(r.expired() for r in references), "while y still lives"


@ALL
@SPLITS
def test_the_output_is_not_kept(device, name, splits):
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    reference = StorageWeakRef(y.untyped_storage())
    z = y.sum()
    del y
    assert reference.expired()
    z.backward()


@ALL
@SPLITS
def test_hooks_may_change_the_values(device, name, splits):
    """What a hook returns is what backward computes with: half precision, compression and noise all rely on
    it.
    """
    x, w, b = leaves(name, device)
    grad = torch.autograd.grad(call(name, splits, x, w, b).sum(), (x, w))
    with saved_tensors_hooks(lambda t: t * 3, lambda t: t):
        y = call(name, splits, x, w, b)
    for got, want in zip(torch.autograd.grad(y.sum(), (x, w)), grad, strict=True):
        torch.testing.assert_close(got, 3 * want)


@ALL
@SPLITS
def test_save_on_cpu(device, name, splits):
    x, w, b = leaves(name, device)
    expected = torch.autograd.grad(call(name, splits, x, w, b).square().sum(), (x, w, b))
    with save_on_cpu():
        y = call(name, splits, x, w, b)
    for got, want in zip(torch.autograd.grad(y.square().sum(), (x, w, b)), expected, strict=True):
        torch.testing.assert_close(got, want)


@ALL
@SPLITS
@pytest.mark.parametrize("which", [0, 1])
def test_an_in_place_edit_is_noticed(device, name, splits, which):
    given = leaves(name, device)
    copies = [t * 1 for t in given]
    y = call(name, splits, *copies)
    copies[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@ALL
@SPLITS
@pytest.mark.parametrize("which,wanted", [(0, (True, False, True)), (1, (False, True, True)), (2, (True, True, True))])
def test_an_edit_of_what_is_not_saved_is_allowed(device, name, splits, which, wanted):
    given = leaves(name, device, wanted)
    y = call(name, splits, *given)
    expected = torch.autograd.grad(y.sum(), [t for t in given if t.requires_grad], retain_graph=True)
    with torch.no_grad():
        given[which].add_(1)
    found = torch.autograd.grad(y.sum(), [t for t in given if t.requires_grad])
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@ALL
@SPLITS
def test_second_backward(device, name, splits):
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    first = torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, w, b))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), (x, w, b))


@ALL
@SPLITS
def test_gradients_accumulate(device, name, splits):
    x, w, b = leaves(name, device)
    call(name, splits, x, w, b).sum().backward()
    once = [t.grad.clone() for t in (x, w, b)]
    call(name, splits, x, w, b).sum().backward()
    for t, want in zip((x, w, b), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * want)


@ALL
@SPLITS
def test_expanded_gradients(device, name, splits):
    """sum().backward() sends one number spread over all places; a mean over channels a partly expanded
    one.
    """
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    stock = getattr(F, name)(x, w, b, padding=1)
    sent = [
        torch.ones((), device=device, dtype=y.dtype).expand(y.shape),
        torch.randn(y.shape[1:], device=device, dtype=y.dtype).expand(y.shape),
        torch.randn(y.shape[2:], device=device, dtype=y.dtype).expand(y.shape),
        torch.randn(*y.shape[:-1], 1, device=device, dtype=y.dtype).expand(y.shape),
    ]
    for grad in sent:
        found = torch.autograd.grad(y, (x, w, b), grad, retain_graph=True)
        expected = torch.autograd.grad(stock, (x, w, b), grad, retain_graph=True)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)


class DropGradient(torch.autograd.Function):
    """Sends an undefined gradient, as branches that do not matter do."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@ALL
@SPLITS
def test_undefined_gradients(device, name, splits):
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    found = torch.autograd.grad(DropGradient.apply(y).sum(), (x, w, b), allow_unused=True, retain_graph=True)
    assert found == (None, None, None)
    half = torch.autograd.grad((DropGradient.apply(y) + y).sum(), (x, w, b))
    whole = torch.autograd.grad(call(name, splits, x, w, b).sum(), (x, w, b))
    for got, want in zip(half, whole, strict=True):
        torch.testing.assert_close(got, want)


@ALL
def test_undefined_second_gradients(device, name):
    """Differentiating one first gradient leaves those of the others undefined."""
    x, w, b = leaves(name, device)
    stock = getattr(F, name)
    for which in range(3):
        results = []
        for operator in (lambda *t: call(name, 2, *t), lambda *t: stock(*t, padding=1)):
            y = operator(x, w, b)
            grads = torch.autograd.grad(y.pow(3).sum(), (x, w, b), create_graph=True)
            results.append(torch.autograd.grad(grads[which].sum(), (x, w, b)))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)


@ALL
@SPLITS
def test_only_what_is_asked_for_is_computed(device, name, splits):
    """grad(y, w) does not compute the input's gradient, nor the other way round."""
    x, w, b = leaves(name, device)
    for wanted, passes in (([x], {"dgrad"}), ([w], {"wgrad"}), ([b], set()), ([x, w], {"dgrad", "wgrad"})):
        y = call(name, splits, x, w, b)
        with pc.record_paths() as records:
            torch.autograd.grad(y.sum(), wanted)
        assert {r["pass"] for r in records} == passes


@ALL
@SPLITS
def test_a_non_contiguous_saved_input_is_kept_as_it_is(device, name, splits):
    """Saving must not make a dense copy of a view."""
    x, w, b = leaves(name, device)
    view = torch.cat([x, x], dim=-1)[..., ::2]
    saved = Saved()
    with saved_tensors_hooks(saved.pack, saved.unpack):
        y = call(name, splits, view, w, b)
    assert view.data_ptr() in [t.data_ptr() for t in saved.packed]
    assert next(t for t in saved.packed if t.data_ptr() == view.data_ptr()).stride() == view.stride()
    y.sum().backward()


@SPLITS
def test_backward_on_another_thread(device, splits):
    x, w, b = leaves("conv2d", device)
    y = call("conv2d", splits, x, w, b)
    expected = torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    found: list[tuple[Tensor, ...]] = []
    threads = [
        threading.Thread(target=lambda: found.append(torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for grads in found:
        for got, want in zip(grads, expected, strict=True):
            torch.testing.assert_close(got, want)


@SPLITS
def test_forward_on_many_threads(device, splits):
    """Concurrent calls, some of them under another workspace limit: the same bits as alone."""
    x, w, b = (t.detach() for t in leaves("conv2d", device))
    expected = call("conv2d", splits, x, w, b)
    results: list[bool] = []

    def work() -> None:
        results.extend(torch.equal(call("conv2d", splits, x, w, b), expected) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 200


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    x, w, b = leaves("conv2d", device)
    expected = torch.autograd.grad(call("conv2d", 2, x, w, b).square().sum(), (x, w, b))
    y = checkpoint(lambda *t: call("conv2d", 2, *t), x, w, b, use_reentrant=reentrant)
    if reentrant:
        y.square().sum().backward()
        found = tuple(t.grad for t in (x, w, b))
    else:
        found = torch.autograd.grad(y.square().sum(), (x, w, b))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
