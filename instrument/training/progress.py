"""Display of training progress: a live progress bar on a terminal, and a few plain lines in a pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from ..analysis.run_files import size_on_disk
from ..formatting import human_bytes
from .loop import Progress

PLAIN_LINES = 10  # Progress lines per run if the output is not a terminal.
REFRESH_SECONDS = 0.1
SIZE_SECONDS = 1.0  # Least interval between reads of the folder; at least 100 times the duration of a read.
SMOOTHING_SECONDS = 3.0  # Time constant of the smoothing, in seconds.
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 5, 30  # Width of the bar, in characters.

# The most important text is first and is omitted last. The order on the screen is that of `progress_texts`.
PRIORITY = ("step", "loss", "accuracy", "left", "speed", "bar", "overhead", "rows", "size")

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

        Args:
            steps: The number of remaining steps.

        Returns:
            Seconds; None before the end of the second step, because the first step is slower than the others.
        """
        return steps * (self.seconds + self._paused / self._done) if self._done > 1 else None


class Size:
    """The size of the tables of a run on disk. The folder is read at most once per second.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bytes = 0
        self._again = 0.0

    @property
    def bytes(self) -> int:
        """The size in bytes. It may be about a second old."""
        started_at = time.perf_counter()
        if started_at >= self._again:
            self._bytes = size_on_disk(self.folder)
            now = time.perf_counter()
            self._again = now + max(SIZE_SECONDS, 100 * (now - started_at))
        return self._bytes


def progress_texts(progress: Progress, speed: Speed, size: int) -> dict[str, str]:
    """Return the texts to display after a training step, by name. Unknown values are omitted.

    Args:
        progress: The progress after the step.
        speed: The speed of training.
        size: The size of the tables, in bytes.
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
    order = ("step", "loss", "accuracy", "speed", "rows", "size", "overhead", "left")
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


class Bar:
    """A progress line that fits the width of the terminal, with the last warning in the line below.

    If the line is too narrow, the least important texts are omitted. The width reserved for a text never shrinks, so
    that the texts after it do not move.

    Args:
        steps: The number of steps of the run.
    """

    def __init__(self, steps: int) -> None:
        self.step, self.steps = 0, steps
        self.texts = {"step": f"step {0:>{len(str(steps))}}/{steps}"}
        self.warning: str | None = None
        self._widths: dict[str, int] = {}

    def update(self, progress: Progress, texts: dict[str, str]) -> None:
        """Set the texts to display.

        Args:
            progress: The progress after the step.
            texts: The texts by name, from `progress_texts`.
        """
        self.step, self.texts = progress.step, texts
        for name, text in texts.items():
            self._widths[name] = max(len(text), self._widths.get(name, 0))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - 1  # Many terminals start a new line after the last column.
        shown, room = self._fit(width)
        parts = []
        for name, text in self.texts.items():
            if name in shown:
                parts.append(Text(text.ljust(self._width(name)), "bold red" if text in NON_FINITE_TEXTS else ""))
                if name == "step" and "bar" in shown:
                    parts.append(self._bar(console, options, room))
        line = Text("  ").join(parts)
        line.rstrip()
        yield from (_truncate(line, width), *([] if self.warning is None else [_truncate(self._warning_line(), width)]))

    def _fit(self, width: int) -> tuple[set[str], int]:
        """Return the names of the texts that fit into a width, and the width of the bar."""
        shown: set[str] = set()
        left, room = width + 2, 0
        for name in PRIORITY:
            if name == "bar" or name in self.texts:
                left -= 2 + (MIN_BAR_WIDTH if name == "bar" else self._width(name))
                if left < 0:
                    break
                shown.add(name)
                room = left
        return shown | {"step"}, min(MAX_BAR_WIDTH, MIN_BAR_WIDTH + room)

    def _width(self, name: str) -> int:
        """Return the reserved width of a text: the largest width so far."""
        return max(len(self.texts[name]), self._widths.get(name, 0))

    def _bar(self, console: Console, options: ConsoleOptions, width: int) -> Text:
        """Return the bar, of `width` characters."""
        character = "-" if options.ascii_only else "━"
        done = width * self.step // max(1, self.steps)
        plain = console.no_color or console.color_system is None
        rest = (" " if plain else character) * (width - done)
        return Text.assemble((character * done, "bar.complete"), (rest, "bar.back"))

    def _warning_line(self) -> Text:
        """Return the last warning as one line."""
        return Text.assemble(("warning ", "yellow"), str(self.warning).replace("\n", " "))


def _truncate(line: Text, width: int) -> Text:
    """Truncate a line to a width, with an ellipsis."""
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


@contextmanager
def progress_bar(console: Console, steps: int, folder: Path) -> Iterator[Show]:
    """Show a progress bar at the bottom of the terminal. Evaluations are printed above it.

    The bar is updated at most ten times per second.

    Args:
        console: The console.
        steps: The number of steps of the run.
        folder: The folder of the run.

    Yields:
        The function to call after each step and each evaluation.
    """
    bar, speed, size = Bar(steps), Speed(), Size(folder)
    drawn = 0.0
    with Live(bar, console=console, transient=True, auto_refresh=False) as live:

        def show(progress: Progress) -> None:
            nonlocal drawn
            if progress.phase == "eval":
                speed.pause()
                console.print(evaluation_text(progress), soft_wrap=True)
                return
            speed.step()
            now = time.perf_counter()
            if now - drawn >= REFRESH_SECONDS or progress.step == progress.steps:
                drawn = now
                bar.warning = progress.warnings[-1] if progress.warnings else None
                bar.update(progress, progress_texts(progress, speed, size.bytes))
                live.refresh()

        live.refresh()
        yield show


def progress_lines(console: Console, steps: int, folder: Path, warn: Callable[[str], None]) -> Show:
    """Print about ten progress lines during a run, and each warning when it occurs.

    Args:
        console: The console.
        steps: The number of steps of the run.
        folder: The folder of the run.
        warn: Called with the text of each warning.

    Returns:
        The function to call after each step and each evaluation.
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
    """Show each warning when it occurs, and no progress.

    Args:
        warn: Called with the text of each warning.

    Returns:
        The function to call after each step and each evaluation.
    """
    count = 0

    def show(progress: Progress) -> None:
        nonlocal count
        for message in progress.warnings[count:]:
            warn(message)
        count = len(progress.warnings)

    return show
