"""Whole networks strip by strip in one process: the executor of spatial rules behind `tile`.

`record` writes down what a module computes; `views` and `filled` follow what it writes in place. `kinds` finds what
needs the whole image first, `sweeps` which rows each strip computes and reads, `plan` how thin strips are and what is
stored, by the predictions of `costs`. `run` computes; `transfers` copies beside it, where a GPU does.
"""

from .modules import tile_modules
from .plan import TilePlan
from .tiling import tile, tile_plan

__all__ = ["TilePlan", "tile", "tile_modules", "tile_plan"]
