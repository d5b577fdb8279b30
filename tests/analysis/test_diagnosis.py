"""Findings of constructed events, grouped by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from instrument.analysis.diagnosis import FAR, LATE, Finding, diagnoses, findings_of
from instrument.config.rules import RULES, default_rules
from instrument.rules.reference import NEW_PARAMETER
from instrument.rules.rule import CAUSES, Part
from instrument.rules.rule_set import RuleEvent
from instrument.rules.watch import ADVICE as WATCH_ADVICE

LAYERS = ["", "linear0", "act0", "linear1", "act1"]
RECORD = {"layers": "**", "kind": "forward", "action": "record"}
EVERY_10 = {"config": {"hooks": {"hook": {**RECORD, "every": 10}, "first": {**RECORD, "steps": [0]}}}}


def event(rule: str, step: int, where: str = "", severity: str = "warning", what: str = "") -> RuleEvent:
    """Return an event; `where` is a layer and a role, such as `act0 output`, or empty for the run as a whole."""
    location = f"{where} (hook)" if where else None
    layer = where.split(" ", maxsplit=1)[0].removesuffix(".weight").removesuffix(".positions") if where else None
    at = f" in {location}" if location else ""
    return RuleEvent(rule, step, f"{what or rule}: at step {step}{at}: value", severity, layer, location, 2.0, 1.0)


def grouped(*events: RuleEvent, info: Mapping[str, Any] | None = None) -> list[list[str]]:
    """Return the names of the rules, and of the layers if there are any, by group."""
    found = findings_of(events, default_rules(), info or {}, LAYERS)
    return [
        [
            each.rule + ("" if each.where == "training" else f"@{each.where.split(' ')[0]}")
            for each in (group.lead, *group.consequences)
        ]
        for group in diagnoses(found)
    ]


def test_setup_precedes_the_divergence_and_its_consequences() -> None:
    events = (
        event("input_not_normalized", 0, "linear0 input"),
        event("loss_spike", 4),
        event("dead_units", 50, "act0 output"),
        event("loss_not_decreasing", 199),
    )
    assert grouped(*reversed(events)) == [
        ["input_not_normalized@linear0", "loss_spike", "dead_units@act0", "loss_not_decreasing"]
    ]
    assert grouped(*events[1:]) == [["loss_spike", "dead_units@act0", "loss_not_decreasing"]]


def test_spike_of_several_losses_began_with_the_first_one() -> None:
    gradient, spike = event("exploding_gradient", 11, "act0 grad_output"), event("loss_spike", 12)
    assert grouped(gradient, spike) == [["exploding_gradient@act0", "loss_spike"]]
    several = replace(
        spike, message="loss spike: at step 12: 3 losses above 2; the first one was 9, 5 times its median 2"
    )
    assert grouped(gradient, several) == [["loss_spike", "exploding_gradient@act0"]]


@pytest.mark.parametrize(
    ("cause", "effect"), [("class_imbalance", "non_finite"), ("unchanged_parameter", "exploding_activation")]
)
def test_problem_that_cannot_cause_another_one_does_not_lead_it(cause: str, effect: str) -> None:
    assert grouped(event(cause, 0), event(effect, 1, "act0 output")) == [[cause], [f"{effect}@act0"]]


def test_learning_rate_of_zero_does_not_cause_earlier_problems() -> None:
    events = (
        event("dead_units", 50, "act0 output"),
        event("zero_learning_rate", 60),
        event("unchanged_parameter", 70, "linear0.weight param"),
    )
    assert grouped(*events) == [["zero_learning_rate", "unchanged_parameter@linear0.weight"], ["dead_units@act0"]]


@pytest.mark.parametrize(
    ("places", "first"),
    [
        (["act1 output", "act0 output"], "act0"),  # the earlier layer
        (["linear0.weight param_grad", "linear1.weight param_grad"], "linear1.weight"),  # the later one: backward
        (["linear0.weight param_grad", "act1 output"], "act1"),  # forward precedes backward
        (["linear0.weight update", "linear1.weight param_grad"], "linear1.weight"),  # backward precedes the update
        ([" grad_output", "act1 grad_output"], ""),  # the root returns last
    ],
)
def test_order_of_a_training_step_decides_within_a_step(places: list[str], first: str) -> None:
    rules = "exploding_activation", "exploding_gradient"
    (group,) = grouped(*(event(rule, 3, place) for rule, place in zip(rules, places, strict=True)))
    assert group[0].endswith(f"@{first}")


@pytest.mark.parametrize(
    ("hook", "place", "part"),
    [
        (RECORD, "linear0 output", "forward"),
        ({**RECORD, "kind": "forward_pre"}, ".[pixel_values] input", "forward"),
        ({**RECORD, "kind": "forward_pre"}, ".[labels] input", "loss"),  # the model computes its loss from it
        ({**RECORD, "kind": "forward_pre"}, ".[class_labels.0] input", "loss"),
        ({**RECORD, "kind": "forward_pre"}, "labels.[0] input", "forward"),  # of a layer with this name
        ({**RECORD, "kind": "forward_pre"}, "linear0.[loss] output", "loss"),  # the model returns it
        ({**RECORD, "kind": "tensor"}, "linear0 output", "backward"),  # the gradient of the output
        ({**RECORD, "kind": "step_post", "role": "param_grad"}, "linear0.weight param_grad", "backward"),
        ({**RECORD, "kind": "step_post", "role": "state.exp_avg"}, "linear0.weight state.exp_avg", "update"),
        ({**RECORD, "kind": "step_post", "role": "buffer"}, "linear0.running_var buffer", "forward"),
    ],
)
def test_advice_of_a_reference_is_that_of_the_part_that_is_outside_first(
    hook: Mapping[str, Any], place: str, part: Part
) -> None:
    rules = {"healthy": {"rule": "reference", "from": "file.parquet"}}
    events = event("healthy", 1, place), event("healthy", 1, "linear0.weight update")
    (found,) = findings_of(events, rules, {"config": {"hooks": {"hook": hook}}}, LAYERS)
    assert found.where == f"{place} (hook)"
    assert found.advice == RULES["reference"].advice_in[part]


@pytest.mark.parametrize(("step", "part"), [(10, "update"), (20, "backward")])
def test_update_outside_of_a_reference_after_the_first_is_of_other_gradients(step: int, part: Part) -> None:
    rules = {"reference": {"from": "file.parquet"}}
    (found,) = findings_of([event("reference", step, "linear0.weight update")], rules, EVERY_10, LAYERS)
    assert found.advice == RULES["reference"].advice_in[part]


@pytest.mark.parametrize(
    ("place", "statistic", "part"),
    [
        ("linear0 grad_output", "zero_fraction", "forward"),
        ("linear0.weight param_grad", "zero_fraction", "forward"),
        ("linear0 grad_output", "rms", "backward"),
        (" grad_output", "zero_fraction", "backward"),
        ("act1 grad_output", "zero_fraction", "backward"),  # the last layer
        (".positions param_grad", "zero_fraction", "forward"),
    ],
)
def test_forward_pass_decides_which_elements_have_a_gradient(place: str, statistic: str, part: Part) -> None:
    rules = {"reference": {"from": "file.parquet"}}
    outside = event("reference", 3, place)
    outside = replace(outside, message=f"outside of the reference: at step 3 in {place}: {statistic} 0.5, above 0.1")
    (found,) = findings_of([outside], rules, EVERY_10, LAYERS)
    assert found.advice == RULES["reference"].advice_in[part]


def test_gradient_of_a_parameter_of_the_root_follows_those_of_layers() -> None:
    rules = {"reference": {"from": "file.parquet"}}
    events = event("reference", 3, ".positions param_grad"), event("reference", 3, "linear0 grad_output")
    assert findings_of(events, rules, EVERY_10, LAYERS)[0].where == "linear0 grad_output (hook)"


@pytest.mark.parametrize(
    ("tensor", "step", "part"),
    [
        ("EmbeddingBackward0.indices", 20, "forward"),
        ("EmbeddingBackward0.indices", 10, "backward"),  # a gradient was outside in the first step
        ("NllLossBackward0.target", 40, "loss"),
        ("NllLossBackward0.target", 20, "backward"),  # before the loss was
    ],
)
def test_values_that_enter_a_training_lead_what_follows_from_them(tensor: str, step: int, part: Part) -> None:
    rules = {**default_rules(), "reference": {"from": "file.parquet", "for": 2}}
    message = "outside of the reference: at step 30: loss 9, above 2; 1 to 1.5 in 3 healthy runs"
    loss = RuleEvent("reference", 30, message, "warning", None, None, 9.0, 2.0)
    message = f"other values: at step 90: {tensor} has 0 of 960 values in bucket 7; 0.03 in 3 healthy runs"
    counts = RuleEvent("reference", 90, message, "warning", None, None, 20.0, 12.0)
    events = loss, event("reference", step, "linear0 grad_output"), event("loss_spike", 60), counts
    leading, *others = findings_of(events, rules, EVERY_10, LAYERS)
    assert leading.advice == RULES["reference"].advice_in[part]
    assert (leading.what == "other values") == (part != "backward")
    assert leading.value.endswith("it can have begun at step 20") == (
        part != "backward"
    )  # as the loss, an interval earlier
    assert {each.cause for each in others} == {"reference"}


def test_counts_of_values_are_no_consequence_of_what_follows_the_loss() -> None:
    message = "outside of the reference: at step 30: loss 9, above 2; 1 to 1.5 in 3 healthy runs"
    loss = RuleEvent("reference", 30, message, "warning", None, None, 9.0, 2.0)
    message = (
        "other values: at step 90: NllLossBackward0.target has 0 of 960 values in bucket 7; 0.03 in 3 healthy runs"
    )
    counts = RuleEvent("reference", 90, message, "warning", None, None, 20.0, 12.0)
    rules = {**default_rules(), "reference": {"from": "file.parquet"}}
    found = findings_of([loss, event("input_not_normalized", 50), counts], rules, EVERY_10, LAYERS)
    assert {each.rule: each.cause for each in found} == {"input_not_normalized": "", "reference": ""}


def test_later_event_of_a_hook_that_records_seldom_does_not_change_what_began_first() -> None:
    events = event("exploding_gradient", 20, "linear0 grad_output"), event("dead_units", 30, "act0 output")
    later = replace(
        event("dead_units", 100, "act1 output"), location="act1 output (seldom)"
    )  # since step 1 at the earliest
    info = {"config": {"hooks": {"hook": RECORD, "seldom": {**RECORD, "every": 100}}}}
    found = findings_of([*events, later], default_rules(), info, LAYERS)
    assert [(each.rule, each.cause) for each in found] == [
        ("exploding_gradient", ""),
        ("dead_units", "exploding_gradient"),
    ]


def test_loss_outside_of_a_reference_follows_the_layers_that_are_outside() -> None:
    rules = {"healthy": {"rule": "reference", "from": "file.parquet"}}
    events = event("healthy", 3, "linear1 loss"), event("healthy", 3, "linear1 output")
    assert [findings_of(each, rules, {}, LAYERS)[0].where for each in (events, events[:1])] == [
        "linear1 output (hook)",
        "linear1 loss (hook)",
    ]
    assert findings_of(events[:1], rules, {}, LAYERS)[0].advice == RULES["reference"].advice_in["loss"]


@pytest.mark.parametrize(
    ("role", "part", "step", "leads"),
    [
        ("grad_output", "backward", 42, True),
        ("grad_output", "backward", 41, False),
        ("output", "forward", 43, True),
        ("output", "forward", 42, False),
    ],
)
def test_mean_loss_follows_tensors_that_left_the_reference_by_the_next_recorded_step(
    role: str, part: Part, step: int, leads: bool
) -> None:
    """The mean loss is outside up to step 22. The next recorded step follows at most 9 steps after its event. A layer is outside from 10
    steps before its event on."""
    rules = {"reference": {"from": "file.parquet", "for": 2}}
    message = "outside of the reference: at step 23: mean_loss 9, above 2; 1 to 1.5 in 3 healthy runs, steps 16 to 22"
    mean = RuleEvent("reference", 23, message, "warning", None, None, 9.0, 2.0)
    first, other = findings_of([mean, event("reference", step, f"linear0 {role}")], rules, EVERY_10, LAYERS)
    assert first.advice == RULES["reference"].advice_in["loss" if leads else part]
    assert other.cause == "reference"
    lr = RuleEvent(
        "reference", 24 if leads else 23, message.replace("mean_loss", "lr"), "warning", None, None, 9.0, 2.0
    )
    (first,) = findings_of([mean, lr], rules, EVERY_10, LAYERS)
    assert (first.advice, first.statistic) == (
        (RULES["reference"].advice_in["loss"], "loss") if leads else (RULES["reference"].advice_in["update"], "lr")
    )


@pytest.mark.parametrize(
    ("metric", "part"), [("lr", "update"), ("loss", "loss"), ("grad_norm", "backward"), ("eval loss", "forward")]
)
def test_metric_outside_of_a_reference_is_part_of_a_step(metric: str, part: Part) -> None:
    message = f"outside of the reference: at step 20: {metric} 9, above 2; 1 to 1.5 in 3 healthy runs"
    outside = RuleEvent("reference", 20, message, "warning", None, None, 9.0, 2.0)
    rules = {"reference": {"from": "file.parquet"}}
    (found,) = findings_of([outside], rules, EVERY_10, LAYERS)
    assert found.advice == RULES["reference"].advice_in[part]
    assert (found.statistic, found.threshold) == ("" if metric == "eval loss" else metric, 2.0)
    later = RuleEvent("reference", 30, message.replace(metric, "loss"), "warning", None, None, 9.0, 2.0)
    (found,) = findings_of([outside, later], rules, EVERY_10, LAYERS)
    assert found.advice == RULES["reference"].advice_in["loss" if metric == "eval loss" else part]
    # It is compared in recorded steps, so it began at step 10, in which the forward pass comes first. The learning rate is compared
    # in each step, so it began at step 19, and it is set before the forward pass.
    last = 28 if metric == "lr" else 20
    for step, lead in ((last, "linear0 output (hook)"), (last + 1, "training")):
        both = findings_of([outside, event("reference", step, "linear0 output")], rules, EVERY_10, LAYERS)
        assert [(each.where == lead, each.cause) for each in both] == [(True, ""), (False, "reference")]


def test_new_parameter_is_a_difference_of_the_forward_pass() -> None:
    rules = {"reference": {"from": "file.parquet"}}
    new = event("reference", 3, "linear1.weight param", what=NEW_PARAMETER)
    found, *others = findings_of([event("reference", 3, "linear0.weight param"), new], rules, EVERY_10, LAYERS)
    assert (found.where, found.what, others) == ("linear1.weight param (hook)", NEW_PARAMETER, [])
    assert found.advice == RULES["reference"].advice_in["forward"]


@pytest.mark.parametrize("watch", ["metrics", ["metrics"]])
def test_watch_with_the_name_of_a_rule_is_no_rule_of_the_catalogue(watch: Any) -> None:
    rules = {"reference": {"watch": watch, "stat": "loss", "above": 1}, "dead_units": {"_target_": "m.Mine"}}
    events = event("reference", 3), event("dead_units", 4, "linear0 output")
    watched, mine = findings_of(events, rules, {"advice": {"dead_units": "custom"}}, LAYERS)
    assert watched.advice == WATCH_ADVICE
    assert (watched.statistic, watched.threshold) == ("loss", 1.0)
    assert (mine.advice, mine.cause, mine.statistic) == ("custom", "", "")


def test_finding_of_a_reference_has_the_statistic_that_left_its_range() -> None:
    message = "outside of the reference: at step 3 in linear0 output (hook): rms 9, above 2; 1 to 1.5 in 3 healthy runs"
    outside = RuleEvent("reference", 3, message, "warning", "linear0", "linear0 output (hook)", 9.0, 2.0)
    (found,) = findings_of([outside], {"reference": {"from": "file.parquet"}}, {}, LAYERS)
    assert (found.statistic, found.number, found.threshold) == ("rms", 9.0, 2.0)


@pytest.mark.parametrize(
    ("spike", "names"),
    [(9, ["reference", "loss_spike", "dead_units"]), (7, ["loss_spike", "reference", "dead_units"])],
)
def test_reference_leads_later_problems_and_follows_earlier_ones(spike: int, names: list[str]) -> None:
    """The location is outside for the second time in succession at step 10, and the hook records each second step."""
    events = (
        event("dead_units", 30, "act0 output"),
        event("loss_spike", spike),
        event("reference", 10, "linear0 output"),
    )
    rules = {**default_rules(), "reference": {"from": "file.parquet"}}  # the name of the entry is that of the rule
    info = {"config": {"hooks": {"hook": {**RECORD, "every": 2}}}}
    (group,) = diagnoses(findings_of(events, rules, info, LAYERS))
    assert [each.rule for each in (group.lead, *group.consequences)] == names
    assert group.lead.value == ("value; it can have begun at step 8" if spike == 9 else "value")


def test_first_gradient_of_a_rule_is_that_of_the_last_layer() -> None:
    """The rows of the gradients of parameters are in the order of the parameters."""
    places = ("linear0.weight param_grad", "linear1.weight param_grad")
    events = [
        event("vanishing_gradient", 20, place, severity)
        for place, severity in zip(places, ("warning", "info"), strict=True)
    ]
    (found,) = findings_of(events, default_rules(), {}, LAYERS)
    assert (found.where, found.severity, found.value) == (
        "linear1.weight param_grad (hook)",
        "warning",
        "value (1 more event)",
    )


def test_problem_began_after_the_last_recorded_step() -> None:
    """A hook that records each 10th step finds NaN at step 10, 8 steps after the loss. `dead_units` needs 5 steps in succession."""
    events = event("non_finite", 2, what="loss not finite"), event("non_finite", 10, "linear0 output")
    assert grouped(*events, info=EVERY_10) == [["non_finite@linear0", "non_finite"]]
    assert grouped(*events) == [["non_finite", "non_finite@linear0"]]
    units = event("dead_units", 40, "act0 output"), event("loss_spike", 10)
    assert grouped(*units, info=EVERY_10) == [["dead_units@act0"], ["loss_spike"]]
    assert grouped(*units) == [["loss_spike", "dead_units@act0"]]


def test_events_far_apart_have_separate_causes() -> None:
    first, second = event("loss_spike", 10), event("non_finite", 11 + FAR, "act0 output")
    assert grouped(first, second) == [["loss_spike"], ["non_finite@act0"]]
    assert grouped(first, event("non_finite", 10 + FAR, "act0 output")) == [["loss_spike", "non_finite@act0"]]
    again = event("loss_spike", 9000, severity="info"), event("exploding_gradient", 9001, "act0 grad_output")
    found = findings_of([first, *again], default_rules(), {}, LAYERS)
    assert [(each.rule, each.step, each.value, each.cause) for each in found] == [
        ("loss_spike", 10, "value (1 more event)", ""),
        ("exploding_gradient", 9001, "value", "loss_spike"),
    ]


def test_unusable_training_comes_first() -> None:
    events = event("class_imbalance", 0), event("non_finite", 9, what="loss not finite")
    assert grouped(*events) == [["non_finite"], ["class_imbalance"]]
    assert [each.severity for each in findings_of(events, default_rules(), {}, [])] == ["error", "warning"]


def test_custom_rule_neither_has_nor_is_a_cause() -> None:
    rules = {**default_rules(), "mine": {"_target_": "m.Mine"}, "far": {"watch": "hook", "stat": "l2", "above": 1}}
    events = [event("mine", 0), event("far", 1, "act0 output"), event("loss_spike", 2)]
    found = findings_of(events, rules, {"advice": {"mine": "Do nothing."}}, LAYERS)
    assert [(each.rule, each.cause, each.statistic, each.threshold) for each in found] == [
        ("mine", "", "", None),
        ("far", "", "l2", 1.0),
        ("loss_spike", "", "loss", 1.0),
    ]
    assert found[0].advice == "Do nothing."


def test_diagnosis_is_one_sentence() -> None:
    consequences = [Finding(f"effect {i}", "a", 10 * i, "", "info", rule="b", cause="a") for i in range(1, 7)]
    lead = Finding("loss spike", "training", 1_234, "40, 20 times its median 2", "warning", rule="a")
    (full,) = diagnoses([lead, *consequences, Finding("loss", "training", None, "2 -> 1")])
    named = "effect 1 at step 10, effect 2 at step 20, effect 3 at step 30, effect 4 at step 40"
    assert str(full) == f"Loss spike at step 1,234: 40, 20 times its median 2; 6 consequences: {named} and 2 more."
    (short,) = diagnoses([lead, *consequences[:1]])
    assert short.summary == "1 consequence: effect 1 at step 10"
    assert str(diagnoses([lead])[0]) == "Loss spike at step 1,234: 40, 20 times its median 2."


def test_every_rule_of_problems_states_its_stage() -> None:
    of_casts = {"underflow", "overflow", "quantization_error"}  # the training does not make these casts
    assert {name for name, rule in RULES.items() if rule.stage is None} == of_casts
    assert {rule.stage for rule in RULES.values()} - {None} == {*CAUSES}


def test_problems_of_late_stages_cause_none_of_earlier_stages() -> None:
    order = {stage: LATE.get(stage, 1) for stage in CAUSES}
    assert {
        (stage, cause) for stage, causes in CAUSES.items() for cause in causes if order[cause] > order[stage]
    } == set()
