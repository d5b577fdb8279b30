"""A run in progress in bounded memory, and its state as text. Each refresh reads only the rows that were added since the previous one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.config_comparison import rules_of
from ..analysis.diagnosis import SEVERITIES, Finding, diagnoses, findings_of
from ..analysis.new_rows import NewRows, RowsRemovedError
from ..analysis.overview import LAYER_COLUMNS, METRIC_COLUMNS, SHOWN_METRICS, Cells, layer_rows, metric_rows, sparkline
from ..analysis.run_history import MAX_VALUES, RunHistory, shown_tables
from ..errors import InstrumentError, InstrumentWarning
from ..storage.remote_folder import is_address, moved_to
from ..storage.run_files import RunFiles
from .charts import curve_of

RUNNING = "running"
DELETED = "deleted"  # run.json does not exist any more; the rows that were read are kept
COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}
STATUS_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "killed": "red"}
MAX_FINDINGS, FEWEST_LAYERS = 6, 5
OTHER_LINES = 14  # of a frame: headings, empty lines, the first finding, progress and metrics of an evaluation


class LiveRun(RunHistory):
    """The history of a run in a local or remote folder, updated by `refresh`. It reads some tables, or all that are shown.

    `version` increases with each refresh that finds changes.
    """

    def __init__(self, folder: Path, tables: Sequence[str] = (), room: int = MAX_VALUES, version: int = 0) -> None:
        self.tables = tuple(tables) or shown_tables()
        self.unreachable: str | None = None  # the error of the last refresh, if the folder could not be read
        self._reset(folder, room, version)

    def _reset(self, folder: Path, room: int, version: int) -> None:
        self._files = RunFiles(folder)
        super().__init__(folder, self._read_info(), room, version)
        moved = moved_to(self.info) is not None and not is_address(folder)
        self._readers = [NewRows(folder, name, self.columns(name), moved=moved) for name in self.tables]

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress."""
        return bool(self.info["status"] == RUNNING)

    @property
    def fraction_read(self) -> float:
        """The fraction of the files that has been read. Less than 1 only for a while after a long run was opened."""
        return min(reader.fraction_read for reader in self._readers)

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self.fraction_read == 1

    @property
    def is_successful(self) -> bool:
        """Whether the run is done or in progress."""
        return self.info["status"] in ("done", RUNNING)

    @property
    def problems(self) -> list[str]:
        """The files that cannot be read, each with the reason, and the error of an unreachable remote folder."""
        unreachable = [] if self.unreachable is None else [self.unreachable]
        return [*unreachable, *self._files.problems, *(problem for each in self._readers for problem in each.problems)]

    @property
    def progress(self) -> str:
        """The number of completed steps, and of all steps if it is known."""
        return f"{self.step:,}" + (f" of {self.steps:,}" if self.steps else "")

    @property
    def state(self) -> dict[str, Any]:
        """What `watch --once --json` prints: status, steps, the last metrics by phase, and findings."""
        last = {phase: {name: value for name, (_, value) in each.items()} for phase, each in self.last_metrics.items()}
        names = {"folder": self.folder, "status": self.info["status"], "error": self.info.get("error")}
        return {**names, "step": self.step, "steps": self.steps, "metrics": last, "findings": self.findings()}

    def findings(self) -> list[Finding]:
        """Return the findings of rules, as in a report, and the other warnings and errors, the most severe ones first."""
        rules = rules_of(self.info)
        fired = [event for event in self.fired if event.rule in rules]
        judged = findings_of(fired, rules, self.info, [row["layer"] for row in self.layers])
        others = []
        first: dict[tuple[str, str, str | None], dict[str, Any]] = {}
        for event in self.events:
            if event["rule"] not in rules and event["severity"] in ("error", "warning"):
                first.setdefault((event["rule"], event["severity"], event["layer"]), event)
        for key, event in first.items():
            count = self.event_counts[key]
            message = event["message"] + (f" ({count:,} events)" if count > 1 else "")
            where = event["layer"] or ""
            others.append(Finding(event["rule"], where, event["step"], message, event["severity"], float(count)))
        return judged + sorted(others, key=lambda finding: SEVERITIES.index(finding.severity))

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Read new rows. Return whether anything changed.

        Older rows are read for at most so many seconds; the rest follows in later calls.
        """
        if not is_address(self.folder) and not (self.folder / "run.json").exists():
            changed = bool(self.info["status"] != DELETED)
            self.info = {**self.info, "status": DELETED}
            self.version += changed
            return changed
        until = time.monotonic() + seconds
        unreachable = self.unreachable
        self.version += 1
        if is_address(self.folder):
            cast(Any, self.folder).fs.invalidate_cache()
        self.unreachable, changed = None, False
        try:
            changed = self._read(until)
        except (InstrumentError, OSError) as error:
            self.unreachable = str(error)
        changed |= self.unreachable != unreachable
        self.version -= not changed
        return changed

    def _read(self, until: float) -> bool:
        """Read new rows, and all rows again if rows were removed. Return whether anything changed."""
        try:
            return self._read_new(until)
        except RowsRemovedError:
            self._reset(self.folder, self.room, self.version)
        with suppress(RowsRemovedError):  # removed at the same time: the next call starts again
            self._read_new(until)
        return True

    def _read_new(self, until: float) -> bool:
        info = self._read_info()
        changed = bool(info != self.info)
        if any(info.get(key) != self.info.get(key) for key in ("started", "resumed")):
            raise RowsRemovedError(self.folder)  # a resumed or another run
        self.info = info
        for reader in self._readers:
            for rows in reader.read(until):
                if rows.num_rows:
                    self.add(reader.table.name, rows)
                    changed = True
        return changed

    def _read_info(self) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InstrumentWarning)  # damaged files are listed as problems
            return self._files.info()


def frame(live: LiveRun, height: int | None = None) -> RenderableType:
    """Return the current state of a run, for a screen with `height` lines; without a height, with all layers."""
    findings, status = live.findings(), live.info["status"]
    name = (str(live.info.get("name") or live.folder.name), "bold")
    text = Text.assemble(name, "  ", (status, STATUS_COLOURS.get(status, "yellow")), f"  step {live.progress}")
    seconds = live.last_metric("train", "seconds")
    if live.is_running and live.steps and seconds:
        text.append(f"  {timedelta(seconds=round(max(0, live.steps - live.step) * seconds))} left")
    if live.info.get("error"):
        text.append(f"\n{live.info['error']}", style="red")
    parts: list[RenderableType] = [text, Text()]
    if live.metrics:
        parts += [table_of("", METRIC_COLUMNS, ("last",), metric_rows(live)), Text()]
    parts += [Text(f"{problem}", style="red") for problem in live.problems]
    shown = findings if height is None else findings[:MAX_FINDINGS]
    if findings:
        table = table_of("Findings", ("rule", "layer", "step", "message"), numbers=("step",))
        for finding in shown:
            step = "" if finding.step is None else f"{finding.step:,}"
            what = f"  {finding.what}" if finding.cause else finding.what  # below its cause
            cells = (Text(what), Text(finding.where), Text(step), Text(finding.value))
            table.add_row(*cells, style=COLOURS[finding.severity])
        parts.append(table)
        if len(findings) > len(shown):
            parts.append(Text(f"{len(findings) - len(shown)} more findings", style="dim"))
        for diagnosis in diagnoses(findings)[:1]:
            lead, curve = diagnosis.lead, curve_of(live, diagnosis.lead)
            parts += [] if curve is None else [Text(f"{lead.statistic} over the steps: {sparkline(curve[1])}")]
            parts += [Text(f"Next: {lead.advice}")] if lead.advice else []
        parts.append(Text())
    if live.series:
        room = None if height is None else max(FEWEST_LAYERS, height - OTHER_LINES - len(SHOWN_METRICS) - len(shown))
        rows, total = layer_rows(live, room)
        count = f"{len(rows)} of {total}" if len(rows) < total else str(total)
        parts.append(table_of(f"Layers, largest change first ({count})", LAYER_COLUMNS, LAYER_COLUMNS[-2:], rows))
    if live.fraction_read < 1:
        parts.append(Text(f"reading earlier steps: {live.fraction_read:.0%}", style="dim"))
    return Group(*parts)


def table_of(title: str, columns: Sequence[str], numbers: Collection[str], rows: Iterable[Cells] = ()) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        is_shortened = name in ("message", "layer", "hook", "overrides")  # if the screen is narrow
        table.add_column(name, justify=justify, no_wrap=not is_shortened)
    for row in rows:
        table.add_row(*map(Text, row.cells), style=COLOURS["error"] if row.is_problem else "")
    return table
