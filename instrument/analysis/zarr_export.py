"""Export of recorded tensors to Zarr arrays, stacked over the firings of a hook.

    tensors.zarr/digit_maps/encoder.0/output/values    [firing, dim_1, dim_2, ...]
    tensors.zarr/digit_maps/encoder.0/output/step      [firing]

There is one group for each hook, layer and role, with a subgroup for each path of a nested value or parameter. Other
identity columns are coordinates like `step` if they vary between firings, and attributes of the group otherwise. If
shapes or dtypes differ, each combination has its own group, such as `float32_8x16x16`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr

from ..capture.sink import Row
from ..capture.tables import TABLES
from ..sinks.tags import group_of, segment
from .arrays import array_of
from .replay import rows_of
from .run_files import RunFiles

CHUNK_BYTES = 4 * 2**20
LARGEST_CHUNK_BYTES = 256 * 2**20  # limit for a single tensor that is larger than CHUNK_BYTES
WAITING_BYTES = 256 * 2**20  # limit for all incomplete chunks together

NAMES = TABLES["tensors"].names
HEAD = NAMES[:-2]  # all columns except the elements
COORDINATES = ("step", "micro_step", "epoch", "rank", "call", "backward", "recompute")
ATTRIBUTES = ("hook", "layer", "role", "path", "kind", "module_type", "phase", "dtype")


def _columns(names: tuple[str, ...]) -> itemgetter[Any]:
    return itemgetter(*(NAMES.index(name) for name in names))


_coordinates, _attributes = _columns(COORDINATES), _columns(ATTRIBUTES)
_series = _columns(("hook", "phase", "layer", "role", "path", "dtype", "shape"))
_elements = _columns(("values", "data", "shape", "dtype"))


class Series(NamedTuple):
    """The tensors that are stacked into one array: same location, dtype and shape."""

    place: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, row: Row) -> Series:
        """Return the series of a row of the tensors table."""
        hook, phase, layer, role, path, dtype, shape = _series(row)
        place = f"{group_of(hook, phase)}/{segment(layer)}/{segment(role)}" + (f"/{segment(path)}" if path else "")
        return cls(place, dtype, tuple(shape))


def write_zarr(files: RunFiles, folder: Path) -> int:
    """Write all recorded tensors into a new store.

    Memory use does not grow with the run, except for the coordinates. Tensors of unsupported dtypes are skipped and
    added to the problems of `files`; bfloat16 and float8 are converted to float32, complex32 to complex64.

    Returns:
        The number of arrays.

    Raises:
        OSError: The store cannot be written.
    """
    counts = Counter(Series.of(row) for batch in files.scan("tensors", HEAD) for row in rows_of(batch))
    of_place = Counter(series.place for series in counts)
    room = min(CHUNK_BYTES, WAITING_BYTES // max(1, len(counts)))
    root = zarr.open_group(str(folder), mode="w-")
    stacks: dict[Series, Stack] = {}
    for batch in files.scan("tensors", NAMES):
        for row in rows_of(batch):
            series = Series.of(row)
            try:
                tensor = array_of(*_elements(row))
            except TypeError:
                files.note_left_out("tensors", f"NumPy has no type {series.dtype}")
                continue
            if series not in stacks:
                own = "" if of_place[series.place] <= 1 else "/" + _told(series)
                stacks[series] = Stack(root.require_group(series.place + own), tensor, counts[series], room)
            stacks[series].add(row, tensor)
    for stack in stacks.values():
        stack.close()
    return len(stacks)


class Stack:
    """One growing array.

    Args:
        group: The Zarr group of the array and its coordinates.
        like: One of the tensors.
        count: Approximate number of tensors.
        room: Maximum number of buffered bytes.
    """

    def __init__(self, group: zarr.Group, like: np.ndarray[Any, Any], count: int, room: int) -> None:
        self.group = group
        self.firings = max(1, min(count, room // max(1, like.nbytes)))  # firings per chunk
        names = ["firing", *(f"dim_{place}" for place in range(1, like.ndim + 1))]
        self.values = group.create_array(
            "values",
            shape=(0, *like.shape),
            chunks=(self.firings, *_chunk(like)),
            dtype=like.dtype,
            dimension_names=names,
        )
        self._waiting: list[np.ndarray[Any, Any]] = []
        self._coordinates = array("q")
        self._attributes: dict[str, str] = {}

    def add(self, row: Row, tensor: np.ndarray[Any, Any]) -> None:
        """Append the tensor of a row."""
        self._attributes = dict(zip(ATTRIBUTES, _attributes(row), strict=True))
        self._coordinates.extend(_coordinates(row))
        self._waiting.append(tensor.copy())  # a view would keep the memory of the whole batch
        if len(self._waiting) == self.firings:
            self._write()

    def close(self) -> None:
        """Write the buffered tensors and the coordinates."""
        self._write()
        table = np.array(self._coordinates, np.int64).reshape(-1, len(COORDINATES))
        constant = {
            name: int(table[0, place]) for place, name in enumerate(COORDINATES) if np.ptp(table[:, place]) == 0
        }
        constant.pop("step", None)
        differing = [name for name in COORDINATES if name not in constant]
        for name in differing:
            numbers = table[:, COORDINATES.index(name)]
            coordinate = self.group.create_array(name, shape=numbers.shape, dtype="int64", dimension_names=["firing"])
            coordinate[:] = numbers
        self.values.attrs["coordinates"] = " ".join(differing)
        self.group.attrs.update({**self._attributes, **constant})

    def _write(self) -> None:
        if self._waiting:
            start = self.values.shape[0]
            self.values.resize((start + len(self._waiting), *self.values.shape[1:]))
            self.values[start:] = np.stack(self._waiting)
            self._waiting = []


def _chunk(tensor: np.ndarray[Any, Any]) -> list[int]:
    """Return the chunk shape of a tensor; the longest sides of a large tensor are halved until it fits."""
    sides = [max(1, side) for side in tensor.shape]
    while math.prod(sides) * tensor.itemsize > LARGEST_CHUNK_BYTES:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    return sides


def _told(series: Series) -> str:
    return f"{series.dtype}_{'x'.join(map(str, series.shape)) or 'scalar'}"
