"""Values that are not finite are told of once for each place, whichever device they were measured on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument
from instrument import MemorySink
from instrument.actions.base import Moment
from instrument.capture import alerts as module
from instrument.capture.alerts import Alerts
from instrument.capture.probe import Probe
from instrument.capture.sink import Row
from instrument.capture.tables import TABLES
from instrument.capture.transfer import Transfer
from instrument.integrations.attach import read_specs
from instrument.plan.sites import make_plan
from instrument.stats.measure import measure_on_device

WATCH = {"layers": "*", "kind": "forward", "action": "record"}
DRILL = {"layers": "0", "kind": "forward", "action": "modify", "fn": "nan", "count": 2, "start": 3}


def row(**cells: Any) -> Row:
    usual = {
        "step": 12,
        "phase": "train",
        "hook": "seen",
        "layer": "a",
        "kind": "forward",
        "role": "output",
        "path": "",
        "numel": 6400,
        "nan_count": 0,
        "inf_count": 0,
    }
    return tuple({**usual, **cells}.get(name) for name in TABLES["stats"].names)


class Told(list[dict[str, Any]]):
    def __call__(self, rule: str, message: str, **about: Any) -> None:
        self.append({"rule": rule, "message": message, **about})


@pytest.fixture
def told() -> Told:
    return Told()


def metrics(loss: float | None, skipped: float | None = None) -> dict[str, float | None]:
    return {"loss": loss, "skipped": skipped}


def test_the_first_value_of_the_run_is_a_warning_and_other_places_are_information(told: Told) -> None:
    alerts = Alerts(told)
    alerts.see_stats([row(), row(layer="b", nan_count=3), row(layer="c", inf_count=1), row(layer="b", nan_count=9)])
    alerts.see_stats([row(layer="b", step=13, nan_count=4), row(layer="b", phase="eval", step=20, nan_count=4)])
    assert told == [
        {
            "rule": "non_finite",
            "message": "first recorded non-finite value: at step 12 in b output: 3 NaN, 0 infinite of 6,400 (hook 'seen')",
            "severity": "warning",
            "layer": "b",
            "step": 12,
        },
        {
            "rule": "non_finite",
            "message": "not finite either: at step 12 in c output: 0 NaN, 1 infinite of 6,400 (hook 'seen')",
            "severity": "info",
            "layer": "c",
            "step": 12,
        },
        {
            "rule": "non_finite",
            "message": "not finite either: in the evaluation after 20 steps in b output: 4 NaN, 0 infinite of 6,400 "
            "(hook 'seen')",
            "severity": "info",
            "layer": "b",
            "step": 20,
        },
    ]


def test_what_was_not_counted_is_not_made_up(told: Told) -> None:
    alerts = Alerts(told)
    alerts.see_stats([row(nan_count=None, inf_count=None)])
    assert told == []
    alerts.see_stats([row(layer="", path="0", role="input", numel=None, nan_count=None, inf_count=7)])
    assert (
        told[0]["message"]
        == "first recorded non-finite value: at step 12 in . input '0': 0 NaN, 7 infinite (hook 'seen')"
    )


def test_no_more_places_than_can_be_read_are_told_of_and_that_is_said(told: Told) -> None:
    alerts = Alerts(told)
    for step in range(3):
        alerts.see_stats([row(step=step, layer=str(layer), nan_count=1) for layer in range(100)])
    assert len(told) == module.MOST_PLACES + 2
    assert told[-1]["message"] == "values were not finite at 21 places: further ones are not told of, and are in stats"
    assert [event["severity"] for event in told] == ["warning", *["info"] * (module.MOST_PLACES + 1)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_told_of_once(told: Told, loss: float) -> None:
    alerts = Alerts(told)
    for step, value in enumerate((1.0, None, loss, loss)):
        alerts.see_metrics(Moment(step, 0, 0, "train"), metrics(value))
    alerts.see_metrics(Moment(4, 0, 0, "eval"), metrics(loss))
    assert [(event["message"], event["severity"], event["layer"]) for event in told] == [
        (f"the loss is {loss} at step 2", "warning", None),
        (f"the loss is {loss} in the evaluation after 4 steps", "info", None),
    ]


def test_gradients_of_a_step_that_the_scaler_skipped_are_no_alarm(told: Told) -> None:
    alerts = Alerts(told)
    for step in range(3):
        alerts.see_metrics(Moment(step, 0, 0, "train"), metrics(1.0, skipped=float(step < 2)))
        alerts.see_stats([row(step=step, kind="parameter_grad", role="param_grad", path="weight", inf_count=5)])
    assert [(event["severity"], event["step"]) for event in told] == [("info", 0), ("warning", 2)]
    assert told[0]["message"].startswith("not finite, and the gradient scaler skipped the step: at step 0 in a ")
    assert "a param_grad 'weight'" in told[1]["message"]


def test_an_activation_of_such_a_step_is_one(told: Told) -> None:
    alerts = Alerts(told)
    alerts.see_metrics(Moment(0, 0, 0, "train"), metrics(1.0, skipped=1.0))
    alerts.see_stats([row(step=0, nan_count=1)])
    assert [event["severity"] for event in told] == ["warning"]


def test_what_was_told_is_not_told_again_by_who_goes_on(told: Told) -> None:
    alerts = Alerts(told)
    alerts.see_stats([row(nan_count=3)])
    alerts.see_metrics(Moment(12, 0, 0, "train"), metrics(math.nan))
    others = Told()
    other = Alerts(others)
    other.load_state_dict(alerts.state_dict())
    other.see_stats([row(step=13, nan_count=3), row(step=13, layer="b", nan_count=3)])
    other.see_metrics(Moment(13, 0, 0, "train"), metrics(math.nan))
    assert [(event["severity"], event["layer"]) for event in others] == [("info", "b")]


# ------------------------------------------------------------------------------------------------ a fire drill


def drilled(probe: Probe, model: nn.Module, steps: int) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean()
        probe.end_step(loss=loss)


def alerts_of(sink: MemorySink) -> list[dict[str, Any]]:
    return [event for event in sink.records("events") if event["rule"] == "non_finite"]


def as_on_a_device(tensor: Tensor, names: tuple[str, ...]) -> Tensor:
    return measure_on_device(tensor.detach().reshape(-1), names)


@pytest.mark.parametrize("where", ["at hand", "on a device"])
def test_a_drill_raises_the_alarm(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "on a device":
        monkeypatch.setattr(Transfer, "is_here", property(lambda transfer: not transfer._places))
        monkeypatch.setattr("instrument.actions.record.measure", as_on_a_device)
        monkeypatch.setattr("instrument.actions.intervention.measure", as_on_a_device)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    told: list[int] = []
    with (
        pytest.warns(
            instrument.InstrumentWarning, match="first recorded non-finite value: at step 3 in 0 output: 2 NaN"
        ),
        instrument.attach(model, {"drill": DRILL, "seen": WATCH}) as probe,
    ):
        for _ in range(6):
            drilled(probe, model, 1)
            told.append(len(alerts_of(probe.sink)))
    late = where == "on a device"  # the rows of a step come when the next one ends
    assert told == ([0, 0, 0, 0, 4, 4] if late else [0, 0, 0, 4, 4, 4])
    events = alerts_of(probe.sink)
    assert {event["step"] for event in events} == {3}
    assert sorted((event["layer"] or "", event["severity"]) for event in events) == [
        ("", "warning"),  # the loss
        ("0", "warning"),
        ("1", "info"),
        ("2", "info"),
    ]


def test_a_run_whose_values_are_finite_has_no_alert() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with instrument.attach(model, {"seen": {**WATCH, "stats": "all"}}) as probe:
        drilled(probe, model, 4)
    assert alerts_of(probe.sink) == []


def test_a_probe_that_goes_on_does_not_raise_it_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    plan = make_plan(read_specs({"drill": DRILL, "seen": WATCH}), model)
    sinks = [MemorySink(), MemorySink()]
    first = Probe(plan, sinks[0])
    with first:
        drilled(first, model, 5)
        state = first.state_dict()
    second = Probe(plan, sinks[1])
    second.load_state_dict(state)
    with second:
        drilled(second, model, 3)
    assert len(alerts_of(sinks[0])) == 2
    assert alerts_of(sinks[1]) == []
    assert second.warnings == first.warnings


@pytest.mark.gpu
def test_a_drill_on_a_gpu_raises_it_without_a_wait() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).cuda()
    batch = torch.randn(4, 3, device="cuda")
    with instrument.attach(model, {"drill": DRILL, "seen": WATCH}) as probe:
        for step in range(6):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                loss = model(batch).square().mean()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            probe.end_step(loss=loss)
    events = alerts_of(probe.sink)
    assert [(event["step"], event["layer"], event["severity"]) for event in events] == [
        (3, None, "warning"),
        (3, "0", "warning"),
        (3, "1", "info"),
    ]
