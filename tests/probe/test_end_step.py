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


def test_end_step_without_a_forward_pass_is_a_possible_cause() -> None:
    model = nn.Linear(2, 2)
    with pytest.warns(InstrumentWarning, match="fired 1 of 2 times"), instrument.attach(model, HOOKS) as probe:
        model(torch.zeros(1, 2))
        probe.end_step()
        probe.end_step()
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"]) == (2, 1)
    assert row["cause"].endswith("or end_step was called without a forward pass")


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


@pytest.mark.parametrize("case", ["closure", "two optimizers", "announced", "compiled"])
@pytest.mark.parametrize("is_first", [True, False])
def test_rows_after_the_optimizer_step_belong_to_the_step_that_its_hook_ends(is_first: bool, case: str) -> None:
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    parameters = [[model.bias], [model.weight]] if case == "two optimizers" else [model.parameters()]
    optimizers = [torch.optim.SGD(group, lr=0.5) for group in parameters]
    roles = {
        role: {"layers": ".", "kind": "step_post", "role": role, "action": "record"} for role in ("param", "update")
    }

    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    def register() -> None:
        optimizers[-1].register_step_post_hook(lambda *_: probe.end_step())

    if is_first:
        register()
    with instrument.attach(model, roles, optimizer=optimizers, steps_by_loop=case == "announced") as probe:
        if not is_first:
            register()
        for _ in range(4):
            if case != "closure":
                closure()
            for optimizer in optimizers:
                if case == "announced":
                    probe.before_optimizer_step()
                step = torch.compile(optimizer.step, backend="eager") if case == "compiled" else optimizer.step
                step(closure if case == "closure" else None)
    rows = probe.stats.sort_values(["hook", "path", "step"])
    assert rows["step"].tolist() == [0, 1, 2, 3] * 4
    assert rows["mean"].tolist() == [-0.5, -1.0, -1.5, -2.0] * 2 + [-0.5] * 8
    assert not probe.warnings


def test_step_may_end_in_a_hook_of_a_wrapped_optimizer() -> None:
    """The wrapper changes the parameters after the end of the step."""
    parameter = nn.Parameter(torch.zeros(2))
    model = nn.Module()
    model.weight = parameter
    inner = torch.optim.SGD([parameter], lr=0.5)

    class Wrapper:
        def __init__(self) -> None:
            self.optimizer = inner

        @torch.no_grad()
        def step(self) -> None:
            self.optimizer.step()
            parameter.mul_(2)

    wrapper = Wrapper()
    hooks = {"weight": {"layers": ".", "kind": "step_post", "role": "param", "action": "record"}}
    with instrument.attach(model, hooks, optimizer=wrapper) as probe:
        inner.register_step_post_hook(lambda *_: probe.end_step())
        for _ in range(3):
            parameter.grad = torch.ones(2)
            wrapper.step()
    assert probe.stats[["step", "mean"]].values.tolist() == [[0, -0.5], [1, -1.5], [2, -3.5]]


@pytest.mark.parametrize("is_first", [True, False])
def test_relations_read_the_optimizer_step_that_a_hook_ends(is_first: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_first:
        optimizer.register_step_post_hook(lambda *_: probe.end_step())
    with instrument.attach(model, HOOKS, optimizer=optimizer, rules="default") as probe:
        if not is_first:
            optimizer.register_step_post_hook(lambda *_: probe.end_step())
        for _ in range(3):  # without zero_grad
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    rows = probe.run.relations.query("relation == 'gradients_zeroed'")
    assert rows[["step", "path", "holds"]].values.tolist() == [[1, "bias", False]]
