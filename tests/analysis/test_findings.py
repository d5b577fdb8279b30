"""Findings of runs with known rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run, write_steps

import instrument
from instrument.analysis.diagnosis import Finding
from instrument.analysis.findings import findings
from instrument.commands.findings import main
from instrument.tables.reasons import NEVER_DUE, NO_INPUT_GRAPH

USUAL = {"stats": {"numel": 100}, "effects": {"numel": 100}, "coverage": {"cause": "", "dropped": 0}}
GRADIENT = {"kind": "parameter_grad", "role": "param_grad", "path": "weight", "hook": "gradients"}
Rows = list[dict[str, Any]]
Make = Callable[..., instrument.Run]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    """Return a factory of runs with the given rows, one step per row; a killed run has neither parts nor an end."""

    def make(*, killed: bool = False, config: Any = None, **tables: Rows) -> instrument.Run:
        steps = [{table: [{**USUAL.get(table, {}), **row}]} for table, rows in tables.items() for row in rows]
        info = {"status": "running" if killed else "done", "config": config}
        return instrument.load(write_steps(tmp_path, steps, close=not killed, info=info))

    return make


def only(run: instrument.Run, what: str) -> Finding:
    (found,) = [finding for finding in findings(run) if finding.what == what]
    return found


def names_of(run: instrument.Run) -> list[str]:
    return [finding.what for finding in findings(run)]


def test_new_module_without_an_optimizer_is_a_finding(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"step": 4, "layer": "head", "rule": "optimizer", "message": "the optimizer does not hold weight"}
    events = [{**event, "severity": "warning", "rank": rank} for rank in range(2)]
    trained = [{**event, "layer": "neck", "severity": severity} for severity in ("warning", "info")]
    run = made(events=[*events, *trained])
    expected = Finding("not trained", "head", 4, event["message"], "warning", layer="head")
    assert findings(run) == [expected]
    assert main([str(run.path)]) == 4
    first, last = capsys.readouterr().out.splitlines()
    assert first == "warning  not trained: step 4: head: the optimizer does not hold weight"
    assert last == f"no rule fired in {run.path}; not all of the model is trained"


@pytest.mark.parametrize(
    ("step", "layer", "found"), [(4, "head", []), (5, "head", ["not trained"]), (0, None, ["not trained"])]
)
def test_optimizer_of_a_resumed_run_holds_earlier_modules(
    made: Make, step: int, layer: str | None, found: list[str]
) -> None:
    event = {"step": step, "layer": layer, "rule": "optimizer", "message": "not held", "severity": "warning"}
    resumed = {"step": 5, "layer": None, "rule": "resumed", "message": "continues", "severity": "info"}
    assert names_of(made(events=[resumed, event] if step == 5 else [event, resumed])) == found


def test_status_of_a_run_that_is_not_done_is_printed(made: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(killed=True, metrics=[{"step": 0, "phase": "train", "loss": 1.0}])
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out == f"no rule fired in {run.path}; the status of the run is killed\n"


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"killed": True},
        {
            "stats": [{"step": i, **about} for i in range(3) for about in ({}, GRADIENT, {"module_type": "ReLU"})],
            "metrics": [{"step": step} for step in range(3)],
        },
        {"stats": [{"dead_fraction": 0.0, "saturated_fraction": 0.0, "zero_fraction": 0.5}]},
        {"stats": [{"nan_count": 1}], "config": {"rules": None}},
    ],
    ids=["no rows", "killed", "no values", "healthy units", "no rules"],
)
def test_run_without_anything_unusual_has_no_findings(made: Make, tables: dict[str, Any]) -> None:
    assert findings(made(**tables)) == []


def test_findings_of_a_sweep_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in "01":
        write_run(tmp_path / job)
    with pytest.raises(instrument.InstrumentError, match=r"run: the folder contains 2 runs"):
        findings(instrument.load(tmp_path))
    assert main([str(tmp_path)]) == 2
    assert f"pass one of them, such as {tmp_path / '0'}" in capsys.readouterr().err


def test_causes_precede_consequences_and_other_findings(made: Make) -> None:
    run = made(
        metrics=[{"step": 0, "loss": 1.0, "grad_norm": 2.0}, {"step": 1, "loss": math.nan}],
        stats=[{"step": 1, "nan_count": 1}],
    )
    assert [finding.severity for finding in findings(run)] == ["warning", "error", "info", "info"]
    assert names_of(run) == ["first recorded non-finite value", "loss not finite", "loss", "largest gradient norm"]
    assert run.findings["cause"].tolist() == ["", "non_finite", "", ""]
    assert run.findings["rule"].tolist() == ["non_finite", "non_finite", "", ""]


@pytest.mark.spread(1)
@pytest.mark.parametrize("killed", [False, True])
def test_largest_gradient_norm_has_the_median_of_its_location(made: Make, killed: bool) -> None:
    norms = {"a": [1.0, 2.0, 50.0, 3.0], "b": [0.1, 0.1, 0.2, 0.1]}
    rows = [{**GRADIENT, "layer": layer, "step": i, "l2": l2} for layer in norms for i, l2 in enumerate(norms[layer])]
    rows.append({"layer": "c", "l2": 900.0})  # an activation
    found = only(made(stats=rows, killed=killed), "largest gradient norm")
    assert (found.where, found.step) == ("a.weight param_grad (gradients)", 2)
    assert (found.value, found.number) == ("50, median at this location 2.5", 50.0)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("about", "where"),
    [
        ({"kind": "tensor", "role": "output"}, "a output (seen)"),
        ({"kind": "full_backward", "role": "grad_input", "path": "0"}, "a[0] grad_input (seen)"),
        ({"kind": "step_pre", "role": "param_grad", "path": "bias"}, "a.bias param_grad (seen)"),
        ({"kind": "step_post", "role": "param", "path": "bias"}, None),
        ({"kind": "forward_pre", "role": "input"}, None),
    ],
)
def test_all_gradient_kinds_and_no_others_count(made: Make, about: dict[str, Any], where: str | None) -> None:
    run = made(stats=[{**about, "l2": 4.0}])
    assert [found.where for found in findings(run) if found.what == "largest gradient norm"] == (
        [where] if where else []
    )


def test_gradient_norms_of_metrics_and_of_tensors_are_separate_findings(made: Make) -> None:
    norms = [3.0, math.inf, 7.0, None, 1.0]
    metrics = [{"step": step, "grad_norm": norm} for step, norm in enumerate(norms)]
    run = made(metrics=metrics, stats=[{**GRADIENT, "layer": "a", "l2": 0.5}])
    found = [each for each in findings(run) if each.what == "largest gradient norm"]
    assert [(each.where, each.step, each.value) for each in found] == [
        ("all parameters", 2, "7, median 3"),
        ("a.weight param_grad (gradients)", 0, "0.5, median at this location 0.5"),
    ]


@pytest.mark.parametrize(("third", "highest"), [(4.0, ", highest 4 at step 2"), (0.25, "")])
def test_loss_finding_has_first_last_lowest_and_highest_value(made: Make, third: float, highest: str) -> None:
    rows = [{"step": step, "loss": loss} for step, loss in enumerate((2.5, 0.125, third, 0.5))]
    run = made(metrics=[*rows, {"step": 4, "phase": "eval", "loss": math.nan}])
    assert only(run, "loss").value == f"2.5 -> 0.5, lowest 0.125 at step 1{highest}"
    assert only(run, "loss not finite").step == 4  # of the evaluation


@pytest.mark.spread(1)
@pytest.mark.parametrize("non_finite", [math.nan, math.inf])
def test_non_finite_loss_is_an_error_with_its_step(made: Make, non_finite: float) -> None:
    run = made(metrics=[{"step": step, "loss": loss} for step, loss in enumerate((2.5, 1.5, non_finite, non_finite))])
    found = only(run, "loss not finite")
    assert (found.where, found.step, found.severity) == ("training", 2, "error")
    assert found.value == f"{non_finite}, 1.5 before"


def test_first_non_finite_value_is_by_step_and_order(made: Make) -> None:
    bad = [(5, "late"), (3, "first"), (3, "second"), (4, "later")]
    rows = [{"step": 1}, *({"step": step, "layer": layer, "nan_count": 2, "inf_count": 1} for step, layer in bad)]
    found = only(made(stats=rows), "first recorded non-finite value")
    assert (found.where, found.step) == ("first output (seen)", 3)
    assert (found.value, found.severity) == ("2 NaN, 1 infinite of 100 (3 more events)", "warning")
    assert found.advice.startswith("Look at the first location")


@pytest.mark.slow
def test_evaluation_precedes_the_step_of_its_number(made: Make) -> None:
    rows = [{"step": 3, "phase": "eval", "layer": "e"}, {"step": 3, "layer": "t"}]
    found = only(made(stats=[{**row, "inf_count": 1} for row in rows]), "first recorded non-finite value")
    assert found.where == "e output (seen, eval)"


def test_gradients_of_skipped_steps_are_ignored(made: Make) -> None:
    gradients = [{**GRADIENT, "step": step, "inf_count": 1} for step in range(4)]
    skipped = [{"step": step, "skipped": step < 2} for step in range(4)]
    assert only(made(stats=gradients, metrics=skipped), "first recorded non-finite value").step == 2


@pytest.mark.slow
def test_rule_is_a_finding_with_advice(made: Make) -> None:
    rows = [{"layer": layer, "step": step, "dead_fraction": 0.75} for step in range(6) for layer in "ab"]
    run = made(stats=rows)
    found = only(run, "dead units")
    assert (found.where, found.step, found.severity, found.number) == ("a output (seen)", 4, "warning", 0.75)
    assert found.value.startswith("75.0% of its units are zero for a whole batch, above 0.7, 5 times")
    assert found.value.endswith("(1 more event)")
    assert [finding.severity for finding in findings(run) if finding.advice] == ["warning"]


def test_recorded_events_of_rules_are_the_findings(made: Make) -> None:
    """A run with rules is not judged again, and other events are not findings."""
    message = "negative loss: at step 3 in a output (seen): mean -2"
    mine = {"step": 3, "layer": "a", "rule": "mine", "message": message, "severity": "warning", "value": -2.0}
    events = [
        {**mine, "location": "a output (seen)", "threshold": 0.0},
        {**mine, "value": None},
        {**mine, "rule": "budget"},
    ]
    run = made(config={"rules": {"mine": {"_target_": "m.Mine"}}}, events=events, stats=[{"nan_count": 1}])
    where = {"layer": "a", "hook": "seen", "role": "output"}
    expected = Finding("negative loss", "a output (seen)", 3, "mean -2", "warning", -2.0, rule="mine", **where)
    assert findings(run) == [expected]
    (row,) = run.findings.to_dict("records")
    assert (row["what"], row["step"], row["number"], row["advice"]) == ("negative loss", 3, -2.0, "")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("ratio", "values"), [(0.04, []), (0.4, ["update_ratio 0.4, above 0.1, 10 times in succession"])]
)
def test_usual_update_ratios_give_no_finding(made: Make, ratio: float, values: list[str]) -> None:
    about = {"kind": "step_post", "role": "update", "hook": "updates", "path": "weight"}
    run = made(stats=[{**about, "step": step, "update_ratio": ratio} for step in range(40)])
    assert [finding.value for finding in findings(run)] == values


def test_hooks_that_did_not_fire_are_grouped_by_cause(made: Make) -> None:
    silent = {"expected": 3, "fired": 0, "cause": "not called"}
    rows = [
        {"layer": "well", "expected": 3, "fired": 3},
        {"layer": "excused", "expected": 0, "fired": 0, "cause": NO_INPUT_GRAPH},
        *({**silent, "layer": layer} for layer in "abcdef"),
        {**GRADIENT, "hook": "half", "layer": "", "expected": 3, "fired": 1, "cause": "no gradient"},
        {"hook": "late", "layer": "z", "expected": 0, "fired": 0, "cause": NEVER_DUE},
    ]
    found = [finding for finding in findings(made(coverage=rows)) if "fired" in finding.what]
    assert [(finding.what, finding.where, finding.value) for finding in found] == [
        ("never fired", "a, b, c, d and 2 more (seen, forward)", "0 of 18 times: not called"),
        ("fired less often than expected", "weight (half, parameter_grad)", "1 of 3 times: no gradient"),
        ("never fired", "z (late, forward)", NEVER_DUE),
    ]
    assert {finding.severity for finding in found} == {"warning"}


def test_location_is_listed_once_for_all_ranks(made: Make) -> None:
    rows = [{"layer": "a", "rank": rank, "expected": 3, "fired": 0, "cause": "not called"} for rank in range(3)]
    (found,) = [finding for finding in findings(made(coverage=rows)) if "fired" in finding.what]
    assert (found.where, found.value) == ("a (seen, forward)", "0 of 9 times: not called")


@pytest.mark.spread(1)
@pytest.mark.parametrize("killed", [False, True])
def test_each_intervention_has_its_changed_fraction(made: Make, killed: bool) -> None:
    tame = {**GRADIENT, "hook": "tame", "numel": 100}
    rows = [
        {**tame, "layer": "a", "changed": 100, "norm_before": 4.0, "norm_after": 1.0},
        {**tame, "layer": "b", "changed": 0, "norm_before": 2.0, "norm_after": 2.0},
        {**tame, "layer": "a", "changed": 50, "norm_before": None, "norm_after": None},
        {"hook": "drill", "numel": 10_000, "changed": 3},
        *({"hook": "rare", "numel": 10, "changed": 5 * held, "held": held} for held in (True, False, False)),
    ]
    found = [finding for finding in findings(made(effects=rows, killed=killed)) if finding.what == "changed"]
    assert [(finding.where, finding.value) for finding in found] == [
        ("2 locations, 3 firings (tame)", "50.0% changed, mean norm 3 -> 1.5"),
        ("1 location, 1 firing (drill)", "3 of 10,000 changed"),
        ("1 location, 3 firings, condition held in 1 (rare)", "16.7% changed"),
    ]
    assert found[0].number == 0.5


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("config", "description"),
    [
        ({"hooks": {"seen": {"layers": "a", "kind": "forward", "action": "clip", "max": 2.5}}}, "clip max 2.5"),
        ({"hooks": {"seen": {"layers": "a", "kind": "forward", "action": "modify", "fn": "<function f>"}}}, "changed"),
        ({"hooks": "damaged"}, "changed"),
        ({}, "changed"),
        (None, "changed"),
    ],
)
def test_intervention_is_described_by_its_config(made: Make, config: Any, description: str) -> None:
    assert names_of(made(config=config, effects=[{"changed": 1}])) == [description]


def test_only_needed_columns_are_read(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(config={"rules": {}}, stats=[{"l2": 1.0, **GRADIENT}], tensors=[], effects=[{"changed": 1}])
    scanned: list[tuple[str, int]] = []

    def counted(run: instrument.Run, original: Any, table: str, columns: list[str], *condition: Any) -> Any:
        scanned.append((table, len(columns)))
        return original(run, table, columns, *condition)

    for name in ("scan", "read"):
        monkeypatch.setattr(type(run), name, partialmethod(counted, getattr(type(run), name)))
    monkeypatch.setattr(type(run), "_frame", None)
    assert names_of(run) == ["largest gradient norm", "changed"]
    assert {table for table, _ in scanned} == {"stats", "metrics", "coverage", "effects", "events", "layers"}
    assert max(count for _, count in scanned) <= 15
    assert len(scanned) == 9, "the statistics, metrics and events are read twice, the other tables once"
