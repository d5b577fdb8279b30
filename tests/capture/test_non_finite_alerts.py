"""Alerts of non-finite values are raised once per location, for values measured on any device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_statistics import use_device_statistics
from torch import nn

import instrument
from instrument import MemorySink
from instrument.actions.base import StepContext
from instrument.capture import non_finite_alerts as module
from instrument.capture.device_copy import Transfer
from instrument.capture.non_finite_alerts import Alerts
from instrument.capture.probe import Probe
from instrument.capture.sink_interface import Row
from instrument.capture.tables import TABLES
from instrument.plan.hook_plan import make_plan
from instrument.spec.spec_file import read_specs

WATCH = {"layers": "*", "kind": "forward", "action": "record"}
INJECT_NAN = {"layers": "0", "kind": "forward", "action": "modify", "fn": "nan", "count": 2, "start": 3}


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


class EventList(list[dict[str, Any]]):
    def __call__(self, rule: str, message: str, **about: Any) -> None:
        self.append({"rule": rule, "message": message, **about})


@pytest.fixture
def events() -> EventList:
    return EventList()


def metrics(loss: float | None, skipped: float | None = None) -> dict[str, float | None]:
    return {"loss": loss, "skipped": skipped}


def test_first_alert_is_a_warning_and_later_ones_are_information(events: EventList) -> None:
    alerts = Alerts(events)
    alerts.check_stats([row(), row(layer="b", nan_count=3), row(layer="c", inf_count=1), row(layer="b", nan_count=9)])
    alerts.check_stats([row(layer="b", step=13, nan_count=4), row(layer="b", phase="eval", step=20, nan_count=4)])
    assert events == [
        {
            "rule": "non_finite",
            "message": "first recorded non-finite value: at step 12 in b output: 3 NaN, 0 infinite of 6,400 (hook 'seen')",
            "severity": "warning",
            "layer": "b",
            "step": 12,
        },
        {
            "rule": "non_finite",
            "message": "further non-finite value: at step 12 in c output: 0 NaN, 1 infinite of 6,400 (hook 'seen')",
            "severity": "info",
            "layer": "c",
            "step": 12,
        },
        {
            "rule": "non_finite",
            "message": "further non-finite value: in the evaluation after 20 steps in b output: 4 NaN, 0 infinite of 6,400 "
            "(hook 'seen')",
            "severity": "info",
            "layer": "b",
            "step": 20,
        },
    ]


def test_missing_counts_raise_no_alert(events: EventList) -> None:
    alerts = Alerts(events)
    alerts.check_stats([row(nan_count=None, inf_count=None)])
    assert events == []
    alerts.check_stats([row(layer="", path="0", role="input", numel=None, nan_count=None, inf_count=7)])
    assert (
        events[0]["message"]
        == "first recorded non-finite value: at step 12 in . input '0': 0 NaN, 7 infinite (hook 'seen')"
    )


def test_number_of_reported_locations_is_limited(events: EventList) -> None:
    alerts = Alerts(events)
    for step in range(3):
        alerts.check_stats([row(step=step, layer=str(layer), nan_count=1) for layer in range(100)])
    assert len(events) == module.MAX_LOCATIONS + 2
    assert (
        events[-1]["message"]
        == "values were not finite at 21 locations; further ones are not reported, see the stats table"
    )
    assert [event["severity"] for event in events] == ["warning", *["info"] * (module.MAX_LOCATIONS + 1)]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_is_reported_once(events: EventList, loss: float) -> None:
    alerts = Alerts(events)
    for step, value in enumerate((1.0, None, loss, loss)):
        alerts.check_metrics(StepContext(step, 0, 0, "train"), metrics(value))
    alerts.check_metrics(StepContext(4, 0, 0, "eval"), metrics(loss))
    assert [(event["message"], event["severity"], event["layer"]) for event in events] == [
        (f"the loss is {loss} at step 2", "warning", None),
        (f"the loss is {loss} in the evaluation after 4 steps", "info", None),
    ]


def test_gradients_of_a_skipped_step_raise_no_warning(events: EventList) -> None:
    alerts = Alerts(events)
    for step in range(3):
        alerts.check_metrics(StepContext(step, 0, 0, "train"), metrics(1.0, skipped=float(step < 2)))
        alerts.check_stats([row(step=step, kind="parameter_grad", role="param_grad", path="weight", inf_count=5)])
    assert [(event["severity"], event["step"]) for event in events] == [("info", 0), ("warning", 2)]
    assert events[0]["message"].startswith(
        "non-finite value in a step that the gradient scaler skipped: at step 0 in a "
    )
    assert "a param_grad 'weight'" in events[1]["message"]


def test_activation_of_a_skipped_step_raises_a_warning(events: EventList) -> None:
    alerts = Alerts(events)
    alerts.check_metrics(StepContext(0, 0, 0, "train"), metrics(1.0, skipped=1.0))
    alerts.check_stats([row(step=0, nan_count=1)])
    assert [event["severity"] for event in events] == ["warning"]


def test_resumed_alerts_are_not_raised_again(events: EventList) -> None:
    alerts = Alerts(events)
    alerts.check_stats([row(nan_count=3)])
    alerts.check_metrics(StepContext(12, 0, 0, "train"), metrics(math.nan))
    resumed_events = EventList()
    other = Alerts(resumed_events)
    other.load_state_dict(alerts.state_dict())
    other.check_stats([row(step=13, nan_count=3), row(step=13, layer="b", nan_count=3)])
    other.check_metrics(StepContext(13, 0, 0, "train"), metrics(math.nan))
    assert [(event["severity"], event["layer"]) for event in resumed_events] == [("info", "b")]


# ------------------------------------------------------------------------------------------------ injected NaN


def train(probe: Probe, model: nn.Module, steps: int) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean()
        probe.end_step(loss=loss)


def alerts_of(sink: MemorySink) -> list[dict[str, Any]]:
    return [event for event in sink.records("events") if event["rule"] == "non_finite"]


@pytest.mark.parametrize("where", ["on the host", "on a device"])
def test_injected_nan_raises_an_alert(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "on a device":
        monkeypatch.setattr(Transfer, "is_complete", property(lambda transfer: not transfer._layout))
        use_device_statistics(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    counts: list[int] = []
    with (
        pytest.warns(
            instrument.InstrumentWarning, match="first recorded non-finite value: at step 3 in 0 output: 2 NaN"
        ),
        instrument.attach(model, {"drill": INJECT_NAN, "seen": WATCH}) as probe,
    ):
        for _ in range(6):
            train(probe, model, 1)
            counts.append(len(alerts_of(probe.sink)))
    late = where == "on a device"  # on a device, the rows of a step arrive when the next one ends
    assert counts == ([0, 0, 0, 0, 4, 4] if late else [0, 0, 0, 4, 4, 4])
    events = alerts_of(probe.sink)
    assert {event["step"] for event in events} == {3}
    assert sorted((event["layer"] or "", event["severity"]) for event in events) == [
        ("", "warning"),  # the loss
        ("0", "warning"),
        ("1", "info"),
        ("2", "info"),
    ]


def test_finite_run_raises_no_alert() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with instrument.attach(model, {"seen": {**WATCH, "stats": "all"}}) as probe:
        train(probe, model, 4)
    assert alerts_of(probe.sink) == []


def test_resumed_probe_does_not_raise_the_alert_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    plan = make_plan(read_specs({"drill": INJECT_NAN, "seen": WATCH}), model)
    sinks = [MemorySink(), MemorySink()]
    first = Probe(plan, sinks[0])
    with first:
        train(first, model, 5)
        state = first.state_dict()
    second = Probe(plan, sinks[1])
    second.load_state_dict(state)
    with second:
        train(second, model, 3)
    assert len(alerts_of(sinks[0])) == 2
    assert alerts_of(sinks[1]) == []
    assert second.warnings == first.warnings


@pytest.mark.gpu
def test_injected_nan_on_a_gpu_raises_an_alert_without_sync() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).cuda()
    batch = torch.randn(4, 3, device="cuda")
    with instrument.attach(model, {"drill": INJECT_NAN, "seen": WATCH}) as probe:
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
