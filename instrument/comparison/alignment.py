"""Matches the rows of two runs that describe the same tensor, by step, layer, role and call. Reads a few steps at a time.

Layers that have other names in the other run are found by mappings with patterns.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..analysis.frames import to_frame
from ..analysis.run_tables import RunTables
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.globs import ROOT
from ..formatting import shorten
from ..storage.parts import grouped
from ..tables.kinds import KINDS
from ..tables.schemas import POSITION, TABLES


def renamed_layers(rename: Mapping[str, str], layers: Sequence[str], others: Sequence[str]) -> dict[str, str]:
    """Return the name that each layer has in another run.

    An entry renames a layer and everything inside it. `*` is one segment of a name or a part of it, and `**` is any
    number of segments; the new name contains the same wildcards. `.` is the root. If several entries match a layer,
    the one with the most segments counts. Raise a ConfigError if an entry is invalid, matches no layer, or leads to no layer of the other
    run; or if two layers get the same name.
    """
    names = dict(zip(layers, layers, strict=True))
    used: dict[str, list[str]] = {old: [] for old in rename}  # the new names that each entry makes
    rules = [(old, pattern_of(old, new), new) for old, new in rename.items()]
    for layer in layers:
        dotted = f"{layer}." if layer else ""  # each segment of a pattern can match its own dot
        matching = [(old, match, new) for old, pattern, new in rules if (match := pattern.fullmatch(dotted))]
        if matching:
            old, match, new = max(matching, key=lambda rule: 0 if rule[0] == ROOT else rule[0].count(".") + 1)
            names[layer] = replaced(new, match)
            used[old].append(names[layer])
    own, theirs = ([layer or ROOT for layer in side] for side in (layers, others))
    problems = []
    for old, new in rename.items():
        where = f"rename {old}={new}"
        if not used[old]:
            message = "matches no recorded layer of A, or only layers that a longer entry renames"
            problems.append(Problem(where, message, old, shorten(own), similar_names(old, own)))
        elif not set(used[old]) & set(others):
            message, wrong = "no recorded layer of B has the new name", used[old][0]
            problems.append(Problem(where, message, wrong, shorten(theirs), similar_names(wrong, theirs)))
    raise_problems(problems)
    taken, known = Counter(names.values()), {*others}
    if twice := [name for name in names.values() if taken[name] > 1 and name in known]:
        same = ", ".join(layer or ROOT for layer, name in names.items() if name == twice[0])
        raise ConfigError(Problem("rename", f"several layers of A get the name {twice[0] or ROOT}", same))
    return names


def pattern_of(old: str, new: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: one group for each wildcard, and one for the rest of the name."""
    wildcards = _WILDCARD.findall(old)
    if wildcards != _WILDCARD.findall(new):
        message = "both names must contain the same wildcards, in the same order"
        raise ConfigError(Problem(f"rename {old}={new}", message, new, ", ".join(wildcards) or "no wildcards"))
    if not all([old, new, *old.split(".")[1:], *new.split(".")[1:]]) and ROOT not in (old, new):
        raise ConfigError(Problem(f"rename {old}={new}", "a name has an empty segment", fix="'.' is the root module"))
    pattern = ""
    for segment in [] if old == ROOT else old.split("."):
        of_segment = re.escape(segment).replace(r"\*", "([^.]*)") + r"\."
        pattern += r"((?:[^.]+\.)*)" if segment == "**" else of_segment
    return re.compile(pattern + "(.*)")


_WILDCARD = re.compile(r"\*\*?")


def replaced(new: str, match: re.Match[str]) -> str:
    """Return the new name, with the wildcards and the rest of the name as in the old one."""
    *wildcards, rest = (group.removesuffix(".") for group in match.groups())
    values = iter(wildcards)
    start = "" if new == ROOT else _WILDCARD.sub(lambda _: next(values), new)
    return ".".join(part for part in (*start.split("."), rest) if part)


LOCATION = ("phase", "hook", "kind", "role", "layer", "path")
"""The columns that identify what a hook recorded in one run."""
MOMENT = ("step", "micro_step", "rank", "call", "backward", "recompute", "scope")
BATCH_ROWS, BATCH_BYTES = 32_768, 2**24  # a larger batch is not combined with the next one
T = TypeVar("T", int, str)
_ONE_PER_RANK = ("local", "shard")  # scopes of rows that describe a part of the batch or of the tensor
IntegerArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RecordedTable:
    """The extent of what one run recorded in a table."""

    # By location: `LOCATION`, `module_type`, `scope`, and `order`, its index in the order of execution.
    locations: pd.DataFrame
    rows: Counter[tuple[str, int]]  # by phase and step
    bytes: Counter[tuple[int, str]]  # of tensors, by step and layer, with eight bytes per element; empty for statistics
    dtypes: tuple[str, ...]  # of tensors; empty for statistics


def recorded(run: RunTables, table: str, steps: ds.Expression | None) -> RecordedTable:
    """Return what a run recorded in a table. Only the columns that identify tensors are read."""
    is_sorted = TABLES[table].is_sorted
    columns = ["step", "module_type", "scope", *LOCATION, *([POSITION.name] if is_sorted else ["dtype", "shape"])]
    locations = pd.DataFrame(columns=[*columns, "order"])
    count: Counter[tuple[str, int]] = Counter()
    size: Counter[tuple[int, str]] = Counter()
    dtypes: dict[str, None] = {}
    for batch in batches(run, table, columns, steps):
        order = pd.Series(range(count.total(), count.total() + len(batch)), batch.index)
        count.update(cast("dict[tuple[str, int], int]", batch.groupby(["phase", "step"]).size().to_dict()))
        rows = batch.assign(order=batch[POSITION.name].fillna(order) if is_sorted else order)
        locations = pd.concat([locations, rows]) if len(locations) else rows
        locations = locations.sort_values(["step", "order"], kind="stable").drop_duplicates(list(LOCATION))
        if not is_sorted:
            sizes = 8 * batch["shape"].map(math.prod)
            of_layers = sizes.groupby([batch["step"], batch["layer"]]).sum().to_dict()
            size.update(cast("dict[tuple[int, str], int]", of_layers))
            dtypes |= dict.fromkeys(batch["dtype"])
    locations = locations[["step", "module_type", "scope", *LOCATION, "order"]]
    return RecordedTable(locations, count, size, tuple(dtypes))


def in_execution_order(stats: pd.DataFrame, tensors: pd.DataFrame) -> pd.DataFrame:
    """Return the locations of a run, each once, in the order of execution; locations of training steps come first.

    Only rows of statistics have positions. If another hook recorded statistics of a recorded tensor, its order counts.
    """
    place = [name for name in LOCATION if name != "hook"]
    known = tensors[[*place]].merge(stats.drop_duplicates(place)[[*place, "step", "order"]], on=place, how="left")
    known.index = tensors.index
    tensors = tensors.assign(**{name: known[name].fillna(tensors[name]) for name in ("step", "order")})
    both = pd.concat([each for each in (stats, tensors) if len(each)] or [stats])
    between = ~both["phase"].isin(STEP_PHASES)
    ordered = both.assign(between=between).sort_values(["between", "step", "order"], kind="stable")
    return ordered.drop_duplicates(list(LOCATION)).drop(columns=["between", "step", "order"])


def batches(
    run: RunTables, table: str, columns: Sequence[str], condition: ds.Expression | None
) -> Iterator[pd.DataFrame]:
    """Iterate over the rows of a table as DataFrames with plain labels. Small batches are combined."""
    for group in grouped(run.scan(table, columns, condition), BATCH_ROWS, BATCH_BYTES):
        yield to_frame(pa.Table.from_batches(group))


def paired_hooks(one: pd.DataFrame, other: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """Return the hook of the first run that corresponds to each hook, kind and role of the other run.

    It has the same name, kind and role. Without such a hook, it is the only remaining hook with this kind and role.
    """
    series = ["hook", "kind", "role"]
    first, second = (list(dict.fromkeys(frame[series].itertuples(index=False, name=None))) for frame in (one, other))
    pairs = {key: key[0] for key in second if key in first}
    for kind, role in dict.fromkeys(key[1:] for key in second):
        left = [key for key in first if key[1:] == (kind, role) and key not in second]
        right = [key for key in second if key[1:] == (kind, role) and key not in first]
        if len(left) == len(right) == 1:
            pairs[right[0]] = left[0][0]
    return pairs


def paired_locations(
    one: pd.DataFrame, other: pd.DataFrame, layers: Mapping[str, str], hooks: Mapping[tuple[str, str, str], str]
) -> pd.DataFrame:
    """Return the locations of both runs in the order of the first run, given the name of each of its layers in the other run.

    The columns are those of `LOCATION` with the names of the first run, `module_type`, and `hook_b`, `layer_b` and `path_b` with the names
    of the other run. The index is the number of the location.
    """
    names = {name: layer for layer, name in layers.items()}
    keys = zip(other["hook"], other["kind"], other["role"], strict=True)
    translated = other.assign(
        hook_b=other["hook"],
        layer_b=other["layer"],
        path_b=other["path"],
        hook=pd.Series([hooks.get(key) for key in keys], other.index, dtype=object),
        layer=pd.Series([names.get(layer) for layer in other["layer"]], other.index, dtype=object),
    )
    rows = translated.loc[translated["hook"].notna() & translated["layer"].notna()]
    rows = _with_paths_of(one, rows)[[*LOCATION, "hook_b", "layer_b", "path_b"]]
    kept = one[[*LOCATION, "module_type"]].astype({"hook": object, "layer": object})
    return kept.merge(rows, on=list(LOCATION), how="inner").reset_index(drop=True)


def _with_paths_of(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Return locations of the other run with the paths of the first run.

    The first tensor that a module gets or returns has the path of the first one of the other run, if neither run has the path
    of the other one: a module can return a tensor in one implementation, and a tuple in another.
    """
    keys = [name for name in LOCATION if name != "path"]
    of_modules = (each[each["role"].isin(["input", "output"])] for each in (one, other))
    first, theirs = (each.drop_duplicates(keys)[[*LOCATION]] for each in of_modules)
    both = theirs.reset_index().merge(first, on=keys, suffixes=("", "_a")).set_index("index")
    places = [{*each[[*LOCATION]].itertuples(index=False, name=None)} for each in (one, other)]
    is_free = [
        (*key, path) not in places[0] and (*key, path_a) not in places[1]
        for *key, path, path_a in both[[*keys, "path", "path_a"]].itertuples(index=False, name=None)
    ]
    return other.assign(path=both["path_a"][is_free].reindex(other.index).fillna(other["path"]))


def aligned(
    runs: Sequence[RunTables],
    table: str,
    columns: Sequence[str],
    locations: pd.DataFrame,
    conditions: Sequence[ds.Expression],
) -> tuple[pd.DataFrame, tuple[int, int]]:
    """Read rows of two runs and match them. Rows that several processes write about the same values are matched with those of one.

    Return the matched rows in the order of the first run, with the `columns` of both runs with the suffixes `_a` and `_b`, and the numbers
    of rows of each run without a match.
    """
    sides = []
    for run, suffix, condition in zip(runs, ("", "_b"), conditions, strict=True):
        names = {name: f"{name}{suffix}" for name in ("hook", "layer", "path")}
        known = locations.reset_index(names="location")[
            ["location", *(names.get(name, name) for name in LOCATION)]
        ].rename(columns={name: column for column, name in names.items()})
        wanted = list(dict.fromkeys([*MOMENT, *LOCATION, *columns]))
        rows = [_with_location(batch, known) for batch in batches(run, table, wanted, condition)]
        frame = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=["location", *MOMENT])
        # Each rank has the same averaged value. The stages of a pipeline have the locations of their own layers.
        is_part, first = frame["scope"].isin(_ONE_PER_RANK), frame.groupby("location")["rank"].transform("min")
        frame = frame.assign(rank=frame["rank"].where(is_part, 0))[is_part | frame["rank"].eq(first)]
        sides.append(frame)
    keys = ["location", *MOMENT]
    # The number of each row among those with the same keys is 0 in almost all runs.
    one, other = (frame.assign(repeat=frame.groupby(keys, sort=False).cumcount()) for frame in sides)
    if one.empty or other.empty:
        return pd.DataFrame(), (len(one), len(other))
    matched = one.merge(other, on=[*keys, "repeat"], suffixes=("_a", "_b"), sort=False)
    return matched, (len(one) - len(matched), len(other) - len(matched))


def _with_location(rows: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of known locations, with the number of the location. Scope and micro-step are made comparable."""
    matches = rows.merge(known, on=list(LOCATION), how="inner").drop(columns=["hook", "layer", "path", "phase"])
    is_part = matches["scope"].isin(_ONE_PER_RANK)
    at_optimizer = [name for name, kind in KINDS.items() if kind.frequency == "step"]
    return matches.assign(
        scope=matches["scope"].where(is_part, "global"),
        micro_step=matches["micro_step"].mask(matches["kind"].isin(at_optimizer), 0),
    ).drop(columns=["kind", "role"])


def windows(keys: Sequence[T], weights: Mapping[T, int], most: int) -> list[list[T]]:
    """Split steps or layers into consecutive groups whose weights add up to at most `most`; each has at least one."""
    groups: list[list[T]] = []
    size = 0
    for key in keys:
        size += weights.get(key, 0)
        if not groups or size > most:
            groups.append([])
            size = weights.get(key, 0)
        groups[-1].append(key)
    return groups


def common_subsequence(one: IntegerArray, other: IntegerArray) -> list[tuple[int, int]]:
    """Return the pairs of indices of a longest common subsequence, in ascending order (Hirschberg, CACM 18, 1975)."""
    shorter = min(len(one), len(other))
    begin = int(np.append(one[:shorter] != other[:shorter], True).argmax())
    pairs = [(i, i) for i in range(begin)]
    one, other = one[begin:], other[begin:]
    middle = len(one) // 2
    if middle:
        rest = _common_lengths(one[middle:][::-1], other[::-1])[::-1]
        split = int((_common_lengths(one[:middle], other) + rest).argmax())
        for i, j in ((0, 0), (middle, split)):
            part = (one[:middle], other[:split]) if i == 0 else (one[middle:], other[split:])
            pairs += [(begin + i + a, begin + j + b) for a, b in common_subsequence(*part)]
    elif len(one):
        pairs += [(begin, begin + int(j)) for j in np.flatnonzero(other == one[0])[:1]]
    return pairs


def _common_lengths(one: IntegerArray, other: IntegerArray) -> IntegerArray:
    """Return the length of the longest common subsequence of one array and each start of the other array."""
    lengths = np.zeros(len(other) + 1, np.int64)
    for key in one:
        lengths[1:] = np.maximum(lengths[1:], lengths[:-1] + (other == key))
        np.maximum.accumulate(lengths, out=lengths)
    return lengths
