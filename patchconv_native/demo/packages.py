"""Whether the packages that the demo needs are installed."""

from __future__ import annotations

import importlib.util

from ..commands.errors import Mistake

NEEDED = {
    "numpy": "numpy",
    "PIL": "pillow",
    "matplotlib": "matplotlib",
    "rich": "rich",
}
"""Modules besides torch, and the packages that bring them."""
EXTRA = "pip install 'patchconv_native[demo]'"


def check_installed(bundled_photo: bool) -> None:
    """Raises Mistake if a package is missing. Imports none of them."""
    needed = NEEDED | ({"skimage": "scikit-image"} if bundled_photo else {})
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise Mistake(f"needs {', '.join(missing)}, not installed here; install with: {EXTRA}")
