"""Rules that only warn read the rows of several steps together. Nothing that a user sees depends on it, except for a short delay."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.capture import rule_rows
from instrument.capture.probe import Probe
from instrument.capture.recorder import Recorder
from instrument.plan.hook_plan import make_plan
from instrument.rules.deferral import MOST_STEPS
from instrument.spec.parse import parse_hooks, parse_rules
from instrument.spec.tables import TABLES

SEEN = {"layers": "*", "kind": "forward", "action": "record"}
LARGE: dict[str, Any] = {"watch": "seen", "stat": "abs_max", "above": 50.0}
SCALES = (1.0, 1.0, 100.0, 1.0)  # of the inputs: the rule LARGE fires at step 2


class Loud(instrument.Rule):
    def update(self, rows: instrument.StepRows) -> Iterator[instrument.Firing]:
        if rows.step == 2:
            yield instrument.Firing("loud", value=1.0)


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_rows, "MOST_SECONDS", float("inf"))


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.eye_(model[0].weight)
    return model


def started(rules: dict[str, Any], model: nn.Module, **seen: Any) -> tuple[Probe, instrument.MemorySink]:
    sink = instrument.MemorySink()
    return Probe(make_plan(parse_hooks({"seen": {**SEEN, **seen}}), model), sink, rules=parse_rules(rules)), sink


def run(probe: Probe, scales: tuple[float, ...] = SCALES, loss: float | None = None) -> None:
    for scale in scales:
        mean = probe.plan.layers.model(torch.full((4, 2), scale)).mean()
        probe.end_step(loss=mean if loss is None else loss)


def written(sink: instrument.MemorySink) -> list[tuple[str, int]]:
    """Return the rule and the step of each event."""
    names = TABLES["events"].names
    events = [dict(zip(names, row, strict=False)) for row in sink.rows["events"]]
    return [(row["rule"], row["step"]) for row in events if row["rule"] in ("big", "mine", "error", "loss")]


def test_warning_is_written_when_it_is_read() -> None:
    model = net()
    probe, sink = started({"big": LARGE}, model)
    with probe:
        run(probe)
        assert written(sink) == []
        assert len(probe.warnings) == 1
        assert written(sink) == [("big", 2)]
        run(probe)
        probe.flush()
        assert written(sink) == [("big", 2), ("big", 6)]
        run(probe)
    assert written(sink) == [("big", 2), ("big", 6), ("big", 10)]


@pytest.mark.parametrize(
    "rule", [{**LARGE, "then": ["warn", "checkpoint"]}, {"_target_": Loud}], ids=["with an action", "custom"]
)
def test_rules_with_consequences_and_custom_rules_read_each_step(rule: dict[str, Any]) -> None:
    probe, sink = started({"big": rule}, net())
    with probe:
        run(probe, SCALES[:3])
        assert written(sink) == [("big", 2)]


def test_slow_steps_evaluations_and_many_steps_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    probe, sink = started({"big": LARGE, "loss": {"rule": "non_finite"}}, model)
    with probe:
        run(probe)
        with probe.evaluating():
            probe.write_metrics(loss=1.0, seconds=0.1)
        assert written(sink) == [("big", 2)]
        run(probe)
        run(probe, (1.0,), loss=float("nan"))
        assert written(sink)[1:] == [("big", 6), ("loss", 8)]
        run(probe, (100.0, *[1.0] * (MOST_STEPS - 2)))
        assert len(written(sink)) == 3
        run(probe, (1.0,))
        assert written(sink)[3:] == [("big", 9)]
        monkeypatch.setattr(rule_rows, "MOST_SECONDS", -1.0)
        run(probe, (100.0,))
        assert len(written(sink)) == 5


def test_events_are_in_the_order_of_the_steps() -> None:
    probe, sink = started({"big": LARGE}, net())
    with contextlib.suppress(KeyError), probe:
        run(probe)
        probe.event("mine", "an event of the loop")
        run(probe, SCALES[:3])
        raise KeyError("missing")
    assert written(sink) == [("big", 2), ("mine", 4), ("big", 6), ("error", 7)]


@pytest.mark.parametrize("read_at", [range(12), range(0, 12, 2), range(1, 12, 3), [6], [7]])
def test_fired_rules_are_those_of_the_last_step(read_at: list[int]) -> None:
    probe, _ = started({"big": LARGE}, net())
    fired = {}
    with probe:
        for step, scale in enumerate(itertools.islice(itertools.cycle(SCALES), 12)):
            run(probe, (scale,))
            if step in read_at:
                fired[step] = probe.fired_rules
                assert probe.fired_rules == fired[step]
    assert fired == {step: {"big"} if step % 4 == 2 else set() for step in read_at}


@pytest.mark.parametrize("then", [["warn"], ["warn", "checkpoint"]])
@pytest.mark.parametrize("record", [{"stats": ["mean"]}, {"stats": [], "tensors": True}], ids=["rows", "tensors"])
def test_fired_rules_remain_after_a_checkpoint(then: list[str], record: dict[str, Any]) -> None:
    hooks = {"seen": SEEN, "saved": {"layers": "*", "kind": "state_dict_post", "action": "record", **record}}
    model = net()
    plan, rules = make_plan(parse_hooks(hooks), model), parse_rules({"big": {**LARGE, "then": then}})
    with Probe(plan, instrument.MemorySink(), rules=rules) as probe:
        run(probe, SCALES[:3])
        with probe.saving_checkpoint():
            model.state_dict()
        assert probe.fired_rules == {"big"}
        run(probe, SCALES[3:])
        assert probe.fired_rules == set()


def test_processes_without_metrics_read_steps_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "note_metrics", lambda recorder, row: None)  # as where rank 0 writes the metrics
    probe, sink = started({"big": LARGE}, net())
    with probe:
        run(probe)
        assert written(sink) == []
        assert len(probe.warnings) == 1
    probe, _ = started({"big": LARGE}, net(), every=2)
    with probe:
        run(probe, SCALES[:3])
        assert probe.fired_rules == {"big"}
        run(probe, SCALES[3:])
        assert probe.fired_rules == set()


@pytest.mark.parametrize("every", [1, 3])
def test_memory_of_kept_rows_is_bounded(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    monkeypatch.setattr(rule_rows, "MOST_ROWS", 20)
    probe, sink = started({"big": LARGE}, net(), every=every, start=2, tensors=True)
    with probe:
        for step in range(18):
            probe.batch(ids=range(4), targets=torch.arange(4))
            run(probe, SCALES[step % 4 :][:1])
        assert len(written(sink)) > 0


def test_state_contains_the_decisions_of_all_steps() -> None:
    first, sink = started({"big": {**LARGE, "for": 2}}, net())
    with first:
        run(first, (1.0, 1.0, 100.0))
        state = json.loads(json.dumps(first.state_dict()))
    second, sink = started({"big": {**LARGE, "for": 2}}, net())
    second.load_state_dict(state)
    with second:
        run(second, (100.0, 100.0))
    assert written(sink) == [("big", 3)]
