"""When a hook is due: the half-open window, every N-th step of it, or a list of steps, in one phase."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.spec.parse import parse_hooks
from instrument.spec.schedule import Phase, Schedule

small = st.integers(0, 40)
END = 60


@given(every=st.integers(1, 15), start=small, length=st.none() | st.integers(1, 40))
def test_a_window_is_half_open_and_counted_from_its_start(every: int, start: int, length: int | None) -> None:
    stop = None if length is None else start + length
    schedule = Schedule(every=every, start=start, stop=stop)
    due = {step for step in range(END) if schedule.due(step, "train")}
    assert due == set(range(start, END if stop is None else min(stop, END), every))


@given(steps=st.frozensets(small, min_size=1))
def test_a_list_of_steps_is_due_at_these_alone(steps: frozenset[int]) -> None:
    schedule = Schedule(steps=steps)
    assert {step for step in range(END) if schedule.due(step, "train")} == steps


@given(step=small, phase=st.sampled_from(["train", "eval"]), every=st.integers(1, 5))
def test_in_the_other_phase_nothing_is_due(step: int, phase: Phase, every: int) -> None:
    other = {"train": "eval", "eval": "train"}[phase]
    assert Schedule(every=every, phase=phase).due(step * every, phase)
    assert not Schedule(every=every, phase=phase).due(step * every, other)
    assert not Schedule(steps=frozenset([step]), phase=phase).due(step, other)


@given(every=st.integers(1, 9), start=small, phase=st.sampled_from(["train", "eval"]), steps=st.lists(small))
def test_among_steps_are_those_that_are_due_in_the_schedules_own_phase(
    every: int, start: int, phase: Phase, steps: list[int]
) -> None:
    schedule = Schedule(every=every, start=start, phase=phase)
    assert schedule.among(steps) == [step for step in steps if step >= start and (step - start) % every == 0]


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
def test_a_specs_fields_become_its_schedule(fields: dict[str, object], due: list[int], words: str) -> None:
    spec = parse_hooks({"look": {"layers": "**", "kind": "forward", "action": "record", **fields}})["look"]
    assert [step for step in range(10) if spec.schedule.due(step, "train")] == due
    assert str(spec.schedule) == words
