"""Non-finite values are reported once per location, for values measured on any device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_statistics import use_device_statistics
from rule_rows import GRADIENT, Step, feed, fired, rule_set
from torch import nn

import instrument
from instrument import MemorySink
from instrument.config.spec_file import read_rules, read_specs
from instrument.plan.hook_plan import make_plan
from instrument.probe.probe import Probe
from instrument.stats.device_copy import Transfer

WATCH = {"layers": "*", "kind": "forward", "action": "record"}
INJECT_NAN = {"layers": "0", "kind": "forward", "action": "modify", "fn": "nan", "count": 2, "start": 3}


def row(**cells: Any) -> dict[str, Any]:
    return {"numel": 6400, "nan_count": 0, "inf_count": 0, **cells}


def test_first_alert_is_a_warning_and_later_ones_are_information() -> None:
    rows = [row(), row(layer="b", nan_count=3), row(layer="c", inf_count=1), row(layer="b", nan_count=9)]
    later = [Step(step=13, rows=[row(layer="b", nan_count=4)])]
    later.append(Step(step=20, phase="eval", rows=[row(layer="b", nan_count=4)]))
    events = fired("non_finite", [Step(step=12, rows=rows), *later])
    assert [(event.message, event.severity, event.layer, event.step) for event in events] == [
        (
            "first recorded non-finite value: at step 12 in b output (seen): 3 NaN, 0 infinite of 6,400",
            "warning",
            "b",
            12,
        ),
        ("further non-finite value: at step 12 in c output (seen): 0 NaN, 1 infinite of 6,400", "info", "c", 12),
        (
            "further non-finite value: in the evaluation after 20 steps in b output (seen, eval): 4 NaN, 0 infinite of 6,400",
            "info",
            "b",
            20,
        ),
    ]


def test_missing_counts_raise_no_alert() -> None:
    assert fired("non_finite", [Step(rows=[row(nan_count=None, inf_count=None)])]) == []
    about = {"layer": "", "path": "0", "role": "input", "numel": None, "nan_count": None, "inf_count": 7}
    (event,) = fired("non_finite", [Step(step=12, rows=[row(**about)])])
    assert event.message == "first recorded non-finite value: at step 12 in .[0] input (seen): 0 NaN, 7 infinite"


MASK = {
    "kind": "forward_pre",
    "role": "input",
    "path": "mask",
    "module_type": "TransformerEncoderLayer",
    "inf_count": 9,
}
SCORES = {"kind": "function", "role": "scores", "module_type": "GPT2Attention"}


@pytest.mark.parametrize(
    ("about", "loss", "count"),
    [
        (MASK, 1.0, 0),
        (MASK, None, 0),
        (MASK, math.inf, 1),
        ({**MASK, "nan_count": 1}, 1.0, 1),
        ({**MASK, "nan_count": 1, "layer": ""}, 1.0, 0),  # missing numbers that the model is given
        ({**MASK, "nan_count": 1, "layer": ""}, None, 1),
        ({**MASK, "nan_count": 1, "layer": ""}, math.nan, 1),
        ({**MASK, "module_type": "MultiheadAttention"}, 1.0, 0),
        ({**MASK, "module_type": "Linear"}, 1.0, 1),
        ({"module_type": "MaskedScores", "inf_count": 9}, 1.0, 0),
        ({"module_type": "MaskedScores", "inf_count": 9}, None, 1),
        ({"module_type": "MaskedScores", "inf_count": 9}, math.nan, 1),
        ({"module_type": "Linear", "inf_count": 9}, 1.0, 1),
        ({"module_type": "MultiheadAttention", "kind": "function", "inf_count": 9}, 1.0, 0),
        ({**GRADIENT, "inf_count": 9}, 1.0, 1),
        ({**SCORES, "inf_count": 9}, math.nan, 0),  # of a causal mask, before the location that is NaN
        ({**SCORES, "nan_count": 9}, math.nan, 1),
    ],
)
def test_computed_infinity_is_reported_and_a_mask_is_not(about: dict[str, Any], loss: float | None, count: int) -> None:
    events = fired("non_finite", [Step(loss=loss, rows=[row(**about)])] * 3)
    assert len([event for event in events if event.location]) == count


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_is_reported_once(loss: float) -> None:
    steps = [Step(loss=value) for value in (1.0, None, loss, loss)]
    events = fired("non_finite", [*steps, Step(phase="eval", loss=loss)])
    assert [(event.message, event.severity, event.layer) for event in events] == [
        (f"loss not finite: at step 2: {loss}, 1 before", "warning", None),
        (f"loss not finite: in the evaluation after 4 steps: {loss}", "info", None),
    ]


def test_gradients_of_a_skipped_step_raise_no_warning() -> None:
    steps = [Step(loss=1.0, skipped=step < 2, rows=[row(**GRADIENT, inf_count=5)]) for step in range(3)]
    events = fired("non_finite", steps)
    assert [(event.severity, event.step, event.value) for event in events] == [("info", 0, None), ("warning", 2, 5.0)]
    assert events[0].message.startswith("non-finite value in a step that the scaler skipped: at step 0 in a.weight ")


def test_activation_of_a_skipped_step_raises_a_warning() -> None:
    events = fired("non_finite", [Step(loss=1.0, skipped=True, rows=[row(nan_count=1)])])
    assert [event.severity for event in events] == ["warning"]


def train(probe: Probe, model: nn.Module, steps: int) -> None:
    torch.manual_seed(0)
    for _ in range(steps):
        loss = model(torch.randn(4, 3)).square().mean()
        probe.end_step(loss=loss)


def alerts_of(sink: MemorySink) -> list[dict[str, Any]]:
    return [event for event in sink.records("events") if event["rule"] == "non_finite"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("where", ["on the host", "on a device"])
def test_injected_nan_raises_an_alert(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    if where == "on a device":
        monkeypatch.setattr(Transfer, "is_complete", property(lambda transfer: not transfer._layout))
        use_device_statistics(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    counts: list[int] = []
    message = r"first recorded non-finite value: at step 3 in 0 output \(seen\): 2 NaN"
    with (
        pytest.warns(instrument.InstrumentWarning, match=message),
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


def test_resumed_probe_does_not_raise_the_alert_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    specs = {"drill": INJECT_NAN, "seen": WATCH}
    plan = make_plan(read_specs(specs), model)
    sinks = [MemorySink(), MemorySink()]
    first = Probe(plan, sinks[0], rules=read_rules(specs))
    with first:
        train(first, model, 5)
        state = first.state_dict()
    second = Probe(plan, sinks[1], rules=read_rules(specs))
    second.load_state_dict(state)
    with second:
        train(second, model, 3)
    assert len(alerts_of(sinks[0])) == 2
    assert alerts_of(sinks[1]) == []
    assert second.warnings == first.warnings


def test_state_is_equal_in_all_processes() -> None:
    """The order of a set of strings differs between processes."""
    rules = rule_set({"nan": {"rule": "non_finite"}}, [])
    feed(rules, [Step(rows=[row(layer=layer, nan_count=1) for layer in "dfahcegb"])])
    reported = rules.state_dict()["rules"]["nan"]["reported"]
    assert [layer for _, layer, *_ in reported] == [*"abcdefgh"]


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
