"""Single recorded tensors, or slices of them, read from where they are: block files are mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from ..storage.blocks import BlockReader, Bytes, Place, copy_rows
from ..storage.checksums import arrow_files
from ..storage.remote_folder import arrow_name
from ..storage.run_files import RunFiles, row_groups
from ..tables.schemas import TABLES
from .frames import SCALED, array_of, cells_of, plain_labels

if TYPE_CHECKING:
    from torch import Tensor

GROUPS_IN_MEMORY = 4  # row groups of Parquet files, of 16 MB each
_VALUES = ["values", "data"]


class _Group(NamedTuple):
    """Rows outside of block files: a row group of a Parquet file, or rows of a journal or of a probe in memory."""

    file: Path
    number: int
    rows: pa.Table | None


class RawTensors:
    """The recorded tensors of one run, of which each is read when it is needed.

    Tensors in block files are views of mapped memory. Those in Parquet files are read with their row group. It can be pickled, for
    worker processes. Tensors that a run in progress records later are not included. Row i of `index`, with `COLUMNS` and the other
    requested columns, describes tensor i.
    """

    COLUMNS: ClassVar[list[str]] = ["rank", "dtype", "shape", *Place._fields]

    def __init__(
        self, folder: Path, index: pa.Table, groups: Sequence[_Group], rows: Sequence[tuple[int, int]]
    ) -> None:
        self.folder = folder
        self.index = index
        self._groups = groups
        self._rows = rows  # the group of each tensor, and the row in it
        self._blocks = BlockReader(folder)
        self._verified: set[int] = set()

    @classmethod
    def of(cls, files: RunFiles, columns: Sequence[str] = (), condition: ds.Expression | None = None) -> RawTensors:
        """Find the tensors that a condition on the columns of `tensors` selects, in the order in which they were written.

        The index has further columns, if they are requested; `values` and `data` are read later.
        """
        table = TABLES["tensors"]
        read = [name for name in table.names if name not in _VALUES]
        pieces: list[pa.Table] = []
        groups: list[_Group] = []
        rows: list[tuple[int, int]] = []
        for file, piece in files.fragments(table):
            for part in row_groups(piece):
                with files.errors_reported(file):
                    index = part.to_table(schema=table.schema, columns=read)
                    index = index.append_column("row", pa.array(np.arange(len(index))))
                    index = index if condition is None else index.filter(condition)
                    numbers = index["row"].to_pylist()
                    is_file = isinstance(part, ds.ParquetFileFragment)
                    in_memory = None if is_file else part.to_table(schema=table.schema, columns=_VALUES)
                    rows += [(len(groups), number) for number in numbers]
                    groups.append(_Group(file, part.row_groups[0].id if is_file else 0, in_memory))
                    pieces.append(plain_labels(index.select(list(dict.fromkeys([*cls.COLUMNS, *columns])))))
        empty = plain_labels(table.schema.empty_table().select(list(dict.fromkeys([*cls.COLUMNS, *columns]))))
        return cls(files.folder, pa.concat_tables([empty, *pieces]).combine_chunks(), groups, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cells", "_group")}

    @cached_property
    def _cells(self) -> list[tuple[int, str, tuple[int, ...], Place]]:
        columns = [self.index[name].to_pylist() for name in self.COLUMNS]
        return [(rank, dtype, tuple(shape), Place(*place)) for rank, dtype, shape, *place in zip(*columns, strict=True)]

    def array(self, i: int, start: int = 0, stop: int | None = None) -> np.ndarray[Any, Any]:
        """Return a tensor, or the entries start:stop of its dimension 0, of which only these bytes are read.

        Returns:
            A read-only view of the file, or a copy in float32 if NumPy does not have the dtype (bfloat16, float8, int8 with scales).

        Raises:
            DamagedFileError: The bytes are missing; or a complete tensor is read for the first time, and they do not match
                their checksum. Slices are not verified.
            TypeError: The dtype is not supported.
        """
        _, dtype, shape, place = self._cells[i]
        if place.block is None:
            group, row = self._rows[i]
            whole = array_of(*(cells[row] for cells in self._group(group)), shape, dtype, copy=False)
            return whole[start:stop] if shape else whole
        content, shape = self._bytes(i, start, stop)
        return array_of(None, content.data, shape, dtype)

    def copy(self, i: int, rows: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]) -> None:
        """Copy the entries of dimension 0 of a tensor to rows of an array, except for negative indices. Errors are those of `array`."""
        rank, dtype, _, place = self._cells[i]
        copy = partial(copy_rows, rows=rows, indices=indices)
        if place.block is not None and dtype == rows.dtype.name:
            self._blocks.read(rank, place, checksum=copy)
        else:
            copy(np.ascontiguousarray(self.array(i), rows.dtype).reshape(-1).view(np.uint8))

    def tensor(self, i: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a tensor, or entries of dimension 0, in the recorded dtype; int8 with scales as float32. Errors are those of `array`.

        A tensor in a block file is not copied, so that changes in place would show in later reads of this process. They do not reach
        the file.
        """
        import torch  # imported here, because reading arrays does not need torch

        _, dtype, _, place = self._cells[i]
        if place.block is None or dtype == SCALED:
            array = self.array(i, start, stop)
            exact = torch.from_numpy(array if array.flags.writeable else array.copy())
            return exact if dtype == SCALED else exact.to(getattr(torch, dtype))
        content, shape = self._bytes(i, start, stop)
        kind: torch.dtype = getattr(torch, dtype)
        return torch.from_numpy(content).view(kind).view(shape) if prod(shape) else torch.empty(shape, dtype=kind)

    def file(self, i: int) -> Path:
        """Return the file that contains the row of a tensor, for error messages."""
        return self._groups[self._rows[i][0]].file

    def release(self) -> None:
        """Remove mapped memory from this process, whose size then does not grow with what was read. Tensors remain valid."""
        self._blocks.release()

    def _bytes(self, i: int, start: int, stop: int | None) -> tuple[Bytes, tuple[int, ...]]:
        """Return bytes of a block file, and the shape of their elements."""
        rank, _, shape, place = self._cells[i]
        length = shape[0] if shape else 1
        start, stop, _ = slice(start, stop).indices(length)
        stop = max(start, stop)
        if (start, stop) == (0, length):
            content = self._blocks.read(rank, place, verified=i in self._verified)
            self._verified.add(i)
            return content, shape
        of_entry = place.size // length
        return self._blocks.read(rank, place, start * of_entry, stop * of_entry), (stop - start, *shape[1:])

    @cached_property
    def _group(self) -> Any:
        @lru_cache(GROUPS_IN_MEMORY)
        def read(number: int) -> list[list[Any]]:
            file, index, rows = self._groups[number]
            if rows is None:
                schema, names = TABLES["tensors"].schema, arrow_name(file)
                files = arrow_files(self.folder)
                part = ds.ParquetFileFormat().make_fragment(names, filesystem=files, row_groups=[index])
                rows = part.to_table(schema=schema, columns=_VALUES)
            return [[*cells_of(name, rows[name])] for name in _VALUES]

        return read
