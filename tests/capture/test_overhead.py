"""What hooks make of a step's time: told where it was measured, and nowhere else."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument.capture.overhead import KEPT, LEAST, LOOK, MOST_SORTS, WARM_UP, Overhead
from instrument.capture.probe import Probe
from instrument.integrations.attach import read_specs
from instrument.plan.sites import make_plan
from instrument.spec.parse import parse_budget


def fed(*steps: tuple[tuple[str, ...], float]) -> Overhead:
    overhead = Overhead()
    for _ in range(WARM_UP):
        overhead.add(("a",), 100.0)
    for due, seconds in steps:
        overhead.add(due, seconds)
    return overhead


def test_it_is_the_average_over_the_schedule_so_far() -> None:
    steps = [(("a",), 3.0), ((), 1.0), ((), 1.0), ((), 1.0)] * 10
    assert fed(*steps).share == pytest.approx(0.5)  # every fourth step takes three times as long


def test_a_step_that_was_held_up_does_not_count() -> None:
    steps = [(("a",), 1.5), ((), 1.0)] * 20
    steps[6] = (("a",), 500.0)
    steps[7] = ((), 500.0)
    assert fed(*steps).share == pytest.approx(0.25)


def test_hooks_that_come_seldom_weigh_what_they_take() -> None:
    steps = [(("a",), 1.2), ((), 1.0)] * 25
    steps[24] = (("a", "maps"), 6.0)
    assert fed(*steps).share == pytest.approx((24 * 0.2 + 5.0) / 50)


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [(("a",), 1.0)] * 100,
        [((), 1.0)] * 100,
        [(("a",), 1.0)] * (LEAST - 1) + [((), 1.0)] * 100,
        [(("a",), 1.0)] * 100 + [((), 1.0)] * (LEAST - 1),
    ],
    ids=["no step", "hooks in all", "hooks in none", "few with", "few without"],
)
def test_without_enough_of_both_it_is_not_measured(steps: list[tuple[tuple[str, ...], float]]) -> None:
    assert fed(*steps).share is None


def test_it_is_looked_at_once_in_a_while() -> None:
    overhead = fed(*[(("a",), 2.0), ((), 1.0)] * 10)
    assert overhead.share == pytest.approx(0.5)
    for _ in range(LOOK - 1):
        overhead.add(("a",), 2.0)
    assert overhead.share == pytest.approx(0.5)
    overhead.add(("a",), 2.0)
    assert overhead.share == pytest.approx(0.75)


def test_it_does_not_grow_with_the_steps() -> None:
    overhead = fed(*((tuple(f"h{bit}" for bit in range(12) if step >> bit & 1), 1.0) for step in range(5000)))
    assert len(overhead._seconds) <= MOST_SORTS + 2
    assert max(map(len, overhead._seconds.values())) <= KEPT


def test_steps_are_compared_with_those_that_had_the_same_beside_them() -> None:
    overhead = Overhead()
    for step in range(400 + WARM_UP):
        beside = ("tame",) if step % 4 < 2 else ()
        due = ("a",) if step % 2 else ()
        overhead.add(due, 1.0 + 0.5 * bool(due) + 2.0 * bool(beside), beside)
    assert overhead.share == pytest.approx(0.25 / 2.0, rel=0.02)
    found = overhead.measured()
    assert found is not None
    assert (found.error, found.bare) == (0.0, pytest.approx(2.0, rel=0.02))


# ------------------------------------------------------------------------------------------------ in a probe


class Clock:
    """A clock that stands still but for what a test says that things take."""

    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.capture.probe.time", SimpleNamespace(perf_counter=lambda: Clock.now))


def slow(tensor: Tensor, context: instrument.Context) -> Tensor:
    Clock.now += 0.004
    return tensor


SLOW: dict[str, Any] = {"layers": ".", "kind": "forward", "action": "modify", "fn": slow}


class Unhurried(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        Clock.now += 0.004
        return batch


def run(probe: Probe, steps: int, *, evaluate: bool = False) -> None:
    with probe:
        for _ in range(steps):
            probe.plan.layers.model(torch.ones(2))
            probe.end_step()
            if evaluate:
                with probe.evaluating():
                    Clock.now += 0.02


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_probe_measures_it_where_hooks_are_not_always_due(evaluate: bool) -> None:
    probe = Probe(make_plan(read_specs({"slow": {**SLOW, "every": 2}}), Unhurried()), instrument.MemorySink())
    run(probe, WARM_UP + 20, evaluate=evaluate)
    assert probe.overhead == pytest.approx(0.5)  # twice as long in every other step


def test_a_probe_whose_hooks_are_always_due_does_not_say() -> None:
    probe = Probe(make_plan(read_specs({"slow": SLOW}), Unhurried()), instrument.MemorySink())
    run(probe, 24)
    assert probe.overhead is None


def test_a_budget_of_time_measures_it_itself() -> None:
    plan = make_plan(read_specs({"slow": {**SLOW, "every": 2}}), Unhurried())
    probe = Probe(plan, instrument.MemorySink(), budget=parse_budget({"time": "5%"}))
    run(probe, 24)
    assert probe.budget is not None
    assert probe.overhead is probe.budget.measured is None
    probe.budget.measured = 0.04
    assert probe.overhead == 0.04


def test_rows_that_come_late_belong_to_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after one with hooks hands over its rows, where they are on a device."""
    owing = itertools.cycle([False, True, False])
    monkeypatch.setattr("instrument.capture.recorder.Recorder.is_owing", property(lambda recorder: next(owing)))
    seen: list[tuple[str, ...]] = []
    monkeypatch.setattr(Overhead, "add", lambda overhead, due, seconds: seen.append(due))
    probe = Probe(make_plan(read_specs({"slow": {**SLOW, "every": 3}}), Unhurried()), instrument.MemorySink())
    run(probe, 6)
    assert seen == [("slow",), ("rows of the step before",), ()] * 2
