"""`spatial`: a model whose images are shared out between ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..spatial import Axes, Axis, NotServed, SpatialTensor
from ..spatial.norms import statistics_over
from ..spatial.operands import scattered
from ..tiles.recorded import Recorded
from ..wrap import Wrapped, add_kind, reason_against
from .moving import gather, groups_on_mesh, scatter, takes
from .ranks import Ranks, group_of, same_everywhere

# Modules that mix all places by matrix products. Every rank gets the whole image for them, and computes all of it.
_ATTENTION: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_ATTENTION_NAMES = frozenset(("Attention", "AttentionBlock", "AttnBlock"))

Which = str | type[nn.Module]


def _on_whole_images(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Gathers the inputs, runs forward on every rank, and keeps this rank's part of what comes out."""
    found: list[Axes] = []

    def whole(value: Any) -> Any:
        if isinstance(value, SpatialTensor):
            found.append(value.axes)
            return gather(value)
        return value

    args, kwargs = tree_map_only(Tensor, whole, (args, kwargs))
    result = forward(*args, **kwargs)
    if not found:
        return result
    axes = found[0]

    def part(value: Tensor) -> Tensor:
        fits = all(d < value.dim() and value.size(d) == axis.size for d, axis in axes.items())
        return scattered(value, axes) if fits else value

    return tree_map_only(Tensor, part, result)


class _Gathered(Wrapped):
    """A module that gets the whole image on every rank."""

    _patchconv_rank = 4
    _patchconv_names = "spatial", "gathered"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _on_whole_images(super().forward, *args, **kwargs)


class _Synced(Wrapped):
    """A SyncBatchNorm that takes, in training, the statistics of all images of its process group."""

    _patchconv_rank = 3
    _patchconv_names = "spatial", "synced"

    def forward(self, input: Tensor) -> Tensor:
        module: Any = self
        if module.training and isinstance(input, Recorded):
            raise NotServed("SyncBatchNorm in training is not served in tiles of parts of an image")
        if not module.training or not isinstance(input, SpatialTensor):
            return super().forward(input)
        group = module.process_group or dist.group.WORLD
        inside = set(dist.get_process_group_ranks(group))
        if any(not inside.issuperset(dist.get_process_group_ranks(group_of(axis))) for axis in input.axes.values()):
            raise ValueError("SyncBatchNorm: expected its process_group to hold all ranks of the image")
        with statistics_over(Ranks(group)):
            return nn.modules.batchnorm._BatchNorm.forward(module, input)


def _run_gathered(module: nn.Module) -> None:
    if reason_against(module, "spatial"):
        # Scripted modules, and those with a forward of the instance: their class cannot do it.
        vars(module)["forward"] = functools.partial(_on_whole_images, module.forward)
    else:
        add_kind(module, _Gathered)


def _random_state(axes: list[Axis]) -> Tensor:
    nccl = any(dist.get_backend(group_of(axis)) == "nccl" for axis in axes)
    return torch.cuda.get_rng_state() if nccl else torch.get_rng_state()


def _is_attention(module: nn.Module) -> bool:
    return isinstance(module, _ATTENTION) or type(module).__name__ in _ATTENTION_NAMES


def _chosen(model: nn.Module, gathered: Iterable[Which]) -> list[str]:
    names, modules = [], dict(model.named_modules())
    for which in gathered:
        if isinstance(which, str):
            if which not in modules:
                raise ValueError(f"spatial: expected gather to name modules of the model, got {which!r}")
            names.append(which)
        elif isinstance(which, type) and issubclass(which, nn.Module):
            names += [name for name, module in modules.items() if isinstance(module, which)]
        else:
            raise TypeError(f"spatial: expected gather to hold names and module classes, got {which!r}")
    names += [name for name, module in modules.items() if _is_attention(module)]
    unique = sorted(set(names))
    return [name for name in unique if not any(name.startswith(outer + ".") for outer in unique)]


def _in_parts(arguments: Any, mesh: Any, dims: str) -> Any:
    """Whole images among a model's arguments, this rank's part of each."""
    given = [t for t in tree_flatten(arguments)[0] if isinstance(t, Tensor)]
    image = next((t for number in takes(dims)[0][:-1] for t in given if t.dim() == number), None)
    if image is None or any(isinstance(t, SpatialTensor) for t in given):
        return arguments

    def part(value: Tensor) -> Tensor:
        fits = value.dim() == image.dim() and value.shape[2:] == image.shape[2:]
        return scatter(value, mesh, dims) if fits else value

    return tree_map_only(Tensor, part, arguments)


def spatial(model: nn.Module, mesh: Any, dims: str = "H", gather: Which | Iterable[Which] = ()) -> nn.Module:
    """Prepares a model, in place, for images of which each rank of `mesh` holds a part; returns it.

    Afterwards the model takes `SpatialTensor`s (`scatter` makes them), or a whole image, the same on every rank, of
    which it takes this rank's part (of all tensors (N, C, H, W) of the first one's height and width that it is given;
    of volumes (N, C, D, H, W) and signals (N, C, L) alike).
    Inside, layers exchange the rows (columns) that their geometry asks for, norms use the statistics of the whole
    image, and what is pooled over the whole image is a plain tensor, the same on every rank.

    Parameters and buffers stay whole on every rank; they are made the first rank's here. Random numbers (dropout,
    stochastic depth) need the same random state on every rank: where it differs in training a warning is given, once.
    After `backward()` each `p.grad` is the gradient of the whole image, the same on every rank. Parameters used after a
    global pool are used alike by every rank and are not summed. state_dict is what it was.

    mesh: a torch.distributed.device_mesh.DeviceMesh with a dimension for each letter of dims (as of `scatter`). For
    data parallelism besides, give this function the mesh's spatial part and DistributedDataParallel the other group;
    nn.SyncBatchNorm then takes the statistics of all images of its process group.

    gather: names or classes of modules that get the whole image on every rank, and give back a part, for what has no
    exact rule on parts. Attention (nn.MultiheadAttention, nn.TransformerEncoderLayer, and classes named Attention,
    AttentionBlock or AttnBlock) always runs so: `spatial_report(model)` names them.

    Raises ValueError for an unknown name, a mesh that does not fit dims, and a model that was prepared before.
    """
    if getattr(model, "_patchconv_spatial", None) is not None:
        raise ValueError("spatial: this model was prepared before")
    names = _chosen(model, [gather] if isinstance(gather, (str, type)) else gather)
    axes = groups_on_mesh("spatial", mesh, dims)
    for tensor in (*model.parameters(), *model.buffers()):
        if not hasattr(tensor, "placements"):  # a DTensor has its own way to be the same
            for axis in axes:
                dist.broadcast(tensor.detach(), group=group_of(axis), group_src=0)
    for name in names:
        _run_gathered(model.get_submodule(name))
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            add_kind(module, _Synced)

    looked = False

    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        nonlocal looked
        if any(isinstance(leaf, Recorded) for leaf in tree_leaves((args, kwargs))):
            return args, kwargs  # tile has what there is of an image, and looks at random states itself
        if module.training and not looked:
            looked = True
            if not same_everywhere(_random_state(axes), axes):
                warnings.warn(
                    "spatial: random states differ between ranks; dropout and its like need the same one on every "
                    "rank, as after torch.manual_seed(0) on all of them", stacklevel=3,
                )  # fmt: skip
        return _in_parts((args, kwargs), mesh, dims)

    vars(model)["_patchconv_spatial"] = tuple(names)
    model.register_forward_pre_hook(take, with_kwargs=True)
    return model


def spatial_report(model: nn.Module) -> str:
    """What `spatial` made of a model: the modules that run gathered, whole on every rank."""
    names = getattr(model, "_patchconv_spatial", None)
    if names is None:
        raise ValueError("spatial_report: expected a model that spatial() has prepared")
    if not names:
        return "Every module runs on parts."
    return "Run gathered, whole on every rank: " + ", ".join(name or "the model itself" for name in names)
