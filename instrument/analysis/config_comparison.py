"""Comparison of configurations: what determines the training of a run, and the runs that differ in one key only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config.base import ObservationSpec
from ..config.hook_specs import HookSpec
from ..config.parse import named_specs, parse_hooks
from ..errors import ConfigError, InstrumentError, Problem, similar_names
from ..formatting import shorten
from .config_fields import canonical_json, leaves, leaves_of, to_yaml
from .run_tables import RunTables

IGNORED_KEYS = ("quiet", "plan", "resume", "sink", "budget", "name", "report", "objective")
"""Root keys that do not affect training."""
DONE = "done"
HOOKS = "hooks"


@dataclass(frozen=True)
class RunSetup:
    """The configuration of a finished run."""

    index: int
    seed: int
    # Without hooks, seed and keys that do not affect training. Device, number of processes (`ranks`) and dataset are those used.
    rest: dict[str, Any]
    hooks: dict[str, dict[str, Any]]  # all that are not null by name, in the order in which they run
    interventions: dict[str, dict[str, Any]]  # the hooks that do not only record

    def at(self, path: Sequence[str]) -> Any:
        """Return the value at a path such as `["hooks", "tame", "norm"]`; None if the path does not exist."""
        value: Any = {**self.rest, HOOKS: self.hooks}
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def identity(self) -> str:
        """A string that is equal for two runs if and only if everything that determines the training is equal."""
        return canonical_json([self.seed, self.rest, list(self.interventions.values())])

    def without(self, path: Sequence[str]) -> str:
        """Return such a string that ignores the value at a path."""
        if path[:1] == [HOOKS]:
            return canonical_json([self.seed, self.rest, list(_without(self.interventions, path[1:]).values())])
        return canonical_json([self.seed, _without(self.rest, path), list(self.interventions.values())])

    @cached_property
    def leaves(self) -> dict[str, str]:
        """The values that determine the training, except the seed, as strings by key such as `optimizer.lr`."""
        return leaves_of({**self.rest, HOOKS: self.interventions})


def trainings(run: RunTables) -> tuple[list[RunSetup], dict[int, str]]:
    """Return the trainings of several runs, and the reason for each run that cannot be compared, by index."""
    comparable, left_out = [], {}
    for index, info in enumerate(run.infos):
        training = f"its status is {info['status']}" if info["status"] != DONE else training_of(index, info)
        if isinstance(training, RunSetup):
            comparable.append(training)
        else:
            left_out[index] = training
    return comparable, left_out


def training_of(index: int, info: Mapping[str, Any]) -> RunSetup | str:
    """Return the training of a run; if it is unknown, the reason."""
    config = info.get("config")
    if not isinstance(config, Mapping):
        return "its run.json has no configuration"
    if info["seed"] is None:
        return "its run.json has no seed"
    if (hooks := hooks_of(info)) is None:
        return "its hooks cannot be parsed by this version"
    options: Any = {"exclude_unset": True, "by_alias": True, "mode": "json", "exclude": {"name"}}
    specs = {name: spec.model_dump(**options) for name, spec in hooks.items()}
    rest = {key: value for key, value in config.items() if key not in (HOOKS, "seed", *IGNORED_KEYS)}
    rest["ranks"] = info.get("ranks", 1)
    if isinstance(device := info.get("device"), str):
        rest["device"] = device.partition(":")[0]  # the index of the device does not matter
    if isinstance(source := info.get("data"), Mapping) and source.get("fallback"):
        rest["data"] = {**(config.get("data") or {}), "dataset": source.get("dataset")}
    interventions = {name: specs[name] for name, spec in hooks.items() if not isinstance(spec, ObservationSpec)}
    return RunSetup(index, info["seed"], rest, specs, interventions)


def _by_overrides(run: RunTables, training: RunSetup) -> RunSetup:
    """Return a training with its overrides as configuration: within a sweep, these determine all other values."""
    index, rest = training.index, {"ranks": training.rest["ranks"], "device": training.rest.get("device")}
    rest |= {"the folder of the sweep": str(run.folders[index].parent), **_relevant(run.infos[index]["overrides"])}
    rest.pop("seed", None)
    return RunSetup(index, training.seed, rest, {}, {})


def differing_overrides(run: RunTables, indices: Collection[int] | None = None) -> list[str]:
    """Return the overrides in which several runs differ, without those that do not affect training."""
    infos = [info for index, info in enumerate(run.infos) if indices is None or index in indices]
    return differing_keys([info["overrides"] for info in infos])


def differing_keys(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in whose values runs differ, without those that do not affect training."""
    keys = dict.fromkeys(key for overrides in runs for key in _relevant(overrides))
    return [key for key in keys if len({str(overrides.get(key)) for overrides in runs}) > 1]


def _relevant(overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in overrides.items() if key.partition(".")[0] not in IGNORED_KEYS}


def hooks_of(info: Mapping[str, Any]) -> Mapping[str, HookSpec] | None:
    """Return the hooks of a run by name; None if this version cannot parse them."""
    try:
        return parse_hooks((info.get("config") or {}).get(HOOKS) or {})
    except (ConfigError, AttributeError):  # for example, run.json is damaged
        return None


def rules_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the rules of a run by name. They are a mapping or a list in the content of run.json, `info`."""
    return dict(named_specs("rules", (info.get("config") or {}).get("rules")))


def _without(value: Any, path: Sequence[str]) -> Any:
    """Return a mapping without the value at a path; an empty mapping for an empty path, and other values unchanged."""
    if not path or not isinstance(value, Mapping):
        return value if path else {}
    items = ((key, item) for key, item in value.items() if key != path[0] or len(path) > 1)
    return {key: _without(item, path[1:]) if key == path[0] else item for key, item in items}


MAX_NAMES = 12  # maximum number of keys or values in an error message


@dataclass(frozen=True)
class RunMatch:
    """Two runs that differ only in the key."""

    # Of the key: a number, a string or None; the name of the option of a config group; YAML text for other lists and mappings.
    value: Any
    index: int
    baseline: int
    seed: int
    by: tuple[Any, ...] = ()  # of the keys that separate comparisons; of the baseline run, if it alone has the hook


@dataclass(frozen=True)
class RunMatches:
    """All matches for a key."""

    baseline: Any
    matches: list[RunMatch]  # ordered by value, numbers first
    left_out: dict[int, str]  # the reason for each unmatched run, by index of the run


def match_runs(run: RunTables, key: str, baseline: Any = None, by: Sequence[str] = ()) -> RunMatches:
    """Match the runs that differ in one key, comparing each value with a baseline; see `Run.effects_of`.

    A run without the hook that contains the key is matched with the runs that have the hook and differ in nothing else. If an
    override selects several keys, such as `exp`, or if other keys are interpolated from it, the runs of a sweep match that have
    the same other overrides. Raise an InstrumentError if the runs do not differ in the key, the key or the value does not exist, or no
    two runs match.
    """
    all_trainings, left_out = trainings(run)
    by_values = []
    for name in by:
        compared, path = next(_comparisons(run, name, all_trainings))
        groups = _groups(run, name, path, compared)
        _check_differs(run, "by", name, groups)
        by_values.append({training.index: group.label for group in groups for training in group.members})
    unmatched: list[dict[int, str]] = []
    for compared, path in _comparisons(run, key, all_trainings):
        comparison = _match(run, key, path, compared, baseline, by_values)
        if comparison.matches:
            return replace(comparison, left_out=dict(sorted((left_out | comparison.left_out).items())))
        unmatched.append(comparison.left_out)
    reasons = [f"{run.names[index]}: {reason}" for index, reason in sorted((left_out | unmatched[0]).items())]
    more = [f"... ({len(reasons)} in all)"] if len(reasons) > MAX_NAMES else []
    raise InstrumentError("\n    ".join([f"{key}: no two runs can be compared", *reasons[:MAX_NAMES], *more]))


def _comparisons(
    run: RunTables, key: str, all_trainings: Sequence[RunSetup]
) -> Iterator[tuple[Sequence[RunSetup], Sequence[str]]]:
    """Yield the trainings to compare and the path of the key: by their configuration, and by their overrides."""
    is_override = key.partition(".")[0] not in ("seed", *IGNORED_KEYS) and any(
        key in run.infos[training.index]["overrides"] for training in all_trainings
    )
    if not is_override or any(key in config_keys(training) for training in all_trainings):
        yield all_trainings, key.split(".")
    if is_override:
        yield [_by_overrides(run, training) for training in all_trainings], [key]


def _match(
    run: RunTables,
    key: str,
    path: Sequence[str],
    all_trainings: Sequence[RunSetup],
    baseline: Any,
    by_values: Sequence[Mapping[int, Any]],
) -> RunMatches:
    """Match trainings. The result can be empty, and `left_out` has the reasons of these trainings only."""
    left_out: dict[int, str] = {}
    groups = _groups(run, key, path, _latest(run, all_trainings, path, left_out))
    _check_differs(run, "effects_of", key, groups)
    baseline_group = groups[_baseline_position(key, groups, baseline)]
    baseline_text = f"{key}={baseline_group.text}"
    matches = []
    others = [group for group in groups if group is not baseline_group]
    # Numbers come first, by size.
    for group in sorted(others, key=lambda group: group.value if isinstance(group.value, int | float) else math.inf):
        matches_of = _matches_of(group.members, baseline_group.members, path)
        for training, matched_runs in zip(group.members, matches_of, strict=True):
            if not matched_runs:
                left_out[training.index] = _unmatched_reason(training, baseline_group.members, key, baseline_text)
            for baseline_run in matched_runs:
                both = ((label[training.index], label[baseline_run.index]) for label in by_values)
                by_cells = tuple(other if one is None else one for one, other in both)
                matches.append(RunMatch(group.label, training.index, baseline_run.index, training.seed, by_cells))
    used = {match.baseline for match in matches}
    unmatched = "no run with another value has the same seed and the same other settings"
    left_out |= {each.index: unmatched for each in baseline_group.members if each.index not in used}
    return RunMatches(baseline_group.label, matches, left_out)


@dataclass
class _Group:
    """The runs with the same value of the key."""

    value: Any
    label: Any
    members: list[RunSetup]

    @property
    def text(self) -> str:
        return self.label if isinstance(self.label, str) else to_yaml(self.label)


def _matches_of(
    all_trainings: Sequence[RunSetup], baseline_runs: Sequence[RunSetup], path: Sequence[str]
) -> list[list[RunSetup]]:
    """Return the baseline runs of each training: the first one that is equal except for the key.

    If one of the two runs does not have the hook, the runs must be equal except for the hook. A run without the hook can have
    several matches, if the hook differs in more than the key.
    """
    outer = outer_of(path)
    by_key: dict[str, list[RunSetup]] = {}
    by_hook: dict[str, list[RunSetup]] = {}
    for baseline_run in baseline_runs:
        by_key.setdefault(baseline_run.without(path), []).append(baseline_run)
        by_hook.setdefault(baseline_run.without(outer), []).append(baseline_run)
    matches = []
    for training in all_trainings:
        same_but_hook = by_hook.get(training.without(outer), [])
        if training.at(outer) is None:
            matches.append(same_but_hook)
        else:
            without_hook = [baseline_run for baseline_run in same_but_hook if baseline_run.at(outer) is None]
            matches.append([*by_key.get(training.without(path), []), *without_hook][:1])
    return matches


def outer_of(path: Sequence[str]) -> Sequence[str]:
    """Return the path of the hook that contains a path; other paths are returned unchanged."""
    return path[:2] if path[0] == HOOKS else path


def _latest(
    run: RunTables, all_trainings: Sequence[RunSetup], path: Sequence[str], left_out: dict[int, str]
) -> list[RunSetup]:
    """Return each training once; if a training was repeated, the last run of it."""
    last: dict[tuple[str, str], RunSetup] = {}
    for training in all_trainings:
        identity = (training.without(path), canonical_json(training.at(path)))
        if identity in last:
            left_out[last[identity].index] = f"it was repeated as {run.names[training.index]}"
        last[identity] = training
    return sorted(last.values(), key=lambda training: training.index)


def _groups(run: RunTables, key: str, path: Sequence[str], all_trainings: Sequence[RunSetup]) -> list[_Group]:
    groups_by_value: dict[str, _Group] = {}
    for training in all_trainings:
        value = training.at(path)
        groups_by_value.setdefault(canonical_json(value), _Group(value, value, [])).members.append(training)
    groups = list(groups_by_value.values())
    collections = [group for group in groups if isinstance(group.value, Mapping | list)]
    for group in collections:
        options = [run.infos[training.index]["overrides"].get(key) for training in group.members]
        named = isinstance(options[0], str) and all(option == options[0] for option in options)
        group.label = options[0] if named else to_yaml(group.value)
    names = Counter(group.label for group in collections)
    for group in collections:
        group.label = group.label if names[group.label] == 1 else to_yaml(group.value)
    return groups


def _check_differs(run: RunTables, where: str, key: str, groups: Sequence[_Group]) -> None:
    if len(groups) > 1:
        return
    all_trainings = trainings(run)[0]
    keys = dict.fromkeys(node for training in all_trainings for node in config_keys(training))
    differing = comparable_keys(run, all_trainings)
    allowed = shorten(differing) or "none: the runs differ only in their seed"
    if not all_trainings:
        message = f"none of the {len(run.infos)} runs is finished and has a configuration"
    elif key == "seed":
        message = "runs are paired by their seed, so its effect cannot be estimated"
    elif key.partition(".")[0] in IGNORED_KEYS:
        message = "this key does not affect training"
    elif key not in keys and not any(key in run.infos[each.index]["overrides"] for each in all_trainings):
        message = "no run has this key in its configuration"
    else:
        message = f"all {len(all_trainings)} finished runs have the value {groups[0].text}"
    near = [] if key in keys else similar_names(key, differing) or similar_names(key, keys)
    raise InstrumentError(Problem(where, message, key, allowed, near))


def comparable_keys(run: RunTables, all_trainings: Sequence[RunSetup]) -> list[str]:
    """Return the keys in which runs differ: the overrides; without them, keys of the configuration."""
    overrides = differing_overrides(run, {training.index for training in all_trainings})
    leaves = dict.fromkeys(key for training in all_trainings for key in training.leaves)
    differing = [key for key in leaves if len({training.leaves.get(key) for training in all_trainings}) > 1]
    return [name for name in overrides if name != "seed"] or differing


def config_keys(training: RunSetup) -> list[str]:
    """Return all keys of a configuration, including those of mappings: `optimizer`, `optimizer.lr`."""
    parts = (key.split(".") for key, _ in leaves({**training.rest, HOOKS: training.hooks}))
    return list(dict.fromkeys(".".join(each[:end]) for each in parts for end in range(1, len(each) + 1)))


def _baseline_position(key: str, groups: Sequence[_Group], baseline: Any) -> int:
    if baseline is not None:
        word = canonical_json(baseline)
        positions = [i for i, group in enumerate(groups) if word in map(canonical_json, (group.value, group.label))]
        if not positions:
            values = [group.text for group in groups]
            message, similar = f"no run has this value of {key}", similar_names(str(baseline), values)
            raise InstrumentError(Problem("baseline", message, to_yaml(baseline), shorten(values), similar))
        return positions[0]
    empty = [i for i, group in enumerate(groups) if group.value is None]
    numbers = [i for i, group in enumerate(groups) if isinstance(group.value, int | float)]
    return empty[0] if empty else min(numbers, key=lambda i: groups[i].value, default=0)


def _unmatched_reason(training: RunSetup, baseline_runs: Sequence[RunSetup], key: str, baseline: str) -> str:
    """Return why a run has no match; `baseline` is the baseline value as `key=value`."""
    same_seed = [baseline_run for baseline_run in baseline_runs if baseline_run.seed == training.seed]
    if not same_seed:
        return f"no run with {baseline} has seed {training.seed}"
    fewest = min((_differences(training, baseline_run, key) for baseline_run in same_seed), key=len)
    return f"it also differs from the runs with {baseline} in {', '.join(fewest) or 'the order of hooks'}"


def _differences(one: RunSetup, other: RunSetup, key: str) -> list[str]:
    outer = outer_of(key.split("."))
    cut = key if one.at(outer) is not None and other.at(outer) is not None else ".".join(outer)
    names = (name for name in one.leaves | other.leaves if name != cut and not name.startswith(f"{cut}."))
    return [name for name in names if one.leaves.get(name) != other.leaves.get(name)]
