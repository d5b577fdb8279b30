"""The differences between two runs, and their summary as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd

from ..config.schedule import STEP_PHASES
from ..rules.step_rows import location_name
from .differences import NOISE_RATIO, ULP_BINS
from .operators import JUMP, OperatorDifferences
from .operators import summary as operator_summary
from .recorded_differences import VALUES, FirstDifference

MIN_DEPTH = 4  # outputs with errors from which their growth is estimated
MAX_LISTED = 8  # settings and unmatched layers that are listed


@dataclass(frozen=True)
class Diff:
    """The differences between two runs. `print` shows a summary.

    Attributes:
        paths: The folders of the two runs.
        infos: The content of the run.json of each run.
        dtypes: The precision of each run, such as `bfloat16`.
        tolerance: The relative difference above which tensors differ.
        settings: The settings, versions and devices that differ, as pairs of texts by key.
        common_steps: The steps that both runs recorded: the first, the last, and their number.
        first: The first difference above the tolerance; None without one.
        with_bits: The number of compared rows with fingerprints in both runs.
        first_bits: The step, the location (the index in `layers`) and the call of the first fingerprints that differ; None
            without one.
        cause: The reason why the first difference is not evidence against its layer: `seed` if the seeds differ, `batches` if
            the samples of its step differ; otherwise empty.
        layers: One row per location that both runs recorded, in the order of execution in the first run:

            - `phase`, `hook`, `kind`, `role`, `layer`, `path`, `module_type`: the location
            - `hook_b`, `layer_b`, `path_b`: the names in the other run
            - `rows`: the number of compared rows of statistics
            - `first_step`: the first step with a difference above the tolerance
            - `difference`, `step`: the largest relative difference of the statistics that decide, and its step
            - `tolerance`: the relative difference above which its tensors differ
            - one column for each of `statistics`: its largest relative difference

        statistics: The statistics that both runs recorded.
        steps: The largest relative difference of each location (rows, as in `layers`) at each step (columns). If there are
            more than 200 steps, a column is a group of steps, named after the first one.
        tensors: One row per location with recorded tensors; the index is that of `layers`:

            - `tensors`, `elements`: the numbers of compared tensors and of their elements
            - `dtype_a`, `dtype_b`: the dtypes
            - `l2`: the largest relative difference, |a - b| / max(|a|, |b|) with L2 norms
            - `cosine`: the smallest cosine of the angle between the tensors
            - `max_abs`, `max_rel`: the largest |a_i - b_i|, and the largest |a_i - b_i| / max(|a_i|, |b_i|)
            - `ulp`: the number of elements by distance in units in the last place of the coarser dtype, in the 13 bins
              0, 1, 2, 3-4, 5-8, ..., 513-1024, > 1024
            - `equal_bits`: whether the dtypes and all bits are equal
            - `noise`, `ratio`: for folders of tensors, the rounding noise of the layer, and `l2` divided by it

        metrics: One row per step and metric that both runs have: `phase`, `step`, `metric`, `a`, `b`, `difference`. The
            difference of NaN and a number is infinite.
        unmatched: One row per location that only one run recorded: `run` (`a` or `b`), and the columns of the location.
        unmatched_rows: For each run, the number of rows at common steps and locations that the other run does not have, and of all
            rows at steps that only this run recorded.
        other_parts: The number of pairs of recorded tensors that are not compared, because the runs recorded different parts.
        operators: The differences of operators, if both runs recorded them: of replays with `--ops`.
        noise: For folders of tensors without a given tolerance, how the rounding noise of the layers is known; otherwise empty.
        alignment: For folders of tensors, how their tokens are aligned, and which tensors could not be written; otherwise empty.
    """

    paths: tuple[Path, Path]
    infos: tuple[Mapping[str, Any], Mapping[str, Any]]
    dtypes: tuple[str, str]
    tolerance: float
    settings: Mapping[str, tuple[str, str]]
    common_steps: tuple[int, int, int]
    first: FirstDifference | None
    with_bits: int
    first_bits: tuple[int, int, int] | None
    cause: Literal["", "seed", "batches"]
    layers: pd.DataFrame
    statistics: tuple[str, ...]
    steps: pd.DataFrame
    tensors: pd.DataFrame
    metrics: pd.DataFrame
    unmatched: pd.DataFrame
    unmatched_rows: tuple[int, int]
    other_parts: int
    operators: OperatorDifferences | None = None
    noise: str = ""
    alignment: str = ""

    @property
    def suspect(self) -> str | None:
        """The layer that causes the first difference; None without one, or if no layer is the reason.

        If the input of a layer is the first tensor that differs, the code that calls the layer computes it: the innermost recorded
        module that contains the layer, or a layer in it that was not recorded.
        """
        if self.first is None or self.cause:
            return None
        row = self.layers.loc[self.first.location]
        if row["role"] != "input" or row["kind"] != "forward_pre" or not row["layer"]:
            return str(row["layer"])
        above = [row["layer"].rsplit(".", count)[0] for count in range(1, row["layer"].count(".") + 1)]
        recorded = {*self.layers["layer"], *self.unmatched["layer"][self.unmatched["run"] == "a"]}
        return next((layer for layer in above if layer in recorded), "")

    @property
    def is_identical(self) -> bool:
        """Whether all compared numbers, shapes and dtypes are equal. Two NaN are equal, and so are -0.0 and 0.0."""
        numbers = (self.layers[[*self.statistics]], self.steps, self.tensors[["max_abs"]], self.metrics[["difference"]])
        is_other = any(np.any(table.to_numpy(np.float64, na_value=0.0) > 0) for table in numbers)
        if self.operators is not None:
            is_other |= self.operators.first is not None or self.operators.relations is not None
        return not is_other and self.tensors["dtype_a"].equals(self.tensors["dtype_b"])

    @property
    def other_losses(self) -> pd.DataFrame:
        """The rows of `metrics` with losses whose relative difference is above the tolerance, in the order of the steps."""
        is_other = (self.metrics["metric"] == "loss") & (self.metrics["difference"] > self.tolerance)
        return self.metrics[is_other].sort_values("step")

    @property
    def is_within_tolerance(self) -> bool:
        """Whether no difference of a tensor or of a loss is above the tolerance."""
        has_other_operators = self.operators is not None and self.operators.above is not None
        return self.first is None and self.other_losses.empty and not has_other_operators

    def __str__(self) -> str:
        return "\n".join(summary(self))

    __repr__ = __str__


def summary(diff: Diff) -> list[str]:
    """Return the summary: the two runs, what was compared, the verdict, and what was not compared."""
    return [
        *_runs(diff),
        *_settings(diff),
        "",
        *_compared(diff),
        "",
        *(verdict(diff) if len(diff.layers) else ()),
        *(() if diff.operators is None else operator_summary(diff.operators)),
        *(
            f"loss: the first difference is at step {row['step']}: {row['a']:.6g} and {row['b']:.6g}"
            for row in records(diff.other_losses.head(1))
        ),
        *_unmatched(diff),
    ]


def verdict(diff: Diff) -> Iterator[str]:
    """Yield the result of the comparison, and how to read it. Lines after the first one are indented."""
    first = diff.first
    if diff.is_identical:
        yield _equality(diff)
    elif first is None and len(diff.other_losses):
        yield "DIFFERENT in the loss only: all compared tensors are within the tolerance"
        yield "  Record more tensors or more steps to find the first layer that differs."
    elif first is None:
        largest = max(records(diff.layers.dropna(subset="difference")), key=lambda row: row["difference"])
        yield f"WITHIN THE TOLERANCE: the largest decisive difference is {largest['difference']:.2g}"
        yield f"  at {place(largest)}, step {largest['step']}"
        if diff.first_bits is not None:
            step, location, call = diff.first_bits
            yield f"  the first bits that differ: step {step}, {place(records(diff.layers)[location], call)}"
        rows = diff.layers[diff.layers["role"] == "output"]
        errors = rows["difference"].to_numpy(np.float64)
        depth = np.arange(1, len(errors) + 1)[errors > 0]
        if diff.noise and len(depth) >= MIN_DEPTH:  # error = c * depth**exponent, by least squares
            errors = errors[errors > 0]
            exponent = np.polyfit(np.log(depth), np.log(errors), 1)[0]
            ends = f"from {errors[0]:.2g} to {errors[-1]:.2g}"
            yield f"  drift with depth: {ends} over {len(rows):,} outputs, like depth**{exponent:.1f}"
        if names := [*diff.metrics[diff.metrics["difference"] > 0]["metric"].unique()]:
            yield f"  metrics that differ: {', '.join(names)}"
    elif diff.cause:
        yield f"DIFFERENT from {_step(first)} on, and no layer is the reason:"
        seeds = [info["seed"] for info in diff.infos]
        yield from (f"  {line.format(*seeds)}" for line in _REASONS[diff.cause])
    else:
        yield f"DIFFERENT: the first difference is at {_step(first)}, {place(records(diff.layers)[first.location], first.call)}"
        yield f"  {_numbers(first)}"
        if diff.noise and not isinstance(first.a, tuple):  # tensors of different shapes have no distance
            row = cast("dict[str, float]", diff.tensors.loc[first.location].to_dict())
            ratio = "above" if np.isnan(row["ratio"]) else f"{row['ratio']:,.0f} times"
            yield f"  {ratio} the rounding noise of this layer, {row['noise']:.2g}; cosine {row['cosine']:.6f}"
        if diff.suspect != diff.layers["layer"][first.location]:
            yield f"  The code of {diff.suspect or '.'} computes this input, or a layer in it that was not recorded."
        yield from (f"  {line}" for line in _before(diff, first))


def _equality(diff: Diff) -> str:
    """Return what is proved for runs without a difference."""
    compared = diff.tensors["tensors"].reindex(diff.layers.index, fill_value=0)
    rows = diff.layers["rows"]
    if diff.with_bits == rows.sum() > 0 and (compared <= rows).all():
        return "EQUAL BITS: the fingerprints of all compared tensors are equal"
    if (compared < rows).any():
        return "EQUAL STATISTICS: all compared numbers are equal. Tensors with equal statistics can differ"
    if diff.tensors["equal_bits"].all():
        return "EQUAL BITS: all compared elements have equal bits"
    return "EQUAL: all compared elements are equal"


_REASONS = {
    "seed": (
        "The seeds are {} and {}, so the initial weights and the batches differ.",
        "Repeat one of the runs with the seed of the other one.",
    ),
    "batches": (
        "The batches of this step consist of different samples.",
        "Repeat one of the runs with the data and the order of the other one.",
    ),
}


def _numbers(first: FirstDifference) -> str:
    difference = f"relative difference {first.difference:.2g}"
    if isinstance(first.a, tuple) and isinstance(first.b, tuple):
        return f"{first.statistic.removeprefix('source_')} {[*first.a]} and {[*first.b]}"
    if first.statistic == "fingerprint":
        return "the fingerprints differ, and so do the bits"
    if first.statistic == VALUES:
        return f"element by element: {difference}"
    return f"{first.statistic} {first.a:.6g} and {first.b:.6g}: {difference}"


def _before(diff: Diff, first: FirstDifference) -> Iterator[str]:
    if diff.noise and first.location == 0 and not diff.suspect and diff.layers["role"][0] == "input":
        yield "The inputs of the models differ: write both folders with the same batch."
    elif first.location == 0 and first.before == 0.0:
        yield "It is the first recorded tensor of the step, so the weights or the batches may differ too. To exclude them,"
        yield "record the inputs (kind: forward_pre) and the parameters (kind: step_pre, role: param)."
    elif first.before == 0.0:
        yield "All tensors before it are equal."
    elif (ratio := first.difference / first.before) >= JUMP:
        yield f"It is a jump: {ratio:,.0f} times the largest difference before it, {first.before:.2g}."
    else:
        yield f"It is not a jump: the largest difference before it is {first.before:.2g}. Rounding errors grow from layer to layer"
        yield "and from step to step."


def place(row: Mapping[str, Any], call: int = 0) -> str:
    """Return a row of `Diff.layers` as text, such as `encoder.1 (ReLU), forward output`."""
    layer, tensor = place_cells(row)
    module_type = f" ({row['module_type']})" if row["module_type"] else ""  # unknown for tensors of other programs
    return f"{layer}{module_type}, {tensor}" + (f", call {call}" if call else "")


def place_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the layer of a row of `Diff.layers`, with its name in the other run, and what was recorded of it."""
    name = location_name(row["layer"], row["path"], row["kind"])
    other = location_name(row["layer_b"], row.get("path_b", row["path"]), row["kind"])
    phase = "" if row["phase"] in STEP_PHASES else f" ({row['phase']})"
    return name if name == other else f"{name} = {other}", f"{row['kind']} {row['role']}{phase}"


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as dictionaries."""
    return cast("list[dict[str, Any]]", table.to_dict("records"))


def number_text(value: Any) -> str:
    """Return a number of a table with two digits; empty for a missing value."""
    if pd.isna(value):
        return ""
    return f"{value:,}" if isinstance(value, int | np.integer) else "0" if value == 0.0 else f"{value:.2g}"


def ulp_text(counts: Sequence[int]) -> str:
    """Return a histogram of distances as text, such as `0: 81%, 1: 19%`; empty without elements."""
    texts = []
    for name, count in zip(ULP_BINS, counts, strict=True):
        if count:
            fraction = count / sum(counts)
            digits = 0 if 0.01 <= fraction <= 0.99 or fraction == 1.0 else 1
            texts.append(f"{name}: {fraction:.{digits}%}" if fraction > 0.001 else f"{name}: <0.1%")
    return ", ".join(texts)


def _step(first: FirstDifference) -> str:
    return f"step {first.step}" + ("" if first.phase in STEP_PHASES else f" ({first.phase})")


def _runs(diff: Diff) -> Iterator[str]:
    for name, path, info, dtype in zip("AB", diff.paths, diff.infos, diff.dtypes, strict=True):
        version = (info.get("versions") or {}).get("torch")
        facts = [info["status"], dtype, info.get("device"), version and f"torch {version}"]
        yield f"{name}  {path}  ({', '.join(str(fact) for fact in facts if fact)})"


def _settings(diff: Diff) -> Iterator[str]:
    if diff.settings:
        yield "settings that differ:"
    width = max(map(len, diff.settings), default=0)
    for key, (one, other) in list(diff.settings.items())[:MAX_LISTED]:
        yield f"  {key:<{width}}  {one} | {other}"
    if len(diff.settings) > MAX_LISTED:
        yield f"  ... ({len(diff.settings)} in all)"


def _compared(diff: Diff) -> Iterator[str]:
    first, last, count = diff.common_steps
    rows = diff.layers["rows"].sum()
    when = f"step {first:,}" if count == 1 else f"{count:,} steps from {first:,} to {last:,}"
    what = [f"{rows:,} rows"] if rows else []
    what += [f"{diff.tensors['tensors'].sum():,} recorded tensors"] if len(diff.tensors) else []
    where = f" at {len(diff.layers):,} locations" if len(diff.layers) else ""
    yield f"compared: {' and '.join(what) or 'operators'}{where}, {when}"
    other = diff.layers.join(diff.tensors.query("dtype_a != dtype_b")[["dtype_a", "dtype_b"]], how="inner")
    for (a, b), same in other.groupby(["dtype_a", "dtype_b"]):
        more = f" and {len(same) - 1:,} other locations" if len(same) > 1 else ""
        yield f"different dtypes: {a} and {b} at {place(records(same)[0])}{more}"
    if diff.alignment:
        yield diff.alignment
    if diff.noise:
        yield f"tolerance: {NOISE_RATIO:.0f} times the rounding noise of each layer, {diff.noise}"
    else:
        yield f"tolerance: {diff.tolerance:.2g}"


def _unmatched(diff: Diff) -> Iterator[str]:
    for name in "ab":
        rows = diff.unmatched[diff.unmatched["run"] == name]
        if rows.empty:
            continue
        places = [location_name(*each) for each in rows[["layer", "path", "kind"]].itertuples(index=False)]
        listed = ", ".join(list(dict.fromkeys(places))[:MAX_LISTED])
        more = f", ... ({len(rows):,} in all)" if len(rows) > MAX_LISTED else ""
        yield f"only in {name.upper()}: {listed}{more}"
    for name, count in zip("AB", diff.unmatched_rows, strict=True):
        if count:
            yield f"rows only in {name}: {count:,} (other steps or tables, or a different number of calls, ranks or micro-steps)"
    if diff.other_parts:
        yield f"recorded tensors of which the runs have different parts: {diff.other_parts:,}, which are not compared"
