"""Run by `make wheel` in a clean environment outside the source tree: the installed wheel works by itself."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import torch

import patchconv_native as pc

folder = Path(pc.__file__).resolve().parent
assert folder.is_relative_to(Path(sys.prefix).resolve()), f"imported from {folder}, not from the wheel"
built = pc.build_info()
assert importlib.metadata.version("patchconv_native") == built["version"]
release = ".".join(built["torch"].split(".")[:2])
assert f"torch=={release}.*" in (importlib.metadata.requires("patchconv_native") or [])

x = torch.randn(1, 3, 33, 41, requires_grad=True)
conv = torch.nn.Conv2d(3, 4, 5, padding=2)
expected = conv(x)
expected_grad = torch.autograd.grad(expected.square().sum(), x)[0]
y = pc.convert(torch.nn.Sequential(conv), splits=3)(x)
torch.testing.assert_close(y, expected)
torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected_grad)

assert pc.distributed.SpatialTensor.__module__ == "patchconv_native.spatial.tensor"
assert (folder / "conv_rules.json").is_file()
assert all((folder / "memory" / name).is_file() for name in ("page.css", "page.js"))
info = subprocess.run([sys.executable, "-I", "-m", "patchconv_native", "info"], capture_output=True, text=True)
assert info.returncode == 0 and "patchconv::conv2d" in info.stdout, info.stdout + info.stderr
script = Path(sys.executable).with_name("patchconv")
assert subprocess.run([script, "trace", "--help"], capture_output=True).returncode == 0
assert not [path.name for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".cu")]
print(f"the wheel works: patchconv_native {built['version']} from {folder}")
