"""Display of training progress: a live progress bar on a terminal, and a few plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..formatting import human_bytes
from ..storage.run_files import size_on_disk
from .loop import Progress

PLAIN_LINES = 10  # Progress lines per run if the output is not a terminal.
REFRESH_SECONDS = 0.1
SIZE_SECONDS = 1.0  # Least interval between reads of the folder; at least 100 times the duration of a read.
SMOOTHING_SECONDS = 3.0  # Time constant of the smoothing, in seconds.
BAR_WIDTH = 10  # Characters.
NON_FINITE_TEXTS = ("loss nan", "loss inf", "loss -inf")

Show = Callable[[Progress], None]


class Speed:
    """The speed of training, exponentially smoothed. The time of evaluations is measured separately."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._done = 0
        self._steps = self._seconds = self._paused = 0.0

    def step(self) -> None:
        """Record the end of a step."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        decay = math.exp(-seconds / SMOOTHING_SECONDS)
        self._done += 1
        self._steps = self._steps * decay + 1.0
        self._seconds = self._seconds * decay + seconds

    def pause(self) -> None:
        """Record the end of an evaluation or of another interval that is not a step."""
        now = time.perf_counter()
        self._paused += now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        """The smoothed duration of a step, in seconds. 0 before the first step."""
        return self._seconds / self._steps if self._steps else 0.0

    def left(self, steps: int) -> float | None:
        """Estimate the remaining time, including evaluations at their present frequency.

        Returns:
            Seconds; None before the end of the second step, because the first step is slower than the others.
        """
        return steps * (self.seconds + self._paused / self._done) if self._done > 1 else None


def progress_texts(progress: Progress, speed: Speed, size: int) -> dict[str, str]:
    """Return the texts to display after a training step by name, the most important first. Unknown values are omitted.

    `size` is the size of the tables, in bytes.
    """
    metrics = progress.metrics
    texts = {
        "step": step_text(progress),
        **metric_texts(metrics),
        "rows": f"{progress.rows:,} rows",
        "size": human_bytes(size),
    }
    if metrics.get("samples_per_second") is not None and metrics["seconds"] and speed.seconds:
        samples = metrics["samples_per_second"] * metrics["seconds"]  # type: ignore[operator]
        texts["speed"] = f"{samples / speed.seconds:,.{0 if samples >= 10 * speed.seconds else 1}f} samples/s"
    if progress.overhead is not None:
        texts["overhead"] = f"overhead {progress.overhead:+.1%}"
    if (left := speed.left(progress.steps - progress.step)) is not None and progress.step < progress.steps:
        texts["left"] = f"{_clock(left)} left"
    order = ("step", "loss", "accuracy", "left", "speed", "overhead", "rows", "size")
    return {name: texts[name] for name in order if name in texts}


def step_text(progress: Progress) -> str:
    """Return a text such as `step  50/100`."""
    return f"step {progress.step:>{len(str(progress.steps))}}/{progress.steps}"


def metric_texts(metrics: Mapping[str, float | None]) -> dict[str, str]:
    """Return texts such as `loss 0.3402` and `accuracy 88.3%`, by name. Unknown metrics are omitted."""
    texts = {}
    if (loss := metrics.get("loss")) is not None:
        texts["loss"] = f"loss {loss:.4f}" if loss == 0.0 or 1e-3 <= abs(loss) < 1e5 else f"loss {loss:.3e}"
    if (accuracy := metrics.get("accuracy")) is not None:
        texts["accuracy"] = f"accuracy {accuracy:.1%}"
    return texts


def evaluation_text(progress: Progress) -> str:
    """Return a text such as `step 50/100  evaluation  loss 0.3819  accuracy 88.6%`."""
    return "  ".join([step_text(progress), "evaluation", *metric_texts(progress.metrics).values()])


def _clock(seconds: float) -> str:
    """Format seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
    """Show a progress bar at the bottom of the terminal, updated at most ten times per second. Evaluations are printed above it.

    Yields:
        The function to call after each step and each evaluation.
    """
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
                duration = time.perf_counter() - now
                read_again = now + max(SIZE_SECONDS, 100 * duration)
            drawn = now
            live.update(bar_with_texts(progress, progress_texts(progress, speed, size)), refresh=True)

        yield show


def progress_lines(console: Console, steps: int, folder: Path, warn: Callable[[str], None]) -> Show:
    """Return a function that prints about ten progress lines during a run, evaluations, and each warning when it occurs.

    It is called after each step and each evaluation.
    """
    every = max(1, steps // PLAIN_LINES)
    speed = Speed()
    warned = warnings_only(warn)

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
    """Return a function that shows each warning when it occurs, and no progress."""
    count = 0

    def show(progress: Progress) -> None:
        nonlocal count
        for message in progress.warnings[count:]:
            warn(message)
        count = len(progress.warnings)

    return show
