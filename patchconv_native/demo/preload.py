"""What workers have imported before they are forked."""

from . import worker

__all__ = ["worker"]
