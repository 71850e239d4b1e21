"""What workers have imported before they are forked."""

import contextlib

with contextlib.suppress(Exception):  # the demo itself reports a torchvision that cannot be imported
    import torchvision.models

from . import worker

__all__ = ["torchvision", "worker"]
