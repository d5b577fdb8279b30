"""Matching of runs that have the same seed and configuration and differ in one configuration key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InstrumentError, Mistake, nearest
from .load import Run
from .training_config import DONE, HOOKS, INERT, Training, differing_overrides, in_yaml, trainings, word_of

MOST_NAMES = 12  # maximum number of keys or values in an error message


@dataclass(frozen=True)
class Match:
    """Two runs that differ only in the key.

    Attributes:
        value: Value of the key in the run: a number, a string or None; for a config group, the name of its option; YAML
            text for other lists and mappings.
        place: Index of the run.
        baseline: Index of the baseline run.
        seed: Seed of both runs.
        by: Values of the keys that separate comparisons; from the baseline run if the run does not have the hook.
    """

    value: Any
    place: int
    baseline: int
    seed: int
    by: tuple[Any, ...] = ()

    @property
    def comparison(self) -> str:
        """A string that identifies the compared value and the values of the `by` keys."""
        return word_of([self.value, *self.by])


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


def match(run: Run, key: str, baseline: Any = None, by: Sequence[str] = ()) -> Matching:
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
    newest = _newest(run, known, path, left_out)
    groups = _groups(run, key, newest)
    _refuse_unless_differing(run, "effects_of", key, known, groups)
    apart = [_told_at(run, name, known, newest) for name in by]
    base = groups[_baseline(key, groups, baseline)]
    partners = _Partners(base.members, path)
    base_told = f"{key}={base.in_words}"
    matches = []
    for group in sorted((group for group in groups if group is not base), key=_order):
        for training in group.members:
            found = partners.of(training)
            if not found:
                left_out[training.place] = _why_alone(training, base.members, key, base_told)
            for partner in found:
                at = tuple(_first_known(told[training.place], told[partner.place]) for told in apart)
                matches.append(Match(group.told, training.place, partner.place, training.seed, at))
    used = {found.baseline for found in matches}
    alone = "no run with another value has its seed and the rest of its configuration"
    left_out |= {control.place: alone for control in base.members if control.place not in used}
    if not matches:
        whys = [f"{run_name(run, place)}: {why}" for place, why in sorted(left_out.items())]
        more = [f"... ({len(whys)} in all)"] if len(whys) > MOST_NAMES else []
        raise InstrumentError("\n    ".join([f"{key}: no two runs can be compared", *whys[:MOST_NAMES], *more]))
    return Matching(base.told, matches, dict(sorted(left_out.items())))


@dataclass
class _Group:
    """The runs with the same value of the key."""

    value: Any
    told: Any
    members: list[Training]

    @property
    def in_words(self) -> str:
        """The value as it is written on a command line."""
        return self.told if isinstance(self.told, str) else in_yaml(self.told)


class _Partners:
    """Finds the baseline runs that match a run.

    A run without the hook can have several matches, if the hook differs in more than the key.
    """

    def __init__(self, controls: Sequence[Training], path: Sequence[str]) -> None:
        self.path = path
        self.outer = outer_of(path)
        bare = [control for control in controls if control.at(self.outer) is None]
        self.alike = {control.without(path): control for control in reversed(controls)}
        self.around: dict[str, list[Training]] = {}
        for control in controls:
            self.around.setdefault(control.without(self.outer), []).append(control)
        self.bare = {control.without(self.outer): control for control in reversed(bare)}

    def of(self, training: Training) -> list[Training]:
        """Return the runs that are equal except for the key.

        If one of the two runs does not have the hook, the runs must be equal except for the hook.
        """
        if training.at(self.outer) is None:
            return self.around.get(training.without(self.outer), [])
        found = self.alike.get(training.without(self.path)) or self.bare.get(training.without(self.outer))
        return [] if found is None else [found]


def outer_of(path: Sequence[str]) -> Sequence[str]:
    """Return the path of the hook that contains a path; other paths are returned unchanged."""
    return path[:2] if path[0] == HOOKS else path


def _first_known(one: Any, other: Any) -> Any:
    return other if one is None else one


def _newest(run: Run, known: Sequence[Training], path: Sequence[str], left_out: dict[int, str]) -> list[Training]:
    """Return each training once; if a training was repeated, the last run of it."""
    last: dict[tuple[str, str], Training] = {}
    for training in known:
        identity = (training.without(path), word_of(training.at(path)))
        if identity in last:
            left_out[last[identity].place] = f"it was run again, as {run_name(run, training.place)}"
        last[identity] = training
    return sorted(last.values(), key=lambda training: training.place)


def _groups(run: Run, key: str, known: Sequence[Training]) -> list[_Group]:
    """Return the runs grouped by value, in order of first appearance."""
    found: dict[str, _Group] = {}
    for training in known:
        value = training.at(key.split("."))
        found.setdefault(word_of(value), _Group(value, value, [])).members.append(training)
    groups = list(found.values())
    whole = [group for group in groups if isinstance(group.value, Mapping | list)]
    for group in whole:
        options = [run.infos[training.place]["overrides"].get(key) for training in group.members]
        named = isinstance(options[0], str) and all(option == options[0] for option in options)
        group.told = options[0] if named else in_yaml(group.value)
    names = Counter(group.told for group in whole)
    for group in whole:
        group.told = group.told if names[group.told] == 1 else in_yaml(group.value)
    return groups


def _told_at(run: Run, key: str, known: Sequence[Training], newest: Sequence[Training]) -> dict[int, Any]:
    """Return the value of another key for each run, by index of the run."""
    groups = _groups(run, key, newest)
    _refuse_unless_differing(run, "by", key, known, groups)
    return {training.place: group.told for group in groups for training in group.members}


def _refuse_unless_differing(
    run: Run, where: str, key: str, known: Sequence[Training], groups: Sequence[_Group]
) -> None:
    if len(groups) > 1:
        return
    keys = dict.fromkeys(node for training in known for node in nodes_of(training))
    overrides = differing_overrides(run, {training.place for training in known})
    differing = [name for name in overrides if name in keys] or _differing_leaves(known)
    more = f", ... ({len(differing)} in all)" if len(differing) > MOST_NAMES else ""
    allowed = ", ".join(differing[:MOST_NAMES]) + more or "nothing: no two runs differ in more than their seed"
    if not known:
        problem = f"none of the {len(run.infos)} runs is done and has a configuration"
    elif key == "seed":
        problem = "runs are matched by their seed, so that it has no effect to be told"
    elif key.partition(".")[0] in INERT:
        problem = "this changes no training"
    elif key not in keys:
        problem = "no run has this key in its configuration"
    else:
        lines = [f"{where}: all {len(known)} runs that are done have {key}={groups[0].in_words}", *_not_done(run, key)]
        raise InstrumentError("\n    ".join([*lines, f"they differ in  {allowed}"]))
    near = nearest(key, differing) or nearest(key, keys)
    raise InstrumentError(str(Mistake(where, problem, key, allowed, near)))


def _not_done(run: Run, key: str) -> Iterator[str]:
    """Yield a line with the number of unfinished runs by override of the key; nothing if all runs are done."""
    left = Counter(
        (in_yaml(info["overrides"][key]) if key in info["overrides"] else None, info["status"])
        for info in run.infos
        if info["status"] != DONE
    )
    told = [f"{count} {status}{f', {key}={value}' if value else ''}" for (value, status), count in left.items()]
    more = [f"... ({len(told)} in all)"] if len(told) > MOST_NAMES else []
    if told:
        yield f"not done        {'; '.join([*told[:MOST_NAMES], *more])}"


def nodes_of(training: Training) -> list[str]:
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
        word = word_of(asked)
        found = [i for i, group in enumerate(groups) if word in (word_of(group.value), word_of(group.told))]
        if not found:
            values = [group.in_words for group in groups]
            allowed = ", ".join(values[:MOST_NAMES])
            raise InstrumentError(
                str(Mistake("baseline", f"no run has this {key}", in_yaml(asked), allowed, nearest(str(asked), values)))
            )
        return found[0]
    empty = [i for i, group in enumerate(groups) if group.value is None]
    numbers = [i for i, group in enumerate(groups) if isinstance(group.value, int | float)]
    return empty[0] if empty else min(numbers, key=lambda i: groups[i].value, default=0)


def _order(group: _Group) -> tuple[bool, float]:
    """Return a sort key that orders numbers by size, before other values."""
    is_number = isinstance(group.value, int | float)
    return not is_number, float(group.value) if is_number else 0.0


def _why_alone(training: Training, controls: Sequence[Training], key: str, told: str) -> str:
    beside = [control for control in controls if control.seed == training.seed]
    if not beside:
        return f"no run with {told} has seed {training.seed}"
    lists = [_differences(training, control, key) for control in beside]
    fewest = min(lists, key=len)
    return f"it differs from the runs with {told} in {', '.join(fewest) or 'the order of hooks'} too"


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


def run_name(run: Run, place: int) -> str:
    """Return the path of a run relative to the opened folder."""
    return str(run.folders[place].relative_to(run.path))
