"""Images on disk for `tile`: .npy files, .zarr arrays and TIFF files, as arrays of which parts are read and written."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .errors import Failed, Mistake, line

FORMATS = ".npy, .zarr, .tif or .tiff"
_PACKAGES = {".npy": "numpy", ".zarr": "zarr", ".tif": "tifffile", ".tiff": "tifffile"}


def check(name: str, path: Path) -> None:
    """Mistake where the file is of another format, or the package for it is missing."""
    package = _PACKAGES.get(path.suffix.lower())
    if package is None:
        raise Mistake(f"{name} {path}: expected a name that ends in {FORMATS}")
    if importlib.util.find_spec(package) is None:
        extra = package if package == "numpy" else f"'patchconv_native[{package}]'"
        raise Mistake(f"{name} {path}: needs {package}: pip install {extra}")


def _package(path: Path) -> Any:
    return importlib.import_module(_PACKAGES[path.suffix.lower()])


def read(path: Path) -> Any:
    """The image as an array of (N, C, H, W), of which nothing has been read yet."""
    if not path.exists():
        raise Mistake(f"INPUT {path}: is not there")
    try:
        package = _package(path)
        if path.suffix == ".npy":
            return package.load(path, mmap_mode="r")
        if path.suffix == ".zarr":
            return package.open_array(str(path), mode="r")
        return _tiff(package, path)
    except Mistake:
        raise
    except Exception as error:
        raise Failed(f"cannot read {path}: {line(error)}") from error


def _tiff(tifffile: Any, path: Path) -> Any:
    """Pages are channels; samples of a pixel are channels too."""
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        axes, dimensions, mapped = series.axes, len(series.shape), series.dataoffset is not None
    if mapped:
        image = tifffile.memmap(path, mode="r")
    else:  # compressed, or in tiles
        if importlib.util.find_spec("zarr") is None:
            raise Mistake(f"INPUT {path}: is compressed or in tiles, which needs zarr: pip install zarr")
        image = importlib.import_module("zarr").open_array(tifffile.imread(path, aszarr=True), mode="r")
    last = axes.endswith("S")
    if not 2 <= dimensions <= 4 or (dimensions == 2 and last):
        raise Mistake(f"INPUT {path}: expected 2 to 4 dimensions, got {dimensions} ({axes})")
    order = {2: (None, None, 0, 1), 3: (None, 2, 0, 1) if last else (None, 0, 1, 2)}
    return Ordered(image, order.get(dimensions, (0, 3, 1, 2) if last else (0, 1, 2, 3)))


class Ordered:
    """An array with its dimensions in another order. order: of each dimension, its own; None for one of size 1."""

    def __init__(self, array: Any, order: tuple[int | None, ...]) -> None:
        self._array, self._order, self.dtype = array, order, array.dtype
        self.shape = tuple(1 if d is None else array.shape[d] for d in order)

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        import numpy

        where = (*where, *[slice(None)] * (len(self._order) - len(where)))
        own = {d: part for d, part in zip(self._order, where, strict=True) if d is not None}
        part = numpy.asarray(self._array[tuple(own[d] for d in sorted(own))])
        part = part.transpose([d for d in self._order if d is not None])
        return part[tuple(None if d is None else slice(None) for d in self._order)]


def write(path: Path, shape: tuple[int, ...], dtype: Any, strip: int, again: bool) -> Any:
    """An array on disk to be written into. again: it is there already. strip: rows that are written at a time."""
    try:
        package = _package(path)
        if path.suffix == ".npy":
            npy = importlib.import_module("numpy.lib.format")
            return npy.open_memmap(path, "r+") if again else npy.open_memmap(path, "w+", dtype, shape)
        if path.suffix == ".zarr":
            if again:
                return package.open_array(str(path), mode="r+")
            chunks = [1] * len(shape)
            chunks[-2:] = (min(strip, shape[-2]), shape[-1]) if len(shape) > 3 else shape[-2:]
            return package.create_array(str(path), shape=shape, dtype=dtype, chunks=tuple(chunks), overwrite=True)
        if again:
            return package.memmap(path, mode="r+")
        return package.memmap(path, shape=shape, dtype=dtype, photometric="minisblack")
    except Exception as error:
        raise Failed(f"cannot write {path}: {line(error)}") from error
