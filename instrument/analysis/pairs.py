"""Runs that differ in one intervention alone: the same seed and configuration, with it and without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .load import Run
from .trainings import HOOKS, trainings


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
    seed: int


def pairs(run: Run) -> list[Pair]:
    """All pairs among several runs; hooks that record change nothing, and are left out of the comparison."""
    known, _ = trainings(run)
    alike: dict[str, list[int]] = {}
    for training in known:
        alike.setdefault(training.word, []).append(training.place)
    return [
        Pair(name, _words(settings), training.place, control, training.seed)
        for training in known
        for name, settings in training.interventions.items()
        for control in alike.get(training.without([HOOKS, name]), [])
    ]


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {json.dumps(value) if not isinstance(value, str) else value}" for key, value in settings.items()
    )
