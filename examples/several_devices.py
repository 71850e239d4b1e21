"""Trains on one image that is spread over several processes: each has a strip of rows.

    torchrun --nproc-per-node 2 several_devices.py --side 512
    torchrun --nproc-per-node 2 several_devices.py --budget 16MiB    # each computes its rows strip by strip
    torchrun --nproc-per-node 4 several_devices.py --device cuda     # one GPU per process; not run on GPUs yet

Outputs and gradients are those of one process, to rounding: the first rank checks the first step.
"""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.distributed.nn  # it holds on to the process group that is there when it is first imported: here, none
from torch.distributed.device_mesh import init_device_mesh

import patchconv_native as pc


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)  # the same weights, and the same dropout, on every rank
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Upsample(scale_factor=2), torch.nn.Conv2d(32, 1, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--budget", help="bytes that a step may take on each rank, such as 16MiB")
    arguments = parser.parse_args()

    dist.init_process_group("gloo" if arguments.device == "cpu" else "nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if arguments.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(arguments.device, (ranks,))
    model = network().to(arguments.device)
    alone = copy.deepcopy(model)

    image = torch.rand(1, 3, arguments.side, arguments.side, device=arguments.device)  # the same on every rank
    target = image.mean(1, keepdim=True)
    model = pc.distributed.spatial(pc.convert(model), mesh, dims="H")
    if arguments.budget:
        pc.tile_modules(model, "", arguments.budget)
    x, part = (pc.distributed.scatter(whole, mesh, dims="H") for whole in (image, target))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), part)
        loss.backward()  # every rank gets the whole image's gradients
        if step == 0 and rank == 0:
            torch.nn.functional.mse_loss(alone(image), target).backward()
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            off = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
            print(f"gradients: at most {off:.1e} from those of one process", flush=True)
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.5f}, {tuple(x.to_local().shape)} on this rank", flush=True)
    dist.barrier()  # no rank ends while another still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
