"""Runs that differ in one intervention alone: the same seed and configuration, with it and without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..spec.parse import parse_hooks
from .load import Run

INERT = ("quiet", "plan", "resume", "sink", "budget", "name", "report")  # root keys that do not change a training
DONE = "done"


@dataclass(frozen=True)
class Pair:
    """Two runs that are done, and differ in one intervention.

    Attributes:
        hook: The name of the intervention.
        settings: What it says, as in the configuration.
        treated: The place among the runs of the one with it.
        control: The place of the one without.
        seed: Of both.
    """

    hook: str
    settings: str
    treated: int
    control: int
    seed: int | None


def pairs(run: Run) -> list[Pair]:
    """All pairs among several runs; hooks that record change nothing, and are left out of the comparison."""
    trainings = {
        place: _training(info["config"])
        for place, info in enumerate(run.infos)
        if info["status"] == DONE and isinstance(info.get("config"), dict)
    }
    known = {place: training for place, training in trainings.items() if training is not None}
    without: dict[str, list[int]] = {}
    for place, (rest, interventions) in known.items():
        without.setdefault(_key(rest, interventions), []).append(place)
    found = []
    for place, (rest, interventions) in known.items():
        for name, settings in interventions.items():
            others = {other: told for other, told in interventions.items() if other != name}
            for control in without.get(_key(rest, others), []):
                found.append(Pair(name, _words(settings), place, control, run.infos[place]["seed"]))
    return found


def _training(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]] | None:
    """What makes a training: its configuration without its hooks, and the interventions among them."""
    try:
        specs = parse_hooks(config.get("hooks") or {})
    except ConfigError:
        return None  # of another version
    rest = {key: value for key, value in config.items() if key not in ("hooks", *INERT)}
    told = {
        name: spec.model_dump(exclude_unset=True, by_alias=True, mode="json", exclude={"name"})
        for name, spec in specs.items()
        if spec.action != "record"
    }
    return rest, told


def _key(rest: Mapping[str, Any], interventions: Mapping[str, Any]) -> str:
    return json.dumps([rest, list(interventions.values())], sort_keys=True, default=str)


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {json.dumps(value) if not isinstance(value, str) else value}" for key, value in settings.items()
    )
