"""The overhead of hooks relative to a step, reported only where it is measurable."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument.config.parse import parse_budget
from instrument.config.spec_file import read_specs
from instrument.plan.hook_plan import make_plan
from instrument.probe.overhead import CHECK_INTERVAL, MAX_DURATIONS, MAX_STEP_TYPES, MIN_STEPS, WARM_UP, Overhead
from instrument.probe.probe import Probe


def overhead_of(*steps: tuple[tuple[str, ...], float]) -> Overhead:
    overhead = Overhead()
    for _ in range(WARM_UP):
        overhead.add(("a",), 100.0)
    for due, seconds in steps:
        overhead.add(due, seconds)
    return overhead


@pytest.mark.parametrize(
    ("steps", "changed", "expected"),
    [
        ([(("a",), 3.0), ((), 1.0), ((), 1.0), ((), 1.0)] * 10, {}, 0.5),  # every fourth step takes three times as long
        ([(("a",), 1.5), ((), 1.0)] * 20, {6: (("a",), 500.0), 7: ((), 500.0)}, 0.25),
        ([(("a",), 1.2), ((), 1.0)] * 25, {24: (("a", "maps"), 6.0)}, (24 * 0.2 + 5.0) / 50),
    ],
    ids=["schedule", "interrupted steps are ignored", "rare hooks are weighted by their time"],
)
def test_overhead_is_the_average_over_the_schedule(steps: list[Any], changed: dict[int, Any], expected: float) -> None:
    steps = [changed.get(number, step) for number, step in enumerate(steps)]
    assert overhead_of(*steps).relative == pytest.approx(expected)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(("a",), 1.0)] * 100,
        [((), 1.0)] * 100,
        [(("a",), 1.0)] * (MIN_STEPS - 1) + [((), 1.0)] * 100,
        [(("a",), 1.0)] * 100 + [((), 1.0)] * (MIN_STEPS - 1),
    ],
    ids=["no step", "hooks in all", "hooks in none", "few with", "few without"],
)
def test_overhead_is_unknown_without_enough_steps_of_both_kinds(steps: list[tuple[tuple[str, ...], float]]) -> None:
    assert overhead_of(*steps).relative is None


def test_overhead_is_updated_at_intervals() -> None:
    overhead = overhead_of(*[(("a",), 2.0), ((), 1.0)] * 10)
    assert overhead.relative == pytest.approx(0.5)
    for _ in range(CHECK_INTERVAL - 1):
        overhead.add(("a",), 2.0)
    assert overhead.relative == pytest.approx(0.5)
    overhead.add(("a",), 2.0)
    assert overhead.relative == pytest.approx(0.75)


def test_overhead_memory_is_bounded() -> None:
    overhead = overhead_of(*((tuple(f"h{bit}" for bit in range(12) if step >> bit & 1), 1.0) for step in range(5000)))
    assert len(overhead._seconds) <= MAX_STEP_TYPES + 2
    assert max(map(len, overhead._seconds.values())) <= MAX_DURATIONS


def test_steps_are_compared_at_equal_other_hooks() -> None:
    overhead = Overhead()
    for step in range(400 + WARM_UP):
        others = ("tame",) if step % 4 < 2 else ()
        due = ("a",) if step % 2 else ()
        overhead.add(due, 1.0 + 0.5 * bool(due) + 2.0 * bool(others), others)
    assert overhead.relative == pytest.approx(0.25 / 2.0, rel=0.02)
    found = overhead.measured()
    assert found is not None
    assert (found.error, found.baseline) == (0.0, pytest.approx(2.0, rel=0.02))


class Clock:
    """A clock that advances only by the durations that a test sets."""

    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.probe.probe.time", SimpleNamespace(perf_counter=lambda: Clock.now))


def slow_function(tensor: Tensor, context: instrument.Context) -> Tensor:
    Clock.now += 0.004
    return tensor


SLOW: dict[str, Any] = {"layers": ".", "kind": "forward", "action": "modify", "fn": slow_function}


class SlowModule(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        Clock.now += 0.004
        return batch


def probe_of(every: int = 1, **options: Any) -> Probe:
    plan = make_plan(read_specs({"slow": {**SLOW, "every": every}}), SlowModule())
    return Probe(plan, instrument.MemorySink(), **options)


def run(probe: Probe, steps: int, *, evaluate: bool = False) -> None:
    with probe:
        for _ in range(steps):
            probe.plan.layers.model(torch.ones(2))
            probe.end_step()
            if evaluate:
                with probe.evaluating():
                    Clock.now += 0.02


@pytest.mark.parametrize("evaluate", [False, True])
def test_probe_measures_overhead_of_hooks_with_a_schedule(evaluate: bool) -> None:
    probe = probe_of(2)
    run(probe, WARM_UP + 20, evaluate=evaluate)
    assert probe.overhead == pytest.approx(0.5)  # twice as long at every second step


def test_probe_with_hooks_at_every_step_has_no_overhead() -> None:
    probe = probe_of()
    run(probe, 24)
    assert probe.overhead is None


def test_time_budget_measures_the_overhead() -> None:
    probe = probe_of(2, budget=parse_budget({"time": "5%"}))
    run(probe, 24)
    assert probe.budget is not None
    assert probe.overhead is probe.budget.estimated is None
    probe.budget.estimated = 0.04
    assert probe.overhead == 0.04


def test_late_rows_are_attributed_to_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after one with hooks writes its rows, where they are on a device."""
    pending = itertools.cycle([False, True, False])
    monkeypatch.setattr("instrument.probe.recorder.Recorder.has_pending_rows", property(lambda recorder: next(pending)))
    steps: list[tuple[tuple[str, ...], bool]] = []
    monkeypatch.setattr(
        Overhead,
        "add",
        lambda overhead, scheduled, seconds, has_pending_rows: steps.append((scheduled, has_pending_rows)),
    )
    probe = probe_of(3)
    run(probe, 6)
    assert steps == [(("slow",), False), ((), True), ((), False)] * 2
