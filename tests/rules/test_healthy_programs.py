"""Healthy trainings in the form of public examples have no warnings."""

from __future__ import annotations

import pytest
import torch
from held_out_programs import HELD_OUT
from public_programs import DEVELOPMENT, warnings_of

import instrument

EXPECTED = {"normalizing_flow": ["dead units"]}
"""Warnings that are true: of the units behind one number, more than half are zero for a whole batch."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVELOPMENT)
def test_development_program_has_no_warning(name: str) -> None:
    with torch.random.fork_rng():
        found = warnings_of(*DEVELOPMENT[name])
    assert [message.partition(":")[0] for message in found] == EXPECTED.get(name, [])


@pytest.mark.slow
def test_at_most_one_of_sixteen_held_out_programs_has_a_warning() -> None:
    """The small language model has one: in 200 steps its loss falls by less than 1%, from 3.69, with 1.39 as the entropy of its text."""
    found = {}
    for name, program in HELD_OUT.items():
        with torch.random.fork_rng():
            found[name] = warnings_of(program, 200)
    assert len(found) == 16
    warned = {name: messages for name, messages in found.items() if messages}
    assert len(warned) <= 1, warned


@pytest.mark.spread(1)
@pytest.mark.parametrize(("name", "steps"), [("vae", 40), ("word_language_model", 12)])
def test_first_steps_of_a_program_have_no_warning(name: str, steps: int) -> None:
    with torch.random.fork_rng():
        assert warnings_of(DEVELOPMENT[name][0], steps) == []


RECORDED = {"layers": "**", "kind": "step_post", "action": "record"}


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("rate", "role", "zeroed", "rule"),
    [
        (0.0, "param", False, "zero_learning_rate"),
        (0.1, "param", True, "unchanged_parameter"),
        (0.1, "update", True, "unchanged_parameter"),
    ],
)
def test_training_without_updates_is_reported_in_four_steps(rate: float, role: str, zeroed: bool, rule: str) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    warned = pytest.warns(instrument.InstrumentWarning, match=rule.replace("_", ".*"))
    with warned, instrument.attach(model, {"h": {**RECORDED, "role": role}}, optimizer=optimizer) as probe:
        for _ in range(4):
            loss = model(torch.ones(1, 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters() if zeroed else ():
                parameter.grad.zero_()
            optimizer.step()
            probe.end_step(loss=loss)
    assert set(probe.events.query("severity == 'warning'").rule) == {rule}
    assert probe.events.step.tolist() == [2]


def test_warm_up_from_zero_is_not_reported() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with instrument.attach(model, {"h": RECORDED}, optimizer=optimizer) as probe:
        for _ in range(6):
            loss = model(torch.ones(1, 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    assert probe.metrics.lr[0] == 0
    assert probe.events.empty
