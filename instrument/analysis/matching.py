"""Runs of a sweep that have the same seed and the same everything else, and differ in one key of the configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InstrumentError, Mistake, nearest
from .load import Run
from .trainings import DONE, HOOKS, INERT, Training, differing_overrides, in_yaml, trainings, word_of

MOST_NAMES = 12  # of keys or values, in an error


@dataclass(frozen=True)
class Match:
    """Two runs that differ in the key alone.

    Attributes:
        value: What the one has there: a number, a word, None; YAML of what has parts; the group's option where it is one.
        place: Its place among the runs.
        baseline: The place of the one that it is compared with.
        seed: Of both.
        by: What it has at the keys that comparisons are told apart by; what its partner has, where it is without the hook.
    """

    value: Any
    place: int
    baseline: int
    seed: int
    by: tuple[Any, ...] = ()

    @property
    def comparison(self) -> str:
        """A word for what is compared with the baseline, and where."""
        return word_of([self.value, *self.by])


@dataclass(frozen=True)
class Matching:
    """All that can be compared.

    Attributes:
        baseline: The value that the others are compared with, as in `Match`.
        matches: In the order of the values, numbers first.
        left_out: By the run's place, why it is in no match.
    """

    baseline: Any
    matches: list[Match]
    left_out: dict[int, str]

    def by_seed(self) -> list[dict[int, list[Match]]]:
        """The matches of each seed, by the baseline's run that they share: so that each run is looked at once."""
        seeds: dict[int, dict[int, list[Match]]] = {}
        for found in self.matches:
            seeds.setdefault(found.seed, {}).setdefault(found.baseline, []).append(found)
        return list(seeds.values())


def match(run: Run, key: str, baseline: Any = None, by: Sequence[str] = ()) -> Matching:
    """The runs that differ in one key, value by value against a baseline.

    A run without the hook that the key is in is matched with those that have it and differ in nothing else.

    Args:
        run: Several runs.
        key: Of the configuration: `hooks.tame.norm`, `hooks.tame`, `optimizer.lr`, `model`.
        baseline: One of the values. Without it: null, or none at all, where there is such; else the smallest number
            (false before true); else the first.
        by: Other keys, whose values tell comparisons apart.

    Raises:
        InstrumentError: The runs do not differ there, there is no such key or value, or no two runs match.
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
    """The runs with one value."""

    value: Any
    told: Any
    members: list[Training]

    @property
    def in_words(self) -> str:
        """The value as it stands on a command line."""
        return self.told if isinstance(self.told, str) else in_yaml(self.told)


class _Partners:
    """Finds a run's partners among those with the baseline's value: several of a run without the hook, where more than the
    key differs in it."""

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
        """Those that are the same but for the key, or else but for the hook, where one of the two has none."""
        if training.at(self.outer) is None:
            return self.around.get(training.without(self.outer), [])
        found = self.alike.get(training.without(self.path)) or self.bare.get(training.without(self.outer))
        return [] if found is None else [found]


def outer_of(path: Sequence[str]) -> Sequence[str]:
    """The whole hook that a path leads into; of anything else the path itself."""
    return path[:2] if path[0] == HOOKS else path


def _first_known(one: Any, other: Any) -> Any:
    return other if one is None else one


def _newest(run: Run, known: Sequence[Training], path: Sequence[str], left_out: dict[int, str]) -> list[Training]:
    """The trainings, each once: of those that were run again the last."""
    last: dict[tuple[str, str], Training] = {}
    for training in known:
        identity = (training.without(path), word_of(training.at(path)))
        if identity in last:
            left_out[last[identity].place] = f"it was run again, as {run_name(run, training.place)}"
        last[identity] = training
    return sorted(last.values(), key=lambda training: training.place)


def _groups(run: Run, key: str, known: Sequence[Training]) -> list[_Group]:
    """The runs by their values, in the order in which they first appear."""
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
    """What each run has at another key, by its place."""
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
    """How many runs are not done, by what the command line said of a key, in one line; none where all are."""
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
    """All keys of a configuration, those of mappings included: `optimizer`, `optimizer.lr`."""
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
    """Which of the groups is the baseline."""
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
    """Numbers first, by size."""
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
    """The keys in which two trainings differ, but for the one."""
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
    """What a run is called among several: its folder below the one that was opened."""
    return str(run.folders[place].relative_to(run.path))
