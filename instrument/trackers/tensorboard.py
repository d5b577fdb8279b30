"""TensorBoard tracker: event files in `<run folder>/tensorboard/`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, SummaryWriter
from torch.utils.tensorboard.summary import histogram_raw, text

from .step_summary import StepSummary
from .tracking import Outcome, TrackedRun

FLUSH_SECONDS, QUEUE = 5, 100  # what a killed process may lose: seconds, or steps


class TensorBoard:
    """Writes one event per step. In a resumed run, TensorBoard discards the steps that are repeated."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self.writer = SummaryWriter(str(folder), purge_step=run.resumed_at, flush_secs=FLUSH_SECONDS, max_queue=QUEUE)
        self.events = cast(FileWriter, self.writer.file_writer)

    def log(self, step: int, summary: StepSummary) -> None:
        """Add the event of a step. A thread of TensorBoard writes it."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in summary.scalars.items()]
        for tag, histogram in summary.histograms.items():
            edges, counts = histogram.bins()
            middles = edges[:-1] * 0.5 + edges[1:] * 0.5
            total, squares = float(counts @ middles), float(counts @ middles**2)
            numbers = edges[0], edges[-1], int(counts.sum()), total, squares
            values += histogram_raw(tag, *numbers, edges[1:].tolist(), counts.tolist()).value
        for tag, lines in summary.texts.items():
            values += text(tag, lines).value
        self.events.add_summary(Summary(value=values), step)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        self.writer.close()
