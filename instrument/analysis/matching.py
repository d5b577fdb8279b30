"""Matching of runs that have the same seed and configuration and differ in one configuration key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InstrumentError, Problem, similar_names
from .run_tables import RunTables
from .training_config import (
    DONE,
    HOOKS,
    IGNORED_KEYS,
    Training,
    canonical_json,
    differing_overrides,
    to_yaml,
    trainings,
)

MOST_NAMES = 12  # maximum number of keys or values in an error message


@dataclass(frozen=True)
class Match:
    """Two runs that differ only in the key.

    Attributes:
        value: Value of the key in the run: a number, a string or None; for a config group, the name of its option; YAML
            text for other lists and mappings.
        index: Index of the run.
        baseline: Index of the baseline run.
        seed: Seed of both runs.
        by: Values of the keys that separate comparisons; from the baseline run if the run does not have the hook.
    """

    value: Any
    index: int
    baseline: int
    seed: int
    by: tuple[Any, ...] = ()

    @property
    def comparison(self) -> str:
        """A string that identifies the compared value and the values of the `by` keys."""
        return canonical_json([self.value, *self.by])


@dataclass(frozen=True)
class Matching:
    """All matches for a key.

    Attributes:
        baseline: The baseline value, as in `Match.value`.
        matches: The matches ordered by value, numbers first.
        left_out: The reason for each unmatched run, by index of the run.
    """

    baseline: Any
    matches: list[Match]
    left_out: dict[int, str]

    def by_seed(self) -> list[dict[int, list[Match]]]:
        """Return the matches of each seed by baseline run, so that each run is read only once."""
        seeds: dict[int, dict[int, list[Match]]] = {}
        for found in self.matches:
            seeds.setdefault(found.seed, {}).setdefault(found.baseline, []).append(found)
        return list(seeds.values())


def match(run: RunTables, key: str, baseline: Any = None, by: Sequence[str] = ()) -> Matching:
    """Match the runs that differ in one key, comparing each value with a baseline.

    A run without the hook that contains the key is matched with the runs that have the hook and differ in nothing else.

    Args:
        run: Several runs.
        key: Configuration key: `hooks.tame.norm`, `hooks.tame`, `optimizer.lr`, `model`.
        baseline: The baseline value. Default: null or a missing key, if any run has it; else the smallest number (false
            before true); else the first value.
        by: Other keys whose values separate comparisons.

    Raises:
        InstrumentError: The runs do not differ in the key, the key or the value does not exist, or no two runs match.
    """
    known, left_out = trainings(run)
    path = key.split(".")
    latest = _latest(run, known, path, left_out)
    groups = _groups(run, key, latest)
    _check_differs(run, "effects_of", key, known, groups)
    by_values = [_values_by_run(run, name, known, latest) for name in by]
    base = groups[_baseline(key, groups, baseline)]
    partners = _PartnerIndex(base.members, path)
    base_text = f"{key}={base.text}"
    matches = []
    for group in sorted((group for group in groups if group is not base), key=_sort_key):
        for training in group.members:
            found = partners.of(training)
            if not found:
                left_out[training.index] = _unmatched_reason(training, base.members, key, base_text)
            for partner in found:
                at = tuple(_first_known(label[training.index], label[partner.index]) for label in by_values)
                matches.append(Match(group.label, training.index, partner.index, training.seed, at))
    used = {found.baseline for found in matches}
    unmatched = "no run with another value has the same seed and the same other settings"
    left_out |= {control.index: unmatched for control in base.members if control.index not in used}
    if not matches:
        reasons = [f"{run_name(run, index)}: {reason}" for index, reason in sorted(left_out.items())]
        more = [f"... ({len(reasons)} in all)"] if len(reasons) > MOST_NAMES else []
        raise InstrumentError("\n    ".join([f"{key}: no two runs can be compared", *reasons[:MOST_NAMES], *more]))
    return Matching(base.label, matches, dict(sorted(left_out.items())))


@dataclass
class _Group:
    """The runs with the same value of the key."""

    value: Any
    label: Any
    members: list[Training]

    @property
    def text(self) -> str:
        """The value as it is written on a command line."""
        return self.label if isinstance(self.label, str) else to_yaml(self.label)


class _PartnerIndex:
    """Finds the baseline runs that match a run.

    A run without the hook can have several matches, if the hook differs in more than the key.
    """

    def __init__(self, controls: Sequence[Training], path: Sequence[str]) -> None:
        self.path = path
        self.outer = outer_of(path)
        without_hook = [control for control in controls if control.at(self.outer) is None]
        self.by_configuration = {control.without(path): control for control in reversed(controls)}
        self.by_other_settings: dict[str, list[Training]] = {}
        for control in controls:
            self.by_other_settings.setdefault(control.without(self.outer), []).append(control)
        self.without_hook = {control.without(self.outer): control for control in reversed(without_hook)}

    def of(self, training: Training) -> list[Training]:
        """Return the runs that are equal except for the key.

        If one of the two runs does not have the hook, the runs must be equal except for the hook.
        """
        if training.at(self.outer) is None:
            return self.by_other_settings.get(training.without(self.outer), [])
        found = self.by_configuration.get(training.without(self.path)) or self.without_hook.get(
            training.without(self.outer)
        )
        return [] if found is None else [found]


def outer_of(path: Sequence[str]) -> Sequence[str]:
    """Return the path of the hook that contains a path; other paths are returned unchanged."""
    return path[:2] if path[0] == HOOKS else path


def _first_known(one: Any, other: Any) -> Any:
    return other if one is None else one


def _latest(run: RunTables, known: Sequence[Training], path: Sequence[str], left_out: dict[int, str]) -> list[Training]:
    """Return each training once; if a training was repeated, the last run of it."""
    last: dict[tuple[str, str], Training] = {}
    for training in known:
        identity = (training.without(path), canonical_json(training.at(path)))
        if identity in last:
            left_out[last[identity].index] = f"it was repeated as {run_name(run, training.index)}"
        last[identity] = training
    return sorted(last.values(), key=lambda training: training.index)


def _groups(run: RunTables, key: str, known: Sequence[Training]) -> list[_Group]:
    """Return the runs grouped by value, in order of first appearance."""
    found: dict[str, _Group] = {}
    for training in known:
        value = training.at(key.split("."))
        found.setdefault(canonical_json(value), _Group(value, value, [])).members.append(training)
    groups = list(found.values())
    whole = [group for group in groups if isinstance(group.value, Mapping | list)]
    for group in whole:
        options = [run.infos[training.index]["overrides"].get(key) for training in group.members]
        named = isinstance(options[0], str) and all(option == options[0] for option in options)
        group.label = options[0] if named else to_yaml(group.value)
    names = Counter(group.label for group in whole)
    for group in whole:
        group.label = group.label if names[group.label] == 1 else to_yaml(group.value)
    return groups


def _values_by_run(run: RunTables, key: str, known: Sequence[Training], latest: Sequence[Training]) -> dict[int, Any]:
    """Return the value of another key for each run, by index of the run."""
    groups = _groups(run, key, latest)
    _check_differs(run, "by", key, known, groups)
    return {training.index: group.label for group in groups for training in group.members}


def _check_differs(run: RunTables, where: str, key: str, known: Sequence[Training], groups: Sequence[_Group]) -> None:
    if len(groups) > 1:
        return
    keys = dict.fromkeys(node for training in known for node in config_keys(training))
    overrides = differing_overrides(run, {training.index for training in known})
    differing = [name for name in overrides if name in keys] or _differing_leaves(known)
    more = f", ... ({len(differing)} in all)" if len(differing) > MOST_NAMES else ""
    allowed = ", ".join(differing[:MOST_NAMES]) + more or "none: the runs differ only in their seed"
    if not known:
        message = f"none of the {len(run.infos)} runs is finished and has a configuration"
    elif key == "seed":
        message = "runs are paired by their seed, so its effect cannot be estimated"
    elif key.partition(".")[0] in IGNORED_KEYS:
        message = "this key does not affect training"
    elif key not in keys:
        message = "no run has this key in its configuration"
    else:
        lines = [f"{where}: all {len(known)} finished runs have {key}={groups[0].text}", *_not_done(run, key)]
        raise InstrumentError("\n    ".join([*lines, f"they differ in: {allowed}"]))
    near = similar_names(key, differing) or similar_names(key, keys)
    raise InstrumentError(str(Problem(where, message, key, allowed, near)))


def _not_done(run: RunTables, key: str) -> Iterator[str]:
    """Yield a line with the number of unfinished runs by override of the key; nothing if all runs are done."""
    left = Counter(
        (to_yaml(info["overrides"][key]) if key in info["overrides"] else None, info["status"])
        for info in run.infos
        if info["status"] != DONE
    )
    counts = [f"{count} {status}{f', {key}={value}' if value else ''}" for (value, status), count in left.items()]
    more = [f"... ({len(counts)} in all)"] if len(counts) > MOST_NAMES else []
    if counts:
        yield f"not finished: {'; '.join([*counts[:MOST_NAMES], *more])}"


def config_keys(training: Training) -> list[str]:
    """Return all keys of a configuration, including those of mappings: `optimizer`, `optimizer.lr`."""
    return list(_nodes({**training.rest, HOOKS: training.hooks}, ""))


def _nodes(value: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, item in value.items():
        yield f"{above}{name}"
        if isinstance(item, Mapping):
            yield from _nodes(item, f"{above}{name}.")


def _differing_leaves(known: Sequence[Training]) -> list[str]:
    keys = dict.fromkeys(key for training in known for key in training.leaves)
    return [key for key in keys if len({training.leaves.get(key) for training in known}) > 1]


def _baseline(key: str, groups: Sequence[_Group], asked: Any) -> int:
    """Return the index of the baseline group."""
    if asked is not None:
        word = canonical_json(asked)
        found = [
            i for i, group in enumerate(groups) if word in (canonical_json(group.value), canonical_json(group.label))
        ]
        if not found:
            values = [group.text for group in groups]
            allowed = ", ".join(values[:MOST_NAMES])
            raise InstrumentError(
                str(
                    Problem(
                        "baseline",
                        f"no run has this value of {key}",
                        to_yaml(asked),
                        allowed,
                        similar_names(str(asked), values),
                    )
                )
            )
        return found[0]
    empty = [i for i, group in enumerate(groups) if group.value is None]
    numbers = [i for i, group in enumerate(groups) if isinstance(group.value, int | float)]
    return empty[0] if empty else min(numbers, key=lambda i: groups[i].value, default=0)


def _sort_key(group: _Group) -> tuple[bool, float]:
    """Return a sort key that orders numbers by size, before other values."""
    is_number = isinstance(group.value, int | float)
    return not is_number, float(group.value) if is_number else 0.0


def _unmatched_reason(training: Training, controls: Sequence[Training], key: str, baseline: str) -> str:
    """Return why a run has no match; `baseline` is the baseline value as `key=value`."""
    same_seed = [control for control in controls if control.seed == training.seed]
    if not same_seed:
        return f"no run with {baseline} has seed {training.seed}"
    lists = [_differences(training, control, key) for control in same_seed]
    fewest = min(lists, key=len)
    return f"it also differs from the runs with {baseline} in {', '.join(fewest) or 'the order of hooks'}"


def _differences(one: Training, other: Training, key: str) -> list[str]:
    """Return the keys in which two trainings differ, except for `key`."""
    path = key.split(".")
    outer = outer_of(path)
    cut = key if one.at(outer) is not None and other.at(outer) is not None else ".".join(outer)
    keys = dict.fromkeys([*one.leaves, *other.leaves])
    return [
        name
        for name in keys
        if one.leaves.get(name) != other.leaves.get(name) and name != cut and not name.startswith(f"{cut}.")
    ]


def run_name(run: RunTables, index: int) -> str:
    """Return the path of a run relative to the opened folder."""
    return str(run.folders[index].relative_to(run.path))
