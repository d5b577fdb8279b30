"""Rows for rules, without a model: each step is a list of rows of statistics, and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

import numpy as np

from instrument.rules.rule_set import RuleEvent, RuleSet
from instrument.rules.step_rows import Columns, Site, Statistics, StepBlock
from instrument.spec.parse import parse_rules
from instrument.stats.single_pass import NATIVE

OUTPUT = {"hook": "seen", "layer": "a", "module_type": "Linear", "kind": "forward", "role": "output", "path": ""}
GRADIENT = {**OUTPUT, "hook": "gradients", "kind": "parameter_grad", "role": "param_grad", "path": "weight"}
UPDATE = {**GRADIENT, "hook": "updates", "kind": "step_post", "role": "update"}
PARAMETER = {**UPDATE, "hook": "parameters", "role": "param"}
INPUT = {**OUTPUT, "kind": "forward_pre", "role": "input", "path": "0"}
METRICS = dict.fromkeys(("loss", "accuracy", "lr", "grad_norm", "seconds", "skipped"))


class Step(dict[str, Any]):
    """The rows of a step: `rows`, `phase`, `targets`, and metrics."""


def rule_set(rules: Mapping[str, Any], events: list[RuleEvent]) -> RuleSet:
    """Return the rules of a configuration. They append their events to a list."""
    return RuleSet(parse_rules(rules), events.append)


def feed(
    rules: RuleSet, steps: Iterable[Step], start: int = 0, *, defers: bool = False, sizes: Iterable[int] = repeat(1)
) -> None:
    """Pass steps to rules. The steps are numbered, unless they have a number.

    Args:
        rules: The rules.
        steps: The steps.
        start: The number of the first step.
        defers: Whether the rows have a matrix of numbers, as in a run, so that the rules can defer steps.
        sizes: How many steps are passed together each time. Default: one step.
    """
    numbered = ((step.get("step", number), step) for number, step in enumerate(steps, start))
    for size in sizes:
        if not (together := [*islice(numbered, size)]):
            break
        rules.update(_blocks(rules, together, defers=defers))


def _blocks(rules: RuleSet, steps: Iterable[tuple[int, Step]], *, defers: bool) -> Iterator[StepBlock]:
    """Yield steps in blocks that are as large as possible."""
    block: StepBlock | None = None
    for number, step in steps:
        phase, rows = step.get("phase", "train"), step.get("rows", [])
        sites = [Site(*({**OUTPUT, "recompute": False, **row}[name] for name in Site._fields)) for row in rows]
        layout = rules.layout(sites, phase, lambda site: site)
        fits = block is not None and block.phase == phase == "train"
        if block is None or not fits or (rows and block.with_rows and block.layout is not layout):
            if block is not None:
                yield block
            block = StepBlock(phase, layout)
        if rows:
            block.layout = layout
        given = {name: value for name, value in step.items() if name in METRICS}
        metrics = {**METRICS, **given} if given else None
        targets = np.array(step["targets"], np.float64) if "targets" in step else None
        statistics = _statistics(rows, defers=defers) if rows else None
        block.append(number, metrics, targets, None if statistics is None else statistics.numbers, statistics)
    if block is not None:
        yield block


def fired(rule: str | Mapping[str, Any], steps: Iterable[Step]) -> list[RuleEvent]:
    """Return the events of one rule."""
    events: list[RuleEvent] = []
    feed(rule_set({"r": {"rule": rule} if isinstance(rule, str) else rule}, events), steps)
    return events


def _statistics(rows: Sequence[Mapping[str, Any]], *, defers: bool) -> Statistics:
    def column(name: str) -> np.ndarray:
        cells = [row.get(name) for row in rows]
        return np.array([np.nan if cell is None else cell for cell in cells], np.float64)

    return Columns(column, np.stack([column(name) for name in NATIVE], axis=1) if defers else None)


def values(about: Mapping[str, Any], statistic: str, numbers: Sequence[float | None], **more: Any) -> list[Step]:
    """Return one step for each value of a statistic at one location."""
    return [Step(rows=[{**about, "numel": 100, statistic: number}], **more) for number in numbers]
