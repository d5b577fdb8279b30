"""Terminal output of a run: a header, the progress, and a summary of the recorded data.

The progress is a live progress bar on a terminal, and a few plain lines in a pipe.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pyarrow.dataset as ds
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..analysis.diagnosis import Finding, diagnoses, severity_of
from ..analysis.findings import findings, recorded
from ..analysis.load import Run, load
from ..formatting import human_bytes, shown_path
from ..plan.cost import Forecast
from ..plan.display import mesh_view, plan_view
from ..probe.metrics import METRICS
from ..storage.run_files import size_on_disk
from ..storage.run_search import report_command
from .compiler import place_of_hooks
from .experiment import Experiment
from .loop import Metrics, Progress, Show

PIPE_WIDTH = 120
PLAIN_LINES = 10  # Progress lines per run if the output is not a terminal.
REFRESH_SECONDS = 0.1
SIZE_SECONDS = 1.0  # Least interval between reads of the folder; at least 100 times the duration of a read.
BAR_WIDTH = 10  # Characters.
NON_FINITE_TEXTS = ("loss nan", "loss inf", "loss -inf")
LOG = logging.getLogger("instrument")
COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}


class PipeSafeConsole(Console):
    """A console that becomes silent when its pipe is closed, as by `| head`. The run continues."""

    def on_broken_pipe(self) -> None:
        """Become silent. The implementation of rich ends the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Terminal:
    """The terminal output of one run: only warnings if `quiet`; if `brief`, one line at the end with the overrides of the job."""

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
        stage = " of the first stage" if experiment.strategy.pipeline is not None else ""
        model = f"{config.model.target.rpartition('.')[2]} with {trained:,} trainable parameters{stage} on {experiment.device}"
        counts = ["a stream of" if n is None else f"{n:,}" for n in (source["train_samples"], source["eval_samples"])]
        slices = f"{counts[0]} training samples, {counts[1]} evaluation samples"
        if config.mode == "forward":
            slices = f"{counts[0]} samples, {config.forward}"
        if (ranks := experiment.strategy.ranks) is not None and config.train.parallel is not None:
            model += f" in {ranks.world_size} processes ({config.train.parallel.label})"
        names, locations = ", ".join(experiment.plan.specs) or "none", len(experiment.plan.sites)
        if experiment.weights is not None:
            model += f", weights from {experiment.weights.path}"
        self.console.print(
            f"[bold]{escape(config.name)}[/]  {escape(model)}, seed {config.seed}\n"
            f"data  {source['dataset'].rpartition('.')[2]}: {escape(slices)}\n"
            f"hooks {len(experiment.plan.specs)} at {locations} location{'s' * (locations != 1)}: {names}\n"
        )

    def _show_fallback(self, fallback: str | None) -> None:
        if fallback:
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
        """Show a warning, with its severity in the findings of the run."""
        severity = severity_of(message.partition(": ")[0], warns=True)
        self.console.print(f"[{COLOURS[severity]}]{severity}[/] {escape(message)}", soft_wrap=True)

    def print_line(self, line: str) -> None:
        """Show a line of `action: print`, above the progress bar if there is one, and write it to the log of the run."""
        LOG.info(line)
        if not self.quiet:
            self.console.print(line, soft_wrap=True, markup=False)

    def show_recording_stopped(self, message: str) -> None:
        """Show that recording stopped, in all modes."""
        self.console.print(f"[bold white on red] RECORDING STOPPED [/] [bold]{escape(message)}[/]", soft_wrap=True)

    def plan(self, experiment: Experiment, forecast: Forecast, folder: Path | None) -> None:
        """Show the plan and the estimated cost of a run, its fallback dataset, and evaluation samples that it trains on."""
        self._show_fallback(experiment.data.source["fallback"])
        if experiment.data.overlap:
            self.warn(experiment.data.overlap)
        self._show_output(experiment)
        self.console.print(plan_view(experiment.plan, experiment.inferred_by_phase, forecast, experiment.steps, folder))
        parallel, reduce = experiment.config.train.parallel, experiment.config.reduce
        if parallel is not None:
            on_gpu = experiment.device.type != "cpu"
            view = mesh_view(experiment.plan, forecast, parallel, reduces=reduce == "global", on_gpu=on_gpu)
            self.console.print(view)
        budget = experiment.config.budget
        if budget.time is not None or budget.bytes is not None:
            self.console.print("The estimate ignores the budget. Hooks over budget are sampled less often.")

    @contextmanager
    def progress(self, steps: int) -> Iterator[Show]:
        """Yield the function to call after each step and evaluation: a progress bar on a terminal, a few plain lines in a pipe or in CI."""
        console = self.console
        can_overwrite = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        if self.quiet or self.brief:
            yield warnings_only(self._warn_at_once)
        elif can_overwrite and not os.environ.get("CI"):
            with progress_bar(console, steps, self.folder) as show:
                yield show
        else:
            yield progress_lines(console, steps, self.folder, self._warn_at_once)

    def _warn_at_once(self, message: str) -> None:
        self._warned.add(message)
        self.warn(message)

    def end(
        self,
        experiment: Experiment,
        folder: Path,
        metrics: Metrics,
        report: Path | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """Show the summary: recorded data, findings, warnings, files and next commands.

        Args:
            metrics: The metrics of the last evaluation, or the means over all batches in `mode: forward`.
            report: The file of the report; None to show the command that creates it.
            stop_reason: Why the run was stopped; None if the run is complete.
        """
        run = load(folder)
        folder, report = shown_path(folder), None if report is None else shown_path(report)
        evaluation = "  ".join(evaluated(metrics))
        in_findings = () if self.quiet or self.brief else (*experiment.config.rules, "coverage")
        shown_rules = {"hidden_module", *in_findings}
        warnings = run.scan("events", ["message", "rule"], ds.field("severity") == "warning")
        rows = [row for batch in warnings for row in batch.to_pylist() if row["rule"] not in shown_rules]
        if self.brief:
            line = "  ".join(filter(None, [str(folder), self.job, evaluation]))
            self.console.print(line, soft_wrap=True, markup=False)
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
        for message in dict.fromkeys(row["message"] for row in rows if row["message"] not in self._warned):
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
        if not (self.quiet or self.brief):
            self.console.print(f"remote      {address}  ({human_bytes(size)} uploaded)", soft_wrap=True, markup=False)

    def end_unrecorded(self, failure: str, metrics: Metrics) -> None:
        self.show_recording_stopped(failure)
        self.console.print("  ".join(["evaluation", *evaluated(metrics)]))


class Speed:
    """The mean speed of training, without evaluations. The first step, which is slower, counts only while there is no other."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._steps = 0
        self._seconds = self._paused = 0.0

    def step(self) -> None:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._steps += 1
        self._seconds = seconds if self._steps <= 2 else self._seconds + seconds

    def pause(self) -> None:
        """Record the end of an evaluation or of another interval that is not a step."""
        now = time.perf_counter()
        self._paused += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """The mean duration of a step, in seconds. 0 before the first step."""
        return self._seconds / max(1, self._steps - 1)

    def left(self, steps: int) -> float | None:
        """Estimate the remaining seconds, including evaluations at their present frequency; None before the second step."""
        return steps * (self.seconds + self._paused / self._steps) if self._steps > 1 else None


def progress_texts(progress: Progress, speed: Speed, size: int) -> dict[str, str]:
    """Return the texts to display after a training step by name, the most important first. `size`: of the tables, in bytes."""
    metrics, texts = progress.metrics, {"step": step_text(progress), **metric_texts(progress.metrics)}
    if (left := speed.left(progress.steps - progress.step)) is not None and progress.step < progress.steps:
        texts["left"] = f"{timedelta(seconds=round(left))} left"
    if metrics.get("samples_per_second") is not None and metrics["seconds"] and speed.seconds:
        samples = metrics["samples_per_second"] * metrics["seconds"]  # type: ignore[operator]
        texts["speed"] = f"{samples / speed.seconds:,.{0 if samples >= 10 * speed.seconds else 1}f} samples/s"
    if progress.overhead is not None:
        texts["overhead"] = f"overhead {progress.overhead:+.1%}"
    return {**texts, "rows": f"{progress.rows:,} rows", "size": human_bytes(size)}


def step_text(progress: Progress) -> str:
    return f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def metric_texts(metrics: Metrics) -> dict[str, str]:
    """Return texts such as `loss 0.3402` and `accuracy 88.3%`, by name. Unknown metrics are omitted."""
    texts = {}
    if (loss := metrics.get("loss")) is not None:
        texts["loss"] = f"loss {loss:.4f}" if loss == 0.0 or 1e-3 <= abs(loss) < 1e5 else f"loss {loss:.3e}"
    if (accuracy := metrics.get("accuracy")) is not None:
        texts["accuracy"] = f"accuracy {accuracy:.1%}"
    return texts


def evaluated(metrics: Metrics) -> list[str]:
    """Return the texts of an evaluation, also those of custom metrics, such as `loss_recovered 0.9447`."""
    custom = {name: value for name, value in metrics.items() if name not in (*METRICS, "skipped")}
    return [
        *metric_texts(metrics).values(),
        *(f"{name} {value:.4g}" for name, value in custom.items() if value is not None),
    ]


def evaluation_text(progress: Progress) -> str:
    """Return a text such as `step 50/100  evaluation  loss 0.3819  accuracy 88.6%`."""
    return "  ".join([step_text(progress), "evaluation", *evaluated(progress.metrics)])


def bar_with_texts(progress: Progress, texts: Mapping[str, str]) -> RenderableType:
    """Return a line with a progress bar and texts, and a line with the last warning. In a narrow terminal, the last texts are cut off."""
    line = Table.grid(padding=(0, 2))
    line.add_column(width=BAR_WIDTH)
    shown = (Text(text, "bold red" if text in NON_FINITE_TEXTS else "") for text in texts.values())
    separator = Text("  ", no_wrap=True, overflow="ellipsis")
    line.add_row(ProgressBar(progress.steps, progress.step), separator.join(shown))
    warnings = (
        Text.assemble(("warning ", "yellow"), text.replace("\n", " "), no_wrap=True, overflow="ellipsis")
        for text in progress.warnings[-1:]
    )
    return Group(line, *warnings)


@contextmanager
def progress_bar(console: Console, steps: int, folder: Path) -> Iterator[Show]:
    """Show a progress bar at the bottom of the terminal, updated at most ten times per second. Evaluations are printed above it."""
    speed, size = Speed(), 0
    drawn = read_again = -math.inf
    first = Progress(0, steps, {}, 0, "train")
    bar = bar_with_texts(first, {"step": step_text(first)})
    with Live(bar, console=console, transient=True, auto_refresh=False) as live:

        def show(progress: Progress) -> None:
            nonlocal drawn, read_again, size
            if progress.phase == "eval":
                speed.pause()
                console.print(evaluation_text(progress), soft_wrap=True)
                return
            speed.step()
            now = time.perf_counter()
            if now - drawn < REFRESH_SECONDS and progress.step < progress.steps:
                return
            if now >= read_again:
                size = size_on_disk(folder)
                read_again = now + max(SIZE_SECONDS, 100 * (time.perf_counter() - now))
            drawn = now
            live.update(bar_with_texts(progress, progress_texts(progress, speed, size)), refresh=True)

        yield show


def progress_lines(console: Console, steps: int, folder: Path, warn: Callable[[str], None]) -> Show:
    """Return a function that prints about ten progress lines during a run, evaluations, and each warning when it occurs."""
    every, speed, warned = max(1, steps // PLAIN_LINES), Speed(), warnings_only(warn)

    def show(progress: Progress) -> None:
        warned(progress)
        if progress.phase == "eval":
            speed.pause()
            console.print(evaluation_text(progress), soft_wrap=True)
            return
        speed.step()
        if progress.step % every == 0 or progress.step == progress.steps:
            console.print("  ".join(progress_texts(progress, speed, size_on_disk(folder)).values()), soft_wrap=True)

    return show


def warnings_only(warn: Callable[[str], None]) -> Show:
    count = 0

    def show(progress: Progress) -> None:
        nonlocal count
        for message in progress.warnings[count:]:
            warn(message)
        count = len(progress.warnings)

    return show


def _table(title: str, left: str, right: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in left.split():
        table.add_column(name)
    for name in right.split():
        table.add_column(name, justify="right")
    return table


def _recorded(experiment: Experiment, run: Run) -> Table:
    table = _table("Recorded", "hook kind role", "layers firings rows tensors")
    amounts = recorded(run)
    for name, spec in experiment.plan.specs.items():
        if spec.action == "record":
            layers = len({site.layer.name for site in experiment.plan.of(name)})
            numbers = (f"{count[name]:,}" for count in amounts)
            table.add_row(name, spec.kind, spec.tensor_role, f"{layers}", *numbers)
    return table


def _findings_table(entries: Sequence[Finding]) -> Table:
    table = _table("Findings", "what where", "step")
    table.add_column("value")
    for each in entries:
        step, what = "" if each.step is None else f"{each.step:,}", f"  {each.what}" if each.cause else each.what
        table.add_row(*map(Text, (what, each.where, step, each.value)), style=COLOURS[each.severity])
    return table
