"""The `metrics` table: one row per training step or evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from torch import Tensor

from ..hooks.clock import Clock
from ..stats.device_copy import PendingMetrics
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from .collectives import Ranks
from .optimizer_step_watch import StepWatch
from .recorder import Recorder

USER_METRICS = ("loss", "accuracy", "lr", "grad_norm")
METRICS = (*USER_METRICS, "seconds", "samples_per_second")
_NO_VALUES: dict[str, Any] = dict.fromkeys((*METRICS, "skipped"))
_KNOWN = _NO_VALUES.keys()
_VALUES_OF = itemgetter(*_NO_VALUES)
_ON_HOST = frozenset((float, bool, type(None)))
_RESERVED = frozenset((*TABLES["metrics"].names, "run", "seed", "samples")) - {*USER_METRICS}


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, Tensor | float | None]:
    """Return metrics as numbers, or as tensors with one element if they are on a device.

    A name without its own column is a custom metric. NumPy arrays and sequences of one number are converted.

    Raises:
        TypeError: A name is that of a computed column, differs from a column in case only, or is not a name; or a value is not one
            number.
    """
    for name in metrics:
        if name in USER_METRICS:
            continue
        if name.lower() in _RESERVED or name.lower() in USER_METRICS:
            raise TypeError(f"{name}: the metrics table has its own column {name.lower()!r}; use another name")
        if not name.isidentifier():
            raise TypeError(
                f"{name!r} is not a valid name of a metric: use letters, digits and underscores, such as 'episode_return'"
            )
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> Tensor | float | None:
    if value is None or type(value) is float:
        return value
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return float(value.item()) if value.is_cpu else value.detach()
        raise TypeError(f"{name} must be one real number, but is a tensor of shape {list(value.shape)}, {value.dtype}")
    try:
        array = np.asarray(value)
    except ValueError:  # a list of lists of different lengths
        array = np.asarray(None)
    if array.size == 1 and array.dtype.kind in "fiub":
        return float(array.item())
    given = f", of shape {list(array.shape)}" if array.dtype.kind in "fiub" else f": {value!r}"
    raise TypeError(f"{name} must be one real number, but is of type {type(value).__name__}{given}")


def custom_metrics_in(row: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: row[name] for name in row if name not in _KNOWN} if len(row) > len(_KNOWN) else {}


class Metrics:
    """Writes the rows of the `metrics` table, with the learning rate of the last optimizer step."""

    def __init__(self, recorder: Recorder, clock: Clock, ranks: Ranks | None, steps: StepWatch) -> None:
        self.recorder = recorder
        self.clock = clock
        self.ranks = ranks
        self.steps = steps
        self._logged: dict[str, dict[str, Tensor | float | None]] = {}  # by phase, for the next row

    def log(self, metrics: Mapping[str, Any]) -> None:
        numbers = checked_metrics(metrics)
        kept = {name: each.clone() if isinstance(each, Tensor) else each for name, each in numbers.items()}
        self._logged.setdefault(self.clock.moment.phase, {}).update(kept)

    @property
    def has_logged(self) -> bool:
        """Whether metrics were logged in the current phase since its last row."""
        return self.clock.moment.phase in self._logged

    @property
    def unwritten(self) -> list[str]:
        """The names of metrics that were logged and are in no row."""
        return [name for logged in self._logged.values() for name in logged]

    def write(
        self, metrics: dict[str, Tensor | float | None], *, seconds: float, samples: int | None = None
    ) -> Mapping[str, float | None]:
        if self._logged:
            metrics = self._logged.pop(self.clock.moment.phase, {}) | {
                name: value for name, value in metrics.items() if value is not None
            }
        moment = self.clock.moment
        if metrics.get("lr") is None and moment.phase == "train":
            metrics["lr"] = self.steps.take_rate()
        count = None if samples is None else _number("samples", samples)
        rate = None if count is None else count / seconds
        row = _on_host({**_NO_VALUES, **metrics, "seconds": seconds, "samples_per_second": rate})
        if self.ranks is None or self.ranks.is_rank_zero or not self.ranks.merged_metrics:
            cells = partial(_cells, (moment.step, moment.epoch, moment.phase, self.clock.rank), row)
            self.recorder.add_metrics((moment.step, moment.phase, row), cells, now=isinstance(row, dict))
        return row


def _on_host(row: dict[str, Any]) -> Mapping[str, float | None]:
    """Return a row with the numbers of its tensors; one that waits for them if they are on a device."""
    if {*map(type, row.values())} <= _ON_HOST:
        return row
    tensors = [name for name, value in row.items() if isinstance(value, Tensor)]
    pending = PendingMetrics(row, tensors)
    return pending.row if pending.transfer.is_complete else pending


def _cells(place: Row, row: Mapping[str, Any]) -> Row:
    *values, skipped = _VALUES_OF(row)
    return (*place, *values, None if skipped is None else bool(skipped), custom_metrics_in(row) or None)
