"""The rows of the recorder reach the rules in their step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_hooks, parse_rules
from instrument.config.spec_file import read_rules
from instrument.plan.hook_plan import make_plan
from instrument.probe.probe import Probe
from instrument.probe.recorder import Recorder
from instrument.rules.step_rows import StepRows

SEEN = {"layers": "*", "kind": "forward", "action": "record"}
LARGE: dict[str, Any] = {"watch": "seen", "stat": "abs_max", "above": 50.0}
SCALES = (1.0, 1.0, 100.0, 1.0)  # of the inputs: the rule LARGE fires at step 2


class Loud(instrument.Rule):
    def update(self, rows: instrument.StepRows) -> Iterator[instrument.Firing]:
        if rows.step == 2:
            yield instrument.Firing("loud", value=1.0)


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
    rows = sink.records("events")
    return [(row["rule"], row["step"]) for row in rows if row["rule"] in ("big", "mine", "error", "loss")]


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    "rule",
    [LARGE, {**LARGE, "then": ["warn", "checkpoint"]}, {"_target_": Loud}],
    ids=["warning", "with an action", "custom"],
)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("has_metrics", [True, False])
def test_rule_fires_in_its_step(
    monkeypatch: pytest.MonkeyPatch, rule: dict[str, Any], every: int, has_metrics: bool
) -> None:
    if not has_metrics:  # as where rank 0 writes the metrics
        monkeypatch.setattr(Recorder, "add_metrics", lambda recorder, row, cells, now: None)
    probe, sink = started({"big": rule}, net(), every=every)
    with probe:
        for step in range(9):
            run(probe, (SCALES[step % 4],))
            fires = step == 2 or (step == 6 and "watch" in rule)
            assert probe.fired_rules == ({"big"} if fires else set())
            assert written(sink)[-1:] == ([("big", step)] if fires else written(sink)[-1:])
    assert written(sink) == ([("big", 2), ("big", 6)] if "watch" in rule else [("big", 2)])
    assert len(probe.warnings) == 1


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 8]), (3, [0, 1, 9])])
def test_rules_get_no_rows_of_uneventful_steps(
    monkeypatch: pytest.MonkeyPatch, every: int, expected: list[int]
) -> None:
    probe, sink = started({"big": LARGE}, net(), every=every)
    read: list[int] = []
    add = StepRows.__init__
    monkeypatch.setattr(
        StepRows, "__init__", lambda rows, step, *more, **named: (read.append(step), add(rows, step, *more, **named))[1]
    )
    with probe:
        run(probe, (*[1.0] * 8, *[100.0] * (1 + every // 2)))
    assert read == expected
    assert written(sink) == [("big", read[-1])]


class Twice(nn.Module):
    """A block that adds its input twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.parametrize(("scale", "count"), [(1.0, 1), (0.5, 0)])
def test_blocks_that_add_their_input_are_found_in_the_finished_run_too(
    tmp_path: Path, scale: float, count: int
) -> None:
    change = {"layers": ".", "kind": "forward", "role": "change", "action": "record"}
    stats = ["mean", "std", "rms", "branch_ratio", "input_cosine"]
    output = {"layers": ".", "kind": "forward", "action": "record", "stats": stats[:3]}
    rules = {"start": {"rule": "poor_initialization"}}
    hooks = {"change": {**change, "stats": stats[3:]}, "output": output}
    model = Twice()
    with instrument.attach(model, hooks, out=tmp_path / "run", rules=rules) as probe:
        model(scale * torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
        probe.end_step()
    run = instrument.load(tmp_path / "run")
    messages = run.events[run.events["rule"] == "start"]["message"].tolist()
    assert len(messages) == count
    assert [event.message for event in rule_events(run, parse_rules(rules))] == messages


@pytest.mark.slow
def test_decisions_equal_those_on_the_finished_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hooks = {
        "seen": SEEN,
        "gradients": {"layers": "*", "kind": "parameter_grad", "action": "record", "every": 3},
        "dead": {**SEEN, "types": "ReLU", "stats": ["dead_fraction"]},
    }
    rules = {"big": {**LARGE, "above": 5.0}, "spike": {"rule": "loss_spike", "window": 8, "after": 4}}
    with instrument.attach(model, hooks, optimizer=optimizer, out=tmp_path / "run", rules=rules) as probe:
        for step in range(210):
            scale = {50: 1e6, 120: float("nan"), 200: 1e3}.get(step, 1.0)
            torch.manual_seed(step)
            loss = model(scale * torch.randn(4, 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if scale == 1.0:
                optimizer.step()
            probe.end_step(loss=loss)
            if step == 150:
                with probe.evaluating():
                    probe.write_metrics(loss=1.0, seconds=0.1)
    run = instrument.load(tmp_path / "run")
    events = rule_events(run, read_rules(hooks, rules))
    of_rules = run.events[run.events["rule"].isin([*read_rules(hooks, rules)])]
    assert len(events) > 10
    assert [(event.rule, event.step, event.message) for event in events] == [
        *of_rules[["rule", "step", "message"]].itertuples(index=False, name=None)
    ]


def test_events_are_in_the_order_of_the_steps() -> None:
    probe, sink = started({"big": LARGE}, net())
    with contextlib.suppress(KeyError), probe:
        run(probe)
        probe.event("mine", "an event of the loop")
        run(probe, SCALES[:3])
        raise KeyError("missing")
    assert written(sink) == [("big", 2), ("mine", 4), ("big", 6), ("error", 7)]


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


def test_state_before_the_first_step_ends_leaves_the_layers_to_the_resumed_probe() -> None:
    first, sink = started({"big": LARGE}, net())
    with first:
        states = [first.state_dict()]
        run(first, SCALES[:1])
        states.append(first.state_dict())
    assert len(sink.records("layers")) == 2
    for state, count in zip(states, (2, 0), strict=True):
        probe, sink = started({"big": LARGE}, net())
        probe.load_state_dict(state)
        with probe:
            run(probe, SCALES[:1])
        assert len(sink.records("layers")) == count


def test_state_that_is_loaded_while_attached_leaves_the_layers_to_this_probe() -> None:
    first, _ = started({"big": LARGE}, net())
    with first:
        run(first, SCALES[:1])
        state = first.state_dict()
    probe, sink = started({"big": LARGE}, net())
    with probe:
        probe.load_state_dict(state)
        run(probe, SCALES[:1])
    assert len(sink.records("layers")) == 2


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
