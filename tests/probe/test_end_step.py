from __future__ import annotations

import warnings

import pytest
import torch
from attached_runs import forward_steps
from torch import nn

import instrument
from instrument import InstrumentWarning

HOOKS = {"seen": {"layers": ".", "kind": "forward", "action": "record"}}


@pytest.mark.parametrize("ends_micro_steps", [False, True])
def test_missing_end_step_is_reported(ends_micro_steps: bool) -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(InstrumentWarning, match="end_step was never called"), instrument.attach(model, HOOKS) as probe:
        for _ in range(3):
            model(torch.zeros(1, 2))
            if ends_micro_steps:
                probe.end_micro_step()
    assert [event["rule"] for event in probe.sink.records("events")] == ["no_end_step"]
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.sink.records("coverage")] == [(3, 3, "")]


@pytest.mark.parametrize("step", [0, 15])
def test_missing_end_step_is_reported_without_forward_hooks(step: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"seen": {"layers": ".", "kind": "parameter_grad", "action": "record"}}
    with (
        pytest.warns(InstrumentWarning, match=f"end_step was never called: all rows have step {step},"),
        instrument.attach(model, hooks, optimizer=optimizer, step=step),
    ):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_exempt_calls_of_earlier_steps_are_no_cause_in_an_incomplete_step() -> None:
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"seen": {**HOOKS["seen"], "calls": 1}}) as probe:
        model(torch.zeros(1, 2))
        probe.end_step()
        for _ in range(2):
            model(torch.zeros(1, 2))
    assert [(row["expected"], row["fired"], row["cause"]) for row in probe.sink.records("coverage")] == [(1, 1, "")]


@pytest.mark.parametrize("steps", [1, 3])
def test_called_end_step_gives_no_warning(steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = forward_steps(nn.Linear(2, 2), HOOKS, torch.zeros(steps, 1, 2))
    assert not probe.sink.records("events")


def test_step_may_end_in_a_hook_of_the_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"seen": {"layers": ".", "kind": "parameter_grad", "action": "record", "every": 10}}
    with instrument.attach(model, hooks, optimizer=optimizer, rules="default") as probe:
        ends = optimizer.register_step_post_hook(lambda *_: probe.end_step())
        for _ in range(40):  # relations are not checked in all of them
            optimizer.zero_grad()
            model(torch.rand(1, 2)).sum().backward()
            optimizer.step()
        ends.remove()
    assert set(probe.run.stats.step) == {0, 10, 20, 30}
