"""Pictures of recorded tensors: feature maps and filters as a grid of tiles.

A 4D tensor of a module shows the channels of its first sample; a 4D parameter shows one tile per filter and input
channel. A 3D tensor shows one tile per index of dimension 0. At most `TILES` tiles are drawn. Tiles longer than
`LONGEST` are subsampled.

If there are negative values, zero is mid-gray, and black and white are the largest magnitude. Otherwise black is zero
and white is the maximum. Values that are not finite are red; the lines between tiles are blue.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..stats.device_copy import HostCopy
from ..tables.kinds import KINDS

TILES = 64
LONGEST = 128  # maximum side of a tile in pixels; longer tiles are subsampled
SHORTEST = 32  # small tiles are enlarged to this side by an integer factor

WHITE, NOT_FINITE, BETWEEN = 253, 254, 255  # indices in the palette; black is 0
PALETTE = [round(grey * 255 / WHITE) for grey in range(WHITE + 1) for _ in "rgb"] + [220, 40, 40] + [40, 60, 110]


def tiles_of(kind: str, tensor: Tensor, dtype: torch.dtype | None = None) -> HostCopy | None:
    """Copy the displayed part of a tensor without waiting for its device.

    Args:
        kind: The hook kind. It distinguishes filters from feature maps.
        tensor: Any shape, strided, on any device.
        dtype: The dtype in which it is recorded; None for its own.

    Returns:
        The copy of the tiles, float32, shape [tiles, height, width]; None if the tensor cannot be drawn.
    """
    shown = _cut(tensor.detach(), filters=kind in KINDS and KINDS[kind].family != "module")
    if shown is None:
        return None
    shown = shown.to(dtype or shown.dtype)
    shown = shown.abs() if shown.is_complex() else shown
    return HostCopy(shown.to(torch.float32))


def _cut(tensor: Tensor, *, filters: bool) -> Tensor | None:
    """Return the tiles, shape [tiles, height, width], as a view if possible."""
    if tensor.dim() not in (3, 4) or not tensor.numel() or min(tensor.shape[-2:]) < 2:
        return None
    if tensor.dim() == 4:
        tensor = tensor[: math.ceil(TILES / tensor.shape[1])].flatten(0, 1) if filters else tensor[0]
    down, right = (math.ceil(side / LONGEST) for side in tensor.shape[-2:])
    return tensor[:TILES, ::down, ::right]


def draw_tiles(tiles: np.ndarray[Any, Any]) -> Image.Image:
    """Draw tiles, float32 [tiles, height, width], as an image with a palette, which takes a third of the bytes of RGB."""
    finite = np.isfinite(tiles)
    known = np.where(finite, tiles, np.float32(0.0))
    low, high = float(known.min()), float(known.max())
    largest = max(-low, high) or 1.0
    grey = 0.5 + known * np.float32(0.5 / largest) if low < 0 else known / np.float32(largest)
    colours = np.where(finite, np.rint(grey * WHITE), NOT_FINITE).astype(np.uint8)
    zoom = max(1, SHORTEST // max(tiles.shape[1:]))
    image = Image.fromarray(_grid(colours.repeat(zoom, axis=1).repeat(zoom, axis=2)), "L")
    image.putpalette(PALETTE)
    return image


def _grid(tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Arrange [tiles, height, width] in a grid with about as many rows as columns and lines in between."""
    count, height, width = tiles.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    padded = np.full((rows * columns, height + 1, width + 1), BETWEEN, np.uint8)
    padded[:count, :-1, :-1] = tiles
    grid = padded.reshape(rows, columns, height + 1, width + 1).swapaxes(1, 2)
    return grid.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]
