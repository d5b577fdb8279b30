"""What makes a run's training, as far as its configuration says: what two runs have to share to be compared."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from ..errors import ConfigError
from ..spec.parse import parse_hooks
from .load import Run

INERT = (
    "quiet",
    "plan",
    "resume",
    "sink",
    "budget",
    "name",
    "report",
    "objective",
)  # root keys that do not change a training
DONE = "done"
HOOKS = "hooks"
EXACT_BELOW = 2**53  # a float that is a whole number below this is that number


@dataclass(frozen=True)
class Training:
    """The configuration of a run that is done.

    Attributes:
        place: Of the run, among the runs.
        seed: The run's.
        rest: The configuration without its hooks, its seed, and what does not change a training; the device, the number of
            processes (`ranks`) and the dataset are those that were used.
        hooks: All hooks that are not null by name, in the order in which they act.
        interventions: The same without those that record, which change nothing.
    """

    place: int
    seed: int
    rest: dict[str, Any]
    hooks: dict[str, dict[str, Any]]
    interventions: dict[str, dict[str, Any]]

    def at(self, path: Sequence[str]) -> Any:
        """What the configuration has at a path, such as `hooks`, `tame`, `norm`; None where it has nothing."""
        found: Any = {**self.rest, HOOKS: self.hooks}
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    @property
    def word(self) -> str:
        """A word for all that makes the training: equal where, and only where, that is equal."""
        return word_of([self.seed, self.rest, list(self.interventions.values())])

    def without(self, path: Sequence[str]) -> str:
        """The same of all but what is at a path."""
        if path[:1] == [HOOKS]:
            return word_of([self.seed, self.rest, list(_less(self.interventions, path[1:]).values())])
        return word_of([self.seed, _less(self.rest, path), list(self.interventions.values())])

    @cached_property
    def leaves(self) -> dict[str, str]:
        """All that makes the training but its seed: each value, as a word, by its key, such as `optimizer.lr`."""
        return leaves_of({**self.rest, HOOKS: self.interventions})


def trainings(run: Run) -> tuple[list[Training], dict[int, str]]:
    """The trainings of several runs, and of the runs that have none to be compared why not, by their places."""
    found, left_out = [], {}
    for place, info in enumerate(run.infos):
        config = info.get("config")
        if info["status"] != DONE:
            left_out[place] = f"it is not done, but {info['status']}"
        elif not isinstance(config, Mapping):
            left_out[place] = "its run.json has no configuration"
        elif info["seed"] is None:
            left_out[place] = "its run.json has no seed"
        elif (specs := _hooks(config)) is None:
            left_out[place] = "its hooks are of another version"
        else:
            rest = {key: value for key, value in config.items() if key not in (HOOKS, "seed", *INERT)} | _used(
                config, info
            )
            acting = {name: spec for name, spec in specs.items() if spec["action"] != "record"}
            found.append(Training(place, info["seed"], rest, specs, acting))
    return found, left_out


def differing_overrides(run: Run, places: Collection[int] | None = None) -> list[str]:
    """The overrides in which several runs differ, without those that do not change a training.

    Args:
        run: All of them.
        places: Of those that are asked about; None: all.
    """
    infos = [info for place, info in enumerate(run.infos) if places is None or place in places]
    keys = dict.fromkeys(key for info in infos for key in info["overrides"])
    telling = [key for key in keys if key.partition(".")[0] not in INERT]
    return [key for key in telling if len({str(info["overrides"].get(key)) for info in infos}) > 1]


def word_of(value: Any) -> str:
    """A value of a configuration as a word, the same for what is the same: 1 and 1.0 are, 1 and true are not."""
    return json.dumps(_whole(value), sort_keys=True, default=str)


def in_yaml(value: Any) -> str:
    """A value as it stands on a command line or in a file: `null`, `{kind: forward, norm: 0.1}`."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _used(config: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """What was used where the configuration leaves it open: the device, the number of processes, a dataset's stand-in."""
    used: dict[str, Any] = {"ranks": info.get("ranks", 1)}
    if isinstance(device := info.get("device"), str):
        used["device"] = device.partition(":")[0]  # which of several alike is no matter
    if isinstance(source := info.get("data"), Mapping) and source.get("fallback"):
        used["data"] = {**(config.get("data") or {}), "dataset": source.get("dataset")}
    return used


def _hooks(config: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What each hook says; None where this version does not know it."""
    try:
        specs = parse_hooks(config.get(HOOKS) or {})
    except ConfigError:
        return None
    return {
        name: spec.model_dump(exclude_unset=True, by_alias=True, mode="json", exclude={"name"})
        for name, spec in specs.items()
    }


def _less(mapping: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A mapping without what is at a path; without anything where the path is empty."""
    if not path:
        return {}
    inner = mapping.get(path[0])
    others = {key: value for key, value in mapping.items() if key != path[0]}
    if len(path) == 1 or path[0] not in mapping:
        return others
    less = _less(inner, path[1:]) if isinstance(inner, Mapping) else inner
    return {key: less if key == path[0] else value for key, value in mapping.items()}


def _whole(value: Any) -> Any:
    """The same with whole numbers as integers."""
    if isinstance(value, Mapping):
        return {str(key): _whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(item) for item in value]
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < EXACT_BELOW
    return int(value) if is_whole else value


def leaves_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Each value of a configuration, as a word, by its key, such as `optimizer.lr`."""
    return dict(_leaves(config, ""))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, word_of(value)
