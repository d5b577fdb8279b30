"""The tables of one run, or of several runs of a sweep, as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..config.schedule import Phase
from ..errors import ConfigError, Problem, first_line, similar_names
from ..formatting import shorten
from ..storage.blocks import Place
from ..storage.remote_folder import is_address
from ..storage.run_files import RunFiles
from ..tables.kinds import KINDS
from ..tables.schemas import CUSTOM, SHAPE, TABLES
from ..tables.statistics import REMAINDERS
from .config_fields import split_overrides
from .frames import (
    add_overrides,
    cells_of,
    custom_metrics_in,
    custom_statistics_of,
    set_exact_integers,
    to_frame,
    typed_frame,
    with_arrays,
    with_custom_columns,
    without_unknown_types,
)

OBJECTIVE_KEY = "objective"  # in run.json next to `metrics`, if the sweep's objective was a number from a table
IN_MEMORY = Path("in memory")
"""The name that stands for the folder of a probe that keeps its rows in memory."""
_VOCABULARIES = {
    "phase": get_args(Phase),
    "kind": tuple(KINDS),
    "role": tuple(dict.fromkeys(chain.from_iterable(kind.roles for kind in KINDS.values()))),
}
"""Values that text columns can have in every run."""
READERS = 32  # threads that read run.json files in parallel; remote storage has a high latency


def check_is_table(owner: object, name: str) -> None:
    """Check that an attribute is a table."""
    if name not in TABLES:
        similar = similar_names(name, [*TABLES, *(each for each in dir(type(owner)) if each[0] != "_")])
        meant = f"; similar: {', '.join(similar)}" if similar else ""
        message = (
            f"{type(owner).__name__!r} object has no attribute {name!r}{meant}; the tables are {', '.join(TABLES)}"
        )
        raise AttributeError(message, name=name, obj=owner)


def check_table(name: str) -> None:
    """Check that a table exists."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}; the tables are {', '.join(TABLES)}")


def _stored(columns: Sequence[str], custom: Sequence[str], *, has_remainders: bool = False) -> list[str]:
    """Return the columns of the files that contain these columns, some of which are custom or have remainders."""
    return [*(name for name in columns if name not in custom), *([CUSTOM.name] if custom or has_remainders else [])]


def _frame_of(
    files: RunFiles, table: str, columns: Sequence[str], custom: Sequence[str], condition: ds.Expression | None
) -> pd.DataFrame:
    """Return some columns of a table of one run, of which `custom` are custom ones."""
    has_extremes = table == "stats" and not REMAINDERS.keys().isdisjoint(columns)
    rows = files.read(table, _stored(columns, custom, has_remainders=has_extremes), condition)
    frame = to_frame((with_custom_columns(rows, custom) if custom else rows).select(columns))
    if has_extremes:
        set_exact_integers(frame, rows)
    if table == "stats" and SHAPE.name in frame:
        shapes = [None if shape is None else tuple(shape.tolist()) for shape in frame[SHAPE.name]]
        frame[SHAPE.name] = pd.Series(shapes, dtype=object)
    return frame


class RunTables:
    """The tables and records of one run, or of several runs in one folder; see `instrument.Run`."""

    def __init__(self, path: Path, folders: Sequence[Path], files: Sequence[RunFiles] | None = None) -> None:
        self.path = path
        self.folders = list(folders)
        self.files = [RunFiles(folder) for folder in self.folders] if files is None else list(files)
        self.is_sweep = self.folders != [path]
        self._metrics_of_runs: dict[int, list[str]] = {}

    def __repr__(self) -> str:
        states = pd.Series([info["status"] for info in self.infos]).value_counts()
        counts = ", ".join(f"{count} {status}" for status, count in states.items())
        return f"<{type(self).__name__} {self.path}: {len(self.folders)} run{'s' if len(self.folders) > 1 else ''}, {counts}>"

    @cached_property
    def infos(self) -> list[dict[str, Any]]:
        """The content of run.json of each run, as dictionaries.

        If the recorded `status` is `running` but the process is gone, `status` is `killed`.
        """
        if not is_address(self.path):
            return [files.info() for files in self.files]
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(RunFiles.info, self.files))

    @cached_property
    def overrides(self) -> list[dict[str, Any]]:
        """The overrides of each run, by key. Of mappings that differ between the runs, the fields that differ."""
        return split_overrides([info["overrides"] for info in self.infos])

    @cached_property
    def names(self) -> list[str]:
        """The folders of the runs relative to the opened folder."""
        return [str(folder.relative_to(self.path)) for folder in self.folders]

    def single(self, index: int) -> RunTables:
        """Return one of the runs."""
        return RunTables(self.folders[index], [self.folders[index]], [self.files[index]])

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json: of several runs, that of the first. `infos` has that of each run, and `runs` a row for each."""
        return self.infos[0]

    @cached_property
    def custom_statistics(self) -> tuple[str, ...]:
        """The names of the custom statistics of all runs: further columns of `stats`."""
        return custom_statistics_of(self.infos)

    @property
    def custom_metrics(self) -> tuple[str, ...]:
        """The names of the custom metrics of all runs: further columns of `metrics`, in the order of their first values."""
        for index, (files, info) in enumerate(zip(self.files, self.infos, strict=True)):
            if index not in self._metrics_of_runs or info["status"] == "running":
                parts = (batch.column(0) for batch in files.scan("metrics", [CUSTOM.name]))
                self._metrics_of_runs[index] = custom_metrics_in(parts)
        return tuple(dict.fromkeys(name for names in self._metrics_of_runs.values() for name in names))

    def custom_columns(self, table: str) -> tuple[str, ...]:
        """Return the names of the custom statistics or metrics that are further columns of a table."""
        return {"stats": lambda: self.custom_statistics, "metrics": lambda: self.custom_metrics}.get(table, tuple)()

    def own_columns(self, table: str) -> list[str]:
        """Return the columns of a table with the custom ones in place of the column that contains them."""
        custom = self.custom_columns(table)
        return [each for name in TABLES[table].schema.names for each in (custom if name == CUSTOM.name else [name])]

    def check_single(self, where: str = "run") -> None:
        """Raise a ConfigError for an argument with this name if there are several runs."""
        if len(self.folders) > 1:
            message = f"the folder contains {len(self.folders)} runs"
            fix = f"pass one of them, such as {self.folders[0]}"
            raise ConfigError(Problem(where, message, str(self.path), fix=fix))

    @property
    def problems(self) -> list[str]:
        """The files that could not be read completely, each with the reason; filled when tables are read."""
        named = zip(self.names, self.files, strict=True)
        found = [(name, problem) for name, files in named for problem in files.problems]
        return [f"{name}/{problem}" if self.is_sweep else problem for name, problem in found]

    @property
    def runs(self) -> pd.DataFrame:
        """One row per run: `run` (the folder), `status`, `warnings`, `seed`, the overrides and the metrics.

        `warnings` is the number of warnings of the process that wrote run.json; missing if an error ended the run.
        The metrics, such as `loss`, are those of the last evaluation. A training without evaluations has none. In `mode: forward`,
        they are the means over all batches.

        An override with a mapping that differs between the runs has a column for each field that differs. If the objective of
        the sweep is a number from a table, the column `objective` has it. Columns have the types of
        their values; lists and mappings are kept as Python objects. An override with the same name as a metric, or
        named `objective`, is renamed to `override.<name>`.
        """
        objectives = ({OBJECTIVE_KEY: info[OBJECTIVE_KEY]} if OBJECTIVE_KEY in info else {} for info in self.infos)
        numbers = [info["metrics"] | more for info, more in zip(self.infos, objectives, strict=True)]
        taken = {name for row in numbers for name in row}
        rows = [
            {
                "run": name,
                "status": info["status"],
                "warnings": info.get("warnings"),
                "seed": info["seed"],
                **{f"override.{key}" if key in taken else key: value for key, value in overrides.items()},
                **row,
            }
            for name, info, overrides, row in zip(self.names, self.infos, self.overrides, numbers, strict=True)
        ]
        return typed_frame(rows)

    def __getattr__(self, name: str) -> pd.DataFrame:
        """Return a table as a DataFrame. It is read on first access."""
        check_is_table(self, name)
        frame = self.__dict__[name] = self._frame(name)
        return frame

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *TABLES})

    def read(
        self, table: str, columns: Sequence[str] | None = None, condition: ds.Expression | None = None
    ) -> pd.DataFrame:
        """Read some columns of a table of all runs, with the arguments of `scan`; other columns are not read from disk.

        Returns:
            The rows of all runs, without the columns `run`, `seed` and the overrides.

        Raises:
            ValueError: As for `scan`.
            TypeError: `columns` is a single name.
        """
        columns, custom = self._columns(table, columns, condition)
        parts = [_frame_of(files, table, columns, custom, condition) for files in self.files]
        return pd.concat(parts, ignore_index=True)

    def scan(
        self, table: str, columns: Sequence[str] | None = None, condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over some columns of a table in record batches, for tables that are larger than memory.

        Args:
            table: Name of the table, such as `stats`.
            columns: Names of the columns of the table, with custom statistics, and `max_remainder` and the like of 64-bit
                integers. Default: None, all of the table.
            condition: A pyarrow filter expression; by default all rows are returned. It cannot contain custom statistics.

        Yields:
            Arrow record batches with these columns, run by run.

        Raises:
            ValueError: The table, or one of the columns, does not exist, or the condition does not fit the table.
        """
        columns, custom = self._columns(table, columns, condition)
        for files in self.files:
            for batch in files.scan(table, _stored(columns, custom), condition):
                if custom:
                    yield from with_custom_columns(pa.Table.from_batches([batch]), custom).select(columns).to_batches()
                else:
                    yield batch

    def _columns(
        self, table: str, columns: Sequence[str] | None, condition: ds.Expression | None
    ) -> tuple[Sequence[str], list[str]]:
        """Return the columns, and which are custom ones. Check that the table exists, and has the columns, also those of the condition."""
        check_table(table)
        try:  # readers would take the error for that of a damaged file
            if condition is not None:
                ds.dataset(TABLES[table].schema.empty_table()).to_table(filter=condition)
        except pa.ArrowException as error:
            raise ValueError(f"condition on table {table!r}: {first_line(error)}") from None
        if isinstance(columns, str):
            raise TypeError(f"columns is a list of names, such as [{columns!r}], not one name")
        columns = self.own_columns(table) if columns is None else columns
        standard = TABLES[table].schema.names
        custom = [name for name in columns if name not in standard]
        remainders = REMAINDERS.values() if table == "stats" else ()
        known = (*self.custom_columns(table), *remainders) if custom else ()
        if unknown := [name for name in custom if name not in known]:
            message = f"table {table!r} has no column {unknown[0]!r}; its columns are {', '.join((*standard, *known))}"
            raise ValueError(message)
        return columns, custom

    def count(self, table: str) -> int:
        """Return the number of rows of a table, without reading the rows. Raise a ValueError if the table does not exist."""
        check_table(table)
        return sum(files.count(table) for files in self.files)

    def tensors(self, **where: Any) -> pd.DataFrame:
        """Read recorded tensors as NumPy arrays.

        Args:
            where: Conditions on columns, as a value or a list of values: `layer="encoder.0", step=[0, 99]`. `.` is the model itself.

        Returns:
            The matching rows of the tensors table. The column `values` contains arrays in the recorded shape. NumPy
            does not support all types of PyTorch: bfloat16, float8 and int8 with scales are converted to float32, complex32 to
            complex64. Arrays of raw tensors are read-only views of the files.
            Rows of other unsupported types are skipped and reported in `problems`.

        Raises:
            ValueError: The tensors table has no column of this name.
            ConfigError: A column cannot have this value: its type is wrong, or the run has no such text, such as a layer or a phase.
        """
        others = ("values", "data", "shape", "source_shape", *Place._fields)
        known = [name for name in TABLES["tensors"].names if name not in others]
        condition, texts = None, {}
        for name, value in where.items():
            if name not in known:
                raise ValueError(f"tensors: cannot select by column {name!r}; the columns are {', '.join(known)}")
            allowed = list(value) if isinstance(value, Collection) and not isinstance(value, str) else [value]
            allowed = ["" if (name, each) == ("layer", ".") else each for each in allowed]
            stored = TABLES["tensors"].schema.field(name).type
            try:
                test = ds.field(name).isin(values := pa.array(allowed).cast(getattr(stored, "value_type", stored)))
            except (pa.ArrowException, OverflowError) as error:
                raise ConfigError(Problem(name, f"wrong type: {error}", repr(value))) from None
            if name in ("layer", "hook", "path", *_VOCABULARIES):
                texts[name] = values.to_pylist()
            condition = test if condition is None else condition & test
        frame = self._frame("tensors", condition)
        for name, names in texts.items():
            if not (found := set(frame[name])).issuperset(names):  # otherwise no other rows need to be read
                self._check_known(name, [each for each in names if each not in found])
        return with_arrays(frame)

    def _check_known(self, column: str, names: Sequence[str]) -> None:
        """Check that the runs can have these values of a text column. Layers and hooks are unknown before the first step."""
        known: list[str] = [*_VOCABULARIES.get(column, ())]
        if column in ("layer", "hook"):
            known = [*self.layers["layer"]] if column == "layer" else [*chain.from_iterable(self.layers["hooks"])]
        if not set(known).issuperset(names):
            known = list(dict.fromkeys([*known, *self.read("tensors", [column])[column]]))
            if known and (unknown := [str(name) for name in names if name not in known]):
                empty = "." if column == "layer" else "''"
                allowed, similar = shorten([name or empty for name in known]), similar_names(unknown[0], known)
                raise ConfigError(Problem(column, f"the run has no such {column}", unknown[0], allowed, similar))

    @cached_property
    def settings(self) -> pd.DataFrame:
        """The overrides and the seed of each run: one row per run."""
        rows = zip(self.overrides, self.infos, strict=True)
        return typed_frame([{**overrides, "seed": info["seed"]} for overrides, info in rows])

    def _frame(self, table: str, condition: ds.Expression | None = None) -> pd.DataFrame:
        frames, custom = [], self.custom_columns(table)
        for index, files in enumerate(self.files):
            if table == "tensors":
                rows = files.read(table, condition=condition)
                frame = to_frame(rows.drop_columns(["data", *Place._fields]))
                frame["data"] = pd.Series([*cells_of("data", rows.column("data"))], dtype=object)
                frame = without_unknown_types(frame, files)
            else:
                frame = _frame_of(files, table, self.own_columns(table), custom, condition)
            if self.is_sweep:
                add_overrides(frame, self.names[index], self.settings, index)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
