"""A second executor of spatial rules: one process, no ranks. A call is computed tile by tile from a stored tensor.

For each tile of the result the call is first made on shapes alone (meta tensors), to learn which range of the input it
reads. Then it is made on that range. Where it needs a value of all tiles it is broken off, and all tiles are begun
again when each of them has given its value. Without gradients.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from patchconv_native.spatial import AtHand, Axis, Range, SpatialTensor, Wanted

Tile = tuple[Range, ...]
Answers = list[dict[Tile, Tensor]]
NAMES = {3: "NCL", 4: "NCHW", 5: "NCDHW"}


class NeedsAllTiles(Exception):
    def __init__(self, value: Tensor) -> None:
        self.value = value


@dataclass
class Asked:
    """What one call for one tile has asked for. answers: each tile's values, for every question that all have asked.
    reads: by the image's number and the place of the dimension.
    """

    tile: Tile
    answers: Answers
    first: bool
    reads: dict[tuple[int, int], Range] = field(default_factory=dict)
    questions: int = 0


@dataclass
class Along:
    """`spatial.Executor` of the cut dimension of this place among the cut dimensions."""

    asked: Asked
    place_of: int
    image: int = field(default=0, compare=False)
    advice: str = ""
    link: None = None
    unread: bool = False

    @property
    def updates_buffers(self) -> bool:
        return self.asked.first

    def place(self, operator: str, axis: Axis, wished: Sequence[int], size: int) -> Axis:
        begin, end = self.asked.tile[self.place_of]
        return Axis(axis.name, (0, begin, end, size), 1, self)

    def fetch(
        self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, pads: tuple[int, int] = (0, 0), fill: float = 0.0,
        fresh: bool = False,
    ) -> AtHand:  # fmt: skip
        ranges, key = wanted[axis.index] or ((0, 0),), (self.image, self.place_of)
        assert key not in self.asked.reads, "fetched twice along one dimension"
        self.asked.reads[key] = min(a for a, _ in ranges), max(b for _, b in ranges)
        parts = [x.narrow(dim, a - axis.range[0], b - a) for a, b in ranges]
        shapes = [[*x.shape[:dim], n, *x.shape[dim + 1 :]] for n in pads]
        return AtHand(torch.cat([x.new_full(shapes[0], fill), *parts, x.new_full(shapes[1], fill)], dim), dim)

    def sum(self, values: Tensor) -> Tensor:
        return self.stack(values[None]).sum(0)

    def known(self) -> None:
        return None

    def stack(self, values: Tensor) -> Tensor:
        """Of the tiles that lie beside this one along this dimension."""
        asked, place = self.asked, self.place_of
        number, asked.questions = asked.questions, asked.questions + 1
        if number == len(asked.answers):
            raise NeedsAllTiles(values)
        others = asked.tile[:place], asked.tile[place + 1 :]
        return torch.cat([v for t, v in asked.answers[number].items() if (t[:place], t[place + 1 :]) == others])


def _call(
    module: nn.Module, images: Sequence[Tensor], boxes: Sequence[Sequence[Range]], dims: Sequence[int], asked: Asked
) -> Tensor:
    parts = []
    for number, (image, box) in enumerate(zip(images, boxes, strict=True)):
        axes, part = {}, image
        for place, (d, (begin, end)) in enumerate(zip(dims, box, strict=True)):
            along = Along(asked, place, number)
            axes[d] = Axis(NAMES[image.dim()][d], (0, begin, end, image.size(d)), 1, along)
            part = part.narrow(d, begin, end - begin)
        parts.append(SpatialTensor.from_local(part, axes))
    return module(*parts)


def clipped(tile: Range, size: int) -> Range:
    return min(tile[0], size), min(tile[1], size)


def _boxes(shapes: nn.Module, images: Sequence[Tensor], tile: Tile, dims: Sequence[int]) -> list[list[Range]]:
    """What a tile reads of each image. Where nothing is fetched along a dimension, the tile's own range."""
    asked = Asked(tile, [], False)
    with contextlib.suppress(NeedsAllTiles):  # it has asked for its ranges by then
        whole = [[(0, image.size(d)) for d in dims] for image in images]
        _call(shapes, [image.to("meta") for image in images], whole, dims, asked)
    return [
        [asked.reads.get((i, place), clipped(tile[place], image.size(d))) for place, d in enumerate(dims)]
        for i, image in enumerate(images)
    ]


@torch.no_grad()
def by_tiles(module: nn.Module, images: Sequence[Tensor], cuts: dict[int, Sequence[int]]) -> Tensor:
    """module(*images), of a module that makes one call. cuts: for each cut dimension, where the result is cut."""
    tiles = list(itertools.product(*(itertools.pairwise(places) for places in cuts.values())))
    shapes = copy.deepcopy(module).to("meta")
    boxes = {tile: _boxes(shapes, images, tile, list(cuts)) for tile in tiles}
    answers: Answers = []
    while True:
        values, parts = {}, {}
        for tile, box in boxes.items():
            try:
                parts[tile] = _call(module, images, box, list(cuts), Asked(tile, answers, tile == tiles[0]))
            except NeedsAllTiles as needs:
                values[tile] = needs.value
        if not values:
            break
        answers.append(values)
    result = parts[tiles[0]]
    if not isinstance(result, SpatialTensor):
        return result  # the same for every tile
    whole = torch.full(result.shape, torch.nan, dtype=result.dtype)
    for part in parts.values():
        where = [slice(None)] * whole.dim()
        for d, axis in part.axes.items():
            where[d] = slice(*axis.range)
        whole[tuple(where)] = part.to_local()
    return whole
