"""Terminal output of a run: a header, the progress, and a summary of the recorded data."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pyarrow.dataset as ds
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..analysis.diagnosis import Finding, diagnoses
from ..analysis.findings import findings
from ..analysis.load import Run, load
from ..analysis.summary import recorded
from ..config.description import describe_forward
from ..formatting import human_bytes, shown_path
from ..plan.cost import Forecast
from ..plan.display import plan_view
from ..storage.run_files import size_on_disk
from ..storage.run_search import report_command
from .compiled_models import place_of_hooks
from .experiment import Experiment
from .progress import Show, metric_texts, progress_bar, progress_lines, warnings_only

PIPE_WIDTH = 120
# Rules of warnings that concern all jobs of a sweep alike; they are shown once per sweep.
ONCE_PER_SWEEP = frozenset({"fallback", "coverage", "data", "output"})
LOG = logging.getLogger("instrument")
COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}


class PipeSafeConsole(Console):
    """A console that becomes silent when its pipe is closed, as by `| head`. The run continues."""

    def on_broken_pipe(self) -> None:
        """Become silent. The implementation of rich ends the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """The terminal output of one run.

    Args:
        quiet: Whether to show only warnings. Default: False.
        brief: Whether to show one line at the end instead of tables, for the jobs of a sweep. Default: False.
        job: The overrides that identify a job of a sweep, for this line. Default: empty.

    Attributes:
        shown_by_jobs: The messages that jobs in this process have shown, with the folder of their sweep.
    """

    shown_by_jobs: ClassVar[set[tuple[Path, str]]] = set()

    def __init__(self, *, quiet: bool = False, brief: bool = False, job: str = "") -> None:
        self.quiet = quiet
        self.brief = brief
        self.job = job
        self.folder = Path()
        self._warned: set[str] = set()  # Warnings that were already shown.
        self.console = PipeSafeConsole(highlight=False)
        if not self.console.is_terminal:
            self.console.width = PIPE_WIDTH

    def silence(self) -> None:
        """Disable the output, because another process shows it."""
        self.quiet = self.console.quiet = True

    def begin(self, experiment: Experiment, folder: Path) -> None:
        """Show the model, the data and the hooks of a run. A fallback dataset is shown in all modes."""
        self.folder = shown_path(folder)
        self._show_fallback(experiment.data.source["fallback"])
        for _, message in experiment.plan.layers.hidden_messages():
            self.warn(message)
        if not self.brief:  # A job of a sweep shows it once, at its end.
            self._show_output(experiment)
        if self.quiet or self.brief:
            return
        config, source = experiment.config, experiment.data.source
        trained = sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)
        model = f"{config.model.target.rpartition('.')[2]} with {trained:,} trainable parameters on {experiment.device}"
        counts = ["a stream of" if n is None else f"{n:,}" for n in (source["train_samples"], source["eval_samples"])]
        slices = f"{counts[0]} training samples, {counts[1]} evaluation samples"
        if config.mode == "forward":
            slices = f"{counts[0]} samples, {describe_forward(config.forward)}"
        if (ranks := experiment.strategy.ranks) is not None:
            model += f" in each of {ranks.world_size} processes ({ranks.parallel})"
        names, locations = ", ".join(experiment.plan.specs) or "none", len(experiment.plan.sites)
        if experiment.weights is not None:
            model += f", weights from {experiment.weights.path}"
        self.console.print(
            f"[bold]{escape(config.name)}[/]  {escape(model)}, seed {config.seed}\n"
            f"data  {source['dataset'].rpartition('.')[2]}: {escape(slices)}\n"
            f"hooks {len(experiment.plan.specs)} at {locations} location{'s' * (locations != 1)}: {names}\n"
        )

    def _show_fallback(self, fallback: str | None) -> None:
        if fallback and self._is_new(fallback):
            self.console.print(f"[bold white on red] FALLBACK [/] [bold]{escape(fallback)}[/]")
            if self.brief:
                self._warned.add(fallback)  # A brief summary follows closely, so it need not be repeated there.

    def _show_output(self, experiment: Experiment) -> None:
        notice = experiment.output_notice
        if notice is not None and notice.severity == "warning":
            self.warn(notice.message)
            self._warned.add(notice.message)
        elif notice is not None and not self.quiet:
            self.console.print(escape(notice.message), soft_wrap=True)

    def warn(self, message: str) -> None:
        """Show a warning."""
        self.console.print(f"[yellow]warning[/] {escape(message)}", soft_wrap=True)

    def print_line(self, line: str) -> None:
        """Show a line of `action: print`, above the progress bar if there is one, and write it to the log of the run."""
        LOG.info(line)
        if not self.quiet:
            self.console.print(line, soft_wrap=True, markup=False)

    def show_recording_stopped(self, message: str) -> None:
        """Show that recording stopped. Shown in all modes."""
        self.console.print(f"[bold white on red] RECORDING STOPPED [/] [bold]{escape(message)}[/]", soft_wrap=True)

    def plan(self, experiment: Experiment, forecast: Forecast, folder: Path | None) -> None:
        """Show the plan and the estimated cost of a run, its fallback dataset, and evaluation samples that it trains on.

        Args:
            folder: The folder that the run would use; None if it is unknown.
        """
        self._show_fallback(experiment.data.source["fallback"])
        if experiment.data.overlap:
            self.warn(experiment.data.overlap)
        self._show_output(experiment)
        self.console.print(plan_view(experiment.plan, experiment.inferred_by_phase, forecast, experiment.steps, folder))
        budget = experiment.config.budget
        if budget.time is not None or budget.bytes is not None:
            self.console.print("The estimate ignores the budget. Hooks over budget are sampled less often.")

    @contextmanager
    def progress(self, steps: int) -> Iterator[Show]:
        """Show the progress of a run: a progress bar on a terminal, a few plain lines in a pipe or in CI.

        Yields:
            The function to call after each step and each evaluation.
        """
        if self.quiet or self.brief:
            yield warnings_only(self._warn_at_once)
        elif self._is_live:
            with progress_bar(self.console, steps, self.folder) as show:
                yield show
        else:
            yield progress_lines(self.console, steps, self.folder, self._warn_at_once)

    @property
    def _is_live(self) -> bool:
        """Whether the output is an interactive terminal on which lines can be overwritten."""
        console = self.console
        return (
            console.is_terminal and not console.is_dumb_terminal and console.file.isatty() and not os.environ.get("CI")
        )

    def _warn_at_once(self, message: str) -> None:
        """Show a warning, and omit it from the summary."""
        self._warned.add(message)
        self.warn(message)

    def _is_new(self, message: str) -> bool:
        """Return whether a message is new. For the jobs of a sweep, a message is new only once per sweep."""
        key = (self.folder.resolve().parent, message)
        if self.brief and key in Terminal.shown_by_jobs:
            return False
        Terminal.shown_by_jobs.add(key)
        return True

    def end(
        self,
        experiment: Experiment,
        folder: Path,
        metrics: Mapping[str, float | None],
        report: Path | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """Show the summary: recorded data, findings, warnings, files and next commands.

        Args:
            metrics: The metrics of the last evaluation, or the means over all batches in `mode: forward`.
            report: The file of the report. Default: None; the command that creates it is shown instead.
            stop_reason: Why the run was stopped. Default: None, the run is complete.
        """
        run = load(folder)
        folder, report = shown_path(folder), None if report is None else shown_path(report)
        evaluation = "  ".join(metric_texts(metrics).values())
        shown_rules = {"hidden_module"} | (
            set() if self.quiet or self.brief else {*experiment.config.rules, "coverage"}
        )  # Already shown.
        warnings = run.scan("events", ["message", "rule"], ds.field("severity") == "warning")
        left = {
            row["message"]: row["rule"]
            for batch in warnings
            for row in batch.to_pylist()
            if row["rule"] not in shown_rules and row["message"] not in self._warned
        }
        new_messages = [
            message for message, rule in left.items() if rule not in ONCE_PER_SWEEP or self._is_new(message)
        ]
        if self.brief:
            hidden = len(left) - len(new_messages)
            verb = "warning is" if hidden == 1 else "warnings are"
            repeated = f"({hidden} repeated {verb} not shown)" if hidden else ""
            self.console.print(
                "  ".join(filter(None, [str(folder), self.job, evaluation, repeated])), soft_wrap=True, markup=False
            )
        elif not self.quiet:
            self.console.print()
            entries = findings(run)
            for table in (_recorded(experiment, run), _findings_table(entries)):
                if table.row_count:
                    self.console.print(table)
                    self.console.print()
            for diagnosis in diagnoses(entries):
                style = COLOURS[diagnosis.severity]
                self.console.print(Text(f"{diagnosis}", style=style), soft_wrap=True)
                if diagnosis.lead.advice:
                    self.console.print(Text(diagnosis.lead.advice, style="bold"), soft_wrap=True)
                self.console.print()
        for message in new_messages:
            self._warn_at_once(message)
        if stop_reason is not None:
            self.console.print(f"[bold yellow]stopped[/]     {escape(stop_reason)}", soft_wrap=True)
        if not (self.quiet or self.brief):
            size = human_bytes(size_on_disk(folder))
            if evaluation:  # A task without a loss has no metrics.
                label = "evaluation" if experiment.config.mode == "train" else "mean      "
                self.console.print(f"{label}  {evaluation}")
            if experiment.config.train.compile is not None:
                self.console.print(f"compile     {place_of_hooks(experiment.plan)}", soft_wrap=True)
            self.console.print(f"files       {folder}  ({size} of Parquet)", soft_wrap=True)
            if experiment.config.sink.tensorboard:
                self.console.print(f"TensorBoard tensorboard --logdir {shlex.quote(str(folder))}", soft_wrap=True)
            self.console.print(f"in Python   instrument.load({str(folder)!r})", soft_wrap=True, markup=False)
            self.console.print(f"report      {report or report_command(folder)}", soft_wrap=True, markup=False)

    def uploaded(self, address: str, size: int) -> None:
        """Show the address of the remote copy.

        Args:
            size: The number of uploaded bytes.
        """
        if not (self.quiet or self.brief):
            self.console.print(f"remote      {address}  ({human_bytes(size)} uploaded)", soft_wrap=True, markup=False)

    def end_unrecorded(self, failure: str, metrics: Mapping[str, float | None]) -> None:
        """Show the summary of a training that continued after recording stopped."""
        self.show_recording_stopped(failure)
        self.console.print("  ".join(["evaluation", *metric_texts(metrics).values()]))


def _table(title: str, *columns: tuple[str, str]) -> Table:
    """Return an empty table with a title. Each column is a name and its alignment."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table


def _recorded(experiment: Experiment, run: Run) -> Table:
    """Return the table of the record hooks and the amount of recorded data."""
    table = _table(
        "Recorded",
        *(("hook", "left"), ("kind", "left"), ("role", "left")),
        *(("layers", "right"), ("firings", "right"), ("rows", "right"), ("tensors", "right")),
    )
    amounts = recorded(run)
    for name, spec in experiment.plan.specs.items():
        if spec.action == "record":
            layers = len({site.layer.name for site in experiment.plan.of(name)})
            numbers = (f"{count[name]:,}" for count in amounts)
            table.add_row(name, spec.kind, spec.tensor_role, f"{layers}", *numbers)
    return table


def _findings_table(entries: Sequence[Finding]) -> Table:
    """Return the table of findings."""
    table = _table("Findings", ("what", "left"), ("where", "left"), ("step", "right"), ("value", "left"))
    for finding in entries:
        step = "" if finding.when is None else f"{finding.when:,}"
        what = f"  {finding.what}" if finding.cause else finding.what  # below its cause
        cells = (what, finding.where, step, finding.value)
        table.add_row(*(Text(cell) for cell in cells), style=COLOURS[finding.severity])
    return table
