"""What a run shows on the terminal: a header, progress, and a summary read back from what was written."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..analysis.files import size_on_disk
from ..analysis.findings import findings
from ..analysis.load import Run, load
from ..analysis.summary import recorded
from ..plan.cost import Forecast
from ..plan.printed import plan_view
from ..quantities import human_bytes
from ..report import command_for
from .display import Show, metric_texts, shown_as_bar, shown_as_lines, shown_as_warnings
from .experiment import Experiment

WIDTH_IN_A_PIPE = 120
SHARED = frozenset({"fallback", "coverage"})  # rules of warnings that come of what the jobs of a sweep are all made of
COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}


class PatientConsole(Console):
    """A console that falls silent where nobody listens any more (`| head`), and lets the run go on."""

    def on_broken_pipe(self) -> None:
        """What rich calls; its own way out ends the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """One run's voice.

    Args:
        quiet: Nothing but warnings.
        brief: One line at the end in place of tables: for the jobs of a sweep.
        job: What tells a sweep's job from the others, for that line.
    """

    of_jobs: ClassVar[set[tuple[Path, str]]] = set()
    """What jobs of this process have told, with the folder that theirs are in."""

    def __init__(self, *, quiet: bool = False, brief: bool = False, job: str = "") -> None:
        self.quiet = quiet
        self.brief = brief
        self.job = job
        self.folder = Path()
        self._warned: set[str] = set()  # what was told when it came
        self.console = PatientConsole(highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_IN_A_PIPE

    def silence(self) -> None:
        """Another process speaks."""
        self.quiet = self.console.quiet = True

    def begin(self, experiment: Experiment, folder: Path) -> None:
        """What will run, on what, and where it is recorded; a fallback is told loudly, whatever else is quiet."""
        self.folder = folder
        fallback = experiment.data.fallback
        if fallback and self._is_news(fallback):
            self.console.print(f"[bold white on red] FALLBACK [/] [bold]{escape(fallback)}[/]")
            if self.brief:
                self._warned.add(fallback)  # it is near enough to the end
        for _, message in experiment.plan.layers.hidden_messages():
            self.warn(message)
        if self.quiet or self.brief:
            return
        config, source = experiment.config, experiment.data.source
        trained = sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)
        model = f"{config.model.target.rpartition('.')[2]} with {trained:,} trainable parameters on {experiment.device}"
        slices = f"{source['train_samples']:,} to train on, {source['eval_samples']:,} to evaluate on"
        if (ranks := experiment.strategy.ranks) is not None:
            model += f" in each of {ranks.size} processes ({ranks.parallel})"
        names = ", ".join(experiment.plan.specs) or "none"
        self.console.print(
            f"[bold]{escape(config.name)}[/]  {escape(model)}, seed {config.seed}\n"
            f"data  {source['dataset'].rpartition('.')[2]}: {slices}\n"
            f"hooks {len(experiment.plan.specs)} at {len(experiment.plan.sites)} places: {names}\n"
        )

    def warn(self, message: str) -> None:
        """A warning, in yellow."""
        self.console.print(f"[yellow]warning[/] {escape(message)}", soft_wrap=True)

    def alarm(self, message: str) -> None:
        """What nobody may overlook, whatever else is quiet."""
        self.console.print(f"[bold white on red] RECORDING STOPPED [/] [bold]{escape(message)}[/]", soft_wrap=True)

    def plan(self, experiment: Experiment, forecast: Forecast, folder: Path | None) -> None:
        """The whole plan, and the folder that a run would be in."""
        self.console.print(plan_view(experiment.plan, experiment.trials, forecast, experiment.steps, folder))
        budget = experiment.config.budget
        if budget.time is not None or budget.bytes is not None:
            self.console.print("The budget is not counted in: what is too much will be looked at less often.")

    @contextmanager
    def progress(self, steps: int) -> Iterator[Show]:
        """What is to be called with the progress after each step: a bar on a screen, a few plain lines in a pipe or in CI."""
        if self.quiet or self.brief:
            yield shown_as_warnings(self._warn_at_once)
        elif self._is_live:
            with shown_as_bar(self.console, steps, self.folder) as show:
                yield show
        else:
            yield shown_as_lines(self.console, steps, self.folder, self._warn_at_once)

    @property
    def _is_live(self) -> bool:
        """Whether somebody looks at a screen on which lines can be written again."""
        console = self.console
        return (
            console.is_terminal and not console.is_dumb_terminal and console.file.isatty() and not os.environ.get("CI")
        )

    def _warn_at_once(self, message: str) -> None:
        self._warned.add(message)
        self.warn(message)

    def _is_news(self, message: str) -> bool:
        """Whether a job that was here before has not told the same; a run that is no job has all to tell."""
        told = (self.folder.resolve().parent, message)
        if self.brief and told in Terminal.of_jobs:
            return False
        Terminal.of_jobs.add(told)
        return True

    def end(
        self, experiment: Experiment, folder: Path, metrics: Mapping[str, float | None], report: Path | None = None
    ) -> None:
        """The summary: what was recorded, what is telling, what is wrong, where the files are, what to type next.

        Args:
            experiment: What was trained.
            folder: The run's folder.
            metrics: Of the last evaluation.
            report: The file of the report; the command that makes it is told without one.
        """
        run = load(folder)
        evaluation = "  ".join(metric_texts(metrics).values())
        told = {"hidden_module"} | (set() if self.quiet or self.brief else {"non_finite", "coverage"})  # above
        events = [event for event in run.events.itertuples() if event.severity == "warning" and event.rule not in told]
        left = {str(event.message): event.rule for event in events if event.message not in self._warned}
        news = [message for message, rule in left.items() if rule not in SHARED or self._is_news(message)]
        if self.brief:
            again = f"({len(left) - len(news)} of its warnings were told before)" if len(news) < len(left) else ""
            self.console.print(
                "  ".join(filter(None, [str(folder), self.job, evaluation, again])), soft_wrap=True, markup=False
            )
        elif not self.quiet:
            self.console.print()
            for table in (_recorded(experiment, run), _findings(run)):
                if table.row_count:
                    self.console.print(table)
                    self.console.print()
        for message in news:
            self._warn_at_once(message)
        if not (self.quiet or self.brief):
            size = human_bytes(size_on_disk(folder))
            self.console.print(f"evaluation  {evaluation}")
            self.console.print(f"files       {folder}  ({size} of Parquet)", soft_wrap=True)
            if experiment.config.sink.tensorboard:
                self.console.print(f"TensorBoard tensorboard --logdir {shlex.quote(str(folder))}", soft_wrap=True)
            self.console.print(f"in Python   instrument.load({str(folder)!r})", soft_wrap=True, markup=False)
            self.console.print(f"report      {report or command_for(folder)}", soft_wrap=True, markup=False)

    def sent(self, address: str, size: int) -> None:
        """Where the run is besides, and how many bytes it took."""
        if not (self.quiet or self.brief):
            self.console.print(f"remote      {address}  ({human_bytes(size)} sent)", soft_wrap=True, markup=False)

    def end_unrecorded(self, failure: str, metrics: Mapping[str, float | None]) -> None:
        """The end of a training that went on without recording."""
        self.alarm(failure)
        self.console.print("  ".join(["evaluation", *metric_texts(metrics).values()]))


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table


def _recorded(experiment: Experiment, run: Run) -> Table:
    table = _table(
        "Recorded",
        *(("hook", "left"), ("kind", "left"), ("role", "left")),
        *(("layers", "right"), ("firings", "right"), ("rows", "right"), ("tensors", "right")),
    )
    counts = recorded(run)
    for name, spec in experiment.plan.specs.items():
        if spec.action == "record":
            layers = len({site.layer.name for site in experiment.plan.of(name)})
            found = counts.loc[name]
            numbers = (f"{layers}", f"{found.firings:,}", f"{found.rows:,}", f"{found.tensors:,}")
            table.add_row(name, spec.kind, spec.tensor_role, *numbers)
    return table


def _findings(run: Run) -> Table:
    table = _table("Findings", ("what", "left"), ("where", "left"), ("step", "right"), ("value", "left"))
    for finding in findings(run):
        step = "" if finding.when is None else f"{finding.when:,}"
        cells = (finding.what, finding.where, step, finding.value)
        table.add_row(*(Text(cell) for cell in cells), style=COLOURS[finding.severity])
    return table
