"""Read one run, or several runs of a sweep, as pandas DataFrames."""

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
from .folders import find_runs
from .frames import add_overrides, plain_labels, with_arrays, without_unknown_types
from .lazy import scan
from .query import Queried
from .run_files import RunFiles
from .sql import ask
from .typed_columns import typed_frame

if TYPE_CHECKING:
    import polars as pl

JUDGED = "objective"  # key in run.json next to `metrics`, present if the sweep's objective was a number from a table
READERS = 32  # threads that read run.json files in parallel; remote storage has a high latency


def load(path: str | Path) -> Run:
    """Open the folder of a run, or a folder that contains several runs, such as the folder of a sweep.

    Subfolders whose name begins with a dot are skipped: a sweep moves the folders of repeated jobs there.

    Args:
        path: A local folder, or the address of a remote folder such as `s3://bucket/prefix`.

    Returns:
        A `Run` with the tables of all runs found at or below `path`.

    Raises:
        NoRunError: The folder does not exist or contains no run.
        ConfigError: The address is invalid, or a package needed to read from it is not installed.
    """
    return Run(*find_runs(path))


class Run:
    """The recorded data of one run, or of several runs in one folder.

    Create it with `instrument.load`. Each table is a pandas DataFrame that is read on first access.

    If the folder contains several runs, every table has these additional columns: `run`, the path of the run relative
    to the opened folder; `seed`; and one column for each override with which any of the runs was started, such as
    `hooks.tame.norm`.

    A run that is still in progress can be read. Methods return the rows that exist when they are called. `infos` and
    the tables that are attributes, such as `stats`, are cached after the first access: call `load` again to read newer
    rows.

    Attributes:
        path: The folder that was opened.
        folders: The folders of the runs, in the order of the rows of `runs`.
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
        """Return the HTML representation for notebooks."""
        from .notebook import html_of

        return html_of(self)

    @cached_property
    def infos(self) -> list[dict[str, Any]]:
        """The content of run.json of each run, as dictionaries.

        If the recorded `status` is `running` but the process is gone, `status` is `killed`.
        """
        if not is_address(self.path):
            return [files.info() for files in self._files]
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(RunFiles.info, self._files))

    @property
    def info(self) -> dict[str, Any]:
        """The content of run.json of the run, or of the first of several runs."""
        return self.infos[0]

    @property
    def problems(self) -> list[str]:
        """The files that could not be read completely, each with the reason; filled when tables are read."""
        return [
            problem if not self._several else f"{folder.relative_to(self.path)}/{problem}"
            for folder, files in zip(self.folders, self._files, strict=True)
            for problem in files.problems
        ]

    @property
    def runs(self) -> pd.DataFrame:
        """One row per run: `run` (the folder), `status`, `seed`, the overrides and the last metrics.

        If the objective of the sweep is a number from a table, the column `objective` has it. Columns have the types of
        their values; lists and mappings are kept as Python objects. An override with the same name as a metric, or
        named `objective`, is renamed to `override.<name>`.
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
        """Statistics. One row per recorded tensor and firing of a hook."""
        return self._frame("stats")

    @cached_property
    def distributions(self) -> pd.DataFrame:
        """Quantiles and histograms. One row per recorded tensor and firing of a hook."""
        return self._frame("distributions")

    @cached_property
    def effects(self) -> pd.DataFrame:
        """What interventions changed. One row per intervention and firing."""
        return self._frame("effects")

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """Loss, accuracy and other metrics. One row per training step and per evaluation."""
        return self._frame("metrics")

    @cached_property
    def coverage(self) -> pd.DataFrame:
        """Expected and actual firings. One row per hook and layer, or per hook and parameter."""
        return self._frame("coverage")

    @cached_property
    def layers(self) -> pd.DataFrame:
        """The modules of the model. One row per module."""
        return self._frame("layers")

    @cached_property
    def events(self) -> pd.DataFrame:
        """Warnings and errors. One row per event."""
        return self._frame("events")

    def read(self, table: str, columns: list[str]) -> pd.DataFrame:
        """Read some columns of a table of all runs; other columns are not read from disk.

        Args:
            table: Name of the table, such as `stats`.
            columns: Names of the columns of the table.

        Returns:
            The rows of all runs, without the columns `run`, `seed` and the overrides.

        Raises:
            KeyError: The table does not exist.
        """
        parts: list[pd.DataFrame] = [plain_labels(files.read(table, columns)).to_pandas() for files in self._files]
        return pd.concat(parts, ignore_index=True)

    def scan(
        self, table: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over some columns of a table in record batches, for tables that are larger than memory.

        Args:
            table: Name of the table, such as `stats`.
            columns: Names of the columns of the table.
            condition: A pyarrow filter expression; by default all rows are returned.

        Yields:
            Arrow record batches with these columns, run by run.

        Raises:
            KeyError: The table does not exist.
        """
        for files in self._files:
            yield from files.scan(table, columns, condition)

    def count(self, table: str) -> int:
        """Return the number of rows of a table, without reading the rows.

        Args:
            table: Name of the table, such as `stats`.

        Raises:
            KeyError: The table does not exist.
        """
        return sum(files.count(table) for files in self._files)

    def tensors(self, **where: Any) -> pd.DataFrame:
        """Read recorded tensors as NumPy arrays.

        Args:
            where: Conditions on columns, as a value or a list of values: `layer="encoder.0", step=[0, 99]`.

        Returns:
            The matching rows of the tensors table. The column `values` contains arrays in the recorded shape. NumPy
            does not support all types of PyTorch: bfloat16 and float8 are converted to float32, complex32 to complex64.
            Rows of other unsupported types are skipped and reported in `problems`.

        Raises:
            KeyError: The tensors table has no column of this name.
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
        """Estimate the effect of one configuration key on metrics and statistics; needs several runs.

        Finished runs are paired if they have the same seed and the same configuration, except for this key, settings
        that do not affect training, and hooks that only record. Each run contributes one number per location and
        statistic, the mean over its steps. For evaluation metrics it is the value of the last evaluation. The
        confidence interval is Student's interval for the mean of n differences d, one per seed,

            mean(d) ± t((1 + confidence) / 2, n - 1) * s(d) / sqrt(n)

        where s(d) is the standard deviation with n - 1 degrees of freedom and t(p, m) is the p-quantile of Student's
        distribution with m degrees of freedom (NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.2,
        https://doi.org/10.18434/M32189).

        If keys that are not in `by` differ as well, the difference of a seed is the mean over its pairs. Runs with the
        same seed start with the same weights and see the same data. Counting them as independent would make the
        interval too narrow (S. H. Hurlbert, Ecological Monographs 54 (1984), 187-211).

        Args:
            key: A key such as `hooks.tame.norm` or `optimizer.lr`, a hook such as `hooks.tame`, or a group such as
                `model`.
            baseline: The value that the others are compared with. Default: null or a missing key, if any run has it;
                else the smallest number (false before true); else the first value.
            by: Other keys in which the runs differ. Each becomes a column, and each combination of their values has its
                own rows.
            steps: Half-open range of steps (first, end); None leaves a side open. For evaluations, the number of steps
                done before the evaluation counts.
            confidence: Confidence level of the intervals, between 0 and 1.

        Returns:
            One row for each value, location and statistic with at least one pair:

            - `value`, `baseline`: the two values of the key; lists and mappings as YAML text
            - one column for each key in `by`
            - `table`, `phase`, `hook`, `layer`, `kind`, `role`, `path`, `scope`, `statistic`: what was measured
            - `n`: the number of seeds used
            - `mean_baseline`, `mean_value`: means over these seeds
            - `difference`: the mean of value - baseline
            - `ci_low`, `ci_high`: the confidence interval; null for a single seed
            - `confidence`: the confidence level
            - `pairs`: the number of pairs used
            - `not_finite`: pairs excluded because a number is NaN or infinite
            - `one_sided`: pairs excluded because only one of the two runs has a number

            `attrs["pairs"]` lists each pair as (value, run, baseline run). `attrs["left_out"]` maps each unpaired run
            to the reason.

        Raises:
            InstrumentError: The runs do not differ in this key, the key or the value does not exist, or no two runs can
                be paired.
        """
        from .effects_of import effects_of

        return effects_of(self, key, baseline=baseline, by=by, steps=steps, confidence=confidence)

    def sql(self, query: str) -> pd.DataFrame:
        """Run a SQL query with DuckDB on the files of the runs.

        DuckDB reads only the columns and row groups that the query needs. Files of tables that the query does not name
        are not opened. The views are the tables of a run, and `runs`. If the folder contains several runs, each view
        also has the columns `run`, `seed` and the overrides, with lists and mappings as JSON text. Files that are
        excluded by a condition on these columns are not opened.

        Args:
            query: A DuckDB query, such as `SELECT layer, avg(l2) FROM stats GROUP BY layer`.

        Returns:
            The result as a pandas DataFrame.

        Raises:
            ConfigError: The query is invalid.
            InstrumentError: DuckDB is not installed, or the query fails while it runs.
        """
        return ask(self._queried(), query)

    def lazy(self, table: str) -> pl.LazyFrame:
        """Return a table as a polars LazyFrame.

        Files are read when the frame is collected, and only the columns and rows that are needed. The columns are the
        same as in `sql`. Rows come in the order of the runs and of their files. Each file is sorted by step and layer;
        rows that are not in a Parquet file yet come last. Files of runs that are excluded by a condition are not
        opened.

        Args:
            table: Name of the table, such as `stats`.

        Raises:
            KeyError: The table does not exist.
            InstrumentError: polars is not installed.
        """
        if table not in TABLES:
            raise KeyError(f"there is no table {table!r}; there are {', '.join(TABLES)}")
        return scan(self._queried(), table)

    def _queried(self) -> Queried:
        names = [str(folder.relative_to(self.path)) for folder in self.folders]
        return Queried(self._files, names if self._several else None, self._given(), self.runs)

    def _given(self) -> pd.DataFrame:
        """Return the seed and the overrides of each run."""
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
