"""Bad arguments: each refused by name, with what was expected and what came, and with nothing changed by the attempt.

The tables hold whole messages. Where one rule serves every operator it is tested on one of them, and
`test_every_operator_names_itself` sees to the names.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.conv_calls import backward_arguments

import patchconv_native as pc

ops = torch.ops.patchconv


def t(*shape: int, **options) -> torch.Tensor:
    return torch.ones(shape, **options)


X, W, B = t(1, 4, 8, 8), t(6, 4, 3, 3), t(6)
X1, X3, W3 = t(1, 4, 8), t(1, 4, 8, 8, 8), t(6, 4, 3, 3, 3)
T = t(4, 2, 3, 3)  # of a transposed convolution

VALUES = {
    "conv2d: expected weight to have 4 dimensions (K, C/groups, R, S), got 3": lambda: ops.conv2d(X, t(6, 4, 3)),
    "conv1d: expected weight to have 3 dimensions (K, C/groups, S), got 4": lambda: ops.conv1d(X1, W),
    "conv3d: expected weight to have 5 dimensions (K, C/groups, T, R, S), got 4": lambda: ops.conv3d(X3, W),
    "conv_transpose2d: expected weight to have 4 dimensions (C, K/groups, R, S), got 3":
        lambda: ops.conv_transpose2d(X, t(4, 6, 3)),
    "conv2d: expected input to have 3 or 4 dimensions (C, H, W) or (N, C, H, W), got 2":
        lambda: ops.conv2d(t(8, 8), W),
    "conv1d: expected input to have 2 or 3 dimensions (C, L) or (N, C, L), got 4": lambda: ops.conv1d(X, t(6, 4, 3)),
    "conv3d: expected input to have 4 or 5 dimensions (C, D, H, W) or (N, C, D, H, W), got 6":
        lambda: ops.conv3d(t(1, 1, 4, 8, 8, 8), W3),
    "conv2d: expected input to have 4 channels for weight of shape [6, 4, 3, 3] and groups 1, got 3":
        lambda: ops.conv2d(t(1, 3, 8, 8), W),
    "conv2d: expected input to have 8 channels for weight of shape [6, 4, 3, 3] and groups 2, got 4":
        lambda: ops.conv2d(X, W, groups=2),
    "conv_transpose2d: expected input to have 5 channels for weight of shape [5, 2, 3, 3] and groups 1, got 4":
        lambda: ops.conv_transpose2d(X, t(5, 2, 3, 3)),
    "conv2d: expected dimension 0 of weight to be a positive multiple of groups (4) and dimension 1 to be positive, "
    "got weight of shape [6, 1, 3, 3]": lambda: ops.conv2d(X, t(6, 1, 3, 3), groups=4),
    "conv2d: expected groups to be at least 1, got 0": lambda: ops.conv2d(X, W, groups=0),
    "conv_transpose1d: expected groups to be at least 1, got -1":
        lambda: ops.conv_transpose1d(X1, t(4, 2, 3), groups=-1),
    "conv2d: expected every kernel size to be at least 1, got weight of shape [6, 4, 3, 0]":
        lambda: ops.conv2d(X, t(6, 4, 3, 0)),
    "conv2d: expected every entry of stride to be at least 1, got [1, 0]": lambda: ops.conv2d(X, W, stride=[1, 0]),
    "conv2d: expected stride to have 1 or 2 entries, got 3": lambda: ops.conv2d(X, W, stride=[1, 1, 1]),
    "conv2d: expected stride to have 1 or 2 entries, got 0": lambda: ops.conv2d(X, W, stride=[]),
    "conv2d: expected every entry of dilation to be at least 1, got [0, 1]": lambda: ops.conv2d(X, W, dilation=[0, 1]),
    "conv3d: expected dilation to have 1 or 3 entries, got 2": lambda: ops.conv3d(X3, W3, dilation=[1, 1]),
    "conv2d: expected every entry of padding to be at least 0, got [0, -1]": lambda: ops.conv2d(X, W, padding=[0, -1]),
    "conv2d: expected padding to have 1, 2 or 4 entries, got 3": lambda: ops.conv2d(X, W, padding=[1, 1, 1]),
    "conv_transpose2d: expected padding to have 1 or 2 entries, got 4":
        lambda: ops.conv_transpose2d(X, T, padding=[1, 1, 1, 1]),
    "conv2d: expected padding_mode to be 'zeros', 'reflect', 'replicate' or 'circular', got 'mirror'":
        lambda: ops.conv2d(X, W, padding=1, padding_mode="mirror"),
    "conv2d: expected reflect padding to be smaller than the input, got padding (8, 8) for size 8 in spatial "
    "dimension 1": lambda: ops.conv2d(X, W, padding=[1, 8], padding_mode="reflect"),
    "conv2d: expected circular padding to be no larger than the input, got padding (0, 9) for size 8 in spatial "
    "dimension 0": lambda: ops.conv2d(X, W, padding=[0, 9, 1, 1], padding_mode="circular"),
    "conv1d: expected an input that is not empty for replicate padding, got size 0 in spatial dimension 0":
        lambda: ops.conv1d(t(1, 4, 0), t(6, 4, 1), padding=1, padding_mode="replicate"),
    "conv2d: expected the kernel to fit the padded input, got kernel extent 11 for padded size 10 in spatial "
    "dimension 1": lambda: ops.conv2d(X, t(6, 4, 3, 11), padding=1),
    "conv2d: expected the kernel to fit the padded input, got kernel extent 9 for padded size 8 in spatial "
    "dimension 0": lambda: ops.conv2d(X, W, dilation=[4, 1]),
    "conv_transpose2d: expected every output size to be at least 1, got 0 in spatial dimension 0 for input of shape "
    "[1, 4, 1, 8]": lambda: ops.conv_transpose2d(t(1, 4, 1, 8), t(4, 2, 2, 3), padding=[1, 0]),
    "conv_transpose2d: expected output_padding to be smaller than stride or dilation, got output_padding [0, 2], "
    "stride [2, 2], dilation [1, 1]": lambda: ops.conv_transpose2d(X, T, stride=2, output_padding=[0, 2]),
    "conv_transpose2d: expected every entry of output_padding to be at least 0, got [0, -1]":
        lambda: ops.conv_transpose2d(X, T, stride=2, output_padding=[0, -1]),
    "conv2d: expected every entry of splits to be at least 1, got [0]": lambda: ops.conv2d(X, W, splits=0),
    "conv2d: expected splits to have 1 or 2 entries, got 3": lambda: ops.conv2d(X, W, splits=[1, 2, 3]),
    "conv_transpose2d: expected every entry of splits to be at least 1, got [2, -1]":
        lambda: ops.conv_transpose2d(X, T, splits=[2, -1]),
    "conv2d: expected bias to have shape [6], got [5]": lambda: ops.conv2d(X, W, t(5)),
    "conv2d: expected bias to have shape [6], got [6, 1]": lambda: ops.conv2d(X, W, t(6, 1)),
    "conv_transpose2d: expected bias to have shape [4], got [2]": lambda: ops.conv_transpose2d(X, T, t(2), groups=2),
}  # fmt: skip
TYPES = {
    "conv2d: expected input to have dtype float64, float32, float16 or bfloat16, got Int":
        lambda: ops.conv2d(X.int(), W),
    "conv2d: expected weight to have dtype float64, float32, float16 or bfloat16, got ComplexFloat":
        lambda: ops.conv2d(X, W.to(torch.complex64)),
    "conv2d: expected weight to have the dtype of input (Float), got Double": lambda: ops.conv2d(X, W.double()),
    "conv2d: expected bias to have the dtype of input (Float), got Half": lambda: ops.conv2d(X, W, B.half()),
}  # fmt: skip
GRAD = t(1, 6, 8, 8)


def backward(grad=GRAD, x=X, w=W, input_size=(1, 4, 8, 8), weight_size=(6, 4, 3, 3), mask=(True, True, True), **kw):
    """As a node calls it."""
    return ops._convolution_backward(*backward_arguments(grad, x, w, input_size, weight_size, mask, padding=1, **kw))


# Of the backward operator, and of Python's own arguments.
MORE_VALUES = {
    "conv2d: expected grad_output to have shape [1, 6, 8, 8], got [1, 6, 8, 7]":
        lambda: backward(t(1, 6, 8, 7)),
    "conv2d: expected input for the gradient of weight, got None": lambda: backward(x=None),
    "conv2d: expected weight for the gradient of input, got None": lambda: backward(w=None),
    "conv2d: expected input to have shape [1, 4, 8, 8], got [1, 4, 8, 9]":
        lambda: backward(x=t(1, 4, 8, 9)),
    "conv2d: expected every entry of splits to be at least 1, got [0]": lambda: backward(splits=[0]),
    "conv2d: expected padding to be 'same', 'valid' or numbers, got 'full'":
        lambda: pc.functional.conv2d(X, W, padding="full"),
    "conv2d: expected stride 1 with padding='same', got 2":
        lambda: pc.functional.conv2d(X, W, stride=2, padding="same"),
}  # fmt: skip


def inner(transposed=False, **given):
    """The operator that the public ones call, which checks for itself."""
    x, w = (t(1, 4, 8, 8), t(6, 4, 3, 3)) if not transposed else (t(1, 6, 8, 8), t(6, 4, 3, 3))
    lists = {"stride": [1, 1], "padding": [1] * 4, "dilation": [1, 1], "output_padding": [0, 0] * transposed}
    lists |= {"splits": [], "groups": 1, "transposed": transposed, "padding_mode": "zeros"} | given
    return ops._convolution(x, w, None, **lists)


INNER_VALUES = {
    "_convolution: expected stride to have 1 to 3 entries, got 4": lambda: inner(stride=[1] * 4),
    "conv2d: expected dilation to have 1 or 2 entries, got 3": lambda: inner(dilation=[1] * 3),
    "conv2d: expected no output_padding, got [1, 1]": lambda: inner(output_padding=[1, 1]),
    "conv_transpose2d: expected as much padding before as after, got [1, 0, 0, 2]":
        lambda: inner(True, padding=[1, 0, 0, 2]),
    "conv_transpose2d: expected padding_mode to be 'zeros', got 'reflect'":
        lambda: inner(True, padding_mode="reflect"),
    "conv2d_fused: expected stride to have 2 entries, got 1":
        lambda: ops._convolution_fused(
            t(4, 8), t(6, 4, 3), None, t(6), None, True, False, [1], [0, 0], [1], [], 1, "zeros"
        ),
}  # fmt: skip
MORE_TYPES = {
    "conv2d: expected weight to have the dtype of grad_output (Float), got Double":
        lambda: backward(w=W.double()),
    "conv2d: expected grad_output to have dtype float64, float32, float16 or bfloat16, got Long":
        lambda: backward(GRAD.long()),
}  # fmt: skip


@pytest.mark.parametrize("text", [*VALUES, *TYPES, *MORE_VALUES, *INNER_VALUES, *MORE_TYPES])
def test_message(text):
    before = pc.workspace_limit(), pc.backend()
    kind = TypeError if text in TYPES | MORE_TYPES else ValueError
    with pytest.raises(kind) as caught:
        (VALUES | TYPES | MORE_VALUES | INNER_VALUES | MORE_TYPES)[text]()
    assert str(caught.value).splitlines()[0] == text
    assert (pc.workspace_limit(), pc.backend()) == before


@pytest.mark.parametrize("text", [*VALUES, *TYPES])
def test_fake_tensors_say_the_same(text):
    """A compiled program learns at tracing time what an eager one learns at the call."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception) as caught:
        (VALUES | TYPES)[text]()
    assert text in str(caught.value)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_operator_names_itself(dims, transposed):
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    with pytest.raises(ValueError, match=f"^{name}: expected weight to have {dims + 2} dimensions"):
        getattr(ops, name)(t(1, 2, *[5] * dims), t(2, 2))
    with pytest.raises(ValueError, match=f"^{name}: expected every entry of splits to be at least 1"):
        getattr(ops, name)(t(1, 2, *[5] * dims), t(2, 2, *[1] * dims), splits=-3)
    with pytest.raises(ValueError, match=f"^{name}"):
        getattr(pc.functional, name)(t(1, 2, *[5] * dims), t(2, 2))


def test_backward_takes_no_more_than_it_needs():
    _, grad_weight, grad_bias = backward(w=None, mask=(False, True, True))
    assert grad_weight.shape == W.shape and grad_bias.shape == B.shape
    grad_input, _, _ = backward(x=None, mask=(True, False, False))
    assert grad_input.shape == X.shape


@pytest.mark.parametrize("bad", ["lots", "12 furlongs", "-1MiB", "", 0, -5, 1.5, None.__class__])
def test_workspace_limit_refuses(bad):
    before = pc.workspace_limit()
    with pytest.raises((ValueError, TypeError), match=r"^workspace_limit: expected"):
        pc.workspace_limit(bad)
    assert pc.workspace_limit() == before


@pytest.mark.parametrize("bad", ["cudnn", "", "AUTO ", 3])
def test_backend_refuses(bad):
    before = pc.backend()
    with pytest.raises((ValueError, TypeError), match=r"^backend: expected 'auto', 'aten' or 'native'"):
        pc.backend(bad)
    assert pc.backend() == before


def test_backend_native_needs_a_cuda_build():
    before = pc.backend()
    if pc.build_info()["cuda"]:
        with pc.backend("native"):
            assert pc.backend() == "native"
    else:
        with pytest.raises(ValueError, match=r"^backend: 'native' is not served: this build has no CUDA kernels"):
            pc.backend("native")
    assert pc.backend() == before


@pytest.mark.parametrize("splits", [None, 3])
def test_a_module_is_unchanged_by_an_error(splits):
    layer = pc.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", splits=splits)
    attributes = copy.deepcopy({k: v for k, v in vars(layer).items() if not k.startswith("_")})
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    for bad in (t(1, 3, 8, 8), t(1, 4, 8), t(2), t(1, 4, 8, 8, dtype=torch.float64), t(1, 4, 1, 1)):
        with pytest.raises((ValueError, TypeError), match=r"^conv2d: expected"):
            layer(bad)
        assert {k: v for k, v in vars(layer).items() if not k.startswith("_")} == attributes
        assert all(torch.equal(v, layer.state_dict()[k]) for k, v in state.items())
    expected = torch.nn.Conv2d.forward(layer, X)
    torch.testing.assert_close(layer(X), expected)


def test_an_error_in_a_block_restores_the_settings():
    limit, backend = pc.workspace_limit(), pc.backend()
    with pytest.raises(ValueError, match=r"^conv2d: expected stride"), pc.workspace_limit(4096), pc.backend("aten"):
        assert (pc.workspace_limit(), pc.backend()) == (4096, "aten")
        ops.conv2d(X, W, None, [1, 1, 1], 0, 1, 1)
    assert (pc.workspace_limit(), pc.backend()) == (limit, backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: tensors on two devices")
def test_tensors_on_two_devices():
    with pytest.raises(ValueError, match=r"^conv2d: expected weight to be on the device of input \(cpu\), got cuda:0"):
        ops.conv2d(X, W.cuda(), None, 1, 0, 1, 1)
