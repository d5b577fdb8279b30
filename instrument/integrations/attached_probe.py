"""The probe that `instrument.attach` yields: it reads back what it has recorded, with the methods of `instrument.Run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..analysis.load import Run, load
from ..analysis.run_tables import IN_MEMORY, check_is_table
from ..config.run_changes import Settings
from ..errors import InstrumentError
from ..plan.hook_plan import HookPlan
from ..probe.probe import Probe
from ..probe.samples import checked_ids, checked_targets
from ..storage.memory import MemorySink
from ..storage.row_batches import as_batch, as_table
from ..storage.run_files import RunFiles
from ..storage.tensors import rows_of
from ..tables.schemas import POSITION, TABLES
from ..tables.sink_interface import Sink
from ..training.control import Control


class AttachedProbe(Probe):
    """A `Probe` whose recorded data can be read at any time, during the block and after it, with the methods of `Run`.

        with instrument.attach(model, hooks) as probe:
            ...
        probe.stats
        X, y, ids = probe.features("avgpool")

    The rows of completed steps are read: from memory, or from the folder `out`. In contrast to `Run`, nothing is cached:
    each access returns the current rows. The method `coverage` returns the current coverage; `probe.run.coverage` has
    the table.

    Args:
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

    def before_optimizer_step(self, optimizer: Optimizer | None = None) -> None:
        """Run the hooks at the optimizer boundary. Only for loops that set `steps_by_loop`.

        Call it when all gradients are complete, before the optimizer uses them.

        Args:
            optimizer: The optimizer that makes its step next. Required if there are several.

        Raises:
            ValueError: The argument is missing although there are several optimizers, or is not an optimizer of this
                probe; or `steps_by_loop` is not set.
            HookError: It is called twice before a step. `optimizer.step()` raises it if this call is missing.
        """
        self._hooks.before_optimizer_step(optimizer)

    def batch(self, *, ids: Any, targets: Any = None) -> None:
        """Name the samples of the next batch. Call it before the forward pass of each micro-step.

        If a hook records a tensor in the micro-step, the table `samples` gets one row for each sample. Then
        `features` of the run returns the tensors with these ids and targets.

        Args:
            ids: One id for each sample, in the order of dimension 0: different integers, such as indices in the
                dataset, or different strings. A list, an array or a tensor, [samples]. The ids of a tensor on a GPU are
                not compared with each other.
            targets: One number for each sample: a list, an array or a tensor, [samples]. The values of a tensor on a
                GPU are copied when the step ends. Or integers [samples, positions], for `position_losses`: the class that the logits at
                each position predict, -100 for none; in the table `samples`, `target` is then null. Default: None, no targets.

        Raises:
            ConfigError: An argument has the wrong type or shape, an id occurs twice, or the batch of this micro-step is
                named already. At the end of the micro-step: dimension 0 of no recorded tensor has as many entries as there are ids.
        """
        names = checked_ids(ids)
        self._name_samples(names, checked_targets(targets, len(names)), is_checked=True)

    def accept_changes(self) -> None:
        """From now on, make the changes that `python -m instrument.control` requests."""
        if self._folder is not None:
            self._control = Control(self._folder, Settings.of(self._info["config"]), self)

    def _end_step(self, samples: int | None, metrics: dict[str, Tensor | float | None]) -> Mapping[str, float | None]:
        """End the current step, and make the changes that were requested."""
        if self._status != "running":
            message = "the block of the probe has ended, which removed its hooks: call end_step inside the block"
            raise InstrumentError(message)
        row = super()._end_step(samples, metrics)
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
        from ..analysis.overview import to_html

        return to_html(self.run, "probe.run", self.coverage()) if self._files or self._folder else None

    @property
    def run(self) -> Run:
        """The data recorded so far, as a `Run`. Waits for values that are still being copied from a GPU.

        Raises:
            InstrumentError: Only a custom sink received the rows.
        """
        self.recorder.flush()
        if self._files is not None:
            return Run(IN_MEMORY, [IN_MEMORY], [self._files])
        if self._folder is None:
            raise InstrumentError("only the custom sink has the rows; pass out=FOLDER to also read them here")
        return load(self._folder)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or a method of `Run` for the current rows, such as `stats`, `tensors` or `sql`."""
        if name.startswith("_") or not hasattr(Run, name):
            check_is_table(self, name)
        return getattr(self.run, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *TABLES, *(name for name in dir(Run) if not name.startswith("_"))})


T = TypeVar("T")


class MemoryFiles(RunFiles):
    """The rows of a `MemorySink` as Arrow tables. New rows are converted when a table is read."""

    def __init__(self, sink: MemorySink, info: Callable[[], dict[str, Any]]) -> None:
        super().__init__(IN_MEMORY)
        self.sink = sink
        self._info = info
        self._pieces: dict[str, list[pa.Table]] = {name: [] for name in TABLES}

    def info(self) -> dict[str, Any]:
        """Return the content that run.json would have."""
        return self._info()

    def table_files(self, name: str) -> tuple[list[Path], list[pa.Table]]:
        """Return no Parquet files, and the rows of a table."""
        if name == "tensors":
            self.sink.wait()
        pieces = self._pieces[name]
        rows, table = self.sink.rows[name][sum(map(len, pieces)) :], TABLES[name]
        if rows and name == "tensors":
            stored = ((tuple(key), tensor.reshape(-1), tensor.dtype == torch.float32) for *key, tensor, _ in rows)
            pieces.append(as_table(table, rows_of(stored)))
        elif rows:
            plain = pa.Table.from_batches([as_batch(table, rows)])
            if table.is_sorted:
                moment = itemgetter(table.names.index("step"), table.names.index("phase"))
                positions = [index for _, same in groupby(rows, moment) for index, _ in enumerate(same)]
                plain = plain.append_column(POSITION.name, pa.array(positions, POSITION.type))
            pieces.append(as_table(table, plain))
        return [], list(pieces)

    def retry_if_merged(self, operation: Callable[[], T], name: str) -> T:  # noqa: ARG002
        """Call `operation` and return its result."""
        return operation()
