"""Rows on disk: a journal that a step's rows are in when it ends, and Parquet parts that take its place.

`instrument.sinks.parts` says which files there are, `instrument.sinks.tensors` how recorded tensors come to them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..capture.ranks import own_rank
from ..capture.sink import Row
from ..capture.tables import TABLES, as_batch
from ..errors import InstrumentWarning, SinkError
from .log import TableLog
from .parts import JOURNALS, reserve_of, row_counts_of
from .recovery import has_moved
from .row_counts import RowCounts
from .tensors import TensorWriter

ROWS_JOURNAL_BYTES = 32 * 2**20  # of a journal of rows, before a part takes its place: some 120,000 rows
TENSORS_JOURNAL_BYTES = 64 * 2**20
RESERVE_BYTES = 65_536
PHASE = {name: table.names.index("phase") for name, table in TABLES.items() if "phase" in table.names}


def warn(message: str) -> None:
    """What is told where nobody else tells it."""
    warnings.warn(message, InstrumentWarning, stacklevel=2)


class ParquetSink:
    """Writes rows below a run's folder.

    Args:
        folder: The run's folder; it has to exist.
        tensors: `list` keeps values as `list<float>`, which every Parquet reader knows; `bytes` keeps raw bytes,
            which are several times faster. Types that float32 cannot hold to the bit are kept as bytes either way.
        when_full: Where tensors come faster than they are written: `wait` for the disk, or `drop` them; what was
            dropped is counted in `coverage`.
        durability: What rows of finished steps outlive: the end of the `process`, however it comes, or a loss of
            `power`, which costs an fsync a step and table.
        on_error: Where nothing can be written any more: `stop` with an error, or `continue` without recording.
        tell: Called with what is wrong, where it continues.
        parts: The number of parts that each table has already; none without it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensors: Literal["list", "bytes"] = "list",
        when_full: Literal["wait", "drop"] = "wait",
        durability: Literal["process", "power"] = "process",
        on_error: Literal["stop", "continue"] = "stop",
        tell: Callable[[str], None] = warn,
        parts: dict[str, int] | None = None,
    ) -> None:
        self.folder = folder
        self.on_error = on_error
        self.tell = tell
        self.failure: str | None = None
        self._place: os.stat_result | None = None  # of the folder, once there are rows: it may be made after the sink
        self._has_reserve = False
        self._step: int | None = None  # the last training step whose rows were written
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._logs = {
            name: TableLog(
                folder,
                table,
                journal_bytes=TENSORS_JOURNAL_BYTES if name == "tensors" else ROWS_JOURNAL_BYTES,
                first=(parts or {}).get(name, 0),
                fsync=durability == "power",
            )
            for name, table in TABLES.items()
        }
        self._counts = RowCounts(row_counts_of(folder, own_rank()))
        self._tensors = TensorWriter(self._logs["tensors"], tensors=tensors, when_full=when_full)

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Take rows; they are written when the step ends."""
        if self.failure is None:
            self._rows[table].extend(rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Copy a tensor into memory that is written while the step goes on.

        Raises:
            SinkError: Tensors cannot be written.
        """
        if self.failure is not None:
            return None
        try:
            return self._tensors.keep(key, source_shape, tensor, dtype)
        except OSError as error:
            self._fail(error)
            return None

    def end_step(self) -> None:
        """Hand everything to the operating system.

        Raises:
            SinkError: It cannot be written.
        """
        if self.failure is not None:
            return
        try:
            self._set_aside()
            self._tensors.end_step()
            for name, rows in self._rows.items():
                if rows:
                    self._logs[name].append(as_batch(TABLES[name], rows))
            self._count()
        except OSError as error:
            self._fail(error)
        else:
            latest = ((self._rows[name][-1], phase) for name, phase in PHASE.items() if self._rows[name])
            self._step = max((row[0] for row, phase in latest if row[phase] == "train"), default=self._step)
            self._rows = {name: [] for name in TABLES}

    def settle(self) -> dict[str, int]:
        """Make parts of all journals; gives the number of parts of each table.

        Raises:
            SinkError: It cannot be written.
        """
        try:
            for log in self._logs.values():
                log.settle()
            self._count()
        except OSError as error:
            self._fail(error)
        return {name: log.part.number for name, log in self._logs.items()}

    def close(self) -> None:
        """Make parts of all that is left, and give every table that had no rows an empty one.

        Raises:
            SinkError: It cannot be written; what is in journals stays there.
        """
        self.end_step()
        self._tensors.stop()
        try:
            if self.failure is None:
                for log in self._logs.values():
                    log.close()
                self._counts.remove()
                self._reserve.unlink(missing_ok=True)
                with suppress(OSError):  # somebody else has put something there
                    (self.folder / JOURNALS).rmdir()
        except OSError as error:
            self._fail(error)
        finally:
            for log in self._logs.values():
                log.release()
            self._counts.release()

    def _count(self) -> None:
        """Write down how many rows the journals hold by now."""
        self._counts.write((log.part.number, log.rows) for log in self._logs.values())

    @property
    def _reserve(self) -> Path:
        return reserve_of(self.folder, own_rank())

    def _set_aside(self) -> None:
        """Keep a little room on the disk, to have it when the disk is full and that is to be said."""
        if not self._has_reserve:
            self._place = os.stat(self.folder)
            self._reserve.parent.mkdir(exist_ok=True)
            self._reserve.write_bytes(os.urandom(RESERVE_BYTES))
            self._has_reserve = True

    def _saved(self) -> str:
        """What is on disk of all that was written, in words: it is looked for."""
        try:
            there = os.stat(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return "the folder is gone: nothing is saved there"
        except OSError as error:
            return f"what is saved cannot be seen: {error.strerror}"
        if self._place is not None and not os.path.samestat(there, self._place):
            return "another folder is in its place: nothing of this run is saved there"
        if self._step is None:
            return "nothing is saved"
        try:
            parts = not has_moved(self.folder)
            lost = [name for name, log in self._logs.items() if not log.is_there(parts=parts)]
        except OSError as error:
            return f"what is saved cannot be seen: {error.strerror}"
        steps = f"steps up to {self._step} are saved"
        return f"{steps}, but files of {', '.join(lost)} are gone" if lost else steps

    def _fail(self, error: OSError) -> None:
        """Nothing is written from now on; it is said, and put down among the events where that is still possible."""
        step = 0 if self._step is None else self._step + 1
        problem = error.strerror or str(error)
        self.failure = f"{self.folder} cannot be written any more: {problem}; {self._saved()}"
        event = (step, own_rank(), None, "recording", self.failure, "error")
        with suppress(OSError):
            self._reserve.unlink()
        with suppress(OSError):
            self._logs["events"].append(as_batch(TABLES["events"], [*self._rows["events"], event]))
        self._rows = {name: [] for name in TABLES}
        if self.on_error == "stop":
            raise SinkError(self.failure) from error
        self.tell(f"{self.failure}; the training goes on without recording")
