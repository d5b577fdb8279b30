"""Pairs of runs that differ in one intervention: same seed and configuration, with and without it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config_comparison import HOOKS, trainings
from .config_fields import differing_fields
from .run_tables import RunTables


@dataclass(frozen=True)
class Pair:
    """Two finished runs that differ in one intervention.

    Attributes:
        hook: Name of the intervention.
        settings: Its settings as text; those in which the runs differ, if it has different ones.
        treated: Index of the run with the intervention.
        control: Index of the run without it.
        seed: Seed of both runs.
    """

    hook: str
    settings: str
    treated: int
    control: int
    seed: int


def pairs(run: RunTables) -> list[Pair]:
    """Return all pairs among several runs; record hooks do not change training and are ignored."""
    all_trainings, _ = trainings(run)
    by_identity: dict[str, list[int]] = {}
    for training in all_trainings:
        by_identity.setdefault(training.identity, []).append(training.index)
    values = {
        name: [training.interventions[name] for training in all_trainings if name in training.interventions]
        for name in {name for training in all_trainings for name in training.interventions}
    }
    return [
        Pair(name, _settings_text(name, settings, values[name]), training.index, control, training.seed)
        for training in all_trainings
        for name, settings in training.interventions.items()
        for control in by_identity.get(training.without([HOOKS, name]), [])
    ]


def _settings_text(name: str, settings: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> str:
    fields = differing_fields(name, settings, values)
    shown = settings if fields == {name: settings} else fields
    return ", ".join(
        f"{key.removeprefix(f'{name}.')}: {json.dumps(value) if not isinstance(value, str) else value}"
        for key, value in shown.items()
    )
