"""Budgets: what costs too much is looked at less often, said, and the rest is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import tiered
from torch import Tensor, nn

import instrument
from instrument.capture.budget import SELDOM
from instrument.capture.calibration import BLOCK, ENOUGH
from instrument.integrations.attach import read_specs
from instrument.kinds.hook_timer import MOST_FACTOR, USUAL_FACTOR, hidden_factor
from instrument.plan.sites import make_plan
from instrument.spec.parse import parse_budget

Cli = Callable[..., Any]
AWAY = ENOUGH // (BLOCK - 1) * BLOCK  # steps in which records look away, to see what a step takes without them


class World:
    """A clock that stands still but for what a test says that things take, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.costs: dict[int, float] = {}  # of measuring a tensor, by its number of elements
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in ("instrument.kinds.hook_timer", "instrument.capture.budget", "instrument.capture.probe"):
            monkeypatch.setattr(f"{module}.time", clock)
        monkeypatch.setattr("instrument.actions.record.measure", self.measure)
        self.spent = 0.0

    def measure(self, tensor: Tensor, names: tuple[str, ...]) -> list[float]:
        cost = self.costs[tensor.numel()]
        self.now += cost
        self.spent += cost
        return [0.0] * len(names)


def model_of(layers: int) -> nn.Module:
    """Each layer puts out another number of elements, by which the world knows it."""
    return nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(layers)))


RECORD = {"layers": "*", "kind": "forward", "action": "record"}


def train(world: World, probe: instrument.Probe, steps: int, bare: float) -> float:
    """The share of time that hooks took."""
    model = probe.plan.layers.model
    before = world.spent
    for _ in range(steps):
        world.now += bare
        model(torch.ones(1, 1))
        probe.end_step()
    return (world.spent - before) / (bare * steps)


@pytest.mark.parametrize("number", tiered(range(10), [2]))
def test_over_ten_workloads_the_overhead_ends_within_a_point_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    draw = random.Random(number)
    layers, bare = draw.randrange(8, 40), 10 ** draw.uniform(-3, -1)
    budget = draw.choice([0.01, 0.02, 0.05, 0.1])
    world = World(monkeypatch)
    at_first = budget * draw.uniform(1.2, 8.0)  # what it would cost
    shares = [draw.expovariate(1.0) for _ in range(layers)]
    world.costs = {i + 2: at_first * bare * share / sum(shares) for i, share in enumerate(shares)}
    with instrument.attach(model_of(layers), {"h": RECORD}, budget={"time": budget}) as probe:
        train(world, probe, 4000, bare)
        ends = train(world, probe, 64 * 8, bare)
    assert ends <= budget + 0.01
    assert ends >= budget - 0.01 or ends >= 0.7 * budget, "no more was given up than had to be"
    events = [row for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert events
    assert all("are allowed: hook 'h' on" in row["message"] for row in events[2:] if row["severity"] == "info")
    (line,) = [warning for warning in probe.warnings if warning.startswith("budget: hook 'h'")]
    assert "of a step's time in the end" in line


def test_within_the_budget_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.costs = {2: 0.0005, 3: 0.0004}
    with instrument.attach(model_of(2), {"h": RECORD}, budget={"time": "10%"}) as probe:
        train(world, probe, 500, 0.01)
    assert len(probe.sink.rows["stats"]) == pytest.approx(1000 - 2 * AWAY, abs=2 * BLOCK)
    told, done = [row["message"] for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert told.startswith(f"in every other {BLOCK} of the first steps")
    assert done.startswith("recording costs 1.0 times what is seen")
    assert probe.warnings == []


def test_what_no_stopwatch_in_a_hook_sees_is_measured_by_looking_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks push things out of the caches: here the rest of a step takes longer by as much as they take themselves."""
    world = World(monkeypatch)
    world.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "15%"}) as probe:
        model = probe.plan.layers.model
        for _ in range(1000):
            before = world.spent
            model(torch.ones(1, 1))
            world.now += 0.01 + (world.spent - before)
            probe.end_step()
        assert probe.budget is not None
        assert probe.budget.measured == pytest.approx(0.1, rel=0.2), "every second time"
    assert any("2.0 times" in row["message"] for row in probe.sink.records("events"))


def test_what_is_due_less_often_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that comes after steps without one pushes more out of the caches: 9 ms in place of none, seen by no stopwatch."""
    world = World(monkeypatch)
    world.costs = {2: 0.003}
    longer = steps = 0
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "5%"}) as probe:
        model, was_due = probe.plan.layers.model, True
        for step in range(6000):
            due, before = probe.lives[0].due, world.now
            model(torch.ones(1, 1))
            world.now += 0.01 + (0.009 if due and not was_due and step > 60 else 0.0)
            was_due = due
            longer, steps = (longer + world.now - before - 0.01, steps + 1) if step >= 4976 else (longer, steps)
            probe.end_step()
        assert probe.budget is not None
        assert probe.overhead == pytest.approx(longer / (steps * 0.01), rel=0.1)
        assert probe.overhead <= 0.05


def test_a_machine_that_becomes_slower_is_not_what_recording_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps record: those without are of the beginning, when a step took half of what it takes now."""
    world = World(monkeypatch)
    world.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "15%"}) as probe:
        train(world, probe, 200, 0.01)
        train(world, probe, 2000, 0.02)
    assert probe.overhead == pytest.approx(0.05, rel=0.05)


def test_an_evaluation_without_hooks_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "50%"}) as probe:
        for _ in range(400):
            train(world, probe, 1, 0.01)
            with probe.evaluating():
                world.now += 0.05
    assert probe.overhead == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", [{"every": 8}, {"every": 16}, {"every": 10}, {"steps": [10, 300]}], ids=str)
def test_hooks_with_rare_steps_are_never_paused(monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any]) -> None:
    """Only hooks that run at every step are paused to measure steps without records."""
    world = World(monkeypatch)
    world.costs = {2: 0.001, 3: 0.001}
    for others in ({}, {"often": RECORD}):
        with instrument.attach(model_of(2), {"h": {**RECORD, **schedule}, **others}, budget={"time": 10.0}) as probe:
            train(world, probe, 400, 0.01)
        seen = {row["step"] for row in probe.sink.records("stats") if row["hook"] == "h"}
        assert seen == set(schedule.get("steps", range(0, 400, schedule.get("every", 1))))
        assert probe.warnings == []


def test_hooks_in_evaluations_are_never_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.costs = {2: 0.001}
    specs = {"train": RECORD, "eval": {**RECORD, "phase": "eval"}}
    with instrument.attach(model_of(1), specs, budget={"time": 10.0}) as probe:
        for _ in range(60):
            train(world, probe, 1, 0.01)
            with probe.evaluating():
                probe.plan.layers.model(torch.ones(1, 1))
    assert sum(row["hook"] == "eval" for row in probe.sink.records("stats")) == 60
    assert sum(row["hook"] == "train" for row in probe.sink.records("stats")) < 60


def test_bytes_are_looked_at_from_the_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch)
    spec = {**RECORD, "stats": "none", "tensors": True}
    with instrument.attach(
        nn.Identity(), {"h": {**spec, "layers": "."}}, budget={"time": "5%", "bytes": 100_000}
    ) as probe:
        for _ in range(100):
            probe.plan.layers.model(torch.ones(1000))
            probe.end_step()
    assert len(probe.sink.rows["tensors"]) * 4000 <= 100_000


@pytest.mark.parametrize(
    ("spec", "bytes_a_row"),
    [({"stats": "none", "histogram": 1000, "quantiles": True}, 4000), ({"stats": "none", "tensors": True}, 4000)],
    ids=str,
)
def test_bytes_are_those_of_all_that_is_recorded(spec: dict[str, Any], bytes_a_row: int) -> None:
    with instrument.attach(nn.Identity(), {"h": {**RECORD, **spec, "layers": "."}}, budget={"bytes": "1GB"}) as probe:
        probe.plan.layers.model(torch.ones(1000))
        assert probe.budget is not None
        assert probe.recorder.bytes_of(probe.lives[0]) == pytest.approx(bytes_a_row, rel=0.02)


def test_a_factor_that_nobody_can_measure_is_the_usual_one() -> None:
    steps, slower = [1.0, 1.1, 0.9] * 6, [1.2, 1.3, 1.1] * 6
    assert hidden_factor(slower, steps, 0.1) == pytest.approx(1.6, abs=0.2), "twice what is seen, not quite certain"
    assert hidden_factor(slower * 500, steps * 500, 0.1) == pytest.approx(2.0, abs=0.01), "certain"
    assert hidden_factor(slower, steps, 1e-6) == pytest.approx(USUAL_FACTOR, abs=0.01), "too little to be seen at all"
    assert hidden_factor(slower[:2], steps, 0.1) == USUAL_FACTOR
    assert hidden_factor(steps * 500, slower * 500, 0.1) == 1.0, "never less than what is seen"
    assert hidden_factor([9.0] * 100, [1.0] * 100, 0.1) == MOST_FACTOR


def test_a_budget_of_bytes_looks_away_from_nothing() -> None:
    with instrument.attach(model_of(2), {"h": RECORD}, budget={"bytes": "1GB"}) as probe:
        for _ in range(100):
            probe.plan.layers.model(torch.ones(1, 1))
            probe.end_step()
    assert len(probe.sink.rows["stats"]) == 200


def test_the_costliest_site_is_thinned_first_and_the_ledger_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.costs = {2: 0.0001, 3: 0.002}
    with instrument.attach(model_of(2), {"h": RECORD}, budget={"time": 0.15}) as probe:
        train(world, probe, 1000, 0.01)
    rows = {row["layer"]: row for row in probe.sink.records("coverage")}
    assert rows["0"]["fired"] == rows["0"]["expected"] == pytest.approx(1000 - AWAY, abs=BLOCK)
    assert rows["1"]["fired"] == rows["1"]["expected"] == pytest.approx(525, abs=40)
    steps = [row["step"] for row in probe.sink.records("stats") if row["layer"] == "1"]
    assert {later - earlier for earlier, later in zip(steps[-100:], steps[-99:], strict=False)} == {2}


def test_what_can_be_thinned_no_more_does_without_tensors_and_then_without_l1_and_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    world.costs = {2: 10.0}
    spec = {**RECORD, "stats": ["mean", "l1"], "tensors": True}
    model = model_of(1)
    with instrument.attach(model, {"h": spec}, budget={"time": "1%"}) as first:
        train(world, first, 6000, 0.01)
        state = first.state_dict()
    told = [row["message"] for row in first.sink.records("events") if row["rule"] == "budget"]
    assert any(f"once in {SELDOM} times" in message for message in told)
    assert any(message.endswith("goes on without tensors") for message in told)
    assert any(message.endswith("goes on without l1") for message in told)
    assert len(first.sink.rows["tensors"]) < len(first.sink.rows["stats"])

    plan = make_plan(read_specs({"h": spec}), model)
    second = instrument.Probe(plan, instrument.MemorySink(), budget=parse_budget({"time": "1%"}))
    second.load_state_dict(state)
    assert second.budget is not None
    assert first.budget is not None
    assert second.budget.state_dict() == first.budget.state_dict()
    assert second.lives[0].thin == SELDOM
    assert second.lives[0].action.statistics == ("numel", "mean", "nan_count", "inf_count")
    assert not second.lives[0].action.keeps_tensors


def test_what_was_thinned_for_a_burst_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something else made hooks slow for a while; when that is over, the budget is used again, and not exceeded."""
    world = World(monkeypatch)
    world.costs = {2: 0.02}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "20%"}) as probe:
        train(world, probe, 400, 0.01)
        thinned = probe.lives[0].thin
        world.costs = {2: 0.001}
        train(world, probe, 4000, 0.01)
        assert thinned >= 16
        assert probe.lives[0].thin == thinned // 16, "four times, so that it does not rise and fall for ever"
        assert train(world, probe, 640, 0.01) <= 0.2
    told = [row["message"] for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert sum(message.endswith(" again") for message in told) == 4


def test_interventions_are_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.costs = {2: 0.01}
    specs = {"seen": RECORD, "half": {**RECORD, "action": "scale", "factor": 0.5}}
    with instrument.attach(model_of(1), specs, budget={"time": "1%"}) as probe:
        train(world, probe, 1000, 0.01)
    assert len(probe.sink.rows["effects"]) == 1000
    assert len(probe.sink.rows["stats"]) < 100


@pytest.mark.parametrize("known", [True, False])
def test_bytes_last_to_the_end(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Ten tensors of 4 kB a step for 2,000 steps would be 80 MB."""

    world = World(monkeypatch)
    allowed = 10_000_000
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    specs = read_specs({"h": {**RECORD, "stats": "none", "tensors": True}})
    sink = instrument.MemorySink()
    steps = 2000 if known else None
    probe = instrument.Probe(make_plan(specs, model), sink, budget=parse_budget({"bytes": "10MB"}), steps=steps)
    with probe:
        for _ in range(2000):
            world.now += 0.05
            model(torch.ones(1000))
            probe.end_step()
    kept = len(sink.rows["tensors"]) * 4000
    assert kept <= allowed
    assert kept >= allowed / (2 if known else 10)
    assert max(row["step"] for row in sink.records("tensors")) > 1900, "there are some of the last steps too"


def test_a_run_says_in_its_summary_and_events_what_it_did_without(cli: Cli) -> None:
    arguments = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "hooks.activations.every=1"]
    answer = cli(*arguments, "train.steps=600", "budget.time=0.1%", "budget.bytes=2GB", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    assert "budget: hook 'activations' was looked at less often at" in answer.out
    run = instrument.load("out")
    assert (run.events.rule == "budget").sum() > 2
    assert (run.coverage.fired == run.coverage.expected).all()
    assert len(run.stats) < 600 * run.stats.layer.nunique(), "how many fewer depends on the speed of the machine"
    assert Path("out/stats").is_dir()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"time": "5%"}, (0.05, None)),
        ({"time": 0.2}, (0.2, None)),
        ({"bytes": "2GB"}, (None, 2 * 10**9)),
        ({"bytes": "1.5 MiB"}, (None, 3 * 2**19)),
        ({"bytes": 500}, (None, 500)),
        ({}, (None, None)),
    ],
    ids=str,
)
def test_shares_and_sizes_are_read(written: dict[str, Any], meant: tuple[float | None, int | None]) -> None:
    budget = parse_budget(written)
    assert budget is not None
    assert (budget.time, budget.bytes) == meant


@pytest.mark.parametrize(
    "written", [{"time": "much"}, {"time": 0}, {"time": "-5%"}, {"bytes": "2 elephants"}, {"bytes": 0}, {"money": 1}]
)
def test_what_is_neither_is_refused(written: dict[str, Any]) -> None:
    with pytest.raises(instrument.ConfigError, match="budget"):
        parse_budget(written)
