"""Training on parts of an image as on one process: checkpoints, converted models, data parallelism besides, optimizers,
layouts and dtypes, and every way to ask for gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.counts import saved_bytes
from support.ranks import needs_gloo, run
from support.spatial_cases import compare, mesh_of
from support.spatial_chains import differences, structured
from torch import Tensor, nn

import patchconv_native as pc

pytestmark = needs_gloo
SHAPE = (2, 3, 14, 10)


def block(a: int, b: int, norm: bool = True) -> nn.Module:
    layers = [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b) if norm else nn.GroupNorm(2, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(b, b, 5, padding=2), nn.SiLU())


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = block(3, 4), block(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        if self.how == "ours":
            return pc.checkpoint(self.second, pc.checkpoint(self.first, x))
        if self.how == "torch":
            first = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, first, use_reentrant=False)
        return self.second(self.first(x))


def dropping() -> nn.Module:
    return nn.Sequential(block(3, 4), nn.Dropout(0.3), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.2))


def modules() -> nn.Module:
    model = nn.Sequential(block(3, 4), block(4, 4))
    pc.checkpoint_modules(model, ["0", "1"])
    return model


def lean() -> Any:
    return pc.lean()


COMPOSED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "checkpoint of torch": (lambda: Checkpointed("torch"), nullcontext),
    "pc.checkpoint": (lambda: Checkpointed("ours"), nullcontext),
    "pc.checkpoint_modules": (modules, nullcontext),
    "converted": (lambda: pc.convert(nn.Sequential(block(3, 4), block(4, 4))), nullcontext),
    "with dropout": (dropping, nullcontext),
    "converted, with dropout": (lambda: pc.convert(dropping()), nullcontext),
    "pc.lean": (lambda: nn.Sequential(block(3, 4), block(4, 4)), lean),
    "pc.lean and pc.checkpoint": (lambda: Checkpointed("ours"), lean),
    "frozen": (lambda: nn.Sequential(block(3, 4).requires_grad_(False), block(4, 4)), nullcontext),
    "splits": (lambda: pc.convert(nn.Sequential(block(3, 4), block(4, 4)), splits=2), nullcontext),
}


def composed(rank: int, world: int) -> dict[str, list[str]]:
    mesh, found = mesh_of(world, (world,)), {}
    for name, (make, surroundings) in COMPOSED.items():
        torch.manual_seed(1)
        try:
            found[name] = compare(make().double(), structured(SHAPE), mesh, "H", 1e-9, surroundings)
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}"]
    return found


def test_composed_with_the_rest_of_the_package() -> None:
    for found in run(2, composed, timeout=120):
        assert not {name: text for name, text in found.items() if text}


def dtypes(rank: int, world: int) -> dict[str, list[str]]:
    """Each held against one process in the same dtype, to that dtype's rounding."""
    mesh, found = mesh_of(world, (world,)), {}

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    for name, dtype, tolerance, surroundings in (
        ("float32", torch.float32, 1e-4, nullcontext),
        ("bfloat16", torch.bfloat16, 0.06, nullcontext),
        ("float16", torch.float16, 0.05, nullcontext),
        ("autocast", torch.float32, 0.06, autocast),
    ):
        for norm in (nn.GroupNorm(2, 4), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.Identity()):
            torch.manual_seed(1)
            layers = [nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 2, 3)]
            for model in (nn.Sequential(*layers), nn.Sequential(*layers[:2]), nn.Sequential(*layers[:2]).eval()):
                key = f"{name} {type(norm).__name__} {len(model)} {'train' if model.training else 'eval'}"
                image = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).to(dtype)
                try:
                    found[key] = compare(model.to(dtype), image, mesh, "H", tolerance, surroundings)
                except Exception as error:
                    found[key] = [f"{type(error).__name__}: {error}"]
    return found


def test_dtypes_and_autocast() -> None:
    for found in run(2, dtypes, timeout=120):
        assert not {name: text for name, text in found.items() if text}


def gradients(rank: int, world: int) -> list[str]:
    """Ways to ask for gradients, on one process and on parts, by the same code."""
    import patchconv_native.distributed as pd

    torch.manual_seed(0)
    model, mesh = nn.Sequential(block(3, 4), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)).double(), mesh_of(world, (world,))
    prepared = pd.spatial(copy.deepcopy(model), mesh)
    again = copy.deepcopy(prepared)
    image, found = structured(SHAPE), []
    if prepared.state_dict().keys() != model.state_dict().keys():
        found.append("names in state_dict")

    def twice(model: nn.Module, x: Tensor) -> list[Any]:
        loss = (model(x) ** 2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad]

    def some(model: nn.Module, x: Tensor) -> list[Any]:
        weights = [model.get_parameter(name) for name in ("0.3.weight", "2.bias")]
        return list(torch.autograd.grad((model(x) ** 2).sum(), weights))

    def input_alone(model: nn.Module, x: Tensor) -> list[Any]:
        return list(torch.autograd.grad((model(x) ** 3).mean(), [x]))

    def penalty(model: nn.Module, x: Tensor) -> list[Any]:
        (g,) = torch.autograd.grad(model(x).square().mean(), [x], create_graph=True)
        (g.square().sum() + (g * x).sum()).backward()
        return [x.grad, g]

    def penalty_of_weights(model: nn.Module, x: Tensor) -> list[Any]:
        grads = torch.autograd.grad(model(x).square().mean(), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        return [x.grad, *grads]

    def hooked(model: nn.Module, x: Tensor) -> list[Any]:
        seen: list[Tensor] = []
        handles = [p.register_hook(lambda g: seen.append(g.clone())) for p in model.parameters()]
        (model(x) ** 2).mean().backward()
        for handle in handles:
            handle.remove()
        return sorted(seen, key=lambda g: (g.numel(), float(g.sum())))

    def no_grad(model: nn.Module, x: Tensor) -> list[Any]:
        with torch.no_grad():
            a = (model(x) ** 2).mean()
        with torch.inference_mode():
            return [a, (model(x) ** 2).mean((0, 1)).sum()]

    def plain_input(model: nn.Module, x: Tensor) -> list[Any]:
        (model(x.detach()) ** 2).mean().backward()
        return []

    def given(model: nn.Module, x: Tensor) -> list[Any]:
        y = model(x)
        y.backward(torch.ones(y.shape, dtype=y.dtype) * 0.5)
        return [x.grad]

    for way in (twice, some, input_alone, penalty, penalty_of_weights, hooked, no_grad, plain_input, given):
        results = []
        for used in (model, prepared, again):
            used.zero_grad()
            values = way(used, image.clone().requires_grad_())
            named = {f"value {i}": v.detach() for i, v in enumerate(values)}
            grads = {f"grad {name}": None if p.grad is None else p.grad.clone() for name, p in used.named_parameters()}
            results.append({**named, **grads})
        for result in results[1:]:
            found += [f"{way.__name__}: {text}" for text in differences(result, results[0])]
    return found


def test_every_way_to_ask_for_gradients() -> None:
    assert run(2, gradients, timeout=120) == [[]] * 2
    assert run(3, gradients, timeout=120) == [[]] * 3


def tools(rank: int, world: int) -> list[str]:
    """scatter, gather and halo_exchange in a formula, differentiated twice, against the same formula on the whole."""
    import patchconv_native.distributed as pd

    mesh, image, found = mesh_of(world, (2, 2)), structured((1, 2, 9, 7)), []

    def formula(x: Tensor, whole: bool) -> Tensor:
        if whole:
            # Every rank's part with its halo, summed over the ranks, is what the ranks add up.
            parts = []
            for r in range(2):
                for c in range(2):
                    a, b = (0, 5, 9)[r : r + 2]
                    d, e = (0, 4, 7)[c : c + 2]
                    parts.append((x[:, :, max(a - 6, 0) : b + 6, max(d - 1, 0) : e + 2].sin() ** 2).sum())
            return sum(parts) + (x.cos() * x).sum()
        s = pd.scatter(x, mesh, "HW")
        if s.cuts != {2: (0, 5, 9), 3: (0, 4, 7)}:
            found.append(f"cuts {s.cuts}")
        halo = pd.halo_exchange(s, (6, 6, 1, 2))
        mine = (halo.sin() ** 2).sum()
        local = s.to_local() * 0 + mine / s.to_local().numel()
        total = pd.SpatialTensor.from_local(local, s.axes).sum()
        whole_again = pd.gather(s)
        return total + (whole_again.cos() * whole_again).sum()

    results = []
    for whole in (True, False):
        x = image.clone().requires_grad_()
        (g,) = torch.autograd.grad(formula(x, whole), [x], create_graph=True)
        (g**3).sum().backward()
        results.append({"value g": g.detach(), "grad x": x.grad})
    found += differences(results[1], results[0])
    x = image.clone().requires_grad_()
    s = pd.scatter(x, mesh, "HW")
    back = pd.from_dtensor(pd.to_dtensor(s * 2, mesh), "HW")
    (pd.gather(back) ** 2).sum().backward()
    if not torch.equal(pd.gather(back).detach(), image * 2) or not torch.allclose(x.grad, 8 * image):
        found.append("DTensor")
    if "H: " not in repr(s) or "SpatialTensor" not in repr(s):
        found.append(repr(s))
    return found


def test_the_functions_that_move_parts_and_their_second_derivatives() -> None:
    assert run(4, tools, timeout=120) == [[]] * 4


def data_parallel(rank: int, world: int) -> list[str]:
    """A mesh of two images by two parts, three steps of an optimizer, against the batch on one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    import patchconv_native.distributed as pd

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
    torch.manual_seed(0)
    images = [structured(SHAPE) + torch.arange(2).view(2, 1, 1, 1) for _ in range(3)]
    found = []
    for converted in (False, True):
        model = nn.Sequential(
            block(3, 4, False), nn.MaxPool2d(3, 2, 1), block(4, 4, False), nn.Conv2d(4, 3, 1)
        ).double()
        if converted:
            pc.convert(model)
        inner = pd.spatial(copy.deepcopy(model), grid["spatial"])
        parts = DistributedDataParallel(inner, process_group=grid.get_group("data"))
        results = []
        for used, share in ((model, slice(0, 2)), (parts, slice(grid.get_local_rank("data"), None, 2))):
            optimizer = torch.optim.AdamW(used.parameters(), 0.01)
            for image in images:
                target = torch.arange(2 * 7 * 5).remainder(3).view(2, 7, 5)
                optimizer.zero_grad()
                F.cross_entropy(used(image[share]), target[share]).backward()
                optimizer.step()
            results.append({f"state {n.removeprefix('module.')}": v for n, v in used.state_dict().items()})
        found += differences(results[1], results[0], 1e-7)
    return found


def synced(rank: int, world: int) -> list[str]:
    """Two images on two ranks each, statistics of both, against one process with a batch of two."""
    from torch.distributed.device_mesh import init_device_mesh

    import patchconv_native.distributed as pd

    def make(norm: type[nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()

    images, one = structured(SHAPE), make(nn.BatchNorm2d)
    one(images).square().sum().backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "spatial"))
    model = pd.spatial(make(nn.SyncBatchNorm), mesh["spatial"])
    data = mesh.get_group("data")
    pd.gather(model(images[dist.get_rank(data)][None])).square().sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=data)
    wrong = []
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        a, b = p.grad, q.grad
        if not torch.allclose(a, b, rtol=1e-9, atol=1e-9 * float(one[0].weight.grad.abs().max())):
            wrong.append(f"{name}: off by {float((a - b).abs().max())}")
    for name in ("running_mean", "running_var"):
        if not torch.allclose(getattr(model[1], name), getattr(one[1], name), rtol=1e-9):
            wrong.append(name)
    return wrong


def test_sync_batch_norm_takes_the_statistics_of_all_images() -> None:
    assert run(4, synced, timeout=120) == [[]] * 4


def test_data_parallel_besides_and_three_steps() -> None:
    assert run(4, data_parallel, timeout=120) == [[]] * 4


def kept(rank: int, world: int) -> dict[str, int]:
    """Bytes that autograd keeps of one pass, each storage once, without parameters."""
    import patchconv_native.distributed as pd

    mesh, found = mesh_of(world, (world,)), {}
    for name in ("stock", "converted", "converted, one process"):
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
        model = nn.Sequential(*layers)
        if name != "stock":
            pc.convert(model)
        if "one" not in name:
            pd.spatial(model, mesh)
        image = torch.randn(1, 4, 64, 64).requires_grad_()
        found[name] = saved_bytes(lambda model=model, image=image: model(image), model.parameters())
    return found


def test_a_converted_model_keeps_no_copy_with_the_halo() -> None:
    for found in run(2, kept, timeout=120):
        # A rank's share of what one process keeps, and the rows of the halos.
        assert found["converted"] < 0.6 * found["converted, one process"], found
        assert found["converted"] < found["stock"], found
