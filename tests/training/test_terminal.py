"""Output of a run: progress bars of several widths, plain lines in pipes and CI, warnings and the summary."""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from training_runs import failing_after

import instrument
from instrument.training import terminal as progress
from instrument.training.loop import Progress
from instrument.training.terminal import (
    Speed,
    Terminal,
    bar_with_texts,
    evaluation_text,
    metric_texts,
    progress_bar,
    progress_lines,
    progress_texts,
)

Cli = Callable[..., Any]
METRICS = {"loss": 0.25, "accuracy": 0.984, "seconds": 0.01, "samples_per_second": 6400.0}
CONTROL = re.compile(r"\x1b")
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "hooks=activations", "train.steps=10")
DRILL = '+hooks.drill={layers:layers,kind:forward,action:modify,fn:"nan",start:5}'


class Screen(io.StringIO):
    """A text buffer that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def console_of(width: int, *, screen: bool = True) -> Console:
    file = Screen() if screen else io.StringIO()
    return Console(file=file, force_terminal=screen, width=width, color_system="truecolor" if screen else None,
                   legacy_windows=False, highlight=False)  # fmt: skip


def written_to(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def progress_at(
    step: int = 50, *, metrics: Mapping[str, float | None] | None = None, phase: str = "train", **more: Any
) -> Progress:
    return Progress(step, 100, METRICS if metrics is None else metrics, 1234, phase, **more)


class Clock:
    """Simulated clock with a settable time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def pace_of(clock: Clock, seconds: float = 0.02, steps: int = 50) -> Speed:
    speed = Speed()
    for _ in range(steps):
        clock.now += seconds
        speed.step()
    return speed


def test_facts_include_all_known_values(clock: Clock) -> None:
    expected = progress_texts(progress_at(overhead=0.031), pace_of(clock), 1_234_567)
    assert list(expected.values()) == [
        *("step  50/100", "loss 0.2500", "accuracy 98.4%", "0:00:01 left"),
        "3,200 samples/s",  # 64 samples in 20 ms of wall time per step
        "overhead +3.1%",
        "1,234 rows",
        "1.23 MB",
    ]


def test_facts_omit_unknown_values(clock: Clock) -> None:
    nothing = dict.fromkeys(METRICS)
    assert list(progress_texts(progress_at(1, metrics=nothing), Speed(), 0)) == ["step", "rows", "size"]
    assert "left" not in progress_texts(progress_at(100), pace_of(clock), 0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(0.0, "0.0000"), (2.30259, "2.3026"), (1e-6, "1.000e-06"), (3.5e7, "3.500e+07"), (math.nan, "nan"),
     (-math.inf, "-inf"), (-0.5, "-0.5000")],
)  # fmt: skip
def test_loss_of_any_magnitude_is_formatted(loss: float, expected: str) -> None:
    assert metric_texts({"loss": loss}) == {"loss": f"loss {expected}"}


def test_pace_is_a_moving_average_without_evaluations(clock: Clock) -> None:
    speed = pace_of(clock, seconds=10.0, steps=1)
    assert speed.left(10) is None
    for _ in range(600):
        clock.now += 0.1
        speed.step()
    clock.now += 60.0
    speed.pause()
    clock.now += 0.1
    speed.step()
    assert speed.seconds == pytest.approx(0.1, rel=1e-3)
    assert speed.left(602) == pytest.approx(60.2 + 60.0, rel=1e-2), "the remaining time should include evaluations"


@pytest.mark.spread(1)
@pytest.mark.parametrize(("seconds", "steps", "interval"), [(0.0, 30, 1.0), (0.5, 999, 50.0)])
def test_folder_size_is_read_rarely(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int, interval: float
) -> None:
    read: list[float] = []

    def read_size(folder: Path) -> int:
        assert folder == Path("here")
        read.append(clock.now)
        clock.now += seconds
        return 100

    monkeypatch.setattr(progress, "size_on_disk", read_size)
    with progress_bar(console_of(200), 1000, Path("here")) as show:
        for step in range(1, steps + 1):
            clock.now += 0.11
            show(progress_at(step))
    assert [b - a >= interval for a, b in itertools.pairwise(read)] == [True] * 2


def bar_lines(width: int, **more: Any) -> list[str]:
    """Return the lines of a progress bar without colors."""
    speed = Speed()
    speed._steps, speed._seconds = 51, 1.0
    shown = progress_at(overhead=0.031, **more)
    console = console_of(width)
    console.print(bar_with_texts(shown, progress_texts(shown, speed, 1_234_567)))
    return re.sub(r"\x1b\[[0-9;]*m", "", written_to(console)).splitlines()


@pytest.mark.parametrize("width", [*range(16, 160, 9), 300])
def test_progress_lines_fit_the_terminal_width(width: int) -> None:
    lines = bar_lines(
        width, warnings=["first recorded non-finite value: at step 12 in encoder.0 output: 3 NaN\nof many " * 5]
    )
    assert len(lines) == 2
    assert max(cell_len(line) for line in lines) <= width


def test_least_important_parts_are_cut_off() -> None:
    every = ["━", "step", "loss", "accuracy", "left", "samples/s", "overhead", "rows", "MB"]
    counts = [sum(part in bar_lines(width)[0] for part in every) for width in (20, 40, 60, 80, 100, 120, 300)]
    assert counts == sorted(counts)
    assert counts[-1] == len(every)
    (line,) = bar_lines(300)
    places = [line.index(part) for part in every]
    assert places == sorted(places)


def test_bar_without_colors_shows_the_progress() -> None:
    console = Console(file=Screen(), force_terminal=True, width=80, color_system=None, legacy_windows=False)
    console.print(bar_with_texts(progress_at(), {"step": "step 50/100"}))
    assert written_to(console).count("━") == 5


def test_bar_is_redrawn_at_most_ten_times_per_second(clock: Clock, tmp_path: Path) -> None:
    console = console_of(100)
    with progress_bar(console, 100, tmp_path) as show:
        counts = []
        for step in range(1, 100):
            clock.now += 0.005
            show(progress_at(step))
            counts.append(len(written_to(console)))
    assert len(set(counts)) in range(4, 7)  # in half a second


def test_evaluation_shows_the_metrics_of_the_task() -> None:
    metrics = {
        "loss": 0.5,
        "accuracy": None,
        "seconds": 2.0,
        "skipped": None,
        "loss_recovered": 0.94473,
        "unknown": None,
    }
    text = evaluation_text(Progress(step=5, steps=10, metrics=metrics, rows=0, phase="eval"))
    assert text == "step  5/10  evaluation  loss 0.5000  loss_recovered 0.9447"


def test_evaluations_are_above_the_bar_and_the_warning_below(clock: Clock, tmp_path: Path) -> None:
    console = console_of(70)
    with progress_bar(console, 100, tmp_path) as show:
        show(progress_at(10, warnings=["one thing", "another thing"]))
        show(progress_at(10, phase="eval"))
    shown = written_to(console)
    assert "step  10/100  evaluation  loss 0.2500  accuracy 98.4%" in shown
    assert "another thing" in shown
    assert "one thing" not in shown


def test_printed_lines_are_above_the_bar(clock: Clock, tmp_path: Path) -> None:
    terminal = Terminal()
    terminal.console = console_of(70)
    with progress_bar(terminal.console, 100, tmp_path) as show:
        show(progress_at(10))
        terminal.print_line("look  step 9  layers.0  output  [64, 32] float32 cpu  mean [bold]1.0")
    shown = written_to(terminal.console)
    assert "look  step 9  layers.0  output  [64, 32] float32 cpu  mean [bold]1.0\n" in shown


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("quiet=true",)])
def test_print_hook_writes_to_the_terminal_and_the_log(cli: Cli, workdir: Path, options: tuple[str, ...]) -> None:
    hook = "+hooks.look={layers: layers.0, kind: forward, action: print, steps: [0, 2]}"
    answer = cli(*TINY, "train.steps=4", "hydra.run.dir=out", hook, *options).expect(0)
    start = r"look  step {}  layers\.0  output  \[64, 10\] float32 cpu  mean "
    log = (workdir / "out" / "instrument.log").read_text()
    for step in (0, 2):
        assert len(re.findall(start.format(step), log)) == 1
        assert len(re.findall("^" + start.format(step), answer.out, re.M)) == (not options)
    assert "step 1" not in log
    assert len(instrument.load("out").coverage.query("hook == 'look' and fired == 2")) == 1


@pytest.mark.slow
def test_plan_prints_no_lines(cli: Cli) -> None:
    hook = "+hooks.look={layers: layers.0, kind: forward, action: print, steps: [0, 2]}"
    answer = cli(*TINY, hook, "plan=true").expect(0)
    assert "print mean, std, min, max" in answer.out
    assert "look  step" not in answer.out


def test_nan_loss_is_highlighted() -> None:
    console = console_of(60)
    console.print(bar_with_texts(progress_at(), {"step": "step 50/100", "loss": "loss nan"}))
    assert "\x1b[1;31mloss nan" in written_to(console)


def lines_of(steps: int, tmp_path: Path, reported: list[str], **at: list[str]) -> list[str]:
    console = console_of(40, screen=False)
    show = progress_lines(console, steps, tmp_path, reported.append)
    for step in range(1, steps + 1):
        warnings = [message for key, messages in at.items() if step >= int(key[1:]) for message in messages]
        show(Progress(step, steps, METRICS, 1234, "train", 0.031, warnings))
    show(Progress(steps, steps, METRICS, 1234, "eval"))
    return written_to(console).splitlines()


@pytest.mark.parametrize(("steps", "count"), [(100, 10), (1000, 10), (7, 7), (105, 11)])
def test_pipe_gets_about_ten_plain_lines(tmp_path: Path, steps: int, count: int) -> None:
    *lines, last = lines_of(steps, tmp_path, [])
    assert len(lines) == count
    assert "evaluation" in last
    for line in lines:
        for word in ("step", "loss 0.2500", "accuracy 98.4%", "samples/s", "1,234 rows", "0 B", "overhead +3.1%"):
            assert word in line
        assert not CONTROL.search(line)
        assert "━" not in line


def test_warning_is_reported_once(tmp_path: Path) -> None:
    reported: list[str] = []
    lines_of(20, tmp_path, reported, s3=["a"], s9=["b", "c"])
    assert reported == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("environment", "screen", "live"),
    [
        ({}, True, True),
        ({"CI": "true"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_bar_is_only_drawn_on_terminals(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], screen: bool, live: bool
) -> None:
    for name in ("CI", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    terminal.console = Console(file=Screen() if screen else io.StringIO(), width=100, highlight=False)
    with terminal.progress(100) as show:
        show(progress_at(100))
    shown = written_to(terminal.console)
    assert ("━" in shown) == live
    assert ("\x1b[" in shown) == live


def test_non_finite_values_are_reported_immediately_and_at_the_end(cli: Cli) -> None:
    answer = cli(*TINY, DRILL, "hooks.activations.every=2", "hydra.run.dir=out").expect(0)
    assert not CONTROL.search(answer.out)
    lines = answer.out.splitlines()
    alarm = [line for line in lines if line.startswith("warning first recorded non-finite value: at step 6 in layers")]
    assert len(alarm) == 1
    assert lines.index(alarm[0]) < next(i for i, line in enumerate(lines) if line.startswith("step  8/10"))
    assert answer.out.count("loss not finite: at step 5: nan") == 1
    findings = answer.out.split("Findings", 1)[1]
    assert re.search(r"loss not finite +training +5 +nan, \d", findings)
    assert re.search(r"first recorded non-finite value +layers(\.0)? output \(activations\) +6 ", findings)
    assert "firings (drill)" in findings
    assert "in Python   instrument.load('out')" in findings
    assert findings.splitlines()[-1] == "report      python -m instrument.report out"


@pytest.mark.slow
def test_overhead_is_shown_if_measured(cli: Cli) -> None:
    measured = cli(*TINY, "train.steps=40", "hooks.activations.every=2", "hydra.run.dir=some").out
    (shown,) = re.findall(r"step 40/40 .* overhead ([+-]\d+\.\d)%", measured)
    assert float(shown) == pytest.approx(100 * instrument.load("some").info["overhead"], abs=0.051)
    assert "overhead" not in cli(*TINY, "hooks.activations.every=1", "hydra.run.dir=all").out


@pytest.mark.slow
def test_hooks_that_did_not_fire_are_a_finding_and_no_warning(cli: Cli) -> None:
    answer = cli(*TINY, "+hooks.activations.start=999", "train.steps=1")
    assert re.search(r"never fired +.*\(activations, +forward\)", answer.out)
    assert "warning" not in answer.out


@pytest.mark.slow
def test_quiet_run_prints_each_warning_once(cli: Cli) -> None:
    answer = cli(*TINY, DRILL, "hooks.activations.every=2", "quiet=true").expect(0)
    lines = answer.out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "error loss not finite",
        "warning first recorded non-finite value",
    ]


@pytest.mark.slow
def test_job_of_a_sweep_prints_a_line_and_its_warnings(cli: Cli) -> None:
    """A job prints its warnings even if another job has printed the same warning."""
    answer = cli("-m", *TINY, DRILL, "hooks.drill.start=5,999,5", "train.steps=6", "hydra.sweep.dir=out").expect(0)
    jobs = [line for line in answer.out.splitlines() if line.startswith("out/")]
    assert [line.split()[:3] for line in jobs] == [
        ["out/0", "hooks.drill.start=5", "loss"],
        ["out/1", "hooks.drill.start=999", "loss"],
        ["out/2", "hooks.drill.start=5", "loss"],
    ]
    assert [line.split()[3] == "nan" for line in jobs] == [True, False, True]
    assert "Findings" not in answer.out
    assert answer.out.count("loss not finite: at step 5: nan") == answer.out.count("loss not finite") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("hydra.run.dir=out",),
        ("plan=true",),
        pytest.param(("-m", "seed=1,2", "hydra.sweep.dir=out"), marks=pytest.mark.slow),
    ],
    ids=["run", "plan", "sweep"],
)
def test_evaluation_of_training_samples_is_reported_by_each_run(cli: Cli, workdir: Path, more: tuple[str, ...]) -> None:
    source = "from torch.utils.data import TensorDataset\nimport torch\n\ndef noise():\n"
    source += "    return TensorDataset(torch.zeros(30, 4), torch.arange(30) % 2)\n"
    (workdir / "unsplit.py").write_text(source)
    data = (
        *("data=random", "data.dataset._target_=unsplit.noise", "~data.dataset.shape", "~data.dataset.classes"),
        "~data.dataset.samples",
    )
    job = ("model=mlp", "model.sizes=[4,2]", *data, "train.steps=1", "train.batch_size=10")
    message = "30 of 30 evaluation samples are training samples too, because both slices are of the same split of unsplit.noise"
    answer = cli(*more, *job).expect(0)
    assert " ".join(answer.out.split()).count(message) == (2 if "-m" in more else 1)
    if "hydra.run.dir=out" in more:
        events = instrument.load("out").events
        assert events[["rule", "severity"]].to_numpy().tolist() == [["data", "warning"]]


@pytest.mark.slow
def test_resumed_run_does_not_repeat_warnings(cli: Cli) -> None:
    arguments = (*TINY, DRILL, "hooks.activations.every=2", "train.checkpoint.every=7", "hydra.run.dir=out")
    with failing_after(8):
        assert cli(*arguments).code == 1
    answer = cli("resume=out").expect(0)
    assert "warning" not in answer.out
    assert re.search(r"first recorded non-finite value +layers", answer.out), "the summary should still list it"
    events = instrument.load("out").events
    assert list(events[events.rule == "non_finite"].severity).count("warning") == 2


@pytest.mark.slow
def test_folder_with_a_space_is_quoted_in_commands(cli: Cli) -> None:
    answer = cli(*TINY, "hydra.run.dir='my runs/one'", "train.steps=1")
    assert answer.out.splitlines()[-1] == f"report      python -m instrument.report 'my runs{os.sep}one'"
