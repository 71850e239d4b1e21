"""Opens the photograph and brings it to size.

Reads 8- and 16-bit pictures of any mode that Pillow reads, as three bytes a pixel (H, W, 3). One that is too large
is made smaller here. One that is too small is enlarged where it is used, a strip at a time.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..commands.errors import Mistake

BUNDLED = ("skimage", "data/rocket.jpg")  # photographed by SpaceX, in the public domain
SMALLEST_SIDE = 16
NARROWEST = 400  # the most that the long side may be of the short one
LARGEST_PIXELS = 2**30  # 3 GiB of bytes once decoded


@dataclass(frozen=True)
class Photo:
    """A photograph, and the size (height, width) at which it is restored."""

    name: str
    pixels: np.ndarray  # uint8 (h, w, 3), no larger than `size`
    size: tuple[int, int]
    opened_size: tuple[int, int]  # as it was in the file

    @property
    def scale(self) -> float:
        """How far the picture is enlarged: 1 for a picture that is large enough."""
        return self.size[1] / self.pixels.shape[1]

    def crop(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """A window of the picture at its size, uint8 (height, width, 3)."""
        down, across = self.pixels.shape[0] / self.size[0], self.pixels.shape[1] / self.size[1]
        box = (left * across, top * down, (left + width) * across, (top + height) * down)
        window = Image.fromarray(self.pixels).resize((width, height), Image.Resampling.BICUBIC, box=box)
        return np.asarray(window)


def load(file: Path | None, megapixels: float) -> Photo:
    """Opens `file`, or the bundled photograph, to be restored at `megapixels` (rounded up).

    Raises Mistake for a file that is no picture, and for a picture that is too small or too narrow.
    """
    picture = _open(_bundled() if file is None else file)
    opened = (picture.height, picture.width)
    if min(opened) < SMALLEST_SIDE:
        raise Mistake(f"the picture is {opened[1]} x {opened[0]} pixels; either side must be {SMALLEST_SIDE} or more")
    scale = math.sqrt(megapixels * 1e6 / (opened[0] * opened[1]))
    # Whole multiples of 8, so that strides divide and the picture shrinks evenly for display.
    height, width = (8 * math.ceil(side * scale / 8) for side in opened)
    if not workable((height, width)):
        raise Mistake(
            f"the picture is {opened[1]} x {opened[0]} pixels, {width} x {height} at {megapixels:g} megapixels; there "
            f"either side must be {SMALLEST_SIDE} or more and at least 1/{NARROWEST} of the other"
        )
    if scale < 1:
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    name = "a rocket at dusk" if file is None else file.name
    return Photo(name, np.array(picture), (height, width), opened)


def workable(size: tuple[int, int]) -> bool:
    """Whether a picture of this size can be restored and drawn."""
    return min(size) >= max(SMALLEST_SIDE, max(size) / NARROWEST)


def _open(file: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            # Pillow treats pictures of more than 89 megapixels as attacks. Here the user chose the file.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, LARGEST_PIXELS // 2
            try:
                with Image.open(file) as picture:
                    return _as_rgb(picture)
            finally:
                Image.MAX_IMAGE_PIXELS = limit
    except FileNotFoundError:
        raise Mistake(f"there is no file {file}") from None
    except IsADirectoryError:
        raise Mistake(f"{file} is a folder, not a picture") from None
    except UnidentifiedImageError:
        raise Mistake(f"{file} is not a picture that Pillow can read") from None
    except Image.DecompressionBombError:
        raise Mistake(f"{file} has more than {LARGEST_PIXELS / 1e6:.0f} megapixels") from None
    except MemoryError:
        raise Mistake(f"{file} does not fit into memory once decoded") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # damaged files end in any of these
        raise Mistake(f"{file} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}") from None


def _as_rgb(picture: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(picture)
    if upright.mode.startswith(("I", "F")):  # 16 bits and more: the picture's own range becomes 0 to 255
        values = np.asarray(upright, dtype=np.float32)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        values = np.nan_to_num((values - low) / max(high - low, 1e-12))
        upright = Image.fromarray((values * 255 + 0.5).astype(np.uint8))
    if upright.has_transparency_data:
        solid = upright.convert("RGBA")
        white = Image.new("RGBA", solid.size, "white")
        upright = Image.alpha_composite(white, solid)
    return upright.convert("RGB")


def _bundled() -> Path:
    package, inside = BUNDLED
    spec = importlib.util.find_spec(package)  # found, not imported: importing it costs a second and brings scipy
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(folder) / inside).is_file():
            return file
    raise Mistake(f"this scikit-image comes without {inside}; name a picture with --image")
