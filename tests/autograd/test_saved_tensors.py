"""What a node keeps and for how long, and that it keeps it where autograd's own rules can see it.

A convolution needs its input only for the weight's gradient and its weight only for the input's. What it does not need
it must not keep alive; what it keeps must go through saved-tensor hooks and the in-place version check.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.counts import Hooked
from support.threads import on_threads
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import patchconv_native as pc

NAMES = ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"]
ALL = pytest.mark.parametrize("name", NAMES)
SPLITS = pytest.mark.parametrize("splits", [None, 2])


def leaves(name: str, device: str, wanted: tuple[bool, bool, bool] = (True, True, True)) -> list[Tensor]:
    dims = int(name[-2])
    shapes = [(2, 4, *[9] * dims), (4, 4, *[3] * dims), (4,)]
    rest = {"device": device, "dtype": torch.float64}
    return [torch.randn(*s, **rest).requires_grad_(w) for s, w in zip(shapes, wanted, strict=True)]


def call(name: str, splits: int | None, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return getattr(pc.functional, name)(x, w, b, padding=1, splits=splits)


@ALL
@SPLITS
@pytest.mark.parametrize(
    "wanted,kept",
    [((True, True, True), "xw"), ((True, False, False), "w"), ((False, True, False), "x"),
     ((False, True, True), "x"), ((False, False, True), ""), ((True, False, True), "w")],
)  # fmt: skip
def test_saves_what_it_needs_and_nothing_else(device, name, splits, wanted, kept):
    x, w, b = leaves(name, device, wanted)
    with Hooked() as saved:
        y = call(name, splits, x, w, b)
    # The very tensors, not copies: saving costs no memory.
    expected = sorted(t.data_ptr() for t, letter in ((x, "x"), (w, "w")) if letter in kept)
    assert sorted(t.data_ptr() for t in saved.packed) == expected
    y.sum().backward()
    assert saved.unpacked == len(kept)
    for tensor, was_wanted in zip((x, w, b), wanted, strict=True):
        assert (tensor.grad is not None) == was_wanted


@ALL
@SPLITS
def test_nothing_is_saved_without_gradients(device, name, splits):
    given = leaves(name, device)
    with Hooked() as saved:
        found = [call(name, splits, *leaves(name, device, (False, False, False)))]
        for block in (torch.no_grad(), torch.inference_mode()):
            with block:
                found.append(call(name, splits, *given))
    assert saved.packed == [] and [y.grad_fn for y in found] == [None] * 3 and found[2].is_inference()


@ALL
@SPLITS
@pytest.mark.parametrize("wanted,freed", [((True, False, True), "x"), ((False, True, True), "w"), ((True,) * 3, "")])
def test_what_is_not_needed_is_freed(device, name, splits, wanted, freed):
    """As soon as its owner drops it, though the graph lives on; what is saved is freed by backward."""
    x, w, b = leaves(name, device, wanted)
    middle, scaled = x * 2, w * 2
    references = {"x": StorageWeakRef(middle.untyped_storage()), "w": StorageWeakRef(scaled.untyped_storage())}
    y = call(name, splits, middle, scaled, b)
    assert not any(r.expired() for r in references.values())
    del middle, scaled
    assert [letter for letter, r in references.items() if r.expired()] == list(freed)
    y.sum().backward()
    assert all(r.expired() for r in references.values()), "while y still lives"
    assert [t.grad is not None for t in (x, w, b)] == list(wanted)


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
    """What a hook returns is what backward computes with: half precision, compression and noise all rely on it."""
    x, w, b = leaves(name, device)
    grad = torch.autograd.grad(call(name, splits, x, w, b).sum(), (x, w))
    with saved_tensors_hooks(lambda t: t * 3, lambda t: t):
        y = call(name, splits, x, w, b)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), [3 * g for g in grad])


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
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@ALL
@SPLITS
def test_second_backward(device, name, splits):
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    first = torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w, b)), first, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), (x, w, b))


@ALL
@SPLITS
def test_expanded_gradients(device, name, splits):
    """sum().backward() sends one number spread over all places; a mean over channels a partly expanded one."""
    x, w, b = leaves(name, device)
    y = call(name, splits, x, w, b)
    stock = getattr(F, name)(x, w, b, padding=1)
    for shape in ((), y.shape[1:], y.shape[2:], (*y.shape[:-1], 1)):
        grad = torch.randn(shape, device=device, dtype=y.dtype).expand(y.shape)
        found, expected = (torch.autograd.grad(one, (x, w, b), grad, retain_graph=True) for one in (y, stock))
        torch.testing.assert_close(found, expected)


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
    torch.testing.assert_close(half, whole)


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
        torch.testing.assert_close(*results)


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
    with Hooked() as saved:
        y = call(name, splits, view, w, b)
    assert [t.stride() for t in saved.packed if t.data_ptr() == view.data_ptr()] == [view.stride()]
    y.sum().backward()


@SPLITS
def test_backward_on_another_thread(device, splits):
    x, w, b = leaves("conv2d", device)
    y = call("conv2d", splits, x, w, b)
    expected = torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True)
    found = on_threads(lambda: torch.autograd.grad(y.sum(), (x, w, b), retain_graph=True), 4)
    torch.testing.assert_close(found, [expected] * 4)


@SPLITS
def test_forward_on_many_threads(device, splits):
    """Concurrent calls, some of them under another workspace limit: the same bits as alone."""
    x, w, b = (t.detach() for t in leaves("conv2d", device))
    expected = call("conv2d", splits, x, w, b)
    equal = on_threads(lambda: [torch.equal(call("conv2d", splits, x, w, b), expected) for _ in range(50)], 4)
    assert equal == [[True] * 50] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    from torch.utils.checkpoint import checkpoint

    given = leaves("conv2d", device)
    expected = torch.autograd.grad(call("conv2d", 2, *given).square().sum(), given)
    checkpoint(lambda *t: call("conv2d", 2, *t), *given, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(tuple(t.grad for t in given), expected)
