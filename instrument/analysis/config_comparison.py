"""Comparison of configurations: the parts of a run's configuration that determine its training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..config.base import ACTIONS, ObservationSpec
from ..config.hook_specs import HookSpec
from ..config.parse import named_specs, parse_hooks
from ..errors import ConfigError
from .config_fields import canonical_json, leaves_of
from .run_tables import RunTables

IGNORED_KEYS = ("quiet", "plan", "resume", "sink", "budget", "name", "report", "objective")
"""Root keys that do not affect training."""
DONE = "done"
HOOKS = "hooks"


@dataclass(frozen=True)
class Training:
    """The configuration of a finished run.

    Attributes:
        rest: The configuration without hooks, seed and keys that do not affect training. Device, number of processes
            (`ranks`) and dataset are those that were used.
        hooks: All hooks that are not null by name, in the order in which they run.
        interventions: The hooks that do not only record.
    """

    index: int
    seed: int
    rest: dict[str, Any]
    hooks: dict[str, dict[str, Any]]
    interventions: dict[str, dict[str, Any]]

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


def trainings(run: RunTables) -> tuple[list[Training], dict[int, str]]:
    """Return the trainings of several runs, and the reason for each run that cannot be compared, by index."""
    comparable, left_out = [], {}
    for index, info in enumerate(run.infos):
        training = f"its status is {info['status']}" if info["status"] != DONE else training_of(index, info)
        if isinstance(training, Training):
            comparable.append(training)
        else:
            left_out[index] = training
    return comparable, left_out


def training_of(index: int, info: Mapping[str, Any]) -> Training | str:
    """Return the training of a run; if it is unknown, the reason."""
    config = info.get("config")
    if not isinstance(config, Mapping):
        return "its run.json has no configuration"
    if info["seed"] is None:
        return "its run.json has no seed"
    if (hooks := hooks_of(info)) is None:
        return "its hooks cannot be parsed by this version"
    specs = {
        name: spec.model_dump(exclude_unset=True, by_alias=True, mode="json", exclude={"name"})
        for name, spec in hooks.items()
    }
    rest = {key: value for key, value in config.items() if key not in (HOOKS, "seed", *IGNORED_KEYS)}
    rest["ranks"] = info.get("ranks", 1)
    if isinstance(device := info.get("device"), str):
        rest["device"] = device.partition(":")[0]  # the index of the device does not matter
    if isinstance(source := info.get("data"), Mapping) and source.get("fallback"):
        rest["data"] = {**(config.get("data") or {}), "dataset": source.get("dataset")}
    interventions = {
        name: spec for name, spec in specs.items() if not issubclass(ACTIONS[spec["action"]], ObservationSpec)
    }
    return Training(index, info["seed"], rest, specs, interventions)


def trainings_by_overrides(run: RunTables, all_trainings: Sequence[Training]) -> list[Training]:
    """Return trainings with their overrides as configuration: within a sweep, these determine all other values."""
    return [
        Training(
            one.index,
            one.seed,
            {
                "ranks": one.rest["ranks"],
                "device": one.rest.get("device"),
                "the folder of the sweep": str(run.folders[one.index].parent),
                **{key: value for key, value in _relevant(run.infos[one.index]["overrides"]).items() if key != "seed"},
            },
            {},
            {},
        )
        for one in all_trainings
    ]


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


def _without(mapping: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """Return a mapping without the value at a path; an empty mapping for an empty path."""
    if not path:
        return {}
    inner = mapping.get(path[0])
    others = {key: value for key, value in mapping.items() if key != path[0]}
    if len(path) == 1 or path[0] not in mapping:
        return others
    less = _without(inner, path[1:]) if isinstance(inner, Mapping) else inner
    return {key: less if key == path[0] else value for key, value in mapping.items()}
