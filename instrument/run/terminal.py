"""What a run shows on the terminal: a header, progress, and a summary read back from what was written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from ..analysis.load import Run, load
from ..analysis.summary import changed, recorded
from ..plan.cost import Forecast
from ..plan.printed import describe_action, human_bytes, plan_view
from .experiment import Experiment
from .loop import Progress

WIDTH_IN_A_PIPE = 120
LINES_IN_A_PIPE = 10  # how often progress is told where nobody looks at a screen


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
    """

    def __init__(self, *, quiet: bool = False, brief: bool = False) -> None:
        self.quiet = quiet
        self.brief = brief
        self.console = PatientConsole(highlight=False)
        if not self.console.is_terminal:
            self.console.width = WIDTH_IN_A_PIPE

    def begin(self, experiment: Experiment) -> None:
        """What will run, on what; a fallback is told loudly, whatever else is quiet."""
        if experiment.data.fallback:
            self.console.print(f"[bold white on red] FALLBACK [/] [bold]{escape(experiment.data.fallback)}[/]")
        for _, message in experiment.plan.layers.hidden_messages():
            self.warn(message)
        if self.quiet or self.brief:
            return
        config, source = experiment.config, experiment.data.source
        trained = sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)
        model = f"{config.model.target.rpartition('.')[2]} with {trained:,} trainable parameters on {experiment.device}"
        slices = f"{source['train_samples']:,} to train on, {source['eval_samples']:,} to evaluate on"
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

    def plan(self, experiment: Experiment, forecast: Forecast) -> None:
        """The whole plan."""
        self.console.print(plan_view(experiment.plan, experiment.trials, forecast, experiment.steps))
        budget = experiment.config.budget
        if budget.time is not None or budget.bytes is not None:
            self.console.print("The budget is not counted in: what is too much will be looked at less often.")

    @contextmanager
    def progress(self, steps: int) -> Iterator[Callable[[Progress], None]]:
        """What is to be called with the progress after each step: a bar on a screen, a few plain lines in a pipe."""
        if self.quiet or self.brief:
            yield lambda progress: None
        elif self.console.is_terminal:
            with self._bar(steps) as show:
                yield show
        else:
            yield self._lines(steps)

    @contextmanager
    def _bar(self, steps: int) -> Iterator[Callable[[Progress], None]]:
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(30),
            TextColumn("{task.fields[told]}"),
            TimeRemainingColumn(compact=True),
        )
        with Bar(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=steps, told="")

            def show(progress: Progress) -> None:
                if progress.phase == "train":
                    bar.update(
                        task, completed=progress.step, told=f"{_metrics(progress.metrics)}  {progress.rows:,} rows"
                    )
                else:
                    bar.console.print(f"{_step(progress)}  evaluation  {_metrics(progress.metrics)}")

            yield show

    def _lines(self, steps: int) -> Callable[[Progress], None]:
        every = max(1, steps // LINES_IN_A_PIPE)

        def show(progress: Progress) -> None:
            if progress.phase == "eval":
                self.console.print(f"{_step(progress)}  evaluation  {_metrics(progress.metrics)}")
            elif progress.step % every == 0 or progress.step == steps:
                self.console.print(f"{_step(progress)}  {_metrics(progress.metrics)}  {progress.rows:,} rows")

        return show

    def end(self, experiment: Experiment, folder: Path, metrics: Mapping[str, float | None]) -> None:
        """The summary: what was recorded, what each intervention did, what is wrong, where the files are, what to type next."""
        run = load(folder)
        if self.brief:
            self.console.print(f"{folder}  {_metrics(metrics)}")
        elif not self.quiet:
            self.console.print()
            self.console.print(_recorded(experiment, run))
            interventions = _interventions(experiment, run)
            if interventions.row_count:
                self.console.print()
                self.console.print(interventions)
            self.console.print()
        for event in run.events.itertuples():
            if event.severity == "warning" and event.rule != "hidden_module":
                self.warn(str(event.message))
        if not (self.quiet or self.brief):
            self.console.print(f"evaluation  {_metrics(metrics)}")
            size = sum(file.stat().st_size for file in folder.rglob("*.parquet"))
            self.console.print(f"files       {folder}  ({human_bytes(size)} of Parquet)", soft_wrap=True)
            self.console.print("next        " + escape(next_command(folder)), soft_wrap=True)

    def end_unrecorded(self, failure: str, metrics: Mapping[str, float | None]) -> None:
        """The end of a training that went on without recording."""
        self.alarm(failure)
        self.console.print(f"evaluation  {_metrics(metrics)}")


def next_command(folder: Path) -> str:
    """What to type to see the statistics of a run."""
    return f"""python -c "import instrument; print(instrument.load('{folder}').stats)\""""


def _step(progress: Progress) -> str:
    return f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def _metrics(metrics: Mapping[str, float | None]) -> str:
    parts = []
    if metrics.get("loss") is not None:
        parts.append(f"loss {metrics['loss']:.4f}")
    if metrics.get("accuracy") is not None:
        parts.append(f"accuracy {metrics['accuracy']:.1%}")
    return "  ".join(parts)


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


def _interventions(experiment: Experiment, run: Run) -> Table:
    table = _table(
        "Changed",
        *(("hook", "left"), ("what", "left"), ("kind", "left")),
        *(("firings", "right"), ("changed", "right"), ("norm before", "right"), ("norm after", "right")),
    )
    effects = changed(run)
    for name, spec in experiment.plan.specs.items():
        if spec.action != "record":
            numbers = ["0", "nothing", "", ""]
            if name in effects.index:
                found = effects.loc[name]
                numbers = [f"{found.firings:,.0f}", f"{found.changed_fraction:.1%}"]
                numbers += [f"{norm:.4g}" for norm in (found.norm_before, found.norm_after)]
            table.add_row(name, describe_action(spec), spec.kind, *numbers)
    return table
