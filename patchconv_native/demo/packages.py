"""Whether the packages that the demo needs are installed and usable."""

from __future__ import annotations

import importlib
import importlib.util

from .errors import DemoError

NEEDED = {
    "numpy": "numpy",
    "PIL": "pillow",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "torchvision": "torchvision",
}
"""Modules besides torch, and the packages that bring them."""
EXTRA = "pip install 'patchconv_native[demo]'"


def check_installed(bundled_photo: bool) -> None:
    """Raises DemoError if a package is missing. Imports none of them."""
    needed = NEEDED | ({"skimage": "scikit-image"} if bundled_photo else {})
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoError(f"needs {', '.join(missing)}, not installed here; install with: {EXTRA}")


def check_torchvision() -> None:
    """Imports torchvision. Raises DemoError if that fails, as it does beside a torch that it was not compiled for."""
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DemoError(f"the torchvision installed here does not work with this torch ({reason})") from error
