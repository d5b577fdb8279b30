"""Budgets: hooks over budget are sampled less often and reported; other hooks are unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attached_runs import forward_steps
from device_statistics import use_general_path
from torch import Tensor, nn

import instrument
from instrument.config.parse import parse_budget
from instrument.config.spec_file import read_specs
from instrument.hooks.clock import MAX_FACTOR, USUAL_FACTOR, overhead_factor
from instrument.plan.hook_plan import make_plan
from instrument.probe.budget import MAX_SUBSAMPLING
from instrument.probe.overhead import BLOCK, MIN_STEPS_OF_EACH
from instrument.stats.measure import Measured

Cli = Callable[..., Any]
PAUSED_STEPS = MIN_STEPS_OF_EACH // (BLOCK - 1) * BLOCK  # steps in which records pause, to measure steps without hooks


class SimulatedTime:
    """A clock that advances only by the durations that a test sets, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.costs: dict[int, float] = {}  # seconds to measure a tensor, by its number of elements
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        for module in ("instrument.hooks.clock", "instrument.probe.budget", "instrument.probe.probe"):
            monkeypatch.setattr(f"{module}.time", clock)
        monkeypatch.setattr("instrument.actions.measurement.measure", self.measure)
        use_general_path(monkeypatch)
        self.spent = 0.0

    def measure(self, tensor: Tensor, *_: object) -> Measured:
        cost = self.costs[tensor.numel()]
        self.now += cost
        self.spent += cost
        return Measured()


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    return SimulatedTime(monkeypatch)


def model_of(layers: int) -> nn.Module:
    """Return a model whose layers have outputs of different sizes, by which `SimulatedTime` identifies them."""
    return nn.Sequential(*(nn.Linear(i + 1, i + 2) for i in range(layers)))


RECORD = {"layers": "*", "kind": "forward", "action": "record"}


@torch.no_grad()
def train(simulated: SimulatedTime, probe: instrument.Probe, steps: int, step_seconds: float) -> float:
    """Run steps; return the fraction of time that hooks took."""
    model = probe.plan.layers.model
    before = simulated.spent
    for _ in range(steps):
        simulated.now += step_seconds
        model(torch.ones(1, 1))
        probe.end_step()
    return (simulated.spent - before) / (step_seconds * steps)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_budget_overhead_converges_to_the_limit(simulated: SimulatedTime, number: int) -> None:
    draw = random.Random(number)
    layers, step_seconds = draw.randrange(3, 40), 10 ** draw.uniform(-3, -1)
    budget = draw.choice([0.01, 0.02, 0.05, 0.1])
    at_first = budget * draw.uniform(1.2, 8.0)  # overhead without a budget
    weights = [draw.expovariate(1.0) for _ in range(layers)]
    simulated.costs = {i + 2: at_first * step_seconds * weight / sum(weights) for i, weight in enumerate(weights)}
    with instrument.attach(model_of(layers), {"h": RECORD}, budget={"time": budget}, rules=None) as probe:
        train(simulated, probe, 1000, step_seconds)
        ends = train(simulated, probe, 64 * 8, step_seconds)
    assert ends <= budget + 0.01
    assert ends >= budget - 0.01 or ends >= 0.7 * budget, "no more was dropped than necessary"
    events = [row for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert events
    assert all(
        "the budget is " in row["message"] and ": hook 'h' on" in row["message"]
        for row in events[2:]
        if row["severity"] == "info"
    )
    (line,) = [warning for warning in probe.warnings if warning.startswith("budget: hook 'h'")]
    assert f"; since the last change, the overhead was {probe.overhead:.1%}" in line


def test_hooks_within_the_budget_are_unchanged(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 0.0005, 3: 0.0004}
    with instrument.attach(model_of(2), {"h": RECORD}, budget={"time": "10%"}, rules=None) as probe:
        train(simulated, probe, 500, 0.01)
    assert len(probe.sink.rows["stats"]) == pytest.approx(1000 - 2 * PAUSED_STEPS, abs=2 * BLOCK)
    first, done = [row["message"] for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert first.startswith(f"in every second block of {BLOCK} of the first steps")
    assert done.startswith("recording costs 1.0 times the time measured")
    assert probe.warnings == []


def test_hidden_cost_is_measured_by_pausing_hooks(simulated: SimulatedTime) -> None:
    """Hooks evict caches: here the rest of a step slows down by as much as the hooks take."""
    simulated.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "15%"}, rules=None) as probe:
        model = probe.plan.layers.model
        for _ in range(400):
            before = simulated.spent
            model(torch.ones(1, 1))
            simulated.now += 0.01 + (simulated.spent - before)
            probe.end_step()
        assert probe.budget is not None
        assert probe.budget.measured == pytest.approx(0.1, rel=0.2), "paused at every second step"
    assert any("2.0 times" in row["message"] for row in probe.sink.records("events"))


@pytest.mark.slow
def test_shown_overhead_is_that_of_the_latest_steps(simulated: SimulatedTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overhead falls at each change. The end of a step takes 0.2 ms with and without records."""
    simulated.costs = {2: 0.0006}

    def end_step(sink: instrument.MemorySink) -> None:
        simulated.now += 0.0002

    monkeypatch.setattr(instrument.MemorySink, "end_step", end_step)
    figures = []
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "30%"}, rules=None) as probe:
        for _ in range(12):
            true = train(simulated, probe, 100, 0.001) / 1.2
            figures.append((probe.attached_hooks[0].subsampling, probe.overhead, true))
    assert [shown for rate, shown, _ in figures if rate == 1] == [None] * 3, "no check yet"
    assert [rate for rate, *_ in figures][3:] == [4] * 3 + [8] * 6
    for _, shown, true in figures[4:6] + figures[7:]:
        assert shown == pytest.approx(true, rel=0.1)
    assert figures[6][1] is None, "the last check measured other rates"


@pytest.mark.slow
def test_cost_of_subsampled_hooks_is_measured_again(simulated: SimulatedTime) -> None:
    """A record after steps without one evicts more of the caches: 9 ms that no hook timer measures."""
    simulated.costs = {2: 0.003}
    longer = steps = 0
    hooked = instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "5%"}, rules=None)
    with torch.no_grad(), hooked as probe:
        model, was_due = probe.plan.layers.model, True
        for step in range(3000):
            due, before = probe.attached_hooks[0].is_scheduled, simulated.now
            model(torch.ones(1, 1))
            simulated.now += 0.01 + (0.009 if due and not was_due and step > 60 else 0.0)
            was_due = due
            longer, steps = (longer + simulated.now - before - 0.01, steps + 1) if step >= 1976 else (longer, steps)
            probe.end_step()
        assert probe.budget is not None
        assert probe.overhead == pytest.approx(longer / (steps * 0.01), rel=0.1)
        assert probe.overhead <= 0.05


@pytest.mark.slow
def test_slower_machine_does_not_count_as_overhead(simulated: SimulatedTime) -> None:
    """All steps record; the steps without records are early ones, when a step took half the time."""
    simulated.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "15%"}, rules=None) as probe:
        train(simulated, probe, 200, 0.01)
        train(simulated, probe, 500, 0.02)
    assert probe.overhead == pytest.approx(0.05, rel=0.05)


@pytest.mark.slow
def test_evaluation_is_not_part_of_a_step(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 0.001}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "50%"}, rules=None) as probe:
        for _ in range(150):
            train(simulated, probe, 1, 0.01)
            with probe.evaluating():
                simulated.now += 0.05
    assert probe.overhead == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        {"every": 10},
        {"steps": [10, 300]},
    ],
    ids=str,
)
def test_hooks_with_rare_steps_are_never_paused(simulated: SimulatedTime, schedule: dict[str, Any]) -> None:
    """Only hooks that run at every step are paused to measure steps without records."""
    simulated.costs = {2: 0.001}
    for others in ({}, {"often": RECORD}):
        with instrument.attach(model_of(1), {"h": {**RECORD, **schedule}, **others}, budget={"time": 10.0}) as probe:
            train(simulated, probe, 400, 0.01)
        seen = {row["step"] for row in probe.sink.records("stats") if row["hook"] == "h"}
        assert seen == set(schedule.get("steps", range(0, 400, schedule.get("every", 1))))
        assert probe.warnings == []


@pytest.mark.slow
def test_hooks_in_evaluations_are_never_paused(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 0.001}
    specs = {"train": RECORD, "eval": {**RECORD, "phase": "eval"}}
    with instrument.attach(model_of(1), specs, budget={"time": 10.0}) as probe:
        for _ in range(60):
            train(simulated, probe, 1, 0.01)
            with probe.evaluating():
                probe.plan.layers.model(torch.ones(1, 1))
    assert sum(row["hook"] == "eval" for row in probe.sink.records("stats")) == 60
    assert sum(row["hook"] == "train" for row in probe.sink.records("stats")) < 60


def test_byte_budget_applies_from_the_first_step(simulated: SimulatedTime) -> None:
    spec = {**RECORD, "layers": ".", "stats": "none", "tensors": True}
    budget = {"time": "5%", "bytes": 100_000}
    probe = forward_steps(nn.Identity(), {"h": spec}, torch.ones(100, 1000), budget=budget)
    assert len(probe.sink.rows["tensors"]) * 4000 <= 100_000


@pytest.mark.parametrize("fields", [{"histogram": 1000, "quantiles": True}, {"tensors": True}], ids=str)
def test_bytes_include_all_recorded_data(fields: dict[str, Any]) -> None:
    spec = {**RECORD, "layers": ".", "stats": "none", **fields}
    with instrument.attach(nn.Identity(), {"h": spec}, budget={"bytes": "1GB"}) as probe:
        probe.plan.layers.model(torch.ones(1000))
        assert probe.budget is not None
        assert probe.recorder.bytes_of(probe.attached_hooks[0]) == pytest.approx(4000, rel=0.02)


def test_overhead_factor_uses_its_default_without_data() -> None:
    steps, slower = [1.0, 1.1, 0.9] * 6, [1.2, 1.3, 1.1] * 6
    # Twice the measured cost, with some uncertainty unless there are many samples; the last difference is too small to measure.
    assert overhead_factor(slower, steps, 0.1) == pytest.approx(1.6, abs=0.2)
    assert overhead_factor(slower * 500, steps * 500, 0.1) == pytest.approx(2.0, abs=0.01)
    assert overhead_factor(slower, steps, 1e-6) == pytest.approx(USUAL_FACTOR, abs=0.01)
    assert overhead_factor(slower[:2], steps, 0.1) == USUAL_FACTOR
    assert overhead_factor(steps * 500, slower * 500, 0.1) == 1.0, "the factor is never below 1"
    assert overhead_factor([9.0] * 100, [1.0] * 100, 0.1) == MAX_FACTOR


def test_byte_budget_never_pauses_hooks() -> None:
    probe = forward_steps(model_of(2), {"h": RECORD}, torch.ones(100, 1, 1), budget={"bytes": "1GB"}, rules=None)
    assert len(probe.sink.rows["stats"]) == 200


@pytest.mark.slow
def test_most_expensive_site_is_subsampled_first(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 0.0001, 3: 0.002}
    with instrument.attach(model_of(2), {"h": RECORD}, budget={"time": 0.15}, rules=None) as probe:
        train(simulated, probe, 600, 0.01)
    rows = {row["layer"]: row for row in probe.sink.records("coverage")}
    assert rows["0"]["fired"] == rows["0"]["expected"] == pytest.approx(600 - PAUSED_STEPS, abs=BLOCK)
    assert rows["1"]["fired"] == rows["1"]["expected"] == pytest.approx(325, abs=25)
    steps = [row["step"] for row in probe.sink.records("stats") if row["layer"] == "1"]
    assert {later - earlier for earlier, later in zip(steps[-100:], steps[-99:], strict=False)} == {2}


def test_lowest_rate_of_a_hook_is_that_of_the_next_run(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 10.0}
    model = model_of(1)
    with instrument.attach(model, {"h": RECORD}, budget={"time": "1%"}) as first:
        train(simulated, first, 2000, 0.01)
        state = first.state_dict()
    messages = [row["message"] for row in first.sink.records("events") if row["rule"] == "budget"]
    assert any(f"once in {MAX_SUBSAMPLING} scheduled steps" in message for message in messages)
    (excess,) = [message for message in messages if "all sites have the lowest rate, which does not suffice" in message]
    assert excess in first.warnings[0]

    plan = make_plan(read_specs({"h": RECORD}), model)
    second = instrument.Probe(plan, instrument.MemorySink(), budget=parse_budget({"time": "1%"}))
    second.load_state_dict(state)
    assert second.budget is not None
    assert first.budget is not None
    assert second.budget.state_dict() == first.budget.state_dict()
    assert second.attached_hooks[0].subsampling == MAX_SUBSAMPLING


@pytest.mark.slow
def test_budget_restores_sampling_after_a_burst(simulated: SimulatedTime) -> None:
    """Hooks are slow for a while; afterwards the budget is used again, and not exceeded."""
    simulated.costs = {2: 0.02}
    with instrument.attach(model_of(1), {"h": RECORD}, budget={"time": "20%"}, rules=None) as probe:
        train(simulated, probe, 400, 0.01)
        subsampling = probe.attached_hooks[0].subsampling
        simulated.costs = {2: 0.001}
        train(simulated, probe, 1000, 0.01)
        assert subsampling >= 16
        assert probe.attached_hooks[0].subsampling == subsampling // 16, (
            "sampling is restored four times only, to prevent oscillation"
        )
        assert train(simulated, probe, 640, 0.01) <= 0.2
    messages = [row["message"] for row in probe.sink.records("events") if row["rule"] == "budget"]
    assert sum("is sampled more often again" in message for message in messages) == 4


@pytest.mark.slow
def test_budget_never_changes_interventions(simulated: SimulatedTime) -> None:
    simulated.costs = {2: 0.01}
    specs = {"seen": RECORD, "half": {**RECORD, "action": "scale", "factor": 0.5}}
    with instrument.attach(model_of(1), specs, budget={"time": "1%"}) as probe:
        train(simulated, probe, 600, 0.01)
    assert len(probe.sink.rows["effects"]) == 600
    assert len(probe.sink.rows["stats"]) < 60


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_byte_budget_lasts_to_the_end_of_the_run(simulated: SimulatedTime, known: bool) -> None:
    """Ten tensors of 4 kB per step for 1,000 steps would be 40 MB."""

    allowed = 5_000_000
    model = nn.Sequential(*(nn.Identity() for _ in range(10)))
    specs = read_specs({"h": {**RECORD, "stats": "none", "tensors": True}})
    sink = instrument.MemorySink()
    steps = 1000 if known else None
    probe = instrument.Probe(make_plan(specs, model), sink, budget=parse_budget({"bytes": allowed}), steps=steps)
    with probe:
        for _ in range(1000):
            simulated.now += 0.05
            model(torch.ones(1000))
            probe.end_step()
    kept = len(sink.rows["tensors"]) * 4000
    assert kept <= allowed
    assert kept >= allowed / (2 if known else 10)
    assert max(row["step"] for row in sink.records("tensors")) > 950, "the last steps are recorded too"


@pytest.mark.slow
def test_run_reports_what_the_budget_dropped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.probe.budget.MIN_SECONDS", 0.0)
    arguments = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "hooks.activations.every=1"]
    answer = cli(*arguments, "train.steps=100", "budget.time=0.1%", "budget.bytes=2GB", "hydra.run.dir=out")
    assert answer.code == 0, answer.err
    assert "budget: hook 'activations' was sampled less often at" in answer.out
    run = instrument.load("out")
    assert (run.events.rule == "budget").sum() > 2
    assert (run.coverage.fired == run.coverage.expected).all()
    assert len(run.stats) < 100 * run.stats.layer.nunique(), "the number depends on the speed of the machine"
    assert Path("out/stats").is_dir()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"time": "5%"}, (0.05, None)),
        ({"time": 0.2}, (0.2, None)),
        ({"bytes": "2GB"}, (None, 2 * 10**9)),
        ({"bytes": "1.5 MiB"}, (None, 3 * 2**19)),
        ({"bytes": 500}, (None, 500)),
        ({}, (None, None)),
        *(({"time": time}, None) for time in ("much", 0, "-5%")),
        *(({"bytes": size}, None) for size in ("2 elephants", 0)),
        ({"money": 1}, None),
    ],
    ids=str,
)
def test_budget_is_parsed_or_refused(written: dict[str, Any], expected: tuple[float | None, int | None] | None) -> None:
    if expected is None:
        with pytest.raises(instrument.ConfigError, match="budget"):
            parse_budget(written)
        return
    budget = parse_budget(written)
    assert budget is not None
    assert (budget.time, budget.bytes) == expected
