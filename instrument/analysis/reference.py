"""References: the ranges of statistics in healthy runs, for the rule `reference`."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..rules.reference_ranges import KEY, SCHEMA, STARTS, Reference, phase_of, rounded
from ..storage.remote_folder import folder_at, is_address
from ..storage.run_search import NoRunError, find_runs
from ..tables.statistics import ALL, NONNEGATIVE, statistic_of
from .finite import REQUIRED_COLUMNS, not_finite_in
from .run_tables import RunTables

DEFAULT_STATISTICS = (
    "rms", "std", "abs_max", "zero_fraction", "dead_fraction", "saturated_fraction", "update_ratio",
)  # fmt: skip
"""The statistics of a reference. Those with a sign depend too much on the seed: many have a mean of zero."""
SECTIONS = ("model", "data", "task", "optimizer", "scheduler", "train", "apply")
"""The sections of the configuration that decide how a model trains."""

INDEX = [*KEY, "statistic", "phase_of_training"]
NEEDED = [name for name in REQUIRED_COLUMNS if name not in KEY]
TAIL = 1e-5  # the probability that a value of a healthy run is outside, if the differences between runs are normal
INDEPENDENT_PHASES = 4
FLOORS = {"ratio": np.log(1.25), "fraction": 0.1, "other": 0.25}
FLOORS_OF_ONE_RUN = {"ratio": np.log(4.0), "fraction": 0.3, "other": 1.0}
LARGEST = 80.0  # the largest logarithm of a factor, which float32 can represent


def make_reference(
    runs: str | Path | Iterable[str | Path], statistics: Sequence[str] = (), *, out: str | Path | None = None
) -> Reference:
    """Compute the ranges of statistics in healthy runs; see the rule `reference`.

    Args:
        runs: The folder of a run, a folder of runs such as a sweep, a pattern such as `runs/healthy*`, or several of these.
        statistics: The names of the statistics, also custom ones. Default: those of `rms`, `std`, `abs_max`, `zero_fraction`,
            `dead_fraction`, `saturated_fraction` and `update_ratio` that the runs recorded.
        out: The file to write. Default: None, no file.

    Returns:
        The reference.

    Raises:
        ConfigError: There is no run, a run is not healthy (its status is not `done`, or its loss became NaN or infinite), no run
            recorded a statistic, or the file cannot be written.
    """
    given = (str(runs),) if isinstance(runs, str | Path) else tuple(str(each) for each in runs)
    reference = _from_runs(given, tuple(statistics), "runs", "statistics")
    if out is not None:
        try:
            Path(out).write_bytes(reference.content())
        except OSError as error:
            message = f"the file cannot be written: {error.strerror}"
            raise ConfigError(Problem("out", message, given=str(out))) from None
    return reference


def read_reference(given: Sequence[str], statistics: Sequence[str], where: str) -> Reference:
    """Return the reference of a rule, from its file or from runs.

    Args:
        given: The field `from`.
        statistics: The field `stats`.
        where: The key of the rule.

    Raises:
        ConfigError: It is neither a reference nor healthy runs, or lacks a statistic.
    """
    file = folder_at(given[0])
    if len(given) > 1 or not file.is_file():
        return _from_runs(given, statistics, f"{where}.from", f"{where}.stats")
    try:
        reference = Reference.parse(file.read_bytes())
    except (ValueError, OSError) as error:
        reason = f"not a reference: {error}"
        fix = "python -m instrument.reference make RUNS --out FILE"
        raise ConfigError(Problem(f"{where}.from", reason, given[0], "a reference or healthy runs", fix=fix)) from None
    for name in statistics:
        if name not in reference.statistics:
            message, known = "the reference lacks this statistic", reference.statistics
            fix = f"python -m instrument.reference make RUNS --stats {' '.join(statistics)} --out FILE"
            raise ConfigError(Problem(f"{where}.stats", message, name, known, similar_names(name, known), fix=fix))
    return reference


def ranges_of(run: RunTables, statistics: Sequence[str]) -> pd.DataFrame:
    """Return the smallest and the largest value of statistics in each phase of training of one run.

    Non-finite rows and recomputed ones are left out, as rules do not read them.

    Returns:
        The columns `low` and `high`, with the index `KEY`, `statistic` and `phase_of_training`.
    """
    columns = [name for name in statistics if name in ALL or name in run.custom_statistics]
    parts: list[pd.DataFrame] = []
    for batch in run.scan("stats", [*KEY, "step", *NEEDED, *columns], ~ds.field("recompute")):
        rows = batch.filter(pa.array(~not_finite_in(batch))).to_pandas()
        rows["phase_of_training"] = phase_of(rows["step"].to_numpy())
        long = rows.astype(dict.fromkeys(KEY, str)).melt([*KEY, "phase_of_training"], columns, "statistic")
        parts.append(_extremes(long.assign(low=long["value"], high=long["value"]).dropna()))
    rows = pd.concat([part.reset_index() for part in parts]) if parts else pd.DataFrame(columns=[*INDEX, "low", "high"])
    return _extremes(rows)


def _extremes(rows: pd.DataFrame) -> pd.DataFrame:
    groups = rows.groupby(INDEX, sort=False)
    extremes: pd.DataFrame = pd.DataFrame({"low": groups["low"].min(), "high": groups["high"].max()}).astype(float)
    return extremes


def _from_runs(given: Sequence[str], statistics: Sequence[str], where: str, where_statistics: str) -> Reference:
    runs = [run for each in given for run in _runs(each, where)]
    problems = [
        Problem(where, f"the run is not healthy: {reason}", str(run.path), fix="leave it out, or complete it")
        for run in runs
        if (reason := _why_unhealthy(run))
    ]
    if problems:
        raise ConfigError(*problems)
    table = _table([ranges_of(run, statistics or DEFAULT_STATISTICS) for run in runs])
    known = table["statistic"].unique().to_pylist()
    if missing := [name for name in statistics if name not in known]:
        message = "none of the runs recorded this statistic"
        raise ConfigError(Problem(where_statistics, message, missing[0], known, similar_names(missing[0], ALL)))
    if not known:
        fix = f"record statistics of tensors, such as {shorten(list(DEFAULT_STATISTICS))}"
        raise ConfigError(Problem(where, "the runs recorded no statistics", list(given), fix=fix))
    config = runs[0].info.get("config") or {}
    about = {
        "runs": [run.path.name for run in runs],
        "last_step": max(_last_step(run) for run in runs),
        "versions": runs[0].info.get("versions") or {},
        "config": {name: config[name] for name in SECTIONS if name in config},
    }
    return Reference(table, about)


def _runs(given: str, where: str) -> list[RunTables]:
    """Return the runs at a path or at the paths that a pattern matches."""
    allowed = "a reference, a run, a folder of runs, or a pattern"
    is_pattern = glob.has_magic(given) and not is_address(given) and not Path(given).exists()
    paths = sorted(glob.glob(given)) if is_pattern else [given]
    if not paths:
        raise ConfigError(Problem(where, "the pattern matches nothing", given, allowed))
    try:
        opened = [RunTables(*find_runs(path)) for path in paths]
    except NoRunError as error:
        raise ConfigError(Problem(where, str(error), given, allowed)) from None
    return [run.single(index) for run in opened for index in range(len(run.folders))]


def _why_unhealthy(run: RunTables) -> str:
    """Return why a run cannot be in a reference; empty if it can."""
    if run.info["status"] != "done":
        return f"its status is {run.info['status']}"
    training = (ds.field("phase") == "train") & ds.field("loss").is_valid()
    for batch in run.scan("metrics", ["step", "loss"], training):
        lost = ~np.isfinite(batch["loss"].to_numpy())
        if lost.any():
            return f"its loss is not finite at step {batch['step'].to_numpy()[lost][0]}"
    return ""


def _last_step(run: RunTables) -> int:
    """Return the last step of a run with statistics."""
    batches = (batch["step"].to_numpy().max(initial=0) for batch in run.scan("stats", ["step"]))
    return max((int(step) for step in batches), default=0)


def _table(runs: Sequence[pd.DataFrame]) -> pa.Table:
    """Return the rows of a reference from the ranges of each run; see `Reference`."""
    lows, highs = (pd.concat([run[name] for run in runs], axis=1) for name in ("low", "high"))
    index = lows.index.to_frame(index=False)
    least, most = lows.min(axis=1).to_numpy(float), highs.max(axis=1).to_numpy(float)
    spreads = _spreads(lows, highs, index["statistic"])
    columns = {
        **{name: index[name] for name in (*KEY, "statistic")},
        "step": STARTS[index["phase_of_training"].to_numpy(int)],
        "low": rounded(least, up=False),
        "high": rounded(most, up=True),
        "spread": rounded(spreads, up=True),
    }
    frame = pd.DataFrame(columns)
    return pa.Table.from_pandas(frame, SCHEMA, preserve_index=False)


def _spreads(lows: pd.DataFrame, highs: pd.DataFrame, statistics: pd.Series[Any]) -> np.ndarray[Any, Any]:
    """Return the margin of each range; see `ReferenceRule`.

    Args:
        lows, highs: The smallest and largest values, [ranges, runs], with the index of `ranges_of`.
        statistics: The statistic of each range, [ranges].
    """
    from scipy.special import stdtrit

    count = lows.shape[1]
    is_ratio = statistics.isin(NONNEGATIVE).to_numpy()
    is_fraction = np.array([statistic_of(name).unit in ("fraction", "units") for name in statistics])
    low, high = (_scaled(values.to_numpy(float), is_ratio) for values in (lows, highs))
    largest = np.fmax.reduce(np.abs([*lows.to_numpy(float).T, *highs.to_numpy(float).T]))
    floors = FLOORS if count > 1 else FLOORS_OF_ONE_RUN
    floor = np.where(is_ratio, floors["ratio"], np.where(is_fraction, floors["fraction"], floors["other"] * largest))
    if count > 1:
        variances = pd.Series((_variances(low) + _variances(high)) / 2, lows.index)
        pooled = variances.groupby(level=[*KEY, "statistic"], sort=False).transform("mean")
        t = stdtrit(INDEPENDENT_PHASES * (count - 1), 1 - TAIL)
        widths = t * np.sqrt(np.maximum(np.asarray(variances), np.asarray(pooled)) * (1 + 1 / count))
    else:
        widths = np.nan_to_num(high - low)[:, 0]
    widths = np.maximum(widths, floor)
    return np.where(is_ratio, np.exp(np.minimum(widths, LARGEST)), widths)


def _scaled(values: np.ndarray[Any, Any], is_ratio: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return logarithms of ratios, and other values as they are; NaN for the logarithm of zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(is_ratio[:, None], np.log(values), values)
    return np.where(np.isfinite(scaled), scaled, np.nan)


def _variances(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the sample variance of each row; 0 for fewer than two numbers."""
    return np.nan_to_num(np.asarray(pd.DataFrame(values).var(axis=1, ddof=1), np.float64))
