"""The sink that writes Parquet. When a step ends, its rows are in a journal; a journal becomes a Parquet part later.

`instrument.storage.parts` describes the files, `instrument.storage.tensors` the writing of recorded tensors.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import Tensor

from ..config.schedule import STEP_PHASES
from ..errors import InstrumentWarning, SinkError
from ..formatting import shown_path
from ..tables.message_template import Message, MessageTemplate
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from ..values.dtensor import own_rank
from .journal_truncation_check import RowCounts
from .parts import JOURNALS, process_file
from .row_batches import as_batch
from .table_writer import TableWriter
from .tensors import TensorWriter

ROWS_JOURNAL_BYTES = 32 * 2**20  # The size at which a journal of rows becomes a part: about 140,000 rows of statistics.
TENSORS_JOURNAL_BYTES = 64 * 2**20
RESERVE_BYTES = 65_536
PHASE = {name: table.names.index("phase") for name, table in TABLES.items() if "phase" in table.names}
_INDEX = {name: index for index, name in enumerate(TABLES)}


def warn(message: str) -> None:
    """Issue a warning; the default for `report`."""
    warnings.warn(message, InstrumentWarning, stacklevel=2)


class ParquetSink:
    """Writes rows and tensors to the folder of a run, which has to exist when the first rows are written.

    The options are those of `instrument.config.experiment.SinkConfig`. Dtypes that float32 cannot represent exactly are always
    stored as bytes.

    Args:
        report: Called with a message if it continues. Default: issue a warning.
        parts: The number of existing parts of each table. Default: none.

    Raises:
        SinkError: From all methods except `write`: rows or tensors cannot be written. Rows in journals are kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensors: Literal["list", "bytes"] | None = None,
        when_full: Literal["wait", "drop"] = "wait",
        durability: Literal["process", "power"] = "process",
        on_error: Literal["stop", "continue"] = "stop",
        report: Callable[[str], None] = warn,
        parts: dict[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.on_error = on_error
        self.report = report
        self.failure: str | None = None
        # Of the folder. Set with the first rows, since the folder may be created after the sink.
        self._folder_stat: os.stat_result | None = None
        self._reserve = process_file(folder, "reserve", own_rank())
        self._step: int | None = None  # the last step whose rows were written
        self._rows: dict[str, list[Sequence[Row]]] = {}  # groups of rows of each table
        self._writers = {
            name: TableWriter(
                folder,
                table,
                journal_bytes=TENSORS_JOURNAL_BYTES if name == "tensors" else ROWS_JOURNAL_BYTES,
                first=(parts or {}).get(name, 0),
                fsync=durability == "power",
            )
            for name, table in TABLES.items()
        }
        self._templates = {name: MessageTemplate(table.plain_schema) for name, table in TABLES.items()}
        self._counts = RowCounts(process_file(folder, "rows", own_rank()))
        self._tensors = TensorWriter(self._writers["tensors"], tensors=tensors, when_full=when_full)

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Buffer rows. They are written at the end of the step."""
        if rows and self.failure is None:
            self._rows.setdefault(table, []).append(rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Copy a tensor into a buffer that a thread writes. Return the number of stored bytes; None if the tensor was dropped."""
        if self.failure is not None:
            return None
        try:
            return self._tensors.keep(key, source_shape, tensor, dtype)
        except OSError as error:
            self._fail(error)
            return None

    def end_step(self, *, wait: bool = False) -> None:
        """Write the rows and tensors of the step to the operating system.

        Tensors that a GPU is still copying follow at the end of a later step, unless `wait` is True.
        """
        if self.failure is not None:
            return
        try:
            if self._folder_stat is None:
                self._reserve_space()
            self._tensors.end_step(wait=wait)
            tables = sorted(self._rows, key=_INDEX.__getitem__)
            steps = [step for table in tables if (step := self._append(table, self._rows[table])) is not None]
            self._count([*tables, "tensors"])
        except OSError as error:
            self._fail(error)
        else:
            self._step = max(steps, default=self._step)
            self._rows = {}

    def _append(self, table: str, groups: list[Any]) -> int | None:
        """Write rows to the journal of a table. Return the step of the last one; None if it is not of a step."""
        rows, template = groups[-1], self._templates[table]
        batch: pa.RecordBatch | Message | None = as_batch(TABLES[table], *groups) if len(groups) > 1 else None
        if hasattr(rows, "columns"):  # `StepColumns`; `isinstance` with an abstract class takes longer
            step, phase = rows.latest
            batch = batch or template.message(len(rows), rows.columns(), rows.block)
        else:
            step, phase = rows[-1][0], rows[-1][PHASE[table]] if table in PHASE else ""
            batch = batch or template.message_of(rows)
        self._writers[table].append(batch)
        return step if phase in STEP_PHASES else None

    def finish_parts(self) -> dict[str, int]:
        """Convert all rows to parts. Return the number of parts of each table."""
        self.end_step(wait=True)
        try:
            for writer in self._writers.values():
                writer.finish_part()
            self._count(self._writers)
        except OSError as error:
            self._fail(error)
        return {name: writer.part.number for name, writer in self._writers.items()}

    def close(self) -> None:
        """Convert all journals to parts, and write an empty part for each table without rows."""
        self.end_step(wait=True)
        self._tensors.stop()
        try:
            if self.failure is None:
                for writer in self._writers.values():
                    writer.close()
                self._counts.remove()
                self._reserve.unlink(missing_ok=True)
                with suppress(OSError):  # another program has put a file there
                    (self.folder / JOURNALS).rmdir()
        except OSError as error:
            self._fail(error)
        finally:
            for writer in self._writers.values():
                writer.release()
            self._counts.release()

    def _count(self, tables: Iterable[str]) -> None:
        self._counts.write([(name, (writer := self._writers[name]).part.number, writer.rows) for name in tables])

    def _reserve_space(self) -> None:
        """Reserve a little disk space, which is released to report a full disk."""
        self._folder_stat = os.stat(self.folder)
        for is_last in (False, False, True):
            self._reserve.parent.mkdir(exist_ok=True)
            try:
                self._reserve.write_bytes(os.urandom(RESERVE_BYTES))
                break
            except FileNotFoundError:  # another process that ends removes the empty folder
                if is_last:
                    raise

    def _describe_saved(self) -> str:
        try:
            stat = os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return "the folder does not exist any more: nothing is saved"
        except OSError as error:
            return f"cannot check which rows are saved: {error.strerror}"
        if self._folder_stat is not None and not os.path.samestat(stat, self._folder_stat):
            return "the folder was replaced by another one: nothing of this run is saved"
        return "nothing is saved" if self._step is None else f"steps up to {self._step} were written"

    def _fail(self, error: OSError) -> None:
        """Stop writing after an error, and report it. It is also recorded as an event if possible."""
        step = 0 if self._step is None else self._step + 1
        problem = error.strerror or str(error)
        self.failure = f"cannot write to {shown_path(self.folder)}: {problem}; {self._describe_saved()}"
        event = (step, own_rank(), None, "recording", self.failure, "error", None, None, None)
        with suppress(OSError):
            self._reserve.unlink()
        with suppress(OSError):
            self._writers["events"].append(as_batch(TABLES["events"], *self._rows.get("events", ()), [event]))
        self._rows = {}
        if self.on_error == "stop":
            raise SinkError(self.failure) from error
        self.report(f"{self.failure}; training continues without recording")
