"""Features of a large image: the first layers of a network, converted, without gradients.

    python large_image.py --side 4096
    python large_image.py --image photo.jpg --limit 16MiB

Prints what the first convolution would do, and how far the memory of the process grew, for stock PyTorch and for the
converted network. Each runs in a process of its own.
"""

import argparse
import multiprocessing
import resource

import torch
import torchvision

import patchconv_native as pc


def load(path: str | None, side: int) -> torch.Tensor:
    """The image as a batch of one, (1, 3, height, width), or random numbers."""
    if path is None:
        return torch.rand(1, 3, side, side)
    return torchvision.io.decode_image(path, torchvision.io.ImageReadMode.RGB).float().div(255)[None]


def stem() -> torch.nn.Sequential:
    """The first layers of a ResNet with reflected borders, whose padding stock PyTorch copies."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 7, padding=3, padding_mode="reflect"),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(32, 32, 3, stride=2, padding=1, padding_mode="reflect"),
        torch.nn.ReLU(inplace=True),
    )
    return model.eval()


@torch.no_grad()
def grown(converted: bool, path: str | None, side: int, limit: str) -> tuple[int, float]:
    """Bytes by which the process grew, and the mean of the features, to compare."""
    model, image = stem(), load(path, side)
    if converted:
        pc.convert(model)
        pc.workspace_limit(limit)
        print(pc.explain(tuple(image.shape), model[0]), flush=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    features = model(image)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024, features.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image", help="a JPEG or PNG file; without one, random numbers")
    parser.add_argument("--side", type=int, default=4096, help="of the random image")
    parser.add_argument("--limit", default="32MiB", help="temporary memory of one convolution")
    arguments = parser.parse_args()
    for name, converted in (("stock", False), ("converted", True)):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            size, mean = pool.apply(grown, (converted, arguments.image, arguments.side, arguments.limit))
        print(f"{name:<10} grew by {size / 2**20:8.1f} MiB, mean of the features {mean:.6f}", flush=True)


if __name__ == "__main__":
    main()
