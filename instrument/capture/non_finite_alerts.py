"""Events for values that are not finite: the first occurrences, and how they spread.

Rows are checked when they are passed to the sink, where the numbers are on the host. Hooks do not become slower. Values
on a GPU are reported at the end of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..actions.base import StepContext
from ..spec.kinds import KINDS
from ..spec.schedule import STEP_PHASES
from .sink_interface import Row
from .tables import TABLES

RULE = "non_finite"
MAX_LOCATIONS = 20  # further locations to report after the first one

_COLUMN = {name: index for index, name in enumerate(TABLES["stats"].names)}
_NAN, _INF = _COLUMN["nan_count"], _COLUMN["inf_count"]
_LOCATION_COLUMNS = ("hook", "layer", "role", "path", "phase")


class EventWriter(Protocol):
    """Writes an event: `Probe.event`."""

    def __call__(
        self, rule: str, message: str, *, severity: str = ..., layer: str | None = ..., step: int | None = ...
    ) -> None: ...


class Alerts:
    """Reports values that are not finite, once per location. The first one of a run is a warning.

    A location is a hook, layer, role, path and phase. Gradients of a step that a gradient scaler skipped are expected,
    since this is how it finds its scale. Only the first of them is reported, with severity `info`.

    Args:
        write_event: Called with each event.
    """

    def __init__(self, write_event: EventWriter) -> None:
        self._write_event = write_event
        self._locations: set[tuple[str, ...]] = set()
        self._losses: set[str] = set()  # phases whose loss was not finite
        self._skipped: int | None = None  # the last step that the gradient scaler skipped
        self._reported_skipped = False

    def check_stats(self, rows: Sequence[Row]) -> None:
        """Check the rows of statistics of a step, in the order in which they were recorded."""
        bad = [row for row in rows if row[_NAN] or row[_INF]]
        if bad and len(self._locations) <= MAX_LOCATIONS:
            for row in bad:
                self._check(row)

    def _check(self, row: Row) -> None:
        location = tuple(row[_COLUMN[name]] for name in _LOCATION_COLUMNS)
        if location in self._locations or len(self._locations) > MAX_LOCATIONS:
            return
        step, layer = row[_COLUMN["step"]], row[_COLUMN["layer"]]
        if step == self._skipped and KINDS[row[_COLUMN["kind"]]].gradient:
            if not self._reported_skipped:
                self._reported_skipped = True
                message = f"non-finite value in a step that the gradient scaler skipped: {_counted(row)}"
                self._write_event(RULE, message, severity="info", layer=layer, step=step)
            return
        first = not self._locations
        self._locations.add(location)
        message = f"{'first recorded non-finite value' if first else 'further non-finite value'}: {_counted(row)}"
        self._write_event(RULE, message, severity="warning" if first else "info", layer=layer, step=step)
        if len(self._locations) > MAX_LOCATIONS:
            message = f"values were not finite at {MAX_LOCATIONS + 1} locations; further ones are not reported, see the stats table"
            self._write_event(RULE, message, severity="info", layer=None, step=step)

    def check_metrics(self, moment: StepContext, metrics: Mapping[str, Any]) -> None:
        """Check a row of metrics. It is available before the rows of statistics of its step."""
        if metrics["skipped"]:
            self._skipped = moment.step
        loss = metrics["loss"]
        if loss is not None and not math.isfinite(loss) and moment.phase not in self._losses:
            first = not self._losses
            self._losses.add(moment.phase)
            message = f"the loss is {loss} {_when(moment.step, moment.phase)}"
            self._write_event(RULE, message, severity="warning" if first else "info", layer=None, step=moment.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what was reported so far, as strings and lists."""
        return {
            "locations": sorted(list(location) for location in self._locations),
            "losses": sorted(self._losses),
            "reported_skipped": self._reported_skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was reported so far."""
        self._locations = {tuple(location) for location in state["locations"]}
        self._losses = set(state["losses"])
        self._reported_skipped = state["reported_skipped"]


def _counted(row: Row) -> str:
    """Describe a row. A truncated message loses the least important part.

    For example `at step 12 in encoder.0 output: 3 NaN, 0 infinite of 6,400 (hook 'activations')`.
    """
    hook, layer, role, path, step, phase, numel = (
        row[_COLUMN[name]] for name in ("hook", "layer", "role", "path", "step", "phase", "numel")
    )
    of = "" if numel is None else f" of {numel:,}"
    where = f"{layer or '.'} {role}" + (f" {path!r}" if path else "")
    return f"{_when(step, phase)} in {where}: {row[_NAN] or 0:,} NaN, {row[_INF] or 0:,} infinite{of} (hook {hook!r})"


def _when(step: int, phase: str) -> str:
    if phase in STEP_PHASES:
        return f"at step {step}"
    return f"in the {'probe batch' if phase == 'probe' else 'evaluation'} after {step} steps"
