"""Schedules: the half-open window, every N-th step of it, or a list of steps, in one phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.config.parse import parse_hooks
from instrument.config.schedule import Evaluations, Phase, Schedule, common

small = st.integers(0, 40)
END = 60


@given(every=st.integers(1, 15), start=small, length=st.none() | st.integers(1, 40))
def test_window_is_half_open_and_counted_from_its_start(every: int, start: int, length: int | None) -> None:
    stop = None if length is None else start + length
    schedule = Schedule(every=every, start=start, stop=stop)
    due = {step for step in range(END) if schedule.includes(step, "train")}
    assert due == set(range(start, END if stop is None else min(stop, END), every))


@given(steps=st.frozensets(small, min_size=1))
def test_list_of_steps_schedules_only_these_steps(steps: frozenset[int]) -> None:
    schedule = Schedule(steps=steps)
    assert {step for step in range(END) if schedule.includes(step, "train")} == steps


@given(step=small, phase=st.sampled_from(["train", "eval"]), every=st.integers(1, 5))
def test_schedule_ignores_the_other_phase(step: int, phase: Phase, every: int) -> None:
    other = {"train": "eval", "eval": "train"}[phase]
    assert Schedule(every=every, phase=phase).includes(step * every, phase)
    assert not Schedule(every=every, phase=phase).includes(step * every, other)
    assert not Schedule(steps=frozenset([step]), phase=phase).includes(step, other)


ranges = st.builds(range, st.integers(0, 40), st.integers(0, 200), st.integers(1, 12))


@given(
    every=st.integers(1, 9),
    start=small,
    stop=st.none() | st.integers(1, 60),
    chosen=st.none() | st.frozensets(small),
    phase=st.sampled_from(["train", "eval"]),
    steps=ranges,
)
def test_among_returns_the_scheduled_steps(
    every: int, start: int, stop: int | None, chosen: frozenset[int] | None, phase: Phase, steps: range
) -> None:
    schedule = Schedule(every=every, start=start, stop=stop, steps=chosen, phase=phase)
    assert list(schedule.steps_in(steps)) == [step for step in steps if schedule.includes(step, phase)]


@given(one=ranges, other=ranges)
def test_common_is_the_intersection_of_two_ranges(one: range, other: range) -> None:
    assert list(common(one, other)) == sorted(set(one) & set(other))


@given(steps=st.integers(1, 60), every=st.integers(0, 20), hook=st.integers(1, 9), start=st.integers(0, 30))
def test_scheduled_evaluations_are_counted(steps: int, every: int, hook: int, start: int) -> None:
    schedule, evaluations = Schedule(every=hook, start=start, phase="eval"), Evaluations(steps, every)
    held = [step for step in range(steps + 1) if step in evaluations]
    assert (
        held == sorted({*range(every, steps + 1, every or 1)} & {*range(1, steps + 1)} | {steps}) if every else [steps]
    )
    assert len(evaluations.steps_in(schedule)) == sum(schedule.includes(step, "eval") for step in held)


def test_long_run_is_counted_without_iterating() -> None:
    schedule, evaluations = Schedule(every=7, start=3, phase="eval"), Evaluations(10**12, 5)
    assert len(schedule.steps_in(range(10**12))) == 142857142857
    assert len(evaluations.steps_in(schedule)) == (10**12 - 10) // 35 + 1  # equal to 3 modulo 7 and 0 modulo 5


@pytest.mark.parametrize(
    ("fields", "due", "words"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], "every step"),
        ({"every": 4}, [0, 4, 8], "every 4 steps"),
        ({"every": 4, "start": 1}, [1, 5, 9], "every 4 steps of [1, end)"),
        ({"start": 2, "stop": 5}, [2, 3, 4], "every step of [2, 5)"),
        ({"every": 3, "start": 2, "stop": 8}, [2, 5], "every 3 steps of [2, 8)"),
        ({"steps": [9, 0]}, [0, 9], "steps 0, 9"),
        ({"steps": [3], "phase": "eval"}, [], "steps 3, in eval"),
    ],
)
def test_spec_fields_become_its_schedule(fields: dict[str, object], due: list[int], words: str) -> None:
    spec = parse_hooks({"look": {"layers": "**", "kind": "forward", "action": "record", **fields}})["look"]
    assert [step for step in range(10) if spec.schedule.includes(step, "train")] == due
    assert str(spec.schedule) == words
