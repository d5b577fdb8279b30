"""Rows for rules, without a model: each step is a list of rows of statistics, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from instrument.config.parse import parse_rules
from instrument.rules.rule_set import RuleEvent, RuleSet
from instrument.rules.step_rows import RowSite, StepRows
from instrument.tables.statistics import ALL

OUTPUT = {"hook": "seen", "layer": "a", "module_type": "Linear", "kind": "forward", "role": "output", "path": ""}
GRADIENT = {**OUTPUT, "hook": "gradients", "kind": "parameter_grad", "role": "param_grad", "path": "weight"}
UPDATE = {**GRADIENT, "hook": "updates", "kind": "step_post", "role": "update"}
PARAMETER = {**UPDATE, "hook": "parameters", "role": "param"}
INPUT = {**OUTPUT, "kind": "forward_pre", "role": "input", "path": "0"}
ALL_INDICES = range(len(ALL))
METRICS = dict.fromkeys(("loss", "accuracy", "lr", "grad_norm", "seconds", "skipped"))


class Step(dict[str, Any]):
    """The rows of a step: `rows`, `phase`, `targets`, `relations`, and metrics."""


def rule_set(rules: Mapping[str, Any], events: list[RuleEvent]) -> RuleSet:
    """Return the rules of a configuration. They append their events to a list."""
    return RuleSet(parse_rules(rules), events.append)


def feed(rules: RuleSet, steps: Iterable[Step], start: int = 0, *, with_numbers: bool = False) -> None:
    """Pass steps to rules. The steps are numbered, unless they have a number.

    With numbers, the rows have a matrix, as in a run, which the rules can compare with their bounds.
    """
    for number, step in enumerate(steps, start):
        phase, rows = step.get("phase", "train"), step.get("rows", [])
        sites = [RowSite(*({**OUTPUT, "recompute": False, **row}[name] for name in RowSite._fields)) for row in rows]
        given = {name: value for name, value in step.items() if name in METRICS}
        targets = np.array(step["targets"], np.float64) if "targets" in step else None
        layout, column = rules.layout(sites, phase, lambda site: site), _column(rows)
        numbers = (ALL_INDICES, np.stack([column(name) for name in ALL])) if with_numbers else None
        metrics = {**METRICS, **given} if given else None
        relations = step.get("relations", ())
        of_step = StepRows(
            step.get("step", number), phase, layout, column, metrics, targets, numbers=numbers, relations=relations
        )
        rules.update(of_step)


def fired(rule: str | Mapping[str, Any], steps: Iterable[Step]) -> list[RuleEvent]:
    """Return the events of one rule."""
    events: list[RuleEvent] = []
    feed(rule_set({"r": {"rule": rule} if isinstance(rule, str) else rule}, events), steps)
    return events


def _column(rows: Sequence[Mapping[str, Any]]) -> Callable[[str], np.ndarray]:
    def column(name: str) -> np.ndarray:
        cells = [row.get(name) for row in rows]
        return np.array([np.nan if cell is None else cell for cell in cells], np.float64)

    return column


def values(about: Mapping[str, Any], statistic: str, numbers: Sequence[float | None], **more: Any) -> list[Step]:
    """Return one step for each value of a statistic at one location."""
    return [Step(rows=[{"numel": 100, **about, statistic: number}], **more) for number in numbers]
