"""The probe that `instrument.attach` yields: it reads back what it has recorded, with the methods of `instrument.Run`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
from torch import Tensor

from ..analysis.features import Features
from ..analysis.load import Run, load
from ..analysis.memory_files import IN_MEMORY, MemoryFiles
from ..capture.probe import Probe
from ..capture.sink_interface import Sink
from ..errors import InstrumentError
from ..plan.hook_plan import HookPlan
from ..sinks.memory import MemorySink
from ..spec.run_changes import Settings
from ..training.control import Control

if TYPE_CHECKING:
    import polars as pl


class AttachedProbe(Probe):
    """A `Probe` whose recorded data can be read at any time, during the block and after it.

        with instrument.attach(model, hooks) as probe:
            ...
        probe.stats
        X, y, ids = probe.features("avgpool")

    The rows of completed steps are read: from memory, or from the folder `out`. In contrast to `Run`, nothing is cached:
    each access returns the current rows. The method `coverage` returns the current coverage; `probe.run.coverage` has
    the table.

    Args:
        plan: See `Probe`.
        sink: See `Probe`.
        folder: The folder to which the sink writes; None if it writes to memory, or only to a custom sink.
        info: The entries of run.json if the sink is in memory.
        options: Further arguments of `Probe`.
    """

    def __init__(
        self, plan: HookPlan, sink: Sink, *, folder: Path | None, info: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(plan, sink, **options)
        self._status = "running"
        self._info = info
        self._folder = folder
        self._control: Control | None = None
        self._files = MemoryFiles(sink, self._run_info) if isinstance(sink, MemorySink) else None

    def accept_changes(self) -> None:
        """From now on, make the changes that `python -m instrument.control` requests."""
        if self._folder is not None:
            self._control = Control(self._folder, Settings.of(self._info["config"]), self)

    def end_step(
        self, *, loss: Tensor | float | None = None, samples: int | None = None, **metrics: Tensor | float | None
    ) -> Mapping[str, float | None]:
        """End the current step, and make the changes that were requested; see `Probe.end_step`."""
        row = super().end_step(loss=loss, samples=samples, **metrics)
        if self._control is not None:
            self._control.end_step()
        return row

    def _finish(self, error: BaseException | None) -> None:
        ended = "done" if self.stop_reason is None else "stopped"
        self._status = ended if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        super()._finish(error)

    def _run_info(self) -> dict[str, Any]:
        advice = self.rules.custom_advice
        return {**self._info, "status": self._status, "overrides": {}, "metrics": {}, "advice": advice}

    def __repr__(self) -> str:
        sites, hooks = len(self.plan.sites), len(self.plan.specs)
        where = "in memory" if self._files else f"in {self._folder}" if self._folder else "in a custom sink"
        rows = f"{self.recorder.rows_written:,} rows {where}"
        return f"<{type(self).__name__} {self._status}: {self.step} steps, {hooks} hooks at {sites} sites, {rows}>"

    def _repr_html_(self) -> str | None:
        """Return the HTML representation for notebooks; None if only a custom sink has the rows."""
        return self.run._repr_html_() if self._files or self._folder else None

    @property
    def run(self) -> Run:
        """The data recorded so far, as a `Run`. Waits for values that are still being copied from a GPU.

        Raises:
            InstrumentError: Only a custom sink received the rows.
        """
        self.flush()
        if self._files is not None:
            return Run(IN_MEMORY, [IN_MEMORY], [self._files])
        if self._folder is None:
            raise InstrumentError("only the custom sink has the rows; pass out=FOLDER to also read them here")
        return load(self._folder)

    @property
    def stats(self) -> pd.DataFrame:
        """Statistics. One row per recorded tensor and firing of a hook."""
        return self.run.stats

    @property
    def distributions(self) -> pd.DataFrame:
        """Quantiles and histograms. One row per recorded tensor and firing of a hook."""
        return self.run.distributions

    @property
    def effects(self) -> pd.DataFrame:
        """What interventions changed. One row per intervention and firing."""
        return self.run.effects

    @property
    def metrics(self) -> pd.DataFrame:
        """Loss, accuracy and other metrics. One row per training step and per evaluation."""
        return self.run.metrics

    @property
    def layers(self) -> pd.DataFrame:
        """The modules of the model. One row per module."""
        return self.run.layers

    @property
    def events(self) -> pd.DataFrame:
        """Warnings and errors. One row per event."""
        return self.run.events

    @property
    def findings(self) -> pd.DataFrame:
        """The rules that fired, with what to do next, and other observations; see `Run.findings`."""
        return self.run.findings

    @property
    def generated(self) -> pd.DataFrame:
        """Texts and tokens that a language model generated. One row per prompt."""
        return self.run.generated

    @property
    def samples(self) -> pd.DataFrame:
        """The id and the target of each sample. One row per sample of a batch in which a tensor was recorded."""
        return self.run.samples

    @property
    def custom_statistics(self) -> tuple[str, ...]:
        """The names of the custom statistics, in alphabetical order; see `Run.custom_statistics`."""
        return self.run.custom_statistics

    @property
    def custom_metrics(self) -> tuple[str, ...]:
        """The names of the custom metrics; see `Run.custom_metrics`."""
        return self.run.custom_metrics

    @property
    def problems(self) -> list[str]:
        """The files that could not be read completely, each with the reason."""
        return self.run.problems

    def tensors(self, **where: Any) -> pd.DataFrame:
        """Read recorded tensors as NumPy arrays; see `Run.tensors`."""
        return self.run.tensors(**where)

    def features(
        self,
        layer: str,
        *,
        hook: str | None = None,
        role: str = "output",
        phase: str | None = None,
        step: int | Collection[int] | None = None,
        epoch: int | Collection[int] | None = None,
        call: int | None = None,
        path: str | None = None,
        out: str | Path | None = None,
    ) -> Features:
        """Join the recorded tensors of a layer over all batches; see `Run.features`."""
        features = self.run.features(
            layer, hook=hook, role=role, phase=phase, step=step, epoch=epoch, call=call, path=path, out=out
        )
        assert isinstance(features, Features), "a probe records one run"
        return features

    def read(self, table: str, columns: list[str]) -> pd.DataFrame:
        """Read some columns of a table; see `Run.read`."""
        return self.run.read(table, columns)

    def scan(
        self, table: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over some columns of a table in record batches; see `Run.scan`."""
        return self.run.scan(table, columns, condition)

    def count(self, table: str) -> int:
        """Return the number of rows of a table; see `Run.count`."""
        return self.run.count(table)

    def sql(self, query: str) -> pd.DataFrame:
        """Run a SQL query with DuckDB on the tables; see `Run.sql`."""
        return self.run.sql(query)

    def lazy(self, table: str) -> pl.LazyFrame:
        """Return a table as a polars LazyFrame; see `Run.lazy`."""
        return self.run.lazy(table)
