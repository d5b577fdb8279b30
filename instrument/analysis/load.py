"""A run, or a whole sweep, as DataFrames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..capture.tables import TABLES
from ..sinks.remote import is_address
from .files import RunFiles
from .folders import find_runs
from .frames import add_overrides, plain_labels, with_arrays, without_unknown_types
from .lazy import scan
from .query import Queried
from .sql import ask
from .typed import typed_frame

if TYPE_CHECKING:
    import polars as pl

JUDGED = "objective"  # what run.json has beside the metrics where a sweep went by a number of a table
READERS = 32  # of run.json at once, where each takes a while to answer


def load(path: str | Path) -> Run:
    """Open a run's folder, or any folder above several of them, such as a sweep's, by its path or its address.

    Folders below it whose name begins with a dot are left out: there a sweep puts aside what is done again.

    Raises:
        NoRunError: There is none.
        ConfigError: The address is none, or a package that reads from there is missing.
    """
    return Run(*find_runs(path))


class Run:
    """What one run left, or several together.

    Of a folder above runs, every table has further columns: `run`, the folder below the one that was opened, `seed`, and one
    for each override that any of them was started with, such as `hooks.tame.norm`.

    Of a run that goes on meanwhile, a method sees the rows that are there when it is called: each byte of a journal is read once,
    and then what was added to it. `infos` and the tables as attributes, such as `stats`, stay as they were when they were first
    asked for: `load` again to see them as they are.

    Attributes:
        path: The folder that was opened.
        folders: The folders of the runs.
    """

    def __init__(self, path: Path, folders: Sequence[Path]) -> None:
        self.path = path
        self.folders = list(folders)
        self._files = [RunFiles(folder) for folder in self.folders]
        self._several = self.folders != [path]

    def __repr__(self) -> str:
        states = pd.Series([info["status"] for info in self.infos]).value_counts()
        told = ", ".join(f"{count} {status}" for status, count in states.items())
        return f"<Run {self.path}: {len(self.folders)} run{'s' if len(self.folders) > 1 else ''}, {told}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from .notebook import html_of

        return html_of(self)

    @cached_property
    def infos(self) -> list[dict[str, Any]]:
        """The run.json of each run; `status` is `killed` where it says that it runs and its process is gone."""
        if not is_address(self.path):
            return [files.info() for files in self._files]
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(RunFiles.info, self._files))

    @property
    def info(self) -> dict[str, Any]:
        """The run.json of the one run, or of the first of several."""
        return self.infos[0]

    @property
    def problems(self) -> list[str]:
        """Files that could not be read, or only in part, each with what is wrong; known once tables have been read."""
        return [
            problem if not self._several else f"{folder.relative_to(self.path)}/{problem}"
            for folder, files in zip(self.folders, self._files, strict=True)
            for problem in files.problems
        ]

    @property
    def runs(self) -> pd.DataFrame:
        """A row a run: its folder, status, seed, overrides, last metrics and, of a sweep that went by a number of a table, that
        number as `objective`; typed; what has parts is as it is.

        An override that is named like one of these numbers, as `objective` itself, is `override.<name>`.
        """
        numbers = [{**info["metrics"], **({JUDGED: info[JUDGED]} if JUDGED in info else {})} for info in self.infos]
        taken = {name for row in numbers for name in row}
        rows = [
            {
                "run": str(folder.relative_to(self.path)),
                "status": info["status"],
                "seed": info["seed"],
                **{f"override.{key}" if key in taken else key: value for key, value in info["overrides"].items()},
                **row,
            }
            for folder, info, row in zip(self.folders, self.infos, numbers, strict=True)
        ]
        return typed_frame(rows)

    @cached_property
    def stats(self) -> pd.DataFrame:
        """Statistics: a row is one tensor at one firing."""
        return self._frame("stats")

    @cached_property
    def distributions(self) -> pd.DataFrame:
        """Quantiles and histograms: a row is one tensor at one firing."""
        return self._frame("distributions")

    @cached_property
    def effects(self) -> pd.DataFrame:
        """What interventions changed: a row is one intervention at one firing."""
        return self._frame("effects")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Loss, accuracy and the like: a row is one step, or one evaluation."""
        return self._frame("metrics")

    @cached_property
    def coverage(self) -> pd.DataFrame:
        """What should have fired and what did: a row is one spec at one layer or parameter."""
        return self._frame("coverage")

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The model: a row is one module."""
        return self._frame("layers")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Warnings and errors."""
        return self._frame("events")

    def read(self, table: str, columns: list[str]) -> pd.DataFrame:
        """Some columns of a table, with nothing else read from disk."""
        parts: list[pd.DataFrame] = [plain_labels(files.read(table, columns)).to_pandas() for files in self._files]
        return pd.concat(parts, ignore_index=True)

    def scan(
        self, table: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of a table in batches, where a condition holds: for tables that are larger than memory."""
        for files in self._files:
            yield from files.scan(table, columns, condition)

    def count(self, table: str) -> int:
        """The number of rows of a table, without reading them."""
        return sum(files.count(table) for files in self._files)

    def tensors(self, **where: Any) -> pd.DataFrame:
        """Recorded tensors, as NumPy arrays in their shapes.

        Args:
            where: Values that columns must have, or lists of them: `layer="encoder.0", step=[0, 99]`.

        Returns:
            The rows of the tensors table that match; `values` holds an array of the recorded shape in each. Of types that
            NumPy does not have, bfloat16 and float8 are given as float32, complex32 as complex64. Rows of any other are
            left out, and named in `problems`.

        Raises:
            KeyError: There is no such column.
        """
        known = [name for name in TABLES["tensors"].names if name not in ("values", "data", "shape", "source_shape")]
        condition = None
        for name, value in where.items():
            if name not in known:
                raise KeyError(f"tensors has no column {name!r} to choose by; it has {', '.join(known)}")
            allowed = list(value) if isinstance(value, list | tuple | set | range) else [value]
            test = ds.field(name).isin(pa.array(allowed))
            condition = test if condition is None else condition & test
        return with_arrays(self._frame("tensors", condition))

    def effects_of(
        self,
        key: str,
        *,
        baseline: Any = None,
        by: str | Sequence[str] = (),
        steps: tuple[int | None, int | None] = (None, None),
        confidence: float = 0.95,
    ) -> pd.DataFrame:
        """What a key of the configuration changes, by metric and by layer and statistic: of a folder above runs.

        Runs that are done are paired where they have the same seed, and the same configuration but for this key, for what
        does not change a training, and for hooks that record. Each is one number at each place: the mean over its steps; of
        the evaluations' metrics the last one's. The interval is Student's for the mean of n differences d, one a seed,

            mean(d) ± t((1 + confidence) / 2, n - 1) * s(d) / sqrt(n)

        where s(d) is their standard deviation, with n - 1, and t(p, m) the p-quantile of Student's distribution with m
        degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.2, https://doi.org/10.18434/M32189.
        Where keys that are not in `by` differ too, a seed's difference is the mean of those of its pairs: runs of one seed
        begin with the same weights and see the same data, and counted as if they were independent they would make the
        interval too narrow (S. H. Hurlbert, Ecological Monographs 54 (1984), 187-211).

        Args:
            key: `hooks.tame.norm`; a whole hook, `hooks.tame`; `optimizer.lr`; a group, `model`.
            baseline: The value that the others are compared with. Without it: null, or nothing at all, where there is such;
                else the smallest number (false before true); else the first.
            by: Other keys in which the runs differ; each has a column, and all of their values rows of their own.
            steps: The first step that counts, and the first that does not any more; of an evaluation, the steps before it.
            confidence: Of the intervals.

        Returns:
            A row for each value, place and statistic that any pair has: `value` and `baseline` of the key (YAML of what has
            parts); `table`, `phase`, `hook`, `layer`, `kind`, `role`, `path`, `scope`, `statistic`; `n`, the seeds that count,
            their `mean_baseline`, `mean_value` and `difference`, the mean of value - baseline; `ci_low` and `ci_high`, null of
            one seed; `confidence`; `pairs` that count; `not_finite`, those that do not because a number is NaN or infinite;
            `one_sided`, those that do not because one run alone has a number. `attrs["pairs"]` has each pair as (value, run,
            run of the baseline), `attrs["left_out"]` why a run is in none, by run.

        Raises:
            InstrumentError: The runs do not differ there, there is no such key or value, or no two runs can be paired.
        """
        from .effects_of import effects_of

        return effects_of(self, key, baseline=baseline, by=by, steps=steps, confidence=confidence)

    def sql(self, query: str) -> pd.DataFrame:
        """Ask DuckDB, which reads of the files what the query needs; those of tables that it does not name are not opened.

        The tables are those of a run, and `runs`. Of a folder above runs each has the columns `run`, `seed` and the overrides,
        with what has parts as JSON text; files that a condition on these rules out are not opened.

        Raises:
            ConfigError: The query is none, or has no answer.
            InstrumentError: DuckDB is not installed, or cannot go on.
        """
        return ask(self._queried(), query)

    def lazy(self, table: str) -> pl.LazyFrame:
        """A table for polars, which reads of the files what is needed when the frame is collected.

        It has the same columns as in `sql`, and rows in the order of the runs and of their files, each of which is sorted by
        step and layer; what is in no file yet comes last. Files of runs that a condition rules out are not opened.

        Raises:
            KeyError: There is no such table.
            InstrumentError: polars is not installed.
        """
        if table not in TABLES:
            raise KeyError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
        return scan(self._queried(), table)

    def _queried(self) -> Queried:
        names = [str(folder.relative_to(self.path)) for folder in self.folders]
        return Queried(self._files, names if self._several else None, self._given(), self.runs)

    def _given(self) -> pd.DataFrame:
        """The seed and the overrides of each run."""
        return typed_frame([{**info["overrides"], "seed": info["seed"]} for info in self.infos])

    def _frame(self, table: str, condition: ds.Expression | None = None) -> pd.DataFrame:
        frames = []
        overrides = self._given()
        for place, (folder, files) in enumerate(zip(self.folders, self._files, strict=True)):
            frame: pd.DataFrame = plain_labels(files.read(table, condition=condition)).to_pandas()
            if table == "tensors":
                frame = without_unknown_types(frame, files)
            if self._several:
                add_overrides(frame, str(folder.relative_to(self.path)), overrides, place)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if len(frames) > 1 else frames[0]
