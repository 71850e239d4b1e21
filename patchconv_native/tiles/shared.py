"""An image of which each rank holds a part: what its strips read of the others' parts.

All ranks make the same plan, of bands, and each computes bands of its own, a strip at a time, in step with the others.
What a strip reads beyond the rank's part comes by messages while the others compute theirs. What follows of all parts,
such as statistics, is put together after each sweep, and is the same on every rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..spatial import Axis, Executor, NotServed, Range, SpatialTensor, Wanted
from ..spatial.layout import joined, order

MOST_DIMENSIONS = 8
"""Of what is summed over ranks."""
_SUMMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def along(region: Sequence[Range]) -> Range:
    """What a rank reads along the axis between ranks, of a part of a value, rows first."""
    return (0, 0) if any(low >= high for low, high in region) else region[1]


def _wanted(ranges: Sequence[Range]) -> Wanted:
    return tuple((one,) if one[0] < one[1] else () for one in ranges)


class OnRanks(Executor, Protocol):
    """An executor whose parts are on ranks."""

    def give_back(self, x: Tensor, dim: int, axis: Axis, wanted: Wanted, into: Tensor) -> None:
        """The way back of `fetch`: adds what every rank has, `x`, for the ranges that it wanted, where these came from:
        to `into`, this rank's part of a tensor that is cut along `dim` as `axis`.
        """
        ...


@dataclass(frozen=True)
class Shared:
    """axis: along which the images are cut between ranks. It is the first one of `Kinds.others`. given: where each of
    the images is cut.
    """

    axis: Axis
    given: tuple[tuple[int, ...], ...]
    executor: OnRanks

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.axis.count

    @property
    def index(self) -> int:
        """Which one this is."""
        return self.axis.index

    def cuts(self, size: int) -> tuple[int, ...]:
        """Where a value of this size is cut between ranks that is computed here: where its bands are."""
        return tuple(size * rank // self.count for rank in range(self.count + 1))

    def part(self, cuts: Sequence[int]) -> Range:
        """This rank's."""
        return cuts[self.index], cuts[self.index + 1]

    def width(self, width: Fraction = Fraction(1)) -> Fraction:
        """Of bands that are no wider than this share of the image, and of which each rank has the same number."""
        return Fraction(1, self.count * max(1, -(-1 // (width * self.count))))

    def bands(self, count: int, rank: int | None = None) -> range:
        """Of so many bands, those of this rank, or of another."""
        each, rank = count // self.count, self.index if rank is None else rank
        return range(rank * each, (rank + 1) * each)

    def peers(self, count: int, band: int) -> list[int]:
        """The bands, out of so many, that all ranks compute at the time when one of them computes this band."""
        each = count // self.count
        return [rank * each + band % each for rank in range(self.count)]

    def fetch(self, x: Tensor, dim: int, cuts: tuple[int, ...], ranges: Sequence[Range]) -> Tensor:
        """x: this rank's part. ranges: what each rank wants."""
        return self.executor.fetch(x, dim, self.axis.cut_at(cuts), _wanted(ranges)).finish()

    def give_back(self, x: Tensor, dim: int, cuts: tuple[int, ...], ranges: Sequence[Range], into: Tensor) -> None:
        """Adds x, gradients of what this rank has fetched, where that came from: to `into`, of this rank's part."""
        self.executor.give_back(x, dim, self.axis.cut_at(cuts), _wanted(ranges), into)

    def sum(self, found: dict[Any, Tensor], keys: Sequence[Any], device: torch.device) -> None:
        """Adds up what the ranks have found, in place. keys: of all that there may be; a rank may have found less."""
        known = torch.full((1, len(keys), 2 + MOST_DIMENSIONS), -1)
        for row, key in zip(known[0], keys, strict=True):
            if key in found:
                one = found[key]
                row[: 2 + one.dim()] = torch.tensor([_SUMMED.index(one.dtype), one.dim(), *one.shape])
        every = self.executor.stack(known.to(device)).amax(0).tolist()
        for key, (dtype, dims, *sizes) in zip(keys, every, strict=True):
            if dims < 0:
                continue  # nobody has it
            if key not in found:
                found[key] = torch.zeros(sizes[:dims], dtype=_SUMMED[dtype], device=device)
            own = found[key]
            total = self.executor.sum(own.contiguous())
            if total is not own:
                own.copy_(total)

    def alike(self, values: dict[str, bytes], device: torch.device) -> list[str]:
        """The names of those that are not the same on every rank. Each rank gets the same answer."""
        own = torch.tensor([[zlib.crc32(one) for one in values.values()]], device=device)
        found = self.executor.stack(own)
        return [name for name, differs in zip(values, (found != found[:1]).any(0).tolist(), strict=True) if differs]

    def failed(self, own: bool, device: torch.device) -> list[int]:
        """The ranks that say True. Each rank gets the same answer."""
        return self.executor.stack(torch.tensor([int(own)], device=device)).nonzero().flatten().tolist()

    def close(self, rows: Tensor) -> bool:
        """Whether the first number of each row is about the same on every rank; the second one is how far it may be
        off. Each rank gets the same answer.
        """
        found = self.executor.stack(rows[None])
        return not bool(((found - found[:1])[..., 0].abs() > found[:1, ..., 1]).any())

    def stack(self, shares: Tensor, counts: Sequence[int]) -> Tensor:
        """All ranks' shares, rank by rank. counts: how many each rank has along the first dimension."""
        missing = max(counts) - shares.size(0)
        if missing:
            shares = joined([shares, shares[-1:].expand(missing, *shares.shape[1:])])
        found = self.executor.stack(shares).split(max(counts))
        return joined([one[:count] for one, count in zip(found, counts, strict=True)])


def shared_by(owner: str, images: Sequence[Any]) -> tuple[int, Shared] | None:
    """Along which dimension images are cut between ranks, and between whom. None where they are whole."""
    parts = [image for image in images if isinstance(image, SpatialTensor)]
    if not parts:
        return None
    if len(parts) < len(images):
        raise ValueError(
            f"{owner}: expected all images to be parts of images or none, got {len(parts)} of {len(images)}"
        )
    places = [{dim: axis.cut_at(()) for dim, axis in part.axes.items()} for part in parts]
    if any(one != places[0] for one in places):
        raise ValueError(f"{owner}: expected all images to be cut along the same dimension between the same ranks")
    if len(parts[0].axes) > 1:
        raise NotServed(
            f"{owner}: images that are cut between ranks along {len(parts[0].axes)} dimensions are not served"
        )
    dim, axis = next(iter(parts[0].axes.items()))
    given = tuple(part.axes[dim].cuts for part in parts)
    return dim, Shared(axis, given, cast(OnRanks, axis.executor))


def strides_of(image: Tensor) -> tuple[int, ...]:
    """Of a whole image, as if it were there, where this is a part of it."""
    if not isinstance(image, SpatialTensor):
        return image.stride()
    return torch.empty(image.shape, device="meta", memory_format=order(image._local)).stride()
