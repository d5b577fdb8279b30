"""References: the ranges of statistics in healthy runs, for the rule `reference`."""

from __future__ import annotations

import glob
import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..errors import ConfigError, InstrumentWarning, Problem, raise_problems, similar_names
from ..fields.pip_extras import packages_of
from ..formatting import shorten
from ..rules.reference_ranges import (
    ABOUT,
    CHANGE_OF_RATE,
    CHANGE_OF_WEIGHTS,
    COUNTS,
    FIRST_STEPS,
    KEY,
    MEAN_LOSS,
    METRICS,
    RATIOS,
    SMALL_RATE,
    STARTS,
    Reference,
    are_near,
    difference_of_counts,
    phase_of,
    rounded,
    schema,
    steps_of,
    sums_of_counts,
)
from ..rules.step_rows import FloatArray
from ..storage.remote_folder import folder_at, is_address
from ..storage.run_record import write_atomically
from ..storage.run_search import NoRunError, find_runs
from ..tables.statistics import ALL, statistic_of
from .config_comparison import rules_of
from .finite import REQUIRED_COLUMNS, not_finite_in
from .rule_events import settings_of
from .run_tables import RunTables

DEFAULT_STATISTICS = (
    "rms", "std", "abs_max", "zero_fraction", "dead_fraction", "saturated_fraction", "update_ratio",
    "row_entropy", "first_fraction", "branch_ratio", "input_cosine", "token_cosine", "softmax_entropy", "z_loss", *METRICS,
)  # fmt: skip
"""The statistics and metrics of a reference. A mean, a minimum or a maximum depends too much on the seed."""
SECTIONS = ("model", "data", "task", "optimizer", "scheduler", "train", "apply")
"""The sections of the configuration that decide how a model trains."""

INDEX = [*KEY, "statistic", "phase_of_training"]
LABELS = [(name, pa.string()) for name in INDEX[:-1]]
OF_RANGES = pa.schema([*LABELS, (INDEX[-1], pa.int64()), ("low", pa.float64()), ("high", pa.float64())])
NEEDED = [name for name in REQUIRED_COLUMNS if name not in KEY]
# The probability that a value of a healthy run is outside, if the differences between runs are normal. A run has one mean loss, and
# thousands of other series.
TAIL, TAIL_OF_MEAN_LOSS = 1e-5, 1e-4
# The largest of many elements has an exponential tail: as often as a normal value exceeds 4.3 standard deviations, it exceeds 8.5
# (E. J. Gumbel, Statistics of Extremes, 1958). So has the logarithm of a softmax, which is a difference of scores.
WIDTH_OF_EXTREMES = 2.0
INDEPENDENT_PHASES = 4
# The variance of attention, and of a value that is neither a factor nor a fraction, is averaged over so many: that of a loss falls with
# the loss, and that of attention grows as the heads specialize.
NEAR_PHASES = 3
# The smallest factor, the smallest difference of fractions, and that of other statistics relative to their largest absolute value.
FLOORS, FLOORS_OF_ONE_RUN = (1.25, 0.1, 0.25), (4.0, 0.3, 1.0)
FLOOR_OF_MEAN_LOSS = 0.1  # of several runs, relative to the largest absolute value
LARGEST = 80.0  # the largest logarithm of a factor, which float32 can represent


def make_reference(
    runs: str | Path | Iterable[str | Path], statistics: str | Sequence[str] = (), *, out: str | Path | None = None
) -> Reference:
    """Compute the ranges of statistics in healthy runs; see the rule `reference`.

    Args:
        runs: The folder of a run, a folder of runs such as a sweep, a pattern such as `runs/healthy*`, or several of these.
        statistics: The names of statistics, also custom ones, and of metrics. Default: those that the runs recorded of `rms`,
            `std`, `abs_max`, `zero_fraction`, `dead_fraction`, `saturated_fraction`, `update_ratio`, `row_entropy`, `first_fraction`,
            `branch_ratio`, `input_cosine`, `token_cosine`, `softmax_entropy`, `z_loss`, `lr`, `loss`, `accuracy`, `grad_norm` and
            `mean_loss`.
        out: The file to write. Default: None, no file.

    Returns:
        The reference.

    Raises:
        ConfigError: There is no run, a run is not healthy (its status is not `done`, or its loss became NaN or infinite), no run
            recorded a statistic, or the file cannot be written.

    Warns:
        InstrumentWarning: Rules warned in some of the runs.
    """
    if not isinstance(runs, Iterable | Path):
        raise ConfigError(Problem("runs", "must be a folder, a pattern or several of these", type(runs).__name__))
    given = (str(runs),) if isinstance(runs, str | Path) else tuple(str(each) for each in runs)
    names = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    reference = _from_runs(given, names, "runs", "statistics")
    if out is not None:
        try:
            write_atomically(Path(out), reference.content())
        except OSError as error:
            message = f"the file cannot be written: {error.strerror}"
            raise ConfigError(Problem("out", message, given=str(out))) from None
    return reference


def read_reference(
    given: Sequence[str], statistics: Sequence[str] = (), *, where: str, where_statistics: str = ""
) -> Reference:
    """Return a reference, from its file or from runs.

    Args:
        given: The file, or runs as for `make_reference`.
        statistics: Statistics that it must have. Default: any.
        where, where_statistics: The keys of both, for messages.

    Raises:
        ConfigError: It is neither a reference nor healthy runs, or lacks a statistic.
    """
    file = folder_at(given[0])
    if len(given) > 1 or not file.is_file():
        return _from_runs(given, statistics, where, where_statistics)
    try:
        reference = Reference.parse(file.read_bytes())
    except (ValueError, OSError) as error:
        reason = f"not a reference: {error}"
        fix = "python -m instrument.reference make RUNS --out FILE"
        raise ConfigError(Problem(where, reason, given[0], "a reference or healthy runs", fix=fix)) from None
    for name in statistics:
        if name not in reference.statistics:
            message, known = "the reference lacks this statistic", reference.statistics
            fix = f"python -m instrument.reference make RUNS --stats {' '.join(statistics)} --out FILE"
            raise ConfigError(Problem(where_statistics, message, name, known, similar_names(name, known), fix=fix))
    return reference


def ranges_of(run: RunTables, statistics: Sequence[str]) -> pa.Table:
    """Return the smallest and the largest value (`low`, `high`) of statistics in each phase of training of one run.

    The other columns are `INDEX`. Non-finite rows and recomputed ones are left out, as rules do not read them.
    """
    columns = [name for name in statistics if name in ALL or name in run.custom_statistics]
    metrics = [name for name in statistics if name in METRICS and name != MEAN_LOSS]
    parts: list[pa.Table] = []
    of_stats = list(dict.fromkeys([*KEY, "step", *NEEDED, *columns]))
    for batch in run.scan("stats", of_stats, ~ds.field("recompute")):
        parts.append(_ranges(batch.filter(pa.array(~not_finite_in(batch))), columns))
    for batch in run.scan("metrics", ["step", "phase", *metrics]):
        parts.append(_ranges(batch, metrics, only_finite=True))
    if MEAN_LOSS in statistics:
        parts.append(_mean_losses(run))
    grouped = pa.concat_tables([OF_RANGES.empty_table(), *parts]).group_by(INDEX, use_threads=False)
    return grouped.aggregate([("low", "min"), ("high", "max")]).rename_columns([*INDEX, "low", "high"])


def _mean_losses(run: RunTables) -> pa.Table:
    """Return the mean loss of each phase of training of several steps that all have one, in the smallest and largest of all processes."""
    of_training = (ds.field("phase") == "train") & ds.field("loss").is_valid()
    losses: defaultdict[tuple[int, int], list[float]] = defaultdict(list)  # by phase of training and process
    for batch in run.scan("metrics", ["step", "rank", "loss"], of_training):
        step, rank, loss = (batch[name].to_numpy(zero_copy_only=False) for name in ("step", "rank", "loss"))
        for key, each in zip(zip(phase_of(step).tolist(), rank.tolist(), strict=True), loss.tolist(), strict=True):
            if math.isfinite(each):
                losses[key].append(each)
    whole = {key: each for key, each in losses.items() if 1 < len(each) == len(steps_of(key[0]))}
    means = [float(np.mean(each)) for each in whole.values()]
    return _rows([phase for phase, _ in whole], MEAN_LOSS, means, means, {"phase": ["train"] * len(means)})


def _ranges(rows: pa.RecordBatch, columns: Sequence[str], *, only_finite: bool = False) -> pa.Table:
    """Return the ranges of columns of a table; the names of locations that it does not have are empty."""
    values = {name: rows[name].to_numpy(zero_copy_only=False).astype(np.float64) for name in columns}
    if only_finite:
        values = {name: np.where(np.isfinite(each), each, np.nan) for name, each in values.items()}
    given = [name for name in KEY if name in rows.schema.names]
    keys = {**{name: rows[name].cast(pa.string()) for name in given}, "at": phase_of(rows["step"].to_numpy())}
    table = pa.table({**keys, **{f"of {name}": pa.array(each, from_pandas=True) for name, each in values.items()}})
    kinds = [(f"of {name}", function) for name in columns for function in ("min", "max")]
    found = table.group_by([*keys], use_threads=False).aggregate(kinds)
    known = {name: found[name] for name in given}
    parts = [_rows(found["at"], name, found[f"of {name}_min"], found[f"of {name}_max"], known) for name in columns]
    return pa.concat_tables([OF_RANGES.empty_table(), *parts]).filter(pc.is_valid(pc.field("low")))


def _rows(phases: Any, statistic: str, low: Any, high: Any, known: Mapping[str, Any]) -> pa.Table:
    """Return ranges of one statistic as a table; the columns of `KEY` that are not known are empty."""
    names = {**dict.fromkeys(KEY, [""] * len(phases)), "statistic": [statistic] * len(phases), **known}
    return pa.table({**names, "phase_of_training": phases, "low": low, "high": high}, OF_RANGES)


def _from_runs(given: Sequence[str], statistics: Sequence[str], where: str, where_statistics: str) -> Reference:
    runs = [run for each in given for run in _runs(each, where)]
    if not runs:
        raise ConfigError(Problem(where, "there is no run", fix="give the folders of healthy runs"))
    fix, reasons = "leave it out, or complete it", ((run, _why_unhealthy(run)) for run in runs)
    what = "the run is not healthy: "
    raise_problems([Problem(where, what + why, str(run.path), fix=fix) for run, why in reasons if why])
    warned = [f"{run.path.name} ({', '.join(names)})" for run in runs if (names := _rules_that_warned(run))]
    if warned:
        message = f"rules warned in {len(warned)} of {len(runs)} runs: {shorten(warned)}; leave out those that are not healthy"
        warnings.warn(message, InstrumentWarning, stacklevel=3)
    table = _table([ranges_of(run, statistics or DEFAULT_STATISTICS) for run in runs])
    known = table["statistic"].unique().to_pylist()
    if missing := [name for name in statistics if name not in known]:
        message = "none of the runs recorded this statistic"
        similar = similar_names(missing[0], (*ALL, *METRICS))
        raise ConfigError(Problem(where_statistics, message, missing[0], known, similar))
    if not known:
        fix = f"record statistics of tensors, such as {shorten(list(DEFAULT_STATISTICS))}"
        raise ConfigError(Problem(where, "the runs recorded no statistics", list(given), fix=fix))
    config = runs[0].info.get("config") or {}
    batches = (batch for run in runs for table in ("stats", "metrics") for batch in run.scan(table, ["step"]))
    about = {
        "runs": [run.path.name for run in runs],
        "last_step": max((int(batch["step"].to_numpy().max(initial=0)) for batch in batches), default=0),
        "versions": runs[0].info.get("versions") or {},
        "config": {name: config[name] for name in SECTIONS if name in config},
        "settings": _common_settings(runs),
        "varied": sorted(map(list, set.intersection(*map(_varied, runs)))),
        "rates": _common_rates(runs),
        "counts": _common_counts(runs),
    }
    return Reference(table, about)


def _common_rates(runs: Sequence[RunTables]) -> list[list[float]]:
    """Return each step at which the learning rate changes, and its value; none if it ever differs between the runs, as if it depends on
    their losses, which one run does not show."""
    of_training = (ds.field("phase") == "train") & ds.field("lr").is_valid()
    tables = [[batch.to_pandas() for batch in run.scan("metrics", ["step", "lr"], of_training)] for run in runs]
    if len(runs) == 1 or not all(tables):
        return []
    rates = pd.concat([pd.concat(each).groupby("step")["lr"].max() for each in tables], axis=1).sort_index()
    least, most = rates.min(axis=1), rates.max(axis=1)
    if not np.allclose(least, most, rtol=1e-6, atol=0):
        return []
    small, changes = SMALL_RATE * most.max(), list[list[float]]()
    for step, rate in most.items():
        if not (changes and math.isclose(rate, changes[-1][1], rel_tol=CHANGE_OF_RATE, abs_tol=small)):
            changes.append([int(step), float(rate)])
    return changes


def _common_counts(runs: Sequence[RunTables]) -> dict[str, dict[str, Any]]:
    """Return `Reference.counts`; none of a single run, which does not show how much runs differ."""
    of_runs: list[defaultdict[str, dict[int, FloatArray]]] = [defaultdict(dict) for _ in runs]
    for run, found in zip(runs, of_runs, strict=True):
        for batch in run.scan("relations", ["step", "path", "text"], ds.field("relation") == COUNTS):
            for step, path, text in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                found[path][step] = np.array(text.split(), np.float64)
    common: dict[str, dict[str, Any]] = {}
    for path in sorted(set.intersection(*map(set, of_runs))) if len(runs) > 1 else ():
        series = [found[path] for found in of_runs]
        sums = [dict(sums_of_counts(each)) for each in series]
        phases = dict.fromkeys(itertools.chain(*sums))
        healthy = {phase: np.sum([own[phase] for own in sums if phase in own], axis=0) for phase in phases}
        largest = 0.0
        for each, own in zip(series, sums, strict=True):
            others = ((counts, healthy[phase] - own[phase]) for phase, counts in sums_of_counts(each))
            differences = [difference_of_counts(counts, other)[0] for counts, other in others if other.any()]
            largest = max([largest, *map(min, itertools.pairwise(differences))])
        listed = {phase: each.astype(int).tolist() for phase, each in healthy.items()}
        common[path] = {"largest": largest, "counts": listed}
    return common


def _varied(run: RunTables) -> set[tuple[str, ...]]:
    """Return the locations of inputs whose fingerprints differ in each two successive steps of the first ones.

    None of a run in which the inputs of the first module repeat: those of later layers then differ only because of the parameters.
    """
    prints: defaultdict[tuple[str, ...], dict[int, tuple[int, int]]] = defaultdict(dict)  # of several calls in a step
    of_inputs = (ds.field("step") < FIRST_STEPS) & (ds.field("role") == "input") & ~ds.field("recompute")
    for batch in run.scan("stats", [*KEY, "step", "fingerprint"], of_inputs & ds.field("fingerprint").is_valid()):
        for *key, step, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            of_steps = prints[tuple(key)]
            low, high = of_steps.get(step, (value, value))
            of_steps[step] = min(value, low), max(value, high)
    values = {key: [of_steps[step] for step in sorted(of_steps)] for key, of_steps in prints.items()}
    varied = [
        key for key, each in values.items() if each[1:] and all(one != other for one, other in itertools.pairwise(each))
    ]
    first = {key[:2] for key in [*prints][:1]}  # its hook and layer: of several inputs, one can be a mask
    return set() if first.isdisjoint(key[:2] for key in varied) else {*varied}


def _common_settings(runs: Sequence[RunTables]) -> dict[str, dict[str, str | None]]:
    """Return the settings of each module in any run: None for one that differs, or that a run does not have.

    Weights of classes can differ a little: those of the first run are then returned as `about` these.
    """
    each = [*map(settings_of, runs)]
    if without := [str(run.path) for run, settings in zip(runs, each, strict=True) if not settings]:
        message = f"settings are not compared, because runs of earlier versions have none: {shorten(without)}"
        warnings.warn(message, InstrumentWarning, stacklevel=2)
    common: dict[str, dict[str, str | None]] = {}
    for layer in dict.fromkeys(itertools.chain(*each)) if all(each) else ():
        own = [settings.get(layer, {}) for settings in each]
        texts = {name: dict.fromkeys(one.get(name) for one in own) for name in itertools.chain(*own)}
        common[layer] = {name: _common(*known) for name, known in texts.items()}
    return common


def _common(first: str | None, *others: str | None) -> str | None:
    if not others:
        return first
    has_weights = "weight=" in (first or "")
    is_common = has_weights and all(are_near(first, each, CHANGE_OF_WEIGHTS) for each in others)
    return f"{ABOUT}{first}" if is_common else None


def _runs(given: str, where: str) -> list[RunTables]:
    allowed = "a reference, a run, a folder of runs, or a pattern"
    is_pattern = glob.has_magic(given) and not is_address(given) and not Path(given).exists()
    paths = sorted(glob.glob(given)) if is_pattern else [given]
    if not paths:
        raise ConfigError(Problem(where, "the pattern matches nothing", given, allowed))
    try:
        opened = [RunTables(*find_runs(path)) for path in paths]
    except NoRunError as error:
        message = str(error) if is_address(given) or Path(given).exists() else "file or folder not found"
        raise ConfigError(Problem(where, message, given, allowed)) from None
    return [run.single(index) for run in opened for index in range(len(run.folders))]


def _why_unhealthy(run: RunTables) -> str:
    if run.info["status"] != "done":
        return f"its status is {run.info['status']}"
    for batch in run.scan("metrics", ["step", "loss"], (ds.field("phase") == "train") & ds.field("loss").is_valid()):
        lost = ~np.isfinite(batch["loss"].to_numpy())
        if lost.any():
            return f"its loss is not finite at step {batch['step'].to_numpy()[lost][0]}"
    return ""


def _rules_that_warned(run: RunTables) -> list[str]:
    warned = ds.field("rule").isin(pa.array([*rules_of(run.info)], pa.string())) & (ds.field("severity") == "warning")
    return sorted({name for batch in run.scan("events", ["rule"], warned) for name in batch["rule"].to_pylist()})


def _table(runs: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of a reference from the ranges of each run; see `Reference`."""
    rows: pd.DataFrame = pa.concat_tables(runs).to_pandas()
    index = rows[INDEX].drop_duplicates(ignore_index=True)
    at = rows.groupby(INDEX, sort=False).ngroup(), np.repeat(np.arange(len(runs)), [len(run) for run in runs])
    both = np.full((2, len(index), len(runs)), np.nan)
    both[0][at], both[1][at] = rows["low"], rows["high"]
    lows, highs = (pd.DataFrame(each, pd.MultiIndex.from_frame(index)) for each in both)
    columns = {
        **{name: index[name] for name in (*KEY, "statistic")},
        "step": STARTS[index["phase_of_training"].to_numpy(int)],
        "low": rounded(lows.min(axis=1).to_numpy(float), up=False),
        "high": rounded(highs.max(axis=1).to_numpy(float), up=True),
        "spread": rounded(_spreads(lows, highs, index["statistic"]), up=True),
    }
    return pa.Table.from_pandas(pd.DataFrame(columns), schema(), preserve_index=False)


def _spreads(lows: pd.DataFrame, highs: pd.DataFrame, statistics: pd.Series[Any]) -> FloatArray:
    """Return the margin of each range; see `ReferenceRule`.

    Args:
        lows, highs: The smallest and largest values, [ranges, runs], with the index `INDEX`.
        statistics: The statistic of each range, [ranges].
    """
    with packages_of("analysis", "a reference"):
        from scipy.special import stdtrit

    count = lows.shape[1]
    is_ratio = statistics.isin(RATIOS).to_numpy()
    is_fraction = np.array(
        [
            name == "accuracy" if name in METRICS else statistic_of(name).unit in ("fraction", "units")
            for name in statistics
        ],
        np.bool_,
    )
    largest = np.asarray(np.fmax(lows.abs().max(axis=1), highs.abs().max(axis=1)), np.float64)
    ratio, fraction, other = FLOORS if count > 1 else FLOORS_OF_ONE_RUN
    is_mean_loss = (statistics == MEAN_LOSS).to_numpy()
    is_attention = lows.index.get_level_values("role") == "attention"
    others = np.where(is_mean_loss & (count > 1), FLOOR_OF_MEAN_LOSS, other) * largest
    floors = np.where(is_ratio, np.log(ratio), np.where(is_fraction, fraction, others))
    low, high = (
        pd.DataFrame(np.where(is_ratio[:, None], np.log(values.where(values > 0)), values), values.index)
        for values in (lows, highs)
    )
    if count > 1:
        variances = (low.var(axis=1, ddof=1).fillna(0.0) + high.var(axis=1, ddof=1).fillna(0.0)) / 2
        pooled = variances.groupby(level=INDEX[:-1], sort=False).transform("mean")
        has_scale = ~(is_ratio | is_fraction) | is_attention
        with_scale = variances[has_scale].sort_index().groupby(level=INDEX[:-1])
        pooled.update(with_scale.transform(lambda phases: phases.rolling(NEAR_PHASES, 1, center=True).mean()))
        tails = np.where(is_mean_loss, TAIL_OF_MEAN_LOSS, TAIL)
        t = stdtrit(np.where(has_scale, NEAR_PHASES, INDEPENDENT_PHASES) * (count - 1), 1 - tails)
        widths = t * np.sqrt(np.fmax(variances, pooled) * (1 + 1 / count))
    else:
        widths = (high - low).max(axis=1)
    is_extreme = ((statistics == "abs_max").to_numpy() | is_attention) & (count > 1)
    spreads: FloatArray = np.fmax(np.asarray(widths, np.float64), floors) * np.where(is_extreme, WIDTH_OF_EXTREMES, 1.0)
    return np.where(is_ratio, np.exp(np.minimum(spreads, LARGEST)), spreads)
