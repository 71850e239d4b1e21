"""The rules by which an image is computed in parts: for each function of torch, what a part of its result reads, how it
is computed, and what it needs of the whole image.

`rules` has the table, which the files of rules fill as they are imported here. `axis` has the interface to what runs
them, the executor; `tensor` the value that they take and give. A rule is called once for every part, each time as if
that part alone were here, and asks the executor of each cut dimension for what belongs to others.
"""

from . import convs, dropout, extremes, joins, norms, pointwise, pools, products, reductions, resize, shapes, unfold  # noqa: F401
from .axis import AtHand, Axes, Axis, Executor, Fetch, Range, Wanted
from .rules import NotServed
from .tensor import SpatialTensor

__all__ = ["AtHand", "Axes", "Axis", "Executor", "Fetch", "NotServed", "Range", "SpatialTensor", "Wanted"]
