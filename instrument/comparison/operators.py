"""The comparison of the operators of two replays of a step, and the first operator with a value that is not finite.

Operators are matched by part, layer, name, output and shape, if both runs have equally many of these: a compiler changes their order. The
others are matched in the order in which they ran, by the longest common subsequence of part, name, output and shape, and of the
layer if both runs have it. So a run in which some operators are missing is compared at the others. Operators of compiled code are matched
also by their line. For runs with different numbers of processes, see `process_relations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds

from ..analysis.run_tables import RunTables
from ..errors import ConfigError, Problem
from ..fields.globs import ROOT
from ..formatting import shorten
from ..tables.schemas import OPERATOR_STATISTICS
from .alignment import batches, common_subsequence
from .differences import Precision, coarsest, decisive, relative_differences, run_precision
from .process_relations import RELATIONS, MatchedOutputs

_CALL = ("step", "rank", "number", "part", "layer", "operator", "source", "output")
_READ = ("dtype", "shape", "random", "inputs", "nan_inputs", "fingerprint", "projection")
_COLUMNS = (*_CALL, *_READ, *OPERATOR_STATISTICS)
_KEY = ("part", "matched_layer", "name", "output", "shape")
# An operator that changes its argument, and one that a compiler uses in its place, are matched with the plain one: relu_ and relu,
# native_batch_norm and _native_batch_norm_legit_functional.
_VARIANT = r"^(\w+)\._?(.+?)(?:_legit\w*)?_?$"
_NEAR = 8  # outputs before one in which its terms are looked for
JUMP = 10.0  # a difference is a jump if it is at least so many times the largest one before it
MAX_LISTED = 6  # operators between two matched ones that are listed

_EARLIER = "the weights, the state of the optimizer or the batch. Replay an earlier step."


@dataclass(frozen=True)
class OperatorDifference:
    """An output of an operator whose bits differ."""

    a: Mapping[str, Any]  # its row of `operators` in the first run
    b: Mapping[str, Any]
    statistic: str  # the one that differs most
    difference: float  # relative; 0 if only the bits differ, infinite if no relation of the processes is possible
    before: tuple[int, int]  # the outputs compared before it in this step, and those of them with equal bits
    between: tuple[tuple[str, ...], tuple[str, ...]]  # operators that only one run has since the last matched output
    reason: str = ""  # for different numbers of processes, why the output follows no relation


@dataclass(frozen=True)
class OperatorDifferences:
    """The differences between the operators of two runs."""

    steps: tuple[int, ...]  # that are compared
    # How many later steps of both runs are not compared. For different numbers of processes, these are those after the first step of an
    # optimizer that divides, such as Adam, which can amplify rounding.
    left_out: int
    precisions: tuple[Precision, Precision]
    tolerance: float  # the relative difference above which outputs differ
    compared: int  # outputs that both runs have; views, collectives and unreadable tensors have no bits to compare
    different: int  # outputs whose bits differ
    first: OperatorDifference | None  # the first one whose bits differ
    above: OperatorDifference | None  # the first one whose difference is above the tolerance
    unmatched: tuple[int, int]  # outputs that only this run has
    # For different numbers of processes, one row per compared output: `step`, `number`, `part`, `layer`, `operator`, `source` and `output`
    # in the first run, its `relation`, which is empty if none holds within the tolerance, and the relative `difference` from it.
    # None for equal numbers.
    relations: pd.DataFrame | None


def compare_operators(
    runs: tuple[RunTables, RunTables], condition: ds.Expression | None, tolerance: float | None
) -> OperatorDifferences | None:
    """Compare the operators of two runs, one step at a time. Return None if they have no output in common.

    Raise a ConfigError if the numbers of processes differ, and one of them recorded no operators in a step.
    """
    seen = [run.read("operators", ["step", "dtype"], condition).drop_duplicates() for run in runs]
    steps = tuple(sorted({*seen[0]["step"]} & {*seen[1]["step"]}))
    empty = pd.DataFrame(columns=["location", "min", "max", "abs_max"])
    one, other = (run_precision(run.info, empty, [*rows["dtype"]]) for run, rows in zip(runs, seen, strict=True))
    limit = coarsest((one, other)).tolerance if tolerance is None else tolerance
    are_related = runs[0].info.get("ranks", 1) != runs[1].info.get("ranks", 1)
    relations: list[pd.DataFrame] = []
    compared, different, unmatched = 0, 0, [0, 0]
    first: OperatorDifference | None = None
    above: OperatorDifference | None = None
    for step in steps:
        outputs = [_outputs(run, step) for run in runs]
        if are_related:
            for name, run, rows in zip("AB", runs, outputs, strict=True):
                if missing := {*range(run.info.get("ranks", 1))} - {*rows["rank"]}:
                    problem = f"no operators of rank {shorten([*map(str, missing)])} in step {step}"
                    raise ConfigError(Problem(name, problem, fix="record the operators of this step in all processes"))
            unit = coarsest((one, other)).unit
            matched = MatchedOutputs(outputs, 2 * unit / limit if limit else 0.0)  # as for statistics of gradients
            table, *firsts = _relations(matched, limit, unit)
            relations.append(table)
            compared, different = compared + len(table), different + int((table["relation"] == "").sum())
            left = [len(rows) - rows["rank"].nunique() * len(table) for rows in outputs]
            unmatched = [total + count for total, count in zip(unmatched, left, strict=True)]
            first, above = (before or of_step for before, of_step in zip((first, above), firsts, strict=True))
            if matched.divides.any():
                break  # the parameters can differ from here on
            continue
        found = []
        for rank in sorted({*outputs[0]["rank"]} & {*outputs[1]["rank"]}):
            sides = [rows[rows["rank"] == rank].reset_index(drop=True) for rows in outputs]
            pairs = _matched(*sides)
            count, *firsts = _first_differences(sides, pairs, limit, coarsest((one, other)))
            compared, different = compared + len(pairs), different + count
            unmatched = [total + len(rows) - len(pairs) for total, rows in zip(unmatched, sides, strict=True)]
            found.append(firsts)
        of_ranks = zip(*found, strict=True)
        earliest = (min(filter(None, all_), key=lambda one: int(one.a["number"]), default=None) for all_ in of_ranks)
        first, above = (before or of_step for before, of_step in zip((first, above), earliest, strict=True))
    if not compared:
        return None
    numbers = (limit, compared, different, first, above, (unmatched[0], unmatched[1]))
    done, joined = len(relations) or len(steps), pd.concat(relations) if relations else None
    return OperatorDifferences(steps[:done], len(steps) - done, (one, other), *numbers, joined)


def _relations(
    matched: MatchedOutputs, limit: float, unit: float
) -> tuple[pd.DataFrame, OperatorDifference | None, OperatorDifference | None]:
    """Return the relation of each matched output, the first difference between the processes, and it again if values differ."""
    differences = matched.differences()
    which = differences[:-2].argmin(0)  # without those that compare no values
    which = np.where(differences[which, np.arange(len(which))] <= limit, which, differences.argmin(0))
    smallest = differences[which, np.arange(len(which))]
    rows = matched.programs[0].iloc[matched.at[0]].reset_index(drop=True)
    names = np.array([*RELATIONS, ""])[np.where(smallest <= limit, which, len(RELATIONS))]
    columns = ["step", "number", "part", "layer", "operator", "source", "output"]
    table = rows[columns].assign(relation=names, difference=smallest)
    at = int((names == "").argmax()) if (names == "").any() else len(names)
    only = matched.only_in_some()
    is_above = at < len(names)
    if only is not None and only[0] <= at:
        at, row, reason = only
    elif is_above:
        row, reason = matched.reason(at)
    else:
        return table, None, None
    before = np.maximum.accumulate([unit, *smallest[:at]])
    random = ["It draws random numbers, which differ in each process. Compare without it."]
    lines = [
        reason,
        *(random if row["random"] else []),
        f"All {at:,} outputs before it in this step follow a relation, with differences up to {before[-1]:.2g}.",
    ]
    if before[-1] > JUMP * unit:
        largest = int((smallest[:at] / before[:-1]).argmax())
        lines.append(f"They grow most at {operator_text(rows.loc[largest])}: to {smallest[largest]:.2g}.")
    difference = float(smallest[at]) if is_above else 0.0
    first = OperatorDifference(row, row, "l2", difference, (at, at), ((), ()), "\n".join(lines))
    return table, first, first if is_above else None


def no_common_step(runs: tuple[RunTables, RunTables], condition: ds.Expression | None) -> Problem | None:
    """Return the problem that both runs recorded operators, but in no common step; None otherwise."""
    one, other = ({*run.read("operators", ["step"], condition)["step"].tolist()} for run in runs)
    if not one or not other or one & other:
        return None
    given = "; ".join(f"{name}: {shorten([*map(str, sorted(each))])}" for name, each in (("A", one), ("B", other)))
    source = (runs[1].info.get("replay") or {}).get("source")
    fix = "record the same step of both in a block `with probe.record_operators():`"
    if source is not None:
        fix = f"python -m instrument.replay {source} --steps {min(one)} --ops"
    message = "nothing to compare: the two runs recorded the operators of different steps"
    return Problem("steps", message, given, "at least one step that both recorded", fix=fix)


def _outputs(run: RunTables, step: int) -> pd.DataFrame:
    """Return the rows of a step that have a fingerprint, with the name of the operator without its overload and variant."""
    rows = run.read("operators", _COLUMNS, (ds.field("step") == step) & ds.field("fingerprint").is_valid())
    names = rows["operator"].astype(str).str.replace(r"\.[^.]*$", "", regex=True)
    names = names.str.replace(_VARIANT, r"\1.\2", regex=True)
    return rows.assign(name=names, shape=rows["shape"].map(tuple))


def _matched(one: pd.DataFrame, other: pd.DataFrame) -> list[tuple[int, int]]:
    """Return the pairs of indices of matched outputs, in the order of the first run."""
    both = pd.concat([one, other])
    is_shared = both["layer"].isin({*one["layer"].dropna()} & {*other["layer"].dropna()})
    both["matched_layer"] = both["layer"].astype(object).where(is_shared, "*")
    pairs: list[tuple[int, int]] = []
    rest = np.arange(len(one)), np.arange(len(other))
    # A compiler leaves operators out, and changes the order of the others.
    is_compiled = bool(both["inputs"].isna().any())
    columns = ([*_KEY, "source"], [*_KEY])[not is_compiled :]
    every = [both.groupby(each, dropna=False).ngroup().to_numpy().astype(np.int64) for each in columns]
    for keys in every:
        sides = keys[: len(one)], keys[len(one) :]
        counts = [np.bincount(side[at], minlength=keys.max() + 1) for side, at in zip(sides, rest, strict=True)]
        are_as_many = (counts[0] == counts[1]) & (np.bincount(keys, is_shared) > 0)
        regular = [at[are_as_many[side[at]]] for side, at in zip(sides, rest, strict=True)]
        ordered = [at[np.argsort(side[at], kind="stable")] for side, at in zip(sides, regular, strict=True)]
        pairs += zip(*ordered, strict=True)
        rest = rest[0][~are_as_many[sides[0][rest[0]]]], rest[1][~are_as_many[sides[1][rest[1]]]]
    found = common_subsequence(every[0][: len(one)][rest[0]], every[0][len(one) :][rest[1]])
    pairs += [(rest[0][i], rest[1][j]) for i, j in found]
    return sorted((int(i), int(j)) for i, j in pairs)


def _first_differences(
    sides: Sequence[pd.DataFrame], pairs: Sequence[tuple[int, int]], tolerance: float, precision: Precision
) -> tuple[int, OperatorDifference | None, OperatorDifference | None]:
    """Return how many outputs have other bits, the first of them, and the first one with a difference above the tolerance.

    With a tolerance of more than 0, sums of terms that cancel do not differ by more than it: see `_is_cancelled`.
    """
    matched = (rows.iloc[[pair[side] for pair in pairs]].reset_index(drop=True) for side, rows in enumerate(sides))
    both = pd.concat([rows.add_suffix(f"_{name}") for rows, name in zip(matched, "ab", strict=True)], axis=1)
    others = [(both[f"{name}_a"] != both[f"{name}_b"]).to_numpy(bool) for name in ("fingerprint", "dtype")]
    is_other = others[0] | others[1]
    if not is_other.any():
        return 0, None, None
    known = [*zip(*pairs, strict=True)]
    differences, which = decisive(relative_differences(both, OPERATOR_STATISTICS, None, 0.0))

    def of(at: int) -> OperatorDifference:
        a, b = ({name: both[f"{name}_{side}"][at] for name in _COLUMNS} for side in "ab")
        last = pairs[at - 1] if at else (-1, -1)
        between = [
            tuple(rows["name"][last[side] + 1 : pairs[at][side]].drop(known[side], errors="ignore").drop_duplicates())
            for side, rows in enumerate(sides)
        ]
        before, statistic = (at, int((~is_other[:at]).sum())), OPERATOR_STATISTICS[which[at]]
        return OperatorDifference(a, b, statistic, float(differences[at]), before, (between[0], between[1]))

    above = np.flatnonzero(is_other & ((differences > tolerance) | (tolerance == 0)))
    unit = precision.unit if tolerance else 0.0
    last = next((of(int(at)) for at in above if not _is_cancelled(both, int(at), unit)), None)
    return int(is_other.sum()), of(int(is_other.argmax())), last


def _is_cancelled(both: pd.DataFrame, at: int, unit: float) -> bool:
    """Return whether the rounding errors of a sum of terms that cancel explain the difference of two outputs.

    The partial sums of n terms with random signs have the size sqrt(n) times that of a term, so the errors are of the size of `unit` times
    this (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2); 10 roundings are assumed. The terms are not
    recorded: the largest of the outputs just before this one is taken for them.
    """
    rows = both.iloc[max(at - _NEAR, 0) : at + 1]
    rows = rows[rows["part_a"] == both["part_a"][at]]
    sizes = rows["shape_a"].map(np.prod).to_numpy(np.float64)
    size = (rows["l2_a"].to_numpy(np.float64) / np.sqrt(np.fmax(sizes, 1.0))).max()
    terms = sizes.max() / max(sizes[-1], 1.0)
    gap = max(abs(both[f"{name}_a"][at] - both[f"{name}_b"][at]) for name in ("mean", "std", "min", "max"))
    return bool(gap <= 10.0 * unit * np.sqrt(terms) * size)


def summary(differences: OperatorDifferences) -> Iterator[str]:
    """Yield the result of the comparison of operators. Lines after the first one are indented."""
    first, above, relations = differences.first, differences.above, differences.relations
    outputs = f"{differences.compared:,} outputs of operators"
    verdict = "WITHIN THE TOLERANCE" if above is None else "DIFFERENT"
    if first is not None:
        yield f"{verdict}: the first operator that differs{'' if relations is None else ' between the processes'} is {_place(first)}"
        yield from (f"  {line}" for line in _details(first))
    elif relations is None:
        yield f"EQUAL BITS: {outputs} are equal"
    else:
        yield f"{verdict}: {outputs} follow a relation of the processes"
    if relations is not None:
        counts = relations["relation"].value_counts()
        yield from (f"  {counts[each]:,}: {each or 'no relation'}" for each in (*RELATIONS, "") if each in counts)
    elif first is not None and above is None:
        yield f"  {differences.different:,} of {outputs} have other bits"
    elif first is not None and above is not None and (above.before, above.a["step"]) != (first.before, first.a["step"]):
        yield f"  the first one above the tolerance is {_place(above)}"
        yield from (f"    {line}" for line in _details(above))
    if differences.left_out:
        yield f"  not compared: {differences.left_out} later steps, since the optimizer divides, which can amplify rounding"
    for name, count in zip("AB", differences.unmatched, strict=True):
        if count:
            yield f"  outputs of operators only in {name}: {count:,}"


def _details(one: OperatorDifference) -> Iterator[str]:
    if one.reason:
        yield from one.reason.splitlines()
        return
    if one.a["dtype"] != one.b["dtype"]:
        yield f"dtypes {one.a['dtype']} and {one.b['dtype']}"
    a, b = one.a[one.statistic], one.b[one.statistic]
    sizes = f"{one.statistic} {a:.6g} and {b:.6g}: relative difference {one.difference:.2g}"
    yield sizes if one.difference else "only the bits differ"
    count, equal = one.before
    if one.a["inputs"] == one.b["inputs"]:
        is_random = one.a["random"]
        reason = "it draws random numbers, so the random states differ" if is_random else "this operator is the reason"
        yield f"Its inputs are equal: {reason}."
    elif count == equal and not any(one.between) and pd.notna(one.a["inputs"]) and pd.notna(one.b["inputs"]):
        yield f"Its inputs differ already: {_EARLIER}"
    different = f"{count - equal:,} of {count:,} outputs before it differ."
    yield f"All {count:,} outputs before it in this step are equal." if count == equal else different
    for name, names in zip("AB", one.between, strict=True):
        if names:
            yield f"Since the last matched operator, only {name} has {shorten(names, MAX_LISTED)}: not compared."


def _place(one: OperatorDifference) -> str:
    texts = dict.fromkeys(map(operator_text, (one.a, one.b)))
    return f"{' = '.join(texts)}, {_moment(one.a)}"


def _moment(row: Mapping[Any, Any]) -> str:
    return f"step {row['step']}" + (f" of rank {row['rank']}" if row["rank"] else "")


def operator_text(row: Mapping[Any, Any]) -> str:
    """Return a row of `operators` as text, such as `aten.div.Tensor in blocks.3.attn (model.py:41), forward`."""
    layer = "" if pd.isna(row["layer"]) else f" in {row['layer'] or ROOT}"
    source = "" if pd.isna(row["source"]) else f" ({row['source']})"
    output = f", output {row['output']}" if row["output"] else ""
    return f"{row['operator']}{layer}{source}, {row['part']}{output}"


def non_finite_operators(run: RunTables) -> Iterator[str]:
    """Yield the number of recorded operators, and the first ones with infinite values and with NaN, as text."""
    count, bad = 0, [pd.DataFrame(columns=_COLUMNS)]
    for rows in batches(run, "operators", _COLUMNS, None):
        count += len(rows[["step", "rank", "number"]].drop_duplicates())
        bad.append(rows[rows[["inf_count", "nan_count"]].gt(0).any(axis=1)])
    yield f"operators    {count:,} calls, in the table operators"
    for column, what in (("inf_count", "infinite value"), ("nan_count", "NaN")):
        for row in pd.concat(bad).query(f"{column} > 0").sort_values(["step", "number"]).head(1).to_dict("records"):
            of = f"{int(row[column]):,} of {int(np.prod(row['shape'])):,}"
            yield f"first {what} of an operator at {_moment(row)}: {operator_text(row)}: {of}"
            if column == "nan_count" and pd.notna(row["nan_inputs"]) and row["nan_inputs"]:
                yield f"  Its inputs have NaN already: {_EARLIER}"
