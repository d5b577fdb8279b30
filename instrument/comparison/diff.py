"""`instrument.diff`: compares what two runs recorded, and finds the first tensor that differs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..analysis.config_comparison import HOOKS, RunSetup, training_of
from ..analysis.config_fields import leaves_of, to_yaml
from ..analysis.frames import plain_labels
from ..analysis.load import Run, load
from ..analysis.rule_events import settings_of
from ..errors import ConfigError, Problem
from ..fields.globs import ROOT
from ..formatting import shorten
from ..rules.reference_ranges import has_graph, is_of_graph, setting_name
from ..storage.remote_folder import is_address
from ..storage.run_search import NoRunError
from .alignment import LOCATION, in_execution_order, paired_hooks, paired_locations, recorded, renamed_layers
from .operators import compare_operators, no_common_step
from .recorded_differences import Comparison, FirstDifference
from .result import Diff

if TYPE_CHECKING:
    from .foreign_runs import Noise

METRICS = ("loss", "accuracy", "lr", "grad_norm")
MAX_NAMES = 6  # maximum number of names in an error message
_EXPRESSION = re.compile(r"[+\[(:]| - |\.T\b")
"""What an entry of `rename` contains that names or computes one tensor, and not layers."""


def diff(
    a: Run | str | Path,
    b: Run | str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    foreign: bool = False,
) -> Diff:
    """Compare what two runs recorded, and find the first tensor that differs.

        difference = instrument.diff("runs/fp32", "runs/bf16")
        print(difference)
        difference.layers

    Rows are matched by phase, step, micro-step, hook, layer, kind, role, path and call. If the other run has no hook of this
    name, its only other hook with the same kind and role is used. Rows are read a few steps at a time.

    `mean`, `std`, `rms`, `l2`, the counts and the shapes decide whether tensors differ. For recorded tensors, the relative L2 difference
    and the shapes decide. Rows without these four statistics use all statistics except fractions. With tolerance 0, all statistics
    decide. The guide "Compare two runs" defines the relative differences.

    A folder of tensors that another program wrote (safetensors, `.pt`, `.npz`, or those of `instrument.dump` and msprobe)
    is compared in the same way; the guide "Port a model" describes it. Their tokens are aligned by sample and position. The
    tolerance of each layer is 10 times its rounding noise: the error of one side against its subfolder `float64`, or else
    an estimate from the dtype, the depth and the lengths of sums.

    Args:
        a: The first run: a run from `instrument.load`, its folder, or `probe.run`; or a folder of tensors.
        b: The other run.
        rename: Layers with another name in the other run, such as `{"encoder": "backbone", "h.*.mlp": "blocks.*.ffn"}`. An
            entry also renames everything inside the layer. `*` is one segment of a name or a part of it, `**` is any
            number of segments, and `.` is the root. For a folder of tensors as B, the new name can be an expression for one
            tensor: `{"h.*.attn.c_attn": "cat(blocks.*.q, blocks.*.k, blocks.*.v)"}`, with +, -, slices, `.T`, `cat`, `split`,
            `heads`, `merge` and `transpose`.
        tolerance: The relative difference above which tensors differ. Default: that of the coarser precision of the two runs,
            1e-10 for float64, 6e-5 for float32, 0.005 for float16, 0.04 for bfloat16.
        steps: Half-open range of steps (first, end); None leaves a side open.
        foreign: Whether folders are read as folders of tensors, also if they contain a run. Default: if they contain none.

    Returns:
        The differences.

    Raises:
        NoRunError: A folder does not exist or contains no run.
        ConfigError: A folder contains several runs; both folders are the same; a run is still in progress and `steps` has no
            end; the runs have no recorded tensor in common, or only counts and fractions of them; an entry of `rename`
            matches nothing; or the tolerance is not a number of at least 0. A folder of tensors cannot be read, or the
            token ids of the two folders differ.
    """
    if tolerance is not None and not (isinstance(tolerance, Real) and 0 <= tolerance < math.inf):
        raise ConfigError(Problem("tolerance", "must be a number of at least 0", tolerance))
    if not isinstance(steps, Sequence) or [isinstance(each, Integral | None) for each in steps] != [True, True]:
        allowed = "(first, end), such as (0, 100) or (50, None)"
        raise ConfigError(Problem("steps", "must be a range of steps", steps, allowed))
    if not isinstance(rename or {}, Mapping):
        raise ConfigError(Problem("rename", "must be a mapping from names in A to names in B", rename))
    plain = {old: new for old, new in (rename or {}).items() if not _EXPRESSION.search(old + new)}
    expressions = {old: new for old, new in (rename or {}).items() if old not in plain}
    runs, measured, alignment = _opened((a, b), plain, expressions, foreign=foreign)
    folders = [run.folders[0] for run in runs]
    if all(folder.exists() for folder in folders) and os.path.samefile(*folders):
        raise ConfigError(Problem(str(folders[0]), "both runs are the same folder", fix="pass two different runs"))
    for run in runs:
        if run.info["status"] == "running" and steps[1] is None:
            fix = "wait until it ends, or compare only steps that it has completed, such as 0:100"
            raise ConfigError(Problem(str(run.path), "the run is still in progress", fix=fix))
    condition = _condition(steps)
    of_a, of_b = ({name: recorded(run, name, condition) for name in ("stats", "tensors")} for run in runs)
    tables = {name: (of_a[name], of_b[name]) for name in of_a}
    one, other = (in_execution_order(*(table[side].locations for table in tables.values())) for side in (0, 1))
    names = renamed_layers(plain, list(dict.fromkeys(one["layer"])), list(dict.fromkeys(other["layer"])))
    locations = paired_locations(one, other, names, paired_hooks(one, other))
    unmatched = _unmatched(one, other, locations)
    noise = None if measured is None else measured.of(locations)
    comparison = Comparison(runs, locations, tables, tolerance, noise, {} if measured is None else measured.order)
    comparison.compare_statistics()
    comparison.compare_tensors()
    operators = compare_operators(runs, condition, tolerance)
    if comparison.first is None and not comparison.has_values and operators is None:
        recorded_steps = [sorted({step for each in tables.values() for _, step in each[side].rows}) for side in (0, 1)]
        problem = None if any(recorded_steps) else no_common_step(runs, condition)
        raise ConfigError(problem or _nothing_in_common((one, other), comparison, recorded_steps))
    first, steps_of = comparison.first, [*comparison.steps.values(), *([] if operators is None else [operators.steps])]
    common = sorted({step for steps in steps_of for step in steps})
    tensors = comparison.tensor_table()
    precisions = comparison.precisions or (() if operators is None else operators.precisions)
    return Diff(
        paths=(runs[0].path, runs[1].path),
        infos=(runs[0].info, runs[1].info),
        dtypes=(precisions[0].dtype, precisions[1].dtype),
        tolerance=comparison.tolerance if operators is None or comparison.precisions else operators.tolerance,
        settings=_settings(*runs),
        common_steps=(common[0], common[-1], len(common)),
        first=first,
        with_bits=comparison.with_bits,
        first_bits=comparison.first_bits,
        cause="" if first is None else _cause(runs, first),
        layers=comparison.table(),
        statistics=comparison.statistics,
        steps=comparison.matrix(),
        tensors=tensors,
        metrics=_metrics(runs, condition),
        unmatched=unmatched,
        unmatched_rows=(comparison.unmatched[0], comparison.unmatched[1]),
        other_parts=comparison.other_parts,
        operators=operators,
        noise="" if measured is None or tolerance is not None or tensors.empty else measured.source,
        alignment=alignment,
    )


def _opened(
    given: tuple[Run | str | Path, Run | str | Path],
    rename: Mapping[str, str],
    expressions: Mapping[str, str],
    *,
    foreign: bool,
) -> tuple[tuple[Run, Run], Noise | None, str]:
    """Return two runs or folders of tensors as runs; with a folder of tensors, also the rounding noise and the alignment as text."""
    opened = [run if isinstance(run, Run) else _run_at(run, foreign=foreign) for run in given]
    for run in opened:
        if run is not None:
            run.check_single()
    if opened[0] is not None and opened[1] is not None and not expressions:
        return (opened[0], opened[1]), None, ""
    from .foreign_runs import opened_folders  # imports torch, which a comparison of two runs does not need

    return opened_folders(given, opened, rename, expressions)


def _run_at(path: str | Path, *, foreign: bool) -> Run | None:
    """Return the run or runs of a folder; None if it is read as a folder of tensors."""
    try:
        if not foreign:
            return load(path)
    except NoRunError:
        from .foreign_folder import is_foreign

        if is_address(path) or not is_foreign(path):
            raise
    return None


def _condition(steps: tuple[int | None, int | None]) -> ds.Expression | None:
    first, end = steps
    tests = [] if first is None else [ds.field("step") >= first]
    tests += [] if end is None else [ds.field("step") < end]
    return tests[0] & tests[-1] if tests else None


def _unmatched(one: pd.DataFrame, other: pd.DataFrame, locations: pd.DataFrame) -> pd.DataFrame:
    """Return the locations that only one of the runs recorded; see `Diff.unmatched`."""
    keys = list(LOCATION)
    of_b = locations.drop(columns=["hook", "layer", "path"]).rename(columns=lambda name: name.removesuffix("_b"))
    left = []
    for name, place, known in (("a", one, locations), ("b", other, of_b)):
        is_known = pd.MultiIndex.from_frame(place[keys]).isin(pd.MultiIndex.from_frame(known[keys]))
        left.append(place[~is_known].assign(run=name))
    return pd.concat(left, ignore_index=True)[["run", *keys, "module_type", "scope"]]


def _nothing_in_common(
    places: Sequence[pd.DataFrame], comparison: Comparison, steps: Sequence[Sequence[int]]
) -> Problem:
    """Return the problem that no value has a counterpart in the other run, with the likely reason."""
    locations = comparison.locations
    layers, series, scopes = (
        [list(dict.fromkeys(map(" ".join, place[columns].astype(str).itertuples(index=False)))) for place in places]
        for columns in (["layer"], ["hook", "kind", "role"], ["scope"])
    )
    texts: Sequence[Sequence[str]] = series
    if not all(steps):
        message = "no tensor was recorded at the compared steps"
        fix = "add a record hook, such as hooks=activations, or compare other steps"
    elif not set(layers[0]) & set(layers[1]) and locations.empty:
        message, texts = "no layer was recorded by both runs", layers
        fix = "pass --rename OLD=NEW, or in Python rename={'OLD': 'NEW'}"
    elif locations.empty:
        message = "the hooks of the two runs record different tensors"
        fix = "record with the same hooks, also the same names if several have the same kind and role"
    elif not set(steps[0]) & set(steps[1]):
        message, texts = "no step was recorded by both runs", [[str(step) for step in each] for each in steps]
        fix = "record with the same 'every', 'start' and 'steps'"
    elif comparison.rows.any():
        message, texts = "only counts and fractions were recorded by both runs", [comparison.statistics] * 2
        fix = "record the same statistics, such as stats=default"
    elif comparison.other_parts:
        message = "the two runs recorded different parts of the tensors"
        fix = "record with the same selection, such as 'samples' and 'slice'"
    else:
        message, texts = "no row has a counterpart with the same call, rank and scope", scopes
        fix = "with several processes, record with reduce=global"
    given = [shorten([name or ROOT for name in names], MAX_NAMES) or "none" for names in texts]
    return Problem("", f"nothing to compare: {message}", f"A: {given[0]}; B: {given[1]}", fix=fix)


def _cause(runs: tuple[Run, Run], first: FirstDifference) -> Literal["", "seed", "batches"]:
    """Return the reason why the first difference is not evidence against its layer; see `Diff.cause`."""
    infos = [run.info for run in runs]
    seeds = {info["seed"] for info in infos} - {None}  # folders of tensors have none
    configs = [info.get("config") for info in infos]
    # Runs that load their weights, and pass the samples in the order of the data, do not depend on their seed.
    are_forward = all(isinstance(each, Mapping) and each.get("mode") == "forward" for each in configs)
    if len(seeds) > 1 and not (are_forward and all((info.get("init_from") or {}).get("path") for info in infos)):
        return "seed"
    samples = [_samples(run, first) for run in runs]
    return "batches" if all(samples) and samples[0] != samples[1] else ""


def _samples(run: Run, first: FirstDifference) -> list[tuple[Any, ...]]:
    """Return the samples of a step in ascending order; empty if they were not recorded."""
    condition = (ds.field("step") == first.step) & (ds.field("phase") == first.phase)
    rows = run.read("samples", ["sample", "id"], condition).astype(str)
    return sorted(rows.itertuples(index=False, name=None))


def _settings(one: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Return the settings, versions and devices that differ; see `Diff.settings`."""
    known: list[dict[str, str]] = []
    of_modules = settings_of(one), settings_of(other)
    has_operators = all(map(has_graph, of_modules))  # as in the rule `reference`
    common = [layer for layer in of_modules[0] if layer in of_modules[1]]
    for info, own in zip((one.info, other.info), of_modules, strict=True):
        training = training_of(0, info)
        leaves = leaves_of({**training.rest, HOOKS: training.hooks}) if isinstance(training, RunSetup) else {}
        settings = {"seed": info["seed"], "device": info.get("device"), "ranks": info.get("ranks", 1)}
        settings |= {f"{name} version": text for name, text in (info.get("versions") or {}).items()}
        flat = {key: to_yaml(json.loads(text)) for key, text in leaves.items() if text != "{}"}
        parts = [(layer, name, text) for layer in common for name, text in own[layer].items()]
        of_layers = {setting_name(at, name): text for at, name, text in parts if has_operators or not is_of_graph(name)}
        known.append(flat | {key: str(value) for key, value in settings.items()} | of_layers)
    keys = dict.fromkeys([*known[0], *known[1]])
    pairs = {key: (known[0].get(key, "missing"), known[1].get(key, "missing")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _metrics(runs: tuple[Run, Run], condition: ds.Expression | None) -> pd.DataFrame:
    """Return the metrics of both runs; see `Diff.metrics`."""
    keys = ["phase", "step"]
    chosen = ds.field("rank") == 0
    chosen = chosen if condition is None else condition & chosen
    tables: list[pd.DataFrame] = []
    for run in runs:
        names = [*METRICS, *run.custom_metrics]
        parts = [pd.DataFrame(columns=[*keys, "metric", "value"])]
        if record_batches := list(run.scan("metrics", [*keys, *names], chosen)):
            rows = plain_labels(pa.Table.from_batches(record_batches))
            for metric in names:  # missing values are left out, and NaN is kept
                given = rows.filter(rows[metric].is_valid()).select([*keys, metric]).to_pandas()
                parts += [given.rename(columns={metric: "value"}).assign(metric=metric)] if len(given) else []
        tables.append(pd.concat(parts[1:] or parts).drop_duplicates([*keys, "metric"]))
    if any(table.empty for table in tables):
        return pd.DataFrame(columns=[*keys, "metric", "a", "b", "difference"])
    both = tables[0].merge(tables[1], on=[*keys, "metric"], suffixes=("_a", "_b"))
    a, b = (both[f"value_{side}"].to_numpy(np.float64) for side in "ab")
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.abs(a - b) / np.fmax(np.abs(a), np.abs(b))
    are_equal = (a == b) | (np.isnan(a) & np.isnan(b))
    difference = np.where(are_equal, 0.0, np.where(np.isnan(relative), np.inf, relative))
    return both[keys].assign(metric=both["metric"], a=a, b=b, difference=difference)
