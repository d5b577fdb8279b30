"""The effects on the page of a sweep: of each intervention, and of each key in which the runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.config_comparison import HOOKS, comparable_keys, match_runs, trainings
from ..analysis.config_fields import differing_fields, to_yaml
from ..analysis.config_key_effects import CONFIDENCE, adjusted, student
from ..analysis.load import Run
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError
from ..formatting import format_number


@dataclass(frozen=True)
class Pair:
    """Two finished runs with the same seed that differ in one intervention, or in one key."""

    hook: str  # or the key
    settings: str  # of the intervention, those that differ if it has different ones; or the compared values of the key
    treated: int  # index of the run with the intervention, or with another value than the baseline
    control: int  # index of the run without it, or with the value of the baseline
    seed: int


def pairs(run: RunTables) -> list[Pair]:
    """Return all pairs with and without an intervention; record hooks do not change training and are ignored."""
    all_trainings, _ = trainings(run)
    by_identity: dict[str, list[int]] = {}
    for training in all_trainings:
        by_identity.setdefault(training.identity, []).append(training.index)
    values: dict[str, list[Mapping[str, Any]]] = {}
    for training in all_trainings:
        for name, settings in training.interventions.items():
            values.setdefault(name, []).append(settings)
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


def effects(run: Run, metrics: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the effects on each metric: mean paired difference, interval, and all differences.

    An effect survives if its p-value, adjusted for the number of effects, is below 5%.

    Returns:
        One row per intervention or value of a key, and metric; and the keys in which runs differ, but of which no two runs
        differ in nothing else, each with the reason.
    """
    unpaired: dict[str, str] = {}
    all_pairs = pairs(run)
    known = {(pair.control, pair.treated) for pair in all_pairs}
    all_pairs += [pair for pair in _pairs_of_keys(run, unpaired) if (pair.control, pair.treated) not in known]
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in all_pairs:
        groups.setdefault((pair.hook, pair.settings), []).append(pair)
    rows = []
    numbers = [info["metrics"] for info in run.infos]
    for (hook, settings), members in groups.items():
        for metric in metrics:
            ends = [
                (pair.seed, numbers[pair.control].get(metric), numbers[pair.treated].get(metric)) for pair in members
            ]
            complete = [end for end in ends if None not in end]
            if complete:
                row = {"hook": hook, "settings": settings, "metric": metric, "count": len(complete)}
                rows.append({**row, **_paired(pd.DataFrame(complete, columns=["seed", "without", "treated"]))})
    limits = adjusted(np.array([row["p_value"] for row in rows], float)) < 1 - CONFIDENCE
    return [{**row, "survives": bool(survives)} for row, survives in zip(rows, limits, strict=True)], unpaired


def _pairs_of_keys(run: Run, unpaired: dict[str, str]) -> Iterator[Pair]:
    for key in comparable_keys(run, trainings(run)[0]):
        try:
            comparison = match_runs(run, key)
        except InstrumentError as error:
            unpaired[key] = str(error).partition("\n")[2].partition("\n")[0].strip() or str(error)
            continue
        for match in comparison.matches:
            baseline = _value_text(run, key, match.baseline, comparison.baseline)
            settings = f"{_value_text(run, key, match.index, match.value)} compared with {baseline}"
            yield Pair(key, settings, match.index, match.baseline, match.seed)


def _value_text(run: Run, key: str, index: int, value: Any) -> str:
    """Return the value of a key in a run; of a mapping, the fields in which the runs differ."""
    start = f"{key}."
    fields = {name: item for name, item in run.overrides[index].items() if name.startswith(start)}
    if fields and isinstance(run.infos[index]["overrides"].get(key), dict):
        return ", ".join(f"{name.removeprefix(start)}: {to_yaml(item)}" for name, item in fields.items())
    return value if isinstance(value, str) else to_yaml(value)


def _paired(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return the means without and with an intervention, and of the difference, with its interval over the seeds."""
    pairs = pairs.assign(difference=pairs["treated"] - pairs["without"])
    seeds = pd.DataFrame([rows.mean(skipna=False) for _, rows in pairs.groupby("seed")])  # keeps NaN of a diverged run
    means = seeds.mean(skipna=False)
    squares = ((seeds["difference"] - means["difference"]) ** 2).sum(skipna=False)
    width, p_value = student(np.array(means["difference"]), np.array(squares), np.array(len(seeds)))
    ends = [format_number(means["difference"] + side * width, sign=True) for side in (-1, 1)]
    return {
        "without": format_number(means["without"]),
        "treated": format_number(means["treated"]),
        "difference": format_number(means["difference"], sign=True),
        "interval": "" if np.isnan(width) else f"{ends[0]} to {ends[1]}",
        "p_value": float(p_value),
        "each": "  ".join(format_number(difference, sign=True) for difference in pairs["difference"]),
    }
