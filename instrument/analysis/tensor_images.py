"""Recorded tensors as images: channels of feature maps, filters of convolutions, and input images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..config.base import parse_slice
from ..tables.kinds import KINDS
from .features import recorded_positions, settings_of
from .plot_data import PlottedTensor, recorded_tensors
from .run_tables import RunTables

GREY, COLOURED = 1, 3  # numbers of channels of an image


@dataclass(frozen=True)
class TensorMaps(PlottedTensor):
    """A stack of maps: [N, C, H, W], [C, H, W] of one sample, or [out, in, H, W] of filters."""

    samples: tuple[int, ...]  # the position in the batch of each recorded sample

    @property
    def what(self) -> str:
        """`inputs`, `feature maps`, `gradient maps`, `filters` or `filter gradients`."""
        if self.series.is_of_parameters:
            return "filter gradients" if self.series.is_gradient else "filters"
        if self.series.role == "input" and not self.series.is_gradient:
            return "inputs"
        return "gradient maps" if self.series.is_gradient else "feature maps"

    @property
    def is_image(self) -> bool:
        """Whether the maps are an image: the input of a module, with one or three channels."""
        return self.what == "inputs" and self.shape[-3] in (GREY, COLOURED)

    def values(self, run: RunTables | pd.DataFrame, sample: int = 0) -> np.ndarray:
        """Return the maps of a recorded sample, [C, H, W], or all filters, [out, in, H, W]; the magnitudes of complex values."""
        array = self.read(run)
        array = np.abs(array) if np.iscomplexobj(array) else array
        return array if self.series.is_of_parameters or array.ndim == 3 else array[sample]


def maps_in(run: RunTables | pd.DataFrame) -> list[TensorMaps]:
    """Return all recorded tensors that can be shown as maps.

    These are tensors with four dimensions in the model, of which at least height and width were recorded.
    """
    all_maps = []
    for tensor in recorded_tensors(run):
        shape = tensor.shape
        plane = len(shape) in (3, 4) and min(shape) > 0 and max(shape[-2:]) > 1
        is_complete = len(shape) == 4 or KINDS[tensor.series.kind].family == "module"
        if len(tensor.source_shape) == 4 and plane and is_complete:
            spec = settings_of(run.files[0], tensor.series.hook) if isinstance(run, RunTables) else {}
            all_maps.append(TensorMaps(**vars(tensor), samples=_samples(tensor, spec)))
    return all_maps


def _samples(tensor: PlottedTensor, spec: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the positions in the batch of the recorded samples of a tensor; the first ones if these are unknown."""
    part = spec.get("slice")
    first = None if part is None else parse_slice(part)[0]
    if isinstance(first, int):
        return (range(tensor.source_shape[0])[first],)
    known = recorded_positions(tensor.shape, tensor.source_shape, spec) if spec else None
    return tuple(range(tensor.shape[0]) if known is None else known.tolist())


def image_of(maps: TensorMaps, others: list[TensorMaps], sample: int = 0) -> tuple[TensorMaps, int] | None:
    """Return the input images of the maps and the index of the recorded sample among them; None if it was not recorded.

    These are the input of the first module whose input is an image, in the same batch.
    """
    if maps.series.is_of_parameters:
        return None
    images = next((other for other in others if other.batch == maps.batch and other.is_image), None)
    position = maps.samples[sample if len(maps.shape) == 4 else 0]
    if images is None or position not in images.samples:
        return None
    return images, images.samples.index(position)


def mosaic(values: np.ndarray, *, columns: int | None = None) -> np.ndarray:
    """Arrange maps in a grid, separated by NaN: float64 [rows * (H + 1) - 1, columns * (W + 1) - 1].

    `values`: [C, H, W]; or [out, in, H, W], of which a row of the grid has all inputs of one or several outputs. Without `columns`, the
    grid is about square.
    """
    together = values.shape[1] if values.ndim == 4 else 1  # maps that must be in the same row
    values = values.reshape(-1, *values.shape[-2:])
    count, height, width = values.shape
    square = (count * (height + 1) / (width + 1)) ** 0.5
    columns = columns or together * min(count // together, max(1, round(square / together)))
    rows = -(-count // columns)
    room = np.full((rows * columns, height + 1, width + 1), np.nan)
    room[:count, :height, :width] = values
    whole = room.reshape(rows, columns, height + 1, width + 1).swapaxes(1, 2)
    return whole.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]


def limits(values: np.ndarray) -> tuple[float, float]:
    """Return the limits of a color scale of the finite values: symmetric around zero if some are negative, else starting at zero."""
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    largest = largest or 1.0
    return (-largest if finite.size and finite.min() < 0 else 0.0), largest


def relative_to_channels(values: np.ndarray) -> np.ndarray:
    """Divide each map [..., H, W] by its largest finite magnitude, so that each channel has its own scale, from -1 to 1.

    A map of zeros is unchanged.
    """
    largest = np.abs(np.where(np.isfinite(values), values, 0.0)).max((-2, -1), keepdims=True)
    return values / np.where(largest == 0.0, 1.0, largest)


def smaller(values: np.ndarray, most: int) -> np.ndarray:
    """Downsample maps [..., H, W] to at most `most` pixels per side by averaging square blocks; the last one may be narrower."""
    factor = -(-max(values.shape[-2:]) // most)
    if factor <= 1:
        return values
    sums = values.astype(np.float64)
    for axis in (-2, -1):
        starts = np.arange(0, values.shape[axis], factor)
        counts = np.diff([*starts, values.shape[axis]])
        shape = [1] * values.ndim
        shape[axis] = -1
        sums = np.add.reduceat(sums, starts, axis=axis) / counts.reshape(shape)
    return sums
