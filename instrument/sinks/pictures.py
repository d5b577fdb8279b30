"""Recorded tensors as pictures: feature maps and filters as a grid of tiles.

A tensor of four dimensions gives the channels of its first sample; that of a parameter one tile for each filter and input
channel. One of three dimensions gives a tile for each entry of the first. No more than the first `TILES` are drawn, and of
a tile longer than `LONGEST` every n-th row and column.

Where there are negative values zero is mid-grey, black and white are the largest magnitude's; else black is zero and white
the largest. Values that are not finite are red, the lines between tiles blue.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..spec.kinds import KINDS

TILES = 64
LONGEST = 128  # pixels of a tile's side
SHORTEST = 32  # to which small tiles are enlarged, by a whole factor

WHITE, NOT_FINITE, BETWEEN = 253, 254, 255  # places in the palette; black is 0
PALETTE = [round(grey * 255 / WHITE) for grey in range(WHITE + 1) for _ in "rgb"] + [220, 40, 40] + [40, 60, 110]


class Arriving(NamedTuple):
    """Tiles in the CPU's memory, or on their way there.

    Attributes:
        tiles: float32, shape [tiles, height, width].
        arrived: The end of their way from a GPU; None where they are here.
    """

    tiles: Tensor
    arrived: torch.cuda.Event | None = None

    def here(self) -> np.ndarray[Any, Any]:
        """The tiles; waits for those that have not arrived."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: np.ndarray[Any, Any] = self.tiles.numpy()
        return found

    def painted(self) -> Image.Image:
        """The tiles as one image; waits for them."""
        return painted(self.here())


def tiles_of(kind: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Arriving | None:
    """A copy of what is to be drawn of a tensor, made without waiting for its device; None where it is no picture.

    Args:
        kind: The hook's kind, which tells filters from feature maps.
        tensor: Any shape, strided, on any device.
        dtype: The type that it is recorded in.
    """
    shown = _cut(tensor.detach(), filters=kind in KINDS and KINDS[kind].family != "module")
    if shown is None:
        return None
    shown = shown.to(dtype or shown.dtype)
    shown = shown.abs() if shown.is_complex() else shown
    if not shown.is_cuda:
        return Arriving(shown.to("cpu", torch.float32, copy=True))
    host = torch.empty(shown.shape, dtype=torch.float32, pin_memory=True)
    host.copy_(shown.to(torch.float32), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(shown.device))
    return Arriving(host, arrived)


def _cut(tensor: Tensor, *, filters: bool) -> Tensor | None:
    """The tiles, shape [tiles, height, width], as a view where that can be."""
    if tensor.dim() not in (3, 4) or not tensor.numel() or min(tensor.shape[-2:]) < 2:
        return None
    if tensor.dim() == 4:
        tensor = tensor[: math.ceil(TILES / tensor.shape[1])].flatten(0, 1) if filters else tensor[0]
    down, right = (math.ceil(side / LONGEST) for side in tensor.shape[-2:])
    return tensor[:TILES, ::down, ::right]


def painted(tiles: np.ndarray[Any, Any]) -> Image.Image:
    """Tiles side by side, as an image with a palette: it is a third of the bytes of the colours.

    Args:
        tiles: float32, shape [tiles, height, width].
    """
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
    """[tiles, height, width] to one of about as many rows as columns, with lines between them."""
    count, height, width = tiles.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    padded = np.full((rows * columns, height + 1, width + 1), BETWEEN, np.uint8)
    padded[:count, :-1, :-1] = tiles
    grid = padded.reshape(rows, columns, height + 1, width + 1).swapaxes(1, 2)
    return grid.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]
