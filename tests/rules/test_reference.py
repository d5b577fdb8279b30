"""Rules on the ranges of healthy runs: the ranges, their margins and file, decisions, and errors."""

from __future__ import annotations

import functools
import json
import math
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from attached_runs import train_steps
from conftest import Answer
from rule_rows import GRADIENT, OUTPUT, PARAMETER, Step, feed, rule_set
from run_folders import write_run
from scipy import stats
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import ConfigError
from instrument.actions.base import StepContext
from instrument.analysis.reference import make_reference
from instrument.analysis.rule_events import rule_events
from instrument.commands import findings, reference
from instrument.config.parse import parse_rules
from instrument.hooks.clock import Clock
from instrument.integrations.attached_probe import AttachedProbe
from instrument.probe import value_counts
from instrument.relations.observations import BACKWARDS
from instrument.rules.reference import ReferenceRanges
from instrument.rules.reference_ranges import BUCKETS, COUNTS, STARTS, Reference, difference_of_counts, phase_of
from instrument.rules.rule import Part
from instrument.rules.rule_set import RuleEvent
from instrument.rules.step_rows import RelationRow

ROUNDING = 2 / 2**8  # of the numbers of a reference, on the safe side
HOOKS = {
    "outputs": {"layers": "**", "kind": "forward", "action": "record"},
    "updates": {"layers": "**", "kind": "step_post", "role": "update", "action": "record"},
}


def write_values(
    folder: Path,
    values: Mapping[str, Sequence[Any]],
    every: int = 1,
    metrics_of: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Path:
    """Write a run with values of statistics at one location, one for each step, and rows of the table `metrics`."""
    count = len(next(iter(values.values())))
    rows = [
        {"step": every * at, "numel": 9, "nan_count": 0, "inf_count": 0, **{name: values[name][at] for name in values}}
        for at in range(count)
    ]
    return write_run(folder, rows={"stats": rows, "metrics": metrics_of}, **options)


def write_healthy(
    folder: Path, numbers: Sequence[Sequence[float]], statistic: str = "rms", role: str = "output"
) -> Path:
    for at, values in enumerate(numbers):
        write_values(folder / str(at), {statistic: values, "role": [role] * len(values)})
    return folder


def table_of(made: Reference) -> pd.DataFrame:
    return made.table.to_pandas().set_index("step")


def stepped(values: Sequence[float | None], statistic: str = "rms", every: int = 1, **about: Any) -> list[Step]:
    row = {**OUTPUT, "numel": 9, "nan_count": 0, "inf_count": 0, **about}
    return [Step(rows=[{**row, statistic: value}], step=every * at, loss=1.0) for at, value in enumerate(values)]


def fired(entry: Mapping[str, Any], steps: Sequence[Step], *, with_numbers: bool = True) -> list[RuleEvent]:
    events: list[RuleEvent] = []
    feed(rule_set({"r": {"rule": "reference", **entry}}, events), steps, with_numbers=with_numbers)
    return events


def test_phases_of_training_are_two_in_each_octave() -> None:
    assert [*STARTS[:12]] == [0, 1, 2, 3, 4, 6, 8, 12, 16, 23, 32, 46]
    assert [*phase_of(np.array([0, 1, 5, 6, 45, 46, 10**12]))] == [0, 1, 4, 5, 10, 11, len(STARTS) - 1]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("count", "statistic", "role"),
    [
        (2, "rms", "output"),
        (3, "rms", "output"),
        (6, "rms", "output"),
        (3, "mean", "output"),
        (3, "row_entropy", "attention"),
    ],
)
def test_ranges_and_margins_are_those_of_numpy(tmp_path: Path, count: int, statistic: str, role: str) -> None:
    """A mean has no fixed scale: its margin is a difference, from the variances of a phase and its neighbors.

    Attention differs more between runs as it specializes, and has an exponential tail: the same variances, and the squared margin.
    """
    random = np.random.default_rng(count)
    runs = np.exp(random.normal(size=(count, 1)) + random.normal(scale=0.1, size=(count, 8)))
    table = table_of(make_reference(write_healthy(tmp_path, runs.tolist(), statistic, role), [statistic]))
    phases = {0: [0], 1: [1], 2: [2], 3: [3], 4: [4, 5], 6: [6, 7]}
    assert [*table.index] == [*phases]
    is_ratio, is_pooled = statistic != "mean", statistic == "rms"
    numbers = np.log(runs) if is_ratio else runs
    variances = [
        np.mean([edge(numbers[:, steps], axis=1).var(ddof=1) for edge in (np.min, np.max)]) for steps in phases.values()
    ]
    t = stats.t.ppf(1 - 1e-5, (4 if is_pooled else 3) * (count - 1))
    for at, (start, steps) in enumerate(phases.items()):
        low, high, spread = table.loc[start, ["low", "high", "spread"]]
        assert low == pytest.approx(runs[:, steps].min(), rel=ROUNDING)
        assert low <= runs[:, steps].min()
        assert high == pytest.approx(runs[:, steps].max(), rel=ROUNDING)
        assert high >= runs[:, steps].max()
        variance = max(variances[at], np.mean(variances if is_pooled else variances[max(0, at - 1) : at + 2]))
        margin = t * np.sqrt(variance * (1 + 1 / count)) * (2 if role == "attention" else 1)
        assert spread == pytest.approx(np.exp(margin) if is_ratio else margin, rel=ROUNDING)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("statistic", "runs", "spread"),
    [
        ("rms", [[2.0], [2.0]], 1.25),
        ("abs_max", [[2.0], [2.0]], 1.25**2),
        ("abs_max", [[2.0]], 4.0),
        ("zero_fraction", [[0.5], [0.5]], 0.1),
        ("mean", [[-2.0], [-2.0]], 0.5),
        ("rms", [[2.0]], 4.0),
        ("rms", [[2.0] * 4 + [1.0, 9.0]], 9.0),
        ("zero_fraction", [[0.5]], 0.3),
        ("mean", [[-2.0]], 2.0),
        ("rms", [[0.0], [0.0]], 1.25),
        ("numel", [[2.0], [2.0]], 0.5),
    ],
)
def test_margin_has_a_floor(tmp_path: Path, statistic: str, runs: list[list[float]], spread: float) -> None:
    made = make_reference(write_healthy(tmp_path, runs, statistic), [statistic])
    assert table_of(made)["spread"].iloc[-1] == pytest.approx(spread, rel=ROUNDING)


@pytest.mark.slow
def test_rule_fires_outside_of_the_range_and_its_margin(tmp_path: Path) -> None:
    entry = {"from": str(write_healthy(tmp_path, [[1.0] * 8, [2.0] * 8]))}
    _, high = make_reference(tmp_path).limits(["rms"], 1.0)
    limit = float(high[0, 0, 0])
    assert fired(entry, stepped([limit * 0.99] * 8)) == []
    (event,) = fired(entry, stepped([1.0, 1.0, limit * 1.01, 1.0, limit * 1.01, limit * 1.1, 1.0]))
    assert (event.step, event.layer, event.severity) == (5, "a", "warning")
    assert event.value == limit * 1.1
    assert event.threshold == pytest.approx(limit)
    assert event.message.endswith("1 to 2 in 2 healthy runs")
    (event,) = fired({**entry, "margin": 0, "for": 1}, stepped([1.0, 2.1, 1.0]))
    assert (event.step, event.threshold) == (1, 2.0)
    (event,) = fired({**entry, "margin": 0, "for": 1}, stepped([1.0, 0.5, 1.0]))
    assert (event.step, event.threshold) == (1, 1.0)


@pytest.mark.spread(1)
@pytest.mark.parametrize("recorded", [1, 2, 3])
def test_location_recorded_at_fewer_steps_has_to_be_outside_at_each(tmp_path: Path, recorded: int) -> None:
    entry = {"from": str(write_healthy(tmp_path, [[1.0] * recorded] * 2)), "margin": 0, "for": 3}
    (event,) = fired(entry, stepped([9.0] * recorded))
    assert event.step == recorded - 1
    assert fired(entry, stepped([9.0] * (recorded - 1) + [1.0])) == []


def in_layers(values: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {**OUTPUT, "layer": f"l{at}", "numel": 9, "nan_count": 0, "inf_count": 0, "rms": each}
        for at, each in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("margins", "more", "count"),
    [
        ((0.5, 0.5, 0.0, 0.0), {}, 1),  # the root mean square is 0.354 margins, above 1 / 3
        ((0.45, 0.45, 0.0, 0.0), {}, 0),  # 0.318
        ((-0.7, 0.0, 0.0, 0.0), {}, 1),  # 0.35, below the range
        ((0.9, 0.9, 0.9), {}, 0),  # three locations
        ((0.5, 0.5, 0.5, 0.5, 1.01), {}, 0),  # one location is reported instead
        ((0.5, 0.5, 0.0, 0.0), {"margin": 2}, 0),
        ((0.5, 0.5, 0.0, 0.0), {"for": 3}, 0),
        ((0.5, 0.5, 0.0, 0.0), {"margin": 0, "for": 3}, 0),
    ],
)
def test_many_locations_within_the_margin_are_reported_together(
    tmp_path: Path, margins: Sequence[float], more: Mapping[str, Any], count: int
) -> None:
    for at, value in enumerate([1.0, 2.0]):
        rows = [{"step": step, **each} for step in range(4) for each in in_layers([value] * len(margins))]
        write_run(tmp_path / str(at), rows={"stats": rows})
    file = tmp_path / "ranges"  # is read faster than the runs
    low, high = (float(each[0, 0, 0]) for each in make_reference(tmp_path, out=file).limits(["rms"], 1.0))
    values = [2 * (high / 2) ** each if each > 0 else low**-each for each in margins]
    usual = [1.5] * len(margins)
    rows = [Step(rows=in_layers(each), step=at, loss=1.0) for at, each in enumerate([values, usual, values, values])]
    entry = {"rule": "reference", "from": str(file), **more}
    events: list[RuleEvent] = []
    first, second = (rule_set({"r": entry}, events) for _ in range(2))
    feed(first, rows[:3], with_numbers=True)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    feed(second, rows[3:], with_numbers=True)
    together = [
        event for event in events if event.message.startswith("outside of the ranges in many places: at step 3 in l0 ")
    ]
    assert len(together) == count
    assert events == fired(entry, rows, with_numbers=False)
    for event in together:
        mean = np.sqrt(np.mean(np.square(margins)))
        assert (
            f"1 to 2 in 2 healthy runs; {mean:.2g} margins beyond the ranges, the root mean square of 4 locations"
            in event.message
        )
        assert (event.value, event.threshold) == (values[0], pytest.approx(high if margins[0] > 0 else low))


def test_many_locations_within_the_margin_of_one_run_are_usual(tmp_path: Path) -> None:
    """A whole training can have gradients of twice the size, since its loss falls later."""
    rows = [{"step": step, **each} for step in range(4) for each in in_layers([1.0] * 4)]
    write_run(tmp_path / "0", rows={"stats": rows})
    entry = {"from": str(tmp_path)}
    for value, count in ((3.0, 0), (5.0, 4)):  # the margin is a factor of 4
        steps = [Step(rows=in_layers([value] * 4), loss=1.0)] * 4
        assert len(fired(entry, steps)) == count


def test_rule_compares_by_step_and_ends_with_the_reference(tmp_path: Path) -> None:
    write_values(tmp_path / "a", {"rms": [1.0, 2.0, 4.0]}, every=10)  # steps 0, 10 and 20, until step 22
    entry = {"from": str(tmp_path), "margin": 0, "for": 1}
    assert fired(entry, stepped([1.0] + [9.0] * 7 + [2.0] * 4 + [9.0] * 4 + [4.0] * 7 + [9.0] * 40)) == []
    assert [event.step for event in fired(entry, stepped([1.0, 3.0], every=20))] == [20]


def test_rule_reads_other_locations_of_no_reference(tmp_path: Path) -> None:
    entry = {"from": str(write_healthy(tmp_path, [[1.0] * 4])), "for": 1}
    assert fired(entry, stepped([99.0] * 4, layer="b") + stepped([99.0], **GRADIENT)) == []
    assert fired({**entry, "hook": "other"}, stepped([99.0])) == []
    assert len(fired(entry, stepped([99.0], module_type="Other"))) == 1


@pytest.mark.parametrize(("path", "last", "low"), [("weight", 2.0, 1), ("bias", 2.0, 0), ("bias", 1.1, 1)])
def test_bias_may_cross_zero_if_it_changes(tmp_path: Path, path: str, last: float, low: int) -> None:
    parameter = {**{name: PARAMETER[name] for name in ("kind", "role")}, "path": path}
    values = {**{name: [value] * 4 for name, value in parameter.items()}, "rms": [1.0, 1.0, 1.0, last]}
    entry = {"from": str(write_values(tmp_path / "a", values))}
    assert len(fired(entry, stepped([1e-6] * 4, **parameter))) == low
    assert len(fired(entry, stepped([99.0] * 4, **parameter))) == 1


def test_parameter_that_no_healthy_run_has_is_outside(tmp_path: Path) -> None:
    parameter = {name: PARAMETER[name] for name in ("kind", "role", "path")}
    values = {**{name: [value] * 4 for name, value in parameter.items()}, "rms": [1.0] * 4}
    entry = {"from": str(write_values(tmp_path / "a", values))}
    known = stepped([1.0] * 4, **parameter)
    rules = {"r": {"rule": "reference", **entry}}
    events: list[RuleEvent] = []
    first, resumed = (rule_set(rules, events) for _ in range(2))
    steps = [{**step, "rows": [*step["rows"], {**step["rows"][0], "layer": "tied"}]} for step in known]
    feed(first, steps[:2])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    feed(resumed, steps[2:])
    (event,) = events
    assert event.message == "new parameter: at step 0 in tied.weight param (seen): no healthy run has it"
    assert (event.layer, event.value, event.threshold) == ("tied", 1.0, None)
    # The same parameter of another hook, of which the healthy runs recorded nothing, and another tensor are no new parameters.
    for other in ({"hook": "more"}, {"role": "update"}):
        assert fired(entry, known + stepped([1.0], **{**parameter, "layer": "tied", **other})) == []


def test_gradients_of_zero_of_one_part_are_outside_if_those_of_healthy_runs_are_not(tmp_path: Path) -> None:
    entry = {"from": str(write_healthy(tmp_path, [[1.0] * 4] * 2, role="grad_output"))}
    steps = stepped([0.0] * 4, role="grad_output", zero_fraction=1.0)
    for step in steps:
        step["rows"].append({**step["rows"][0], "layer": "b", "zero_fraction": 0.0})
    (event,) = fired(entry, steps)
    assert (event.severity, event.value, event.layer) == ("warning", 0.0, "a")


def test_input_that_repeats_only_in_the_new_run_is_reported(tmp_path: Path) -> None:
    hooks = {"inputs": {"layers": "*", "kind": "forward_pre", "action": "record", "stats": ["rms", "fingerprint"]}}

    def run(name: str, seed: int, *, repeats: bool, **options: Any) -> AttachedProbe:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"data": nn.Bilinear(3, 3, 2), "constant": nn.Linear(2, 1)})  # is never called itself
        data, mask, constant = torch.randn(3, 8, 3), torch.ones(8, 3), torch.ones(8, 2)
        with instrument.attach(model, hooks, out=tmp_path / name, **options) as probe:
            for batch in data[[0, 0, 1] if repeats else [0, 1, 2]]:
                model["data"](mask, mask)
                model["constant"](model["data"](mask, batch) * 0 + constant)
                probe.end_step()
        return probe

    for seed in range(3):
        run(f"healthy/{seed}", seed, repeats=False, rules=None)
    rules = {"same": {"rule": "reference", "from": str(tmp_path / "healthy")}}
    with pytest.warns(instrument.InstrumentWarning, match="repeated input"):
        probe = run("new", 7, repeats=True, rules=rules)
    (message,) = probe.events.loc[probe.events["rule"] == "same", "message"]
    text = "it has the bits of the step before; they differ in 3 healthy runs"
    assert message == f"repeated input: at step 1 in data[1] input (inputs): {text}"
    assert [event.message for event in rule_events(instrument.load(tmp_path / "new"), parse_rules(rules))] == [message]
    finding = probe.findings.iloc[0]
    assert (finding["layer"], finding["advice"]) == ("data", ReferenceRanges.advice_in["forward"])
    for other in (run("other", 8, repeats=False, rules=rules), run("more", 7, repeats=True, rules={
        "same": {**rules["same"], "stats": ["rms"]}
    })):  # fmt: skip
        assert "same" not in set(other.events["rule"])
    run("healthy/3", 4, repeats=True, rules=None)
    assert "same" not in set(run("again", 7, repeats=True, rules=rules).events["rule"])


def test_hook_set_of_inputs_shows_features_that_no_sample_of_a_batch_has(tmp_path: Path) -> None:
    def run(name: str, seed: int, kept: int, **options: Any) -> AttachedProbe:
        torch.manual_seed(seed)
        states = nn.functional.one_hot(torch.randint(kept, (2, 64)), 8).float()
        assert (states == 0).all(1).float().mean(1).tolist() == [1 - kept / 8] * 2
        return train_steps(nn.Sequential(nn.Linear(8, 1)), "inputs", states, out=tmp_path / name, **options)

    for seed in range(3):
        run(f"healthy/{seed}", seed, 8, rules=None)
    with pytest.warns(instrument.InstrumentWarning, match="outside of the reference"):
        probe = run("new", 3, 5, rules={"same": {"rule": "reference", "from": str(tmp_path / "healthy")}})
    message = probe.events.loc[probe.events["rule"] == "same", "message"].iloc[0]
    text = "dead_fraction 0.375, above 0.1001; 0 to 0 in 3 healthy runs"  # 3 of 8; rms and std are the same
    assert message == f"outside of the reference: at step 1 in .[0] input (model_inputs): {text}"


def test_hidden_inputs_of_constant_data_are_not_compared(tmp_path: Path) -> None:
    hooks = {"inputs": {"layers": "*", "kind": "forward_pre", "action": "record", "stats": ["rms", "fingerprint"]}}

    def run(name: str, rate: float, **options: Any) -> AttachedProbe:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        return train_steps(model, hooks, torch.ones(3, 4, 2), lr=rate, out=tmp_path / name, **options)

    run("healthy", 0.1, rules=None)
    with pytest.warns(instrument.InstrumentWarning, match="other setting"):
        probe = run("new", 0.0, rules={"same": {"rule": "reference", "from": str(tmp_path / "healthy")}})
    assert not any("repeated" in message for message in probe.events["message"])


def test_missing_range_of_a_statistic_is_not_compared(tmp_path: Path) -> None:
    write_values(
        tmp_path / "a", {"rms": [1.0, 1.0], "std": [None, 1.0], "kurtosis": [1.0, 2.0], "row_entropy": [1.0, 2.0]}
    )
    assert make_reference(tmp_path).statistics == ("rms", "std", "row_entropy")
    assert (
        make_reference(tmp_path, ["kurtosis"]).statistics
        == make_reference(tmp_path, "kurtosis").statistics
        == ("kurtosis",)
    )
    with pytest.raises(ConfigError, match="runs: there is no run"):
        make_reference([])
    assert fired({"from": str(tmp_path), "for": 1}, stepped([99.0], "std")) == []
    (event,) = fired({"from": str(tmp_path), "for": 1}, stepped([1.0, 99.0], "std"))
    assert event.message.startswith("outside of the reference: at step 1 in a output (seen): std 99, above 4;")


@pytest.mark.parametrize("is_watched", [True, False])
def test_gradients_of_zero_are_reported_if_that_is_asked(tmp_path: Path, *, is_watched: bool) -> None:
    """Default rules only note a part whose loss has a factor of 0."""
    about = {**GRADIENT, "role": "grad_output", "numel": 9, "nan_count": 0, "inf_count": 0}
    rows = [{**about, "layer": layer, "zero_fraction": 0.1} for layer in ("b", "a")]
    write_run(tmp_path / "healthy", rows={"stats": rows})
    watch = {"watch": "gradients", "stat": "zero_fraction", "above": 0.9, "then": "warn"}
    rule = watch if is_watched else {"rule": "reference", "from": str(tmp_path), "for": 1}
    events: list[RuleEvent] = []
    run = Step(rows=[{**rows[0], "zero_fraction": 1.0}, rows[1]], step=0, loss=1.0)
    feed(rule_set({"r": rule}, events), [run], with_numbers=True)
    assert [(event.layer, event.severity, event.value) for event in events] == [("b", "warning", 1.0)]


def test_runs_in_which_rules_warned_are_named(tmp_path: Path) -> None:
    events = [
        {"step": 3, "rule": "loss_spike", "severity": "warning", "message": "loss spike: at step 3: loss 9"},
        {"step": 4, "rule": "coverage", "severity": "warning", "message": "hook h never fired"},
    ]
    metrics = [{"step": 0, "phase": "train", "loss": 1.0}]
    write_run(tmp_path / "a", rows={"metrics": metrics})
    rules = {"rules": {"loss_spike": {}, "overfit": {}}}
    for folder in ("b", "c/b"):
        write_run(tmp_path / folder, rows={"metrics": metrics, "events": events}, config=rules)
    text = r"rules warned in 2 of 3 runs: b \(loss_spike\), b \(loss_spike\); leave out those that are not healthy"
    with pytest.warns(instrument.InstrumentWarning, match=text):
        make_reference([tmp_path / "[ab]", tmp_path / "c"])
    with pytest.warns(instrument.InstrumentWarning) as warned:
        reference.main(["check", str(tmp_path / "a"), "--reference", str(tmp_path / "c")])
    assert sum("rules warned in 1 of 1 runs: b" in str(each.message) for each in warned) == 1


@pytest.mark.parametrize(
    ("metric", "values", "spread"),
    [("lr", (0.1, 0.1), 1.25), ("loss", (-2.0, -2.0), 0.5), ("accuracy", (0.5, 0.5), 0.1), ("grad_norm", (3.0,), 4.0)],
)
def test_margin_of_a_metric_has_a_floor(tmp_path: Path, metric: str, values: Sequence[float], spread: float) -> None:
    for at, value in enumerate(values):
        write_run(tmp_path / str(at), rows={"metrics": [{"step": 0, "phase": "train", metric: value}]})
    made = make_reference(tmp_path)
    assert made.statistics == (metric,)
    assert table_of(made).loc[0, "spread"] == pytest.approx(spread, rel=ROUNDING)


@pytest.mark.parametrize("last", [2.0, 4.0])
def test_margin_of_the_mean_loss_is_that_of_a_single_series(tmp_path: Path, last: float) -> None:
    for at, loss in enumerate((2.0, last)):
        metrics = [{"step": step, "phase": "train", "loss": loss} for step in range(4, 8)]
        write_run(tmp_path / str(at), rows={"metrics": metrics})
    (spread,) = table_of(make_reference(tmp_path, ["mean_loss"]))["spread"].unique()
    margin = stats.t.ppf(1 - 1e-4, 3) * np.sqrt(np.var([2.0, last], ddof=1) * (1 + 1 / 2))
    assert spread == pytest.approx(max(margin, 0.1 * last), rel=ROUNDING)


def write_losses(folder: Path, count: int = 20) -> str:
    """Write two runs whose loss is 1 and 2, and 3 and 4 in evaluations, with a statistic that is 1."""
    for at in range(2):
        metrics = [{"step": step, "phase": "train", "loss": 1.0 + at} for step in range(count)]
        metrics += [{"step": step, "phase": "eval", "loss": 3.0 + at} for step in (8, 16)]
        write_values(folder / str(at), {"rms": [1.0] * count}, metrics_of=metrics)
    return str(folder)


def test_losses_are_compared_in_recorded_steps_and_in_evaluations(tmp_path: Path) -> None:
    entry = {"from": write_losses(tmp_path), "margin": 0}
    inside = stepped([1.0] * 16)
    assert fired(entry, [{**step, "loss": 1.0 + step["step"] % 2} for step in inside]) == []
    # Steps without rows do not count, so the loss is outside in succession at steps 8 and 12.
    for every in (1, 4):
        steps = [{**step, "loss": 5.0 if step["step"] >= 7 else 1.5} for step in inside]
        steps = [step if step["step"] % every == 0 else {**step, "rows": []} for step in steps]
        (event,) = [event for event in fired(entry, steps) if "mean_loss" not in event.message]
        assert (event.step, event.location, event.layer, event.value) == (12 if every == 4 else 8, None, None, 5.0)
        assert event.message.endswith(": loss 5, above 2; 1 to 2 in 2 healthy runs")
    evaluations = [Step(step=at, phase="eval", loss=0.5) for at in (8, 16)]
    (event,) = fired(entry, sorted([*inside, *evaluations], key=lambda step: step["step"]))
    assert (event.step, event.value, event.threshold) == (16, 0.5, 3.0)
    assert ": eval loss 0.5, below 3; 3 to 4 in" in event.message


def test_learning_rate_is_compared_in_each_step(tmp_path: Path) -> None:
    metrics = [{"step": step, "phase": "train", "loss": 1.0, "lr": 0.1} for step in range(8)]
    write_values(tmp_path / "0", {"rms": [1.0, 1.0]}, every=4, metrics_of=metrics)
    rows = {step["step"]: step["rows"] for step in stepped([1.0, 1.0], every=4)}
    steps = [Step(step=at, rows=rows.get(at, []), loss=1.0, lr=0.1 if at < 2 else 0.9) for at in range(8)]
    (event,) = fired({"from": str(tmp_path)}, steps)
    assert (event.step, event.value, event.location) == (3, 0.9, None)


@pytest.mark.parametrize(("last", "margin", "step"), [(80, 1, None), (80, 0, None), (112, 1, 83)])
def test_learning_rate_of_all_healthy_runs_is_compared_with_that_of_its_step(
    tmp_path: Path, last: int, margin: float, step: int | None
) -> None:
    """A cosine that rises after its end, at step 80, stays within the range of the steps 64 to 90 until their end.

    A healthy run may be shorter. One run does not show whether its rates depend on its losses.
    """

    def rates(last: int) -> list[float]:
        return [0.05 * (1 + math.cos(math.pi * min(at, last) / 80)) for at in range(112)]

    for name, count in (("0", 60), ("1", 112)):
        metrics = [{"step": at, "phase": "train", "loss": 1.0, "lr": rate} for at, rate in enumerate(rates(80)[:count])]
        write_values(tmp_path / name, {"rms": [1.0] * (count // 4)}, every=4, metrics_of=metrics)
    assert not make_reference(tmp_path / "1").rates.size
    made = make_reference([tmp_path / "0", tmp_path / "1"], out=tmp_path / "healthy.parquet")
    assert 40 < made.rates.shape[1] < 80
    entry = {"from": str(tmp_path / "healthy.parquet"), "margin": margin}
    events = fired(entry, [Step(step=at, loss=1.0, lr=rate) for at, rate in enumerate(rates(last))])
    assert [event.step for event in events] == ([] if step is None else [step])
    metrics[50]["lr"] = 0.1
    write_values(tmp_path / "2", {"rms": [1.0] * 28}, every=4, metrics_of=metrics)
    assert not make_reference(
        [tmp_path / name for name in "012"]
    ).rates.size  # not a schedule: it differs between the runs


def write_noisy_losses(folder: Path, count: int = 32) -> str:
    """Write two runs with losses whose means are 4 and 8 from step 4 on, and a statistic that is 1 in every eighth step."""
    for at, mean in enumerate((4.0, 8.0)):
        losses = [mean + (3.0 if step % 2 else -3.0) for step in range(count)]
        metrics = [{"step": step, "phase": "train", "loss": loss} for step, loss in enumerate(losses)]
        write_values(folder / str(at), {"rms": [1.0] * (count // 8)}, every=8, metrics_of=metrics)
    return str(folder)


@pytest.mark.spread(1)
def test_mean_loss_of_a_phase_of_training_is_compared_when_it_ends(tmp_path: Path) -> None:
    entry = {"from": write_noisy_losses(tmp_path), "margin": 0}
    table = table_of(make_reference(tmp_path, ["mean_loss"]))
    means = dict.fromkeys((4, 6, 8, 12), (4.0, 8.0))  # phases of one step have none
    # The last phase with an odd number of steps: 16 to 22, and 23 to 31.
    means |= {16: (4.0 - 3 / 7, 8.0 - 3 / 7), 23: (4.0 + 3 / 9, 8.0 + 3 / 9)}
    assert [*table.index] == [*means]
    for start, (low, high) in means.items():
        assert table.loc[start, ["low", "high"]].tolist() == pytest.approx([low, high], rel=ROUNDING)
    rows = {step["step"]: step["rows"] for step in stepped([1.0] * 4, every=8)}

    def steps(loss_of: Callable[[int], float | None], count: int = 32) -> list[Step]:
        return [Step(step=at, rows=rows.get(at, []), loss=loss_of(at)) for at in range(count)]

    assert fired(entry, steps(lambda at: 6.0 + (4.9 if at % 2 else -4.9))) == []
    # 9 is within the range of single losses, and above that of their means in 12 to 15 and 16 to 22.
    (event,) = fired(entry, steps(lambda at: 9.0 if at >= 12 else 6.0))
    assert (event.step, event.layer, event.location, event.value) == (23, None, None, 9.0)
    assert event.threshold == pytest.approx(8.0 - 3 / 7, rel=ROUNDING)
    assert ": mean_loss 9, above 7.5" in event.message
    assert event.message.endswith(" in 2 healthy runs, steps 16 to 22")
    chosen = {**entry, "stats": ["mean_loss"]}
    assert [event.step for event in fired({**chosen, "for": 1}, steps(lambda at: 3.0))] == [6]
    # A phase is compared if it has ended, and each of its steps has a loss.
    assert fired({**chosen, "for": 1}, steps(lambda at: None if at in (5, 7, 9, 15, 20, 30) else 9.0)) == []
    assert fired({**chosen, "for": 1}, steps(lambda at: 9.0, count=6)) == []
    rules = rule_set({"r": {"rule": "reference", **chosen}}, found := [])
    feed(rules, [Step(step=at, loss=9.0) for at in range(32)], with_numbers=True)
    assert ([event.step for event in found], rules.unread) == ([8], [])


def test_losses_of_a_reference_are_a_choice(tmp_path: Path) -> None:
    steps = [{**step, "loss": 9.0} for step in stepped([1.0] * 4)]
    write_losses(tmp_path)
    for entry, count in (({}, 1), ({"hook": "seen"}, 0), ({"stats": ["rms"]}, 0), ({"stats": ["loss"]}, 1)):
        assert len(fired({"from": str(tmp_path), "margin": 0, **entry}, steps)) == count
    assert {event.location for event in fired({"from": str(tmp_path), "stats": ["loss"]}, stepped([99.0] * 4))} == set()


def test_metric_that_is_not_finite_is_not_compared(tmp_path: Path) -> None:
    """The norm of the gradients is infinite in steps that a gradient scaler skips, also in healthy runs."""
    values = [*[1.0] * 4, *[np.inf, np.nan] * 2, 9.0, np.inf, 9.0]
    metrics = [{"step": step, "phase": "train", "grad_norm": 1.0} for step in range(16)]
    write_values(tmp_path / "a", {"rms": [1.0] * 16}, metrics_of=metrics)
    steps = [{**step, "grad_norm": value} for step, value in zip(stepped([1.0] * 11), values, strict=True)]
    assert [event.step for event in fired({"from": str(tmp_path), "margin": 0}, steps)] == [10]


def test_reference_of_metrics_that_were_never_read_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loss.parquet"
    make_reference(write_losses(tmp_path / "healthy"), ["loss"], out=file)
    entry = {"rule": "reference", "from": str(file), "stats": ["loss"]}
    for more, loss, count in (({}, 1.0, 0), ({}, None, 1), ({"hook": "seen"}, 1.0, 1)):
        rules = rule_set({"r": {**entry, **more}}, [])
        feed(
            rules, [{**step, "loss": value} for step, value in zip(stepped([1.0] * 3), (None, loss, None), strict=True)]
        )
        assert [text.partition("\n")[0] for text in rules.unread] == [
            "rules.r.from: the run recorded no metric in a phase of training of the reference"
        ] * count
    write_values(tmp_path / "run", {"rms": [1.0]})
    assert reference.main(["check", str(tmp_path / "run"), "--reference", str(file)]) == 2
    assert "metrics (train), metrics (eval)" in capsys.readouterr().err


def test_rule_decides_the_same_with_bounds_and_when_resumed(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    file = tmp_path / "reference.parquet"
    for at, values in enumerate(random.uniform(1, 2, (3, 2, 40))):
        losses = [{"step": step, "phase": "train", "loss": value} for step, value in enumerate(values[1])]
        write_values(tmp_path / "runs" / str(at), {"rms": values[0].tolist()}, metrics_of=losses)
    make_reference(tmp_path / "runs", out=file)
    entry = {"from": str(file), "margin": 0.1}
    for fraction in (0.02, 0.5):
        values, losses = np.where(random.random((2, 60)) < fraction, random.uniform(0, 9, (2, 60)), 1.5).tolist()
        steps = [Step(step, loss=loss) for step, loss in zip(stepped(values), losses, strict=True)]
        steps = [step for number, step in enumerate(steps) if number % 2 or number < 20]
        expected = fired(entry, steps, with_numbers=False)
        events: list[RuleEvent] = []
        first, second = (rule_set({"r": {"rule": "reference", **entry}}, events) for _ in range(2))
        feed(first, steps[:25], with_numbers=True)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        feed(second, steps[25:], with_numbers=True)
        assert events == expected
    assert {event.location is None for event in expected} == {True, False}


def test_rule_does_not_read_steps_within_the_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rule_set({"r": {"rule": "reference", "from": write_losses(tmp_path, 100)}}, [])
    (rule,) = rules.rules
    read: list[int] = []
    update = rule.update
    monkeypatch.setattr(rule, "update", lambda rows: (read.append(rows.step), update(rows))[1])
    feed(rules, stepped([1.0] * 150), with_numbers=True)
    assert read == [*STARTS[STARTS < 100], 128]  # the first step of each phase, and of the time after the reference


def test_changed_reference_is_refused_when_resumed(tmp_path: Path) -> None:
    first = rule_set({"r": {"rule": "reference", "from": str(write_healthy(tmp_path, [[1.0]]))}}, [])
    write_values(tmp_path / "more", {"rms": [2.0]})
    second = rule_set({"r": {"rule": "reference", "from": str(tmp_path)}}, [])
    with pytest.raises(ConfigError, match=r"rules\.r\.from: the reference has changed since the run stopped"):
        second.load_state_dict(first.state_dict())


def test_reference_that_was_never_read_is_reported(tmp_path: Path) -> None:
    rules = rule_set({"r": {"rule": "reference", "from": str(write_healthy(tmp_path, [[1.0] * 4]))}}, [])
    feed(rules, stepped([1.0], "std"))
    assert not rules.unread
    late = rule_set({"r": {"rule": "reference", "from": str(tmp_path)}}, [])
    feed(late, [Step(step=number, rows=stepped([1.0])[0]["rows"]) for number in (50, 60)])
    assert "rules.r.from: the run recorded no statistic at a location and in a phase" in late.unread[0]
    assert "allowed  steps 0 to 3" in late.unread[0]


def train(
    seed: int,
    out: Path | None,
    *,
    lr: float = 0.1,
    scale: float = 1.0,
    change: Callable[[nn.Sequential], object] = lambda model: None,
    **options: Any,
) -> AttachedProbe:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), nn.Dropout(0.0))
    model.seed = seed
    change(model)
    with torch.no_grad():
        model[2].weight.mul_(scale)
        model[2].bias.mul_(scale)
    return train_steps(model, HOOKS, torch.randn(12, 16, 4), lr=lr, out=out, **options)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for seed in range(3):
        train(seed, folder / str(seed), rules=None)
    return folder


@pytest.fixture(scope="module")
def made(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the reference of the healthy runs, which is read faster than the runs."""
    file = tmp_path_factory.mktemp("made") / "reference.parquet"
    make_reference(healthy, out=file)
    return str(file)


def test_run_decides_live_as_afterwards_without_the_healthy_runs(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reference.parquet"
    made = make_reference(healthy, out=file)
    assert (made.about["last_step"], made.about["runs"]) == (11, ["0", "1", "2"])
    with pytest.warns(instrument.InstrumentWarning, match="outside of the reference: at step 1 in 2 output"):
        probe = train(7, tmp_path / "run", scale=0.01, rules={"same": {"rule": "reference", "from": file}})
    events = probe.events[probe.events["rule"] == "same"]
    assert events["layer"].iloc[0] == "2"
    file.unlink()
    assert findings.main([str(tmp_path / "run")]) == findings.FIRED
    message = events["message"].iloc[0].partition("in 2 output")[2]
    assert (
        f"step 1: 2 output{message} ({len(events) - 1} more event{'s' * (len(events) > 2)})" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("change", "options", "layer", "text"),
    [
        (lambda model: setattr(model[5], "p", 1e-6), {}, "5", "5.p 1e-06; 0.0 in 3 healthy runs"),
        (
            lambda model: model[5].__dict__.update(p=0.5, inplace=True),
            {},
            "5",
            "5.p 0.5; 0.0 in 3 healthy runs; also inplace True instead of False",
        ),
        (lambda model: model.append(nn.Identity()), {}, "6", "6.type Identity; missing in 3 healthy runs"),
        (
            lambda model: model.pop(5),
            {},
            "5",
            "5.type missing; Dropout in 3 healthy runs; also p, inplace",
        ),
        (
            lambda model: model.__setitem__(1, nn.Hardtanh()),
            {},
            "1",
            "1.type Hardtanh; Tanh in 3 healthy runs; also min_val, max_val, inplace",
        ),
        (
            lambda model: model[4].bias.requires_grad_(False),
            {},
            "4",
            "4.bias.optimizer frozen; optimizer in 3 healthy runs",
        ),
        (
            lambda model: model[2].bias.data.copy_(model[0].bias),
            {},
            "2",
            "2.bias.equals 0.bias; missing in 3 healthy runs",
        ),
        (lambda model: None, {"lr": 0.1001}, None, "optimizer.lr 0.1001; 0.1 in 3 healthy runs"),
    ],
)
def test_other_setting_is_reported_live_and_afterwards(
    made: str,
    tmp_path: Path,
    change: Callable[[nn.Sequential], object],
    options: Mapping[str, Any],
    layer: str | None,
    text: str,
) -> None:
    rules = {"same": {"rule": "reference", "from": made}}
    with pytest.warns(instrument.InstrumentWarning, match="other setting: at step 0"):
        probe = train(7, tmp_path, change=change, rules=rules, **options)
    live = probe.events[probe.events["rule"] == "same"]
    first = live.iloc[0]
    assert first["message"] == f"other setting: at step 0: {text}"
    assert (None if pd.isna(first["layer"]) else first["layer"]) == layer
    assert first["value"] == 1 + (text.count(",") + 1 if "also" in text else 0)
    events = rule_events(instrument.load(tmp_path), parse_rules(rules))
    assert [event.message for event in events] == live["message"].tolist()
    finding = probe.findings.iloc[0]
    part = "update" if "optimizer" in text else "forward"
    assert (finding["what"], finding["advice"]) == ("other setting", ReferenceRanges.advice_in[part])
    for chosen in ({"stats": ["loss"]}, {"hook": ["outputs"]}):
        quiet = rule_events(instrument.load(tmp_path), parse_rules({"same": {**rules["same"], **chosen}}))
        assert not any("other setting" in event.message for event in quiet)


def test_parameters_of_a_loop_that_goes_on_are_not_those_of_its_start(made: str, tmp_path: Path) -> None:
    rules = {"same": {"rule": "reference", "from": made}}
    with pytest.warns(instrument.InstrumentWarning, match=r"other setting: at step 4: optimizer\.lr 0\.1001"):
        probe = train(
            7, tmp_path, change=lambda model: model[2].bias.data.copy_(model[0].bias), lr=0.1001, rules=rules, step=4
        )
    assert not probe.events["message"].str.contains("equals").any()


@pytest.mark.parametrize(("length", "rate", "names"), [(90, 0.1, []), (100, 0.1001, ["initial_lr"]), (2, 0.1, ["lr"])])
def test_learning_rate_of_a_schedule_has_a_margin(tmp_path: Path, length: int, rate: float, names: list[str]) -> None:
    """Its first rate has none: the schedule of PyTorch keeps it."""

    def train_on_schedule(name: str, length: int, rate: float, **options: Any) -> AttachedProbe:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, length)
        with instrument.attach(model, HOOKS, optimizer=optimizer, out=tmp_path / name, **options) as probe:
            for batch in torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0)):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                probe.end_step(loss=loss)
        return probe

    train_on_schedule("healthy", 100, 0.1, rules=None)
    rules = {"same": {"rule": "reference", "from": str(tmp_path / "healthy"), "margin": 100}}
    with warnings.catch_warnings(action="ignore"):
        events = train_on_schedule("new", length, rate, rules=rules).events
    found = [message for message in events.message if "other setting" in message]
    assert [message.partition("optimizer.")[2].partition(" ")[0] for message in found] == names


class _Branches(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)
        for each in (self.left, self.right):
            nn.init.ones_(each.weight)  # without the right one, the loss is a quarter
        self.graph = nn.Parameter(torch.zeros(2))  # also the name of operators
        self._how = how  # not a setting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._how == "left out":
            return self.left(x)
        right = self.right(x)
        if self._how == "unused":
            return self.left(x)
        if self._how == "added to the values":  # the graph lacks the sum, too
            left = self.left(x)
            left.data.add_(right.detach())
            return left
        if "weighted" in self._how:  # by a product, which has an input without a gradient, too
            weights = right * x[:, :2]
            return self.left(x) * (weights.detach() if self._how == "weighted, detached" else weights)
        change = {"detached": torch.Tensor.detach, "rounded": torch.round}.get(self._how)
        return self.left(x) + (right if change is None else change(right))


@pytest.fixture(scope="module")
def healthy_branches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Function that returns the reference of healthy runs of `_Branches`. It trains once for each argument."""

    @functools.cache
    def made(usual: str) -> str:
        folder = tmp_path_factory.mktemp("branches")
        for seed in range(5):
            torch.manual_seed(seed)
            train_steps(_Branches(usual), HOOKS, torch.randn(4, 512, 4), out=folder / "runs" / str(seed), rules=None)
        make_reference(folder / "runs", out=folder / "ranges")
        return str(folder / "ranges")

    return made


@pytest.mark.parametrize(("usual", "how", "first", "part"), [
    ("", "detached", "right.graph.AccumulateGrad missing; 2", "backward"),
    ("detached", "", "right.graph.AccumulateGrad 2; missing", "backward"),
    ("weighted, detached", "weighted", "right.graph.AccumulateGrad 2; missing", "backward"),
    ("", "rounded", "loss.RoundBackward0 1; missing", "backward"),
    ("", "added to the values", "right.graph.AccumulateGrad missing; 2", "backward"),
    ("", "unused", "right.graph.AccumulateGrad missing; 2", "forward"),
    ("", "left out", "right.graph.AccumulateGrad missing; 2", "forward"),
])  # fmt: skip
def test_layers_without_gradients_are_detached_or_not_used(
    healthy_branches: Callable[[str], str], usual: str, how: str, first: str, part: Part
) -> None:
    rules = {"same": {"rule": "reference", "from": healthy_branches(usual)}}
    torch.manual_seed(7)
    with pytest.warns(instrument.InstrumentWarning, match="other setting( of gradients)?: at step 0"):
        probe = train_steps(_Branches(how), HOOKS, torch.randn(4, 512, 4), rules=rules)
    finding = probe.findings.iloc[0]
    assert finding["value"].startswith(first)
    assert finding["advice"] == ReferenceRanges.advice_in[part]


def _train_with_factor(seed: int, factor: float, noted: float = 1.0, **options: Any) -> AttachedProbe:
    """Train with a loss that is multiplied before the backward pass, and pass it multiplied by another factor."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with instrument.attach(model, HOOKS, optimizer=optimizer, **options) as probe:
        for batch in torch.randn(4, 64, 4):
            loss = model(batch).square().mean()
            (loss * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss.item() * noted)
    return probe


@pytest.mark.parametrize(
    ("noted", "what", "part"), [(1.0, "other setting of gradients", "backward"), (64.0, "other setting", "loss")]
)
def test_factor_of_a_usual_loss_scales_gradients(tmp_path: Path, noted: float, what: str, part: Part) -> None:
    for seed in range(3):
        _train_with_factor(seed, 0.25, out=tmp_path / str(seed), rules=None)
    rules = {"same": {"rule": "reference", "from": str(tmp_path)}}
    with pytest.warns(instrument.InstrumentWarning, match=f"{what}: at step 0"):
        finding = _train_with_factor(7, 16.0, noted, rules=rules).findings.iloc[0]
    assert finding["value"].startswith("loss.factor.MulBackward0 1 (other=16.0); 1 (other=0.25) in 3 healthy runs")
    assert (finding["what"], finding["advice"]) == (what, ReferenceRanges.advice_in[part])


@pytest.mark.parametrize(
    ("weights", "reduction", "is_outside"),
    [
        ((1.3, 3.5), "mean", False),
        ((3.5, 1.3), "mean", True),
        (None, "mean", True),
        ((1.3, 3.5), "sum", True),  # the setting 2 instead of 1
    ],
)
def test_weights_of_classes_can_differ_a_little(
    tmp_path: Path, weights: tuple[float, float] | None, reduction: str, is_outside: bool
) -> None:
    def train(given: tuple[float, float] | None, reduction: str = "mean", **options: Any) -> AttachedProbe:
        model = nn.Linear(4, 2)
        with instrument.attach(model, {"outputs": HOOKS["outputs"]}, **options) as probe:
            weight = None if given is None else torch.tensor(given)
            output = model(torch.randn(64, 4))
            loss = nn.functional.cross_entropy(output, torch.arange(64) % 2, weight, reduction=reduction)
            loss.backward()
            probe.end_step(loss=loss)
        return probe

    for seed, given in enumerate([(1.0, 4.0), (1.2, 3.7), (1.4, 3.0)]):
        train(given, out=tmp_path / str(seed), rules=None)
    rules = {"same": {"rule": "reference", "from": str(tmp_path), "margin": 10}}
    with pytest.warns(instrument.InstrumentWarning, match="loss.NllLoss") if is_outside else nullcontext():
        findings = train(weights, reduction, rules=rules).findings
    problems = findings.loc[findings["rule"] == "same", "advice"].tolist()
    assert problems == [ReferenceRanges.advice_in["loss"]] * is_outside


def test_runs_of_earlier_versions_have_layers_without_settings(healthy: Path, tmp_path: Path) -> None:
    earlier = shutil.copytree(healthy, tmp_path / "earlier")
    for file in earlier.glob("*/layers/*.parquet"):
        pq.write_table(pq.read_table(file).drop_columns("settings"), file)
    run = instrument.load(next(iter(earlier.iterdir())))
    assert run.layers["module_type"].tolist()[:3] == ["Sequential", "Linear", "Tanh"]
    assert run.layers["settings"].isna().all()
    with pytest.warns(instrument.InstrumentWarning, match="settings are not compared, because .*: .*earlier"):
        assert make_reference(earlier).settings == {}


def test_settings_of_many_modules_leave_room_for_the_root(made: str, tmp_path: Path) -> None:
    def add_modules(model: nn.Sequential) -> None:
        for number in range(30):
            model[0].add_module(f"unused{number}", nn.LazyLinear(2))

    rules = {"same": {"rule": "reference", "from": made}}
    with pytest.warns(instrument.InstrumentWarning, match="other setting: at step 0"):
        probe = train(7, tmp_path, change=add_modules, lr=0.1001, rules=rules)
    live = probe.events[probe.events["message"].str.startswith("other setting")]
    assert live["layer"].tolist()[:10] == [f"0.unused{number}" for number in range(10)]
    assert live["message"].tolist()[10:] == [
        "other setting: at step 0: 20 other modules, too",
        "other setting: at step 0: optimizer.lr 0.1001; 0.1 in 3 healthy runs",
    ]
    events = rule_events(instrument.load(tmp_path), parse_rules(rules))
    assert [event.message for event in events if "other setting" in event.message] == live["message"].tolist()


def test_settings_that_differ_between_healthy_runs_are_not_compared(healthy: Path, tmp_path: Path) -> None:
    made = make_reference(healthy)
    assert made.settings[""]["seed"] is None
    assert made.settings["1"] == {"type": "Tanh"}
    same = {"rule": "reference", "from": str(healthy)}
    probe = train(9, tmp_path, rules={"same": same}, change=lambda model: setattr(model, "seed", "other"))
    assert "other setting" not in "".join(probe.events["message"])


@pytest.mark.slow
def test_healthy_run_with_another_seed_has_no_event(healthy: Path) -> None:
    probe = train(8, None, rules={"same": {"rule": "reference", "from": healthy}})
    assert "same" not in set(probe.events["rule"])


@pytest.mark.slow
def test_file_has_the_same_ranges_and_is_small(healthy: Path, tmp_path: Path) -> None:
    made = make_reference([healthy / "0", str(healthy / "[12]")], out=tmp_path / "r.parquet")
    read = Reference.parse((tmp_path / "r.parquet").read_bytes())
    assert (read.digest, read.about) == (made.digest, {**made.about, "format": 1})
    assert pd.read_parquet(tmp_path / "r.parquet")["statistic"].nunique() == 7
    random = np.random.default_rng(0)
    count = 500 * 10 * 20
    rows = pd.DataFrame(np.exp(random.normal(size=(count, 3)) * 3), columns=["low", "high", "spread"])
    frame = made.table.to_pandas().iloc[np.zeros(count, int)].reset_index(drop=True)
    frame["layer"] = [f"transformer.h.{at // 200}.mlp" for at in range(count)]
    frame["statistic"] = [f"statistic {at // 20 % 10}" for at in range(count)]
    frame["step"] = STARTS[np.arange(count) % 20]
    frame[rows.columns] = (np.floor(rows * 256) / 256).astype(np.float32)
    table = type(made.table).from_pandas(frame, made.table.schema, preserve_index=False)
    assert len(Reference(table, {}).content()) < 10**6


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("missing", ["rules.same.from: file or folder not found", "given    missing"]),
        ("missing*", ["rules.same.from: the pattern matches nothing"]),
        ("empty", ["rules.same.from: no run.json in or below empty"]),
        ("text.parquet", ["not a reference: it was not made by", "fix      python -m instrument.reference make"]),
        ("frame.parquet", ["not a reference: it was not made by"]),
        ("failed", ["the run is not healthy: its status is failed", "given    failed/b", "fix      leave it out"]),
        ("diverged", ["the run is not healthy: its loss is not finite at step 1"]),
        ("bare", ["the runs recorded no statistics"]),
        (["run", "missing"], ["file or folder not found"]),
        (
            "run",
            ["the hooks record no layer of the reference", "recorded are a (seen)", "make a reference of runs"],
        ),
        ("other_hook", ["the hooks record no layer of the reference", "fix      record with its hooks (other)"]),
    ],
)
def test_problem_of_a_reference_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.parquet").write_text("no")
    pd.DataFrame({"a": [1]}).to_parquet("frame.parquet")
    write_values(Path("failed/a"), {"rms": [1.0]})
    write_values(Path("failed/b"), {"rms": [1.0]}, status="failed")
    write_run(Path("diverged"), rows={"metrics": [{"step": 0, "loss": 1.0}, {"step": 1, "loss": np.inf}]})
    write_run(Path("bare"))
    write_values(Path("run"), {"rms": [1.0]}, metrics_of=[{"step": 0, "phase": "train", "loss": 1.0}])
    write_run(Path("other_hook"), rows={"stats": [{"hook": "other", "layer": "0", "numel": 9, "rms": 1.0}]})
    with pytest.raises(ConfigError) as error:
        train(0, tmp_path / "new", rules={"same": {"rule": "reference", "from": given}})
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("stats", "parts"),
    [
        ("rmss", ["rules.same.stats: none of the runs recorded this statistic", "given    rmss", "similar  rms"]),
        ("kurtosis", ["rules.same.stats: none of the runs recorded this statistic"]),
    ],
)
def test_statistic_that_no_healthy_run_recorded_is_named(healthy: Path, stats: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        train(0, None, rules={"same": {"rule": "reference", "from": healthy, "stats": stats}})
    for part in parts:
        assert part in str(error.value)


def test_statistic_of_the_reference_that_no_hook_records_is_named(healthy: Path, tmp_path: Path) -> None:
    hooks = {"outputs": {**HOOKS["outputs"], "stats": ["mean"]}}
    with pytest.raises(ConfigError, match=r"rules\.same\.stats: the hooks of the reference do not record it: outputs"):
        train_steps(nn.Linear(4, 2), {"outputs": {**hooks["outputs"], "layers": "."}}, [], rules={
            "same": {"rule": "reference", "from": str(write_root(tmp_path))}
        })  # fmt: skip
    with pytest.raises(ConfigError) as error:
        train_steps(nn.Sequential(nn.Linear(4, 2)), hooks, [], rules={
            "same": {"rule": "reference", "from": str(healthy), "stats": ["std", "rms", "loss", "abs_max"]}
        })  # fmt: skip
    assert [problem.given for problem in error.value.problems] == ["std", "rms", "abs_max"]
    make_reference(healthy, ["rms"], out=tmp_path / "rms.parquet")
    with pytest.raises(ConfigError, match=r"rules\.same\.stats: the reference lacks this statistic"):
        train(0, None, rules={"same": {"rule": "reference", "from": tmp_path / "rms.parquet", "stats": "std"}})


def write_root(folder: Path) -> Path:
    return write_run(folder / "root", rows={"stats": [{"hook": "outputs", "layer": "", "numel": 9, "rms": 1.0}]})


def test_command_makes_shows_and_checks(healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "reference.parquet")
    assert reference.main(["make", str(healthy), "--out", file]) == 0
    settings = sum(
        1 + len(own) for own in instrument.load(healthy / "0").layers["settings"]
    )  # and the type of each module
    summary = f"3 runs, steps 0 to 11, 13 locations, {settings} settings, rms, std, abs_max, zero_fraction"
    assert summary in capsys.readouterr().out
    assert reference.main(["show", file, "--layer", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 output (outputs) rms: step 0:" in out
    assert "2.weight update (updates) abs_max: step 0:" in out
    assert "4 output" not in out
    assert "train loss" not in out
    assert reference.main(["show", file, "--layer", "22", "--json"]) == 2
    assert "--layer: this pattern matches no layer of the reference" in capsys.readouterr().err
    assert reference.main(["show", file]) == 0
    out = capsys.readouterr().out
    assert "\ntrain lr: step 0: 0.0996 to 0.1 (margin a factor of 1.25), step 3:" in out
    assert "\n0, 1, 2, 3, 4, 5, . output (outputs): rms, std" in out
    assert "output (outputs) rms: step 0:" not in out
    assert reference.main(["show", file, "--layer", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["runs"]), shown["last_step"]) == (3, 11)
    assert {row["layer"] for row in shown["ranges"]} == {"2"}
    (row,) = (row for row in shown["ranges"] if (row["hook"], row["statistic"]) == ("outputs", "rms"))
    assert [phase["step"] for phase in row["phases"]] == [0, 1, 2, 3, 4, 6, 8]
    runs = pd.concat(instrument.load(healthy / str(seed)).stats for seed in range(3))
    values = runs.query("hook == 'outputs' and layer == '2' and step == 1")["rms"]
    assert row["phases"][1]["low"] < values.min() < values.max() < row["phases"][1]["high"]
    assert [row["phases"][1][name] for name in ("smallest", "largest")] == pytest.approx(
        [values.min(), values.max()], rel=1e-2
    )
    train(9, tmp_path / "good", rules=None)
    assert reference.main(["check", str(tmp_path / "good"), "--reference", file]) == 0
    assert f"nothing outside of {file} in " in capsys.readouterr().out
    assert reference.main(["check", str(tmp_path / "good"), "--reference", file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    train(9, tmp_path / "bad", scale=0.01, rules=None)
    assert reference.main(["check", str(tmp_path / "bad"), "--reference", file]) == findings.FIRED
    assert "outside of the reference: step 1: 2 output (outputs): rms" in capsys.readouterr().out
    assert reference.main(["check", str(tmp_path / "bad"), "--reference", file, "--json"]) == findings.FIRED
    assert {"reference"} == {each["rule"] for each in json.loads(capsys.readouterr().out)}
    write_losses(tmp_path / "others")
    assert reference.main(["check", str(tmp_path / "others" / "0"), "--reference", file]) == 2
    assert "the run recorded no location of the reference" in capsys.readouterr().err
    assert reference.main(["make", str(tmp_path / "none"), "--out", file]) == 2
    assert reference.main(["make", str(healthy), "--out", str(tmp_path / "no" / "file")]) == 2


@pytest.mark.parametrize("count", [23, 24])
def test_check_names_the_steps_after_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    file, run = tmp_path / "reference.parquet", write_losses(tmp_path / "longer", count)
    make_reference(write_losses(tmp_path / "healthy"), out=file)  # steps 0 to 19: the last phase has the steps 16 to 22
    assert reference.main(["check", f"{run}/0", "--reference", str(file)]) == 0
    *lines, _ = capsys.readouterr().out.splitlines()
    message = "steps after 22 were not compared: the reference ends at step 19, in the phase of the steps 16 to 22"
    assert lines == [message] * (count > 23)


@pytest.mark.slow
def test_experiment_uses_a_reference_and_keeps_it(cli: Callable[..., Answer], workdir: Path) -> None:
    run = ["model=mlp", "data=digits", "hooks=activations", "train.steps=1"]
    rule = "+rules.same={rule: reference, from: %s, margin: 0, for: 1}"
    assert cli(*run, "hydra.run.dir=runs/a").code == 0
    assert cli(*run, rule % "runs/a", "hydra.run.dir=runs/b").code == 0
    assert (workdir / "runs/b/references/same.parquet").is_file()
    assert "same" not in set(instrument.load("runs/b").events["rule"])
    answer = cli(*run, rule % "runs/c", "hydra.run.dir=runs/d")
    assert (answer.code, "rules.same.from: file or folder not found" in answer.err) == (2, True)


@pytest.mark.parametrize("counts", [[10, 20, 30, 0], [400, 0, 300, 200]])
def test_difference_of_counts_is_that_of_a_chi_square(counts: Sequence[int]) -> None:
    ours, healthy = np.zeros((2, BUCKETS))
    ours[:4], healthy[:4] = counts, [100, 150, 300, 80]
    expected = stats.chi2_contingency([ours[:4], healthy[:4]], correction=False)
    difference, bucket = difference_of_counts(ours, healthy)
    assert difference == pytest.approx((expected.statistic - 3) / math.sqrt(6))
    residuals = (ours[:4] - expected.expected_freq[0]) ** 2 / expected.expected_freq.prod(axis=0)
    assert bucket == (residuals * expected.expected_freq.sum(axis=0)).argmax()
    assert difference_of_counts(ours, 5 * ours)[0] == pytest.approx(
        -math.sqrt(np.count_nonzero(counts) - 1) / math.sqrt(2)
    )


def texts_of_counts(of_first: int) -> str:
    return " ".join(map(str, [of_first, 1000 - of_first, *[0] * (BUCKETS - 2)]))


@pytest.mark.parametrize(("count", "times"), [(2, 8.0), (3, 5.0), (7, 3.0)])
def test_few_runs_show_little_of_how_much_their_values_differ(tmp_path: Path, count: int, times: float) -> None:
    for at in range(count):
        row = {"relation": COUNTS, "path": "targets", "text": texts_of_counts((450, 550, 500)[min(at, 2)])}
        tables = {"stats": [], "metrics": [{"step": 0, "phase": "train", "loss": 1.0}]}
        rows = {**tables, "relations": [{**row, "step": step} for step in range(4)]}
        write_run(tmp_path / str(at), rows=rows)
    known = make_reference(tmp_path).counts["targets"]
    assert known["largest"] > 6  # so that a multiple of it is above the smallest difference
    found = set()
    for of_first in range(500, 1000, 20):
        row = RelationRow(COUNTS, "", "targets", None, None, texts_of_counts(of_first))
        events = fired({"from": str(tmp_path)}, [Step(step=step, loss=1.0, relations=[row]) for step in range(4)])
        counts, healthy = np.array(row.text.split(), np.float64), np.array(known["counts"]["0"], np.float64)
        is_outside = difference_of_counts(counts, healthy)[0] > times * known["largest"]
        assert [event.step for event in events] == [1] * is_outside
        found.add(is_outside)
    assert found == {False, True}


def classify(seed: int, out: Path, shift: int = 0, of: str = "targets", **options: Any) -> AttachedProbe:
    """Train a classifier of pairs of tokens, whose sum is the class. From step 16 on, tokens or classes can be shifted."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(8, 12))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    hooks = {"outputs": {"layers": "2", "kind": "forward", "action": "record", "every": 4}}
    with instrument.attach(model, hooks, optimizer=optimizer, out=out, **options) as probe:
        for step in range(32):
            tokens = torch.randint(4, (64, 2))
            targets = tokens.sum(1)
            if step >= 16:
                tokens, targets = (tokens + shift, targets) if of == "tokens" else (tokens, targets + shift)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), targets)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


@pytest.mark.parametrize(
    ("of", "shift", "name", "part"),
    [
        ("targets", 0, "", None),
        ("targets", 3, "NllLossBackward0.target", "loss"),
        ("tokens", 1, "EmbeddingBackward0.indices", "forward"),
    ],
)
def test_values_with_other_frequencies_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str, shift: int, name: str, part: Part | None
) -> None:
    monkeypatch.setattr(value_counts, "EVERY", 4)
    rules = {"same": {"rule": "reference", "from": str(tmp_path / "healthy")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", instrument.InstrumentWarning)
        for seed in range(3):
            classify(seed, tmp_path / "healthy" / str(seed))
        probe = classify(7, tmp_path / "run", shift, of, rules=rules)
    live = probe.events[probe.events["message"].str.startswith("other values")]
    assert len(live) == bool(part)
    events = rule_events(instrument.load(tmp_path / "run"), parse_rules(rules))
    assert [event.message for event in events if event.message.startswith("other values")] == live["message"].tolist()
    if part is not None:
        assert (live.iloc[0]["step"], live.iloc[0]["message"].split()[5]) == (20, name)
        assert probe.findings.iloc[0]["advice"] == ReferenceRanges.advice_in[part]
    for chosen in ({"stats": ["loss"]}, {"hook": ["outputs"]}):
        quiet = rule_events(instrument.load(tmp_path / "run"), parse_rules({"same": {**rules["same"], **chosen}}))
        assert not any(event.message.startswith("other values") for event in quiet)


def test_values_are_counted_in_recorded_steps_of_a_training_with_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_counts, "EVERY", 2)
    monkeypatch.setattr(value_counts, "DENSE", 8)
    found = classify(0, tmp_path / "run").run.relations
    found = found[found["relation"] == "counts"]
    assert found["step"].unique().tolist() == [
        0,
        4,
        8,
        12,
        16,
        24,
    ]  # hooks record in one of four, and from 16 on, one of eight is observed
    assert classify(0, tmp_path / "without", rules=None).run.relations.empty
    torch.manual_seed(0)
    nn.Sequential(nn.Embedding(8, 4), nn.Flatten(), nn.Linear(8, 12))
    tokens = torch.randint(4, (64, 2))
    expected = {"EmbeddingBackward0.indices": tokens, "NllLossBackward0.target": tokens.sum(1)}
    first = found[found["step"] == 0].set_index("path")["text"]
    assert {path: [*map(int, text.split())] for path, text in first.items()} == {
        path: values.flatten().bincount(minlength=BUCKETS).tolist() for path, values in expected.items()
    }
    assert not BACKWARDS.observers


@pytest.mark.parametrize("rank", [0, 1])
def test_values_are_counted_in_the_first_process(rank: int) -> None:
    """Each process judges its own rows, and its part of the data can differ from that of the others."""
    model = nn.Linear(4, 3)
    hooks = {"outputs": {"layers": ".", "kind": "forward", "action": "record"}}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        with instrument.attach(model, hooks, rules={"loss_spike": {}}) as probe:
            nn.functional.cross_entropy(model(torch.randn(6, 4)), torch.tensor([0, 1, 2, 0, 0, 1])).backward()
            probe.end_step()
    finally:
        dist.destroy_process_group()
    assert ("counts" in [*probe.relations["relation"]]) == (rank == 0)


def test_numbers_are_counted_by_their_exponent_and_recomputed_ones_are_not(tmp_path: Path) -> None:
    targets = torch.tensor([0.0, 1.0, -1.0, 0.75, 5.0, float("nan")])
    model = nn.Linear(1, 1)

    def recomputed(numbers: torch.Tensor) -> torch.Tensor:
        return nn.functional.smooth_l1_loss(model(numbers)[:, 0], targets)

    hooks = {"outputs": {"layers": ".", "kind": "forward", "action": "record"}}
    with instrument.attach(model, hooks, out=tmp_path) as probe:
        numbers = torch.ones(6, 1)
        loss = nn.functional.mse_loss(model(numbers)[:, 0], targets)
        (loss + checkpoint(recomputed, numbers, use_reentrant=False)).backward()
        probe.end_step()
    found = probe.run.relations
    counts = found[found["relation"] == "counts"].set_index("path")["text"]
    assert counts.index.tolist() == ["MseLossBackward0.target"]
    expected = Counter(2 * math.frexp(value)[1] + (value < 0) for value in (0.0, 1.0, -1.0, 0.75, 5.0, 0.0))
    assert counts.iloc[0].split() == [str(expected[bucket]) for bucket in range(BUCKETS)]


def test_counted_values_need_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = torch.full((1,), 3).expand(2**40)
    assert value_counts._buckets(expanded).unique().tolist() == [3]
    monkeypatch.setattr(value_counts, "MAX_TENSORS", 8)
    model = nn.Embedding(8, 1)
    hooks = {"outputs": {"layers": ".", "kind": "forward", "action": "record"}}
    with instrument.attach(model, hooks, rules="default") as probe:
        for _ in range(5):
            (model(torch.tensor([1])) + model(torch.tensor([2]))).mean().mul(model(torch.tensor([3])).mean()).backward()
        probe.end_step()
    found = probe.relations[probe.relations["relation"] == "counts"]
    assert found["value"].sum() == 8


class Elsewhere(torch.Tensor):
    """As a tensor on another device."""

    while_waiting: Callable[[], None]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        self.while_waiting()
        return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.cat
        return super().__torch_function__(func, types, args, kwargs or {})


def test_values_on_several_devices_are_counted_together() -> None:
    counts = value_counts.ValueCounts(Clock(StepContext(0, 0, 0, "train")))
    buckets = torch.tensor([1, 2], dtype=torch.uint8)
    elsewhere: Any = buckets.as_subclass(Elsewhere)
    elsewhere.while_waiting = lambda: counts._buckets.update(other=[buckets])  # by another thread
    counts._buckets["name 3"] = [buckets, elsewhere]
    (row,) = counts.take()
    assert row.text.split()[:4] == ["0", "2", "2", "0"]
    assert [row.path for row in counts.take()] == ["other"]
