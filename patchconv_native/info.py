"""Prints what is installed: versions, devices, settings, and every operator with its dispatch keys.

Needs torch alone. With rich installed it prints tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import sys

from ._bytes import format_bytes
from .memory.labels import aligned

# The dispatch keys under which this library, or torch for it, may register kernels, in the order of a call: transforms,
# autocast, autograd, then the backends. A name that this torch does not have is left out.
KEYS = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchVmapMode",
    "FuncTorchBatched",
    "AutocastCPU",
    "AutocastCUDA",
    "Functionalize",
    "ADInplaceOrView",
    "Autograd",
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradMeta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "BackendSelect",
    "CPU",
    "CUDA",
    "Meta",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", action="store_true", help="plain text, also where rich is installed")


def run(arguments: argparse.Namespace) -> int:
    found = facts()
    table = operators()
    if arguments.plain or importlib.util.find_spec("rich") is None:
        _print_plain(found, table)
    else:
        _print_rich(found, table)
    return 0


def facts() -> dict[str, str]:
    """What was built, what is running, and the settings, by name, each as a line of text."""
    import torch

    from . import _library, backend, build_info, workspace_limit

    info = build_info()
    built = _library.load().built_with()
    return {
        "package": info["version"],
        "Python": f"{platform.python_version()} (built for {info['python']})",
        "torch": f"{torch.__version__} (built with {built['torch']})",
        "CUDA": f"{torch.version.cuda or 'none, a CPU build'} (built with {built['cuda'] or 'none'})",
        "architectures": info["archs"] or "none: a CPU-only build",
        "GPU": "; ".join(_gpus()),
        "convolution rules": "; ".join(_conv_rules()),
        "compiler": built["compiler"],
        "CPU": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{torch.get_num_threads()} in an operator, {torch.get_num_interop_threads()} between",
        "workspace limit": format_bytes(workspace_limit()),
        "backend": backend(),
    }


def operators() -> dict[str, list[str]]:
    """Every operator of the namespace `patchconv` with the dispatch keys that have a kernel for it."""
    import torch

    known = []
    for key in KEYS:
        try:
            torch._C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", key)
        except RuntimeError:
            continue  # this torch has no such key
        known.append(key)
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("patchconv::"))
    return {name: [key for key in known if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)] for name in names}


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return ["none"]
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        found.append(f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {format_bytes(gpu.total_memory)})")
    return found


def _conv_rules() -> list[str]:
    """The convolution rules of each kind of GPU, a line a kind."""
    import torch

    from . import build_info, conv_rules

    if build_info()["cuda"] is None:
        return ["none: a CPU-only build"]
    if not torch.cuda.is_available():
        return ["no GPU here"]
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return list(dict.fromkeys(conv_rules.describe((gpu.major, gpu.minor), gpu.name) for gpu in gpus))


def _print_plain(found: dict[str, str], table: dict[str, list[str]]) -> None:
    print(aligned(found.items(), "<<"))
    print(f"\n{len(table)} operators and their dispatch keys")
    print(aligned(((name, " ".join(keys) or "none") for name, keys in table.items()), "<<"))


def _print_rich(found: dict[str, str], table: dict[str, list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    # A pipe has no width. 200 keeps each fact on one line for a program that reads it.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    head = Table(box=None, show_header=False, pad_edge=False)
    head.add_column(style="bold cyan", no_wrap=True)
    head.add_column()
    for name, value in found.items():
        head.add_row(name, escape(value))
    console.print(head)
    body = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    body.add_column(f"{len(table)} operators", style="bold", no_wrap=True)
    body.add_column("dispatch keys")
    for name, keys in table.items():
        body.add_row(name, " ".join(keys) or "none")
    console.print(body)
