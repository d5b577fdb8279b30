"""The effects on the page of a sweep: of each intervention, and of each key in which the runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.confidence_interval import CONFIDENCE, adjusted, half_width, p_values
from ..analysis.config_comparison import trainings
from ..analysis.config_fields import to_yaml
from ..analysis.load import Run
from ..analysis.run_matching import comparable_keys, match_runs
from ..analysis.runs_with_and_without import pairs
from ..errors import InstrumentError
from .numbers import format_number


@dataclass(frozen=True)
class _Pair:
    """Two runs that differ in one key. `what` is the intervention or key, `settings` the values that are compared."""

    what: str
    settings: str
    seed: int
    baseline: int
    index: int


class Comparisons:
    """The pairs of runs that differ in one intervention, or in the value of one key.

    Args:
        run: Several runs.

    Attributes:
        unpaired: The keys in which runs differ, but of which no two runs differ in nothing else; each with the reason.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.unpaired: dict[str, str] = {}
        self.groups: dict[tuple[str, str], list[_Pair]] = {}
        found = [_Pair(pair.hook, pair.settings, pair.seed, pair.control, pair.treated) for pair in pairs(run)]
        known = {(pair.baseline, pair.index) for pair in found}
        found += [pair for pair in self._of_keys() if (pair.baseline, pair.index) not in known]
        for pair in found:
            self.groups.setdefault((pair.what, pair.settings), []).append(pair)

    def rows(self, metrics: Sequence[str]) -> list[dict[str, Any]]:
        """Return the effects on each metric: mean paired difference, interval, and all differences.

        An effect survives if its p-value, adjusted for the number of effects, is below 5%.
        """
        rows = []
        for (what, settings), members in self.groups.items():
            for metric in metrics:
                ends = [
                    (pair.seed, self._end(pair.baseline, metric), self._end(pair.index, metric)) for pair in members
                ]
                known = [(seed, *both) for seed, *both in ends if None not in both]
                if known:
                    row = {"hook": what, "settings": settings, "metric": metric, "count": len(known)}
                    rows.append({**row, **_paired(pd.DataFrame(known, columns=["seed", "without", "treated"]))})
        limits = adjusted(np.array([row["p_value"] for row in rows], float)) < 1 - CONFIDENCE
        return [{**row, "survives": bool(survives)} for row, survives in zip(rows, limits, strict=True)]

    def _end(self, index: int, metric: str) -> Any:
        return self.run.infos[index]["metrics"].get(metric)

    def _of_keys(self) -> Iterator[_Pair]:
        """Yield the pairs of each key: the runs with the baseline value, and those with another value."""
        for key in comparable_keys(self.run, trainings(self.run)[0]):
            try:
                found = match_runs(self.run, key)
            except InstrumentError as error:
                self.unpaired[key] = str(error).partition("\n")[2].partition("\n")[0].strip() or str(error)
                continue
            for match in found.matches:
                baseline = self._text(key, match.baseline, found.baseline)
                settings = f"{self._text(key, match.index, match.value)} compared with {baseline}"
                yield _Pair(key, settings, match.seed, match.baseline, match.index)

    def _text(self, key: str, index: int, value: Any) -> str:
        """Return the value of a key in a run; of a mapping, the fields in which the runs differ."""
        fields = {
            name.removeprefix(f"{key}."): item
            for name, item in self.run.overrides[index].items()
            if name.startswith(f"{key}.")
        }
        is_mapping = isinstance(self.run.infos[index]["overrides"].get(key), dict)
        if is_mapping and fields:
            return ", ".join(f"{name}: {to_yaml(item)}" for name, item in fields.items())
        return value if isinstance(value, str) else to_yaml(value)


def _paired(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return the means without and with an intervention, and of the difference, with its interval over the seeds."""
    pairs = pairs.assign(difference=pairs["treated"] - pairs["without"])
    seeds = pd.DataFrame([rows.mean(skipna=False) for _, rows in pairs.groupby("seed")])  # keeps NaN of a diverged run
    means = seeds.mean(skipna=False)
    squares = ((seeds["difference"] - means["difference"]) ** 2).sum(skipna=False)
    numbers = (np.array(squares), np.array(len(seeds)))
    width = float(half_width(*numbers))
    ends = [format_number(means["difference"] + side * width, sign=True) for side in (-1, 1)]
    return {
        "without": format_number(means["without"]),
        "treated": format_number(means["treated"]),
        "difference": format_number(means["difference"], sign=True),
        "interval": "" if math.isnan(width) else f"{ends[0]} to {ends[1]}",
        "p_value": float(p_values(np.array(means["difference"]), *numbers)),
        "each": "  ".join(format_number(difference, sign=True) for difference in pairs["difference"]),
    }
