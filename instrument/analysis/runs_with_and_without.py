"""Pairs of runs that differ in one intervention: same seed and configuration, with and without it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_comparison import HOOKS, trainings
from .run_tables import RunTables


@dataclass(frozen=True)
class Pair:
    """Two finished runs that differ in one intervention.

    Attributes:
        hook: Name of the intervention.
        settings: Its settings, as in the configuration.
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
    return [
        Pair(name, _settings_text(settings), training.index, control, training.seed)
        for training in all_trainings
        for name, settings in training.interventions.items()
        for control in by_identity.get(training.without([HOOKS, name]), [])
    ]


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {json.dumps(value) if not isinstance(value, str) else value}" for key, value in settings.items()
    )
