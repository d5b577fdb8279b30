"""The `metrics` table: one row per training step or evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ..kinds.clock import Clock
from .collectives import Ranks
from .device_copy import PendingMetrics, Transfer
from .optimizer_step_watch import StepWatch
from .recorder import Recorder
from .sink_interface import Row

USER_METRICS = ("loss", "accuracy", "lr", "grad_norm")
METRICS = (*USER_METRICS, "seconds", "samples_per_second")


def check_metric_names(names: Iterable[str], *internal: str) -> None:
    """Refuse metrics without a column in the `metrics` table.

    Args:
        names: The names of the metrics.
        internal: Names that are allowed in addition, for calls by this package.

    Raises:
        TypeError: The table has no such column.
    """
    for name in names:
        if name not in (*USER_METRICS, *internal):
            raise TypeError(f"unknown metric {name!r}; allowed: {', '.join(USER_METRICS)}, samples")


class Metrics:
    """Writes the rows of the `metrics` table.

    Args:
        recorder: Receives the rows.
        clock: Provides step, epoch and phase.
        ranks: The processes that train together; None for a single one.

    Attributes:
        steps: Provides the learning rate; None without an optimizer.
    """

    def __init__(self, recorder: Recorder, clock: Clock, ranks: Ranks | None) -> None:
        self.recorder = recorder
        self.clock = clock
        self.ranks = ranks
        self.steps: StepWatch | None = None

    def write(
        self, *, seconds: float, samples: int | None = None, **metrics: Tensor | float | None
    ) -> Mapping[str, float | None]:
        """Write a row for the current step and phase; see `Probe.write_metrics`."""
        metrics |= {"seconds": seconds, "samples_per_second": None if samples is None else samples / seconds}
        if metrics.get("lr") is None and self.steps is not None and self.clock.moment.phase == "train":
            metrics["lr"] = self.steps.take_rate()
        transfer = Transfer([value for value in metrics.values() if isinstance(value, Tensor)])

        def read() -> dict[str, Any]:
            numbers = transfer.read()
            read = {name: next(numbers)[0] if isinstance(value, Tensor) else value for name, value in metrics.items()}
            return {**dict.fromkeys((*METRICS, "skipped")), **read}

        row = read() if transfer.is_complete else PendingMetrics(read)
        if self.ranks is None or self.ranks.is_rank_zero or not self.ranks.merged_metrics:
            self._keep(row, now=transfer.is_complete)
        return row

    def _keep(self, row: Mapping[str, Any], *, now: bool) -> None:
        moment = self.clock.moment

        def cells() -> Row:
            skipped = None if row["skipped"] is None else bool(row["skipped"])
            return (moment.step, moment.epoch, moment.phase, self.clock.rank, *(row[name] for name in METRICS), skipped)

        self.recorder.note_metrics((moment.step, moment.phase, row))
        if now:
            self.recorder.write("metrics", [cells()])
        else:
            self.recorder.write_deferred("metrics", cells)
