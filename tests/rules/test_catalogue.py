"""Every rule of the catalogue fires on rows with its fault, and not on rows without it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import pytest
from rule_rows import GRADIENT, INPUT, OUTPUT, PARAMETER, UPDATE, Step, feed, fired, rule_set, values

from instrument.config.parse import parse_rules
from instrument.config.rules import RULES, RuleBase, default_rules
from instrument.errors import ConfigError
from instrument.rules.relations import RelationRule
from instrument.rules.rule import CatalogueRule, Firing
from instrument.rules.rule_set import MAX_EVENTS, RuleEvent, RuleSet
from instrument.rules.step_rows import RelationRow, StepRows

NOISE = [1.0, 1.3, 0.8, 1.1, 0.9] * 6
CONV = {**OUTPUT, "layer": "b", "module_type": "Conv2d"}


def losses(*numbers: float, **more: Any) -> list[Step]:
    return [Step(loss=number, **more) for number in numbers]


def evaluated(training: list[float], evaluation: list[float]) -> list[Step]:
    """Return one step and one evaluation for each pair of losses."""
    steps = []
    for number, (loss, eval_loss) in enumerate(zip(training, evaluation, strict=True)):
        steps += [Step(step=number, loss=loss), Step(step=number + 1, phase="eval", loss=eval_loss)]
    return steps


def outputs(*stds: float) -> list[Step]:
    return [Step(rows=[{**OUTPUT, "layer": str(i), "numel": 9, "std": std} for i, std in enumerate(stds)])]


def inputs(mean: float, std: float) -> list[Step]:
    return [
        Step(rows=[{**INPUT, "numel": 9, "mean": mean, "std": std}, {**INPUT, "layer": "b", "mean": 9e9, "std": 0.0}])
    ]


def parameters(*numbers: float, **more: Any) -> list[Step]:
    return [Step(rows=[{**PARAMETER, "numel": 9, "mean": number, "l2": number}], **more) for number in numbers]


def messages(sent: float, got: float, operation: str = "all_reduce", numel: int = 100) -> Step:
    """Return a step with a collective operation in which these fractions of the elements are zero."""
    shared = {"layer": "", "kind": "collective", "path": f"{operation}.0", "numel": numel}
    roles = {"input": sent, "output": got}
    return Step(rows=[{**OUTPUT, **shared, "hook": role, "role": role, "zero_fraction": roles[role]} for role in roles])


def relation(name: str, holds: bool | None) -> RelationRow:
    return RelationRow(name, "", "", holds, 2.0, "some text")


# By rule: steps with the fault, steps without it, and the step and the value of the event.
CASES: dict[str, tuple[list[Step], list[Step], int, float]] = {
    "non_finite": (values(OUTPUT, "nan_count", [0, 0, 3]), values(OUTPUT, "nan_count", [0, 0, None]), 2, 3.0),
    "exploding_gradient": (values(GRADIENT, "l2", [*NOISE, 300.0]), values(GRADIENT, "l2", [*NOISE, 80.0]), 30, 300.0),
    "exploding_activation": (values(OUTPUT, "abs_max", [2.0, 1.0, 3e4]), values(OUTPUT, "abs_max", [1e5, 2e9]), 2, 3e4),
    "vanishing_gradient": (
        values(GRADIENT, "rms", [1e-9] * 4, loss=2.3),
        values(GRADIENT, "rms", [1e-3], loss=2.3) + values(GRADIENT, "rms", [1e-9] * 9, loss=0.1),
        2,
        1e-9,
    ),
    "dead_units": (
        values(OUTPUT, "dead_fraction", [0.8] * 6),
        values(OUTPUT, "dead_fraction", [*[0.8] * 4, 0.6] * 3),
        4,
        0.8,
    ),
    "underflow": (
        values(OUTPUT, "underflow_fraction", [0.06] * 6),
        values(OUTPUT, "underflow_fraction", [*[0.06] * 4, 0.05] * 3),
        4,
        0.06,
    ),
    "overflow": (
        values({**OUTPUT, "scale": 2.0}, "overflow_fraction", [1e-4] * 6),
        values({**OUTPUT, "scale": 2.0}, "overflow_fraction", [*[1e-4] * 4, 1e-6] * 3),
        4,
        1e-4,
    ),
    "quantization_error": (
        values(OUTPUT, "quantization_error", [0.02] * 6),
        values(OUTPUT, "quantization_error", [*[0.02] * 4, 0.003] * 3),
        4,
        0.02,
    ),
    "saturated_activation": (
        values(OUTPUT, "saturated_fraction", [0.0, *[0.75] * 5]),
        values(OUTPUT, "saturated_fraction", [0.25] * 9),
        5,
        0.75,
    ),
    "poor_initialization": (outputs(1.0, 0.01, 1e-5), outputs(1.0, 0.3, 0.1, 0.03), 0, 1e5),
    "all_zero": (
        values(GRADIENT, "zero_fraction", [1.0] * 4),
        values(GRADIENT, "zero_fraction", [1.0, 1.0, 0.9]),
        2,
        1.0,
    ),
    "unchanged_parameter": (
        parameters(0.5, 0.25, 0.25, 0.25, 0.25),
        [*parameters(0.5, 0.25, 0.25, 0.75), *parameters(*[0.75] * 9, lr=0.0), *parameters(*[0.5] * 9, loss=0.0)],
        3,
        0.0,
    ),
    "zero_learning_rate": (
        [Step(lr=rate) for rate in (0.1, 0.0, 0.0, 0.0)],
        [Step(lr=rate) for rate in (0.0, 0.0, 0.1, 0.0, None)] + [Step(phase="eval", lr=0.0)] * 9,
        3,
        0.0,
    ),
    "update_ratio": (
        values(UPDATE, "update_ratio", [0.01] * 20 + [0.5] * 11),
        values(UPDATE, "update_ratio", [1.0] + [0.9] * 19 + [0.05] * 30),
        29,
        0.5,
    ),
    "loss_not_decreasing": (losses(*[2.3, 2.31] * 110), losses(*(3 / (step + 1) for step in range(220))), 199, 2.305),
    "loss_spike": (losses(1.0, *[0.05, 0.06] * 15, *[0.9] * 3), losses(1.0, *[0.001] * 30, *[0.02] * 3), 33, 0.9),
    "overfit": (
        evaluated([1.0, 0.1, 0.1, 0.1, 0.1], [1.0, 0.5, 0.76, 0.78, 0.8]),
        evaluated([1.0, 0.1, 0.1, 0.1, 0.1], [1.0, 0.5, 0.5, 0.5, 0.5]),
        5,
        7.0,
    ),
    "overtraining": (
        evaluated([1.0] * 12, [1.0, 0.5, *[0.6] * 10]),
        evaluated([1.0] * 12, [1.0, 0.5, *[0.6, 0.5] * 5]),
        12,
        0.6,
    ),
    "tensor_variance": (
        values(CONV, "std", [1e-6] * 6),
        values({**CONV, "module_type": "ReLU"}, "std", [0.0] * 9) + values(CONV, "std", [1e-3, 900.0]),
        4,
        1e-12,
    ),
    "class_imbalance": (
        [Step(targets=[0] * 58 + [1, 1] + [2] * 4)] * 9,
        [Step(targets=[0] * 30 + [1] * 30 + [2] * 4)] * 9,
        7,
        29.0,
    ),
    "zero_message": (
        [messages(0.2, 0.1), messages(1.0, 0.9), messages(1.0, 0.9)],
        [
            *(messages(0.9, 0.9), messages(1.0, 1.0), messages(1.0, 0.0, numel=8)),
            *(messages(1.0, 0.5, "all_gather"), messages(0.5, 1.0, "reduce_scatter")),
        ],
        1,
        1.0,
    ),
    "input_not_normalized": (inputs(120.0, 60.0), inputs(0.13, 0.31), 0, 60.0),
    **{
        name: (
            [Step(relations=[relation(name, True)]), *[Step(loss=1.0)] * 3, Step(relations=[relation(name, False)])],
            [Step(relations=[relation(name, True), relation(name, None), relation("other", False)])],
            4,
            2.0,
        )
        for name in sorted(RULES)
        if issubclass(RULES[name], RelationRule)
    },
}


def test_zero_message_of_one_micro_step_is_found() -> None:
    first, second = messages(0.5, 0.5), messages(1.0, 0.9)
    (event,) = fired("zero_message", [Step(rows=[*first["rows"], *second["rows"]])])
    assert "all_reduce.0 input" in event.message


def test_zero_message_of_several_tensors_is_reported_once() -> None:
    received, sent = (messages(*values, "reduce_scatter")["rows"] for values in ((0.5, 0.5), (1.0, 0.5)))
    rows = [{**sent[0], "path": f"reduce_scatter.0.{at}"} for at in range(2)]
    (event,) = fired("zero_message", [Step(rows=[*rows, received[1]])])
    assert "reduce_scatter.0.0 input" in event.message
    padding = [rows[0], {**received[0], "path": "reduce_scatter.0.1"}]
    assert not fired("zero_message", [Step(rows=[*padding, received[1]])])


def test_every_rule_has_a_case_and_an_advice() -> None:
    assert CASES.keys() == RULES.keys() - {"reference"} == default_rules().keys()  # see test_reference.py
    for name, rule in RULES.items():
        assert rule.what, name
        assert ": " not in rule.what, name
        assert rule.advice.endswith("."), name
        assert rule.requires, name


def test_registered_rule_is_parsed_fires_and_is_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RULES) == len(CASES) + 1
    for state in ("_entries", "places"):
        monkeypatch.setattr(RULES, state, {**getattr(RULES, state)})

    class LowLossRule(RuleBase):
        rule: Literal["low_loss"]
        below: float = 0.5

    @RULES.register("low_loss")
    class LowLoss(CatalogueRule[LowLossRule]):
        fields = LowLossRule
        what = "low loss"

        def update(self, rows: StepRows) -> Iterator[Firing]:
            loss = rows.metric("loss")
            if loss is not None and loss < self.spec.below:
                yield Firing(f"{loss:g}", loss, self.spec.below)

    (event,) = fired({"rule": "low_loss", "below": 0.2}, losses(1.0, 0.3, 0.1))
    assert (event.step, event.message) == (2, "low loss: at step 2: 0.1")
    assert "low_loss" not in default_rules()
    with pytest.raises(ConfigError, match="unknown rule") as failed:
        parse_rules({"r": {"rule": "low_los"}})
    (problem,) = failed.value.problems
    assert {*problem.allowed} >= {*CASES, "low_loss"}
    assert problem.similar[0] == "low_loss"
    with pytest.raises(ConfigError, match=r"rule 'mine' is not a subclass of CatalogueRule with 'fields'"):
        RULES.register("mine")(int)


WHAT = {
    "non_finite": "first recorded non-finite value",
    "update_ratio": "updates too large",
    "tensor_variance": "constant output",
}
"""What a rule reports in `CASES`, if it is not the `what` of the rule."""


@pytest.mark.parametrize("name", CASES)
def test_rule_fires_once_on_its_fault_only(name: str) -> None:
    faulty, healthy, step, value = CASES[name]
    assert fired(name, healthy) == []
    (event,) = fired(name, faulty)
    assert (event.rule, event.step, event.severity) == ("r", step, "warning")
    assert event.value == pytest.approx(value)
    assert event.message.startswith(f"{WHAT.get(name, RULES[name].what)}: ")
    assert (event.location is None) == (event.layer is None) == ("rows" not in faulty[0])


@pytest.mark.spread(12)
@pytest.mark.parametrize("name", CASES)
def test_resumed_rule_decides_like_an_uninterrupted_one(name: str) -> None:
    faulty, healthy, *_ = CASES[name]
    for steps in (faulty, healthy):
        for at in {1, len(steps) // 2, len(steps) - 1}:
            events: list[RuleEvent] = []
            first, second = (rule_set({"r": {"rule": name}}, events) for _ in range(2))
            numbered = [Step({"step": number, **step}) for number, step in enumerate(steps)]
            feed(first, numbered[:at])
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            feed(second, numbered[at:])
            assert events == fired(name, steps)


def test_rule_resumes_from_an_earlier_version_with_fewer_attributes() -> None:
    events: list[RuleEvent] = []
    first, second = (rule_set({"r": {"rule": "loss_not_decreasing"}}, events) for _ in range(2))
    faulty, *_ = CASES["loss_not_decreasing"]
    feed(first, [Step({"step": number, **step}) for number, step in enumerate(faulty[:100])])
    state = first.state_dict()
    for name in ("limit", "exceeded"):
        del state["rules"]["r"][name]
    second.load_state_dict(state)
    feed(second, [Step({"step": number, **step}) for number, step in enumerate(faulty)][100:])
    assert events == fired("loss_not_decreasing", faulty)


def test_growth_fires_again_after_the_value_was_small_again() -> None:
    steps = values(GRADIENT, "l2", [*NOISE, 3e5, 3e5, *NOISE, 400.0])
    (event, again) = fired("exploding_gradient", steps)
    assert [(each.step, each.severity) for each in (event, again)] == [(30, "warning"), (62, "info")]
    assert event.threshold == pytest.approx(100.0)
    where = "exploding gradient: at step 30 in a.weight param_grad (gradients)"
    assert event.message == f"{where}: l2 3e+05, 300,000 times its median 1"


@pytest.mark.parametrize(("last", "layers"), [(700.0, ["a"]), (400.0, [])])
def test_growth_of_a_gradient_is_compared_with_its_own_and_other_layers(last: float, layers: list[str]) -> None:
    rows = [{**GRADIENT, "layer": layer, "numel": 9} for layer in "ab"]
    steps = [Step(rows=[{**rows[0], "l2": 1.0}, {**rows[1], "l2": 500.0}]) for _ in range(20)]
    steps.append(Step(rows=[{**rows[1], "l2": 600.0}, {**rows[0], "l2": last}]))
    assert [event.layer for event in fired("exploding_gradient", steps)] == layers


LAST = {**OUTPUT, "layer": "b", "module_type": "Sigmoid", "numel": 9, "saturated_fraction": 0.9}
QUARTERS = (0.60, 0.56, 0.61, 0.63)


def rates(*numbers: float) -> list[Step]:
    return [Step(lr=number) for number in numbers]


EPISODES = [10.0, 30.0, 12.0, 55.0, 20.0, 15.0] * 8


def biases(small: float) -> list[Step]:
    """Return steps with the gradients of a weight, about 1, and of a bias, which grows 2,000 times from a small value."""
    bias = {**GRADIENT, "path": "bias", "numel": 9}
    weights = values(GRADIENT, "l2", NOISE)
    return [
        Step(rows=[*step["rows"], {**bias, "l2": 2e3 * small if at == len(weights) - 1 else small}])
        for at, step in enumerate(weights)
    ]


EXPLODING = values(GRADIENT, "l2", [*NOISE, 300.0])
IMAGES = {**INPUT, "numel": 9, "module_type": "Conv2d", "layer": "a.b", "mean": 120.0, "std": 60.0}
OF_CONVOLUTION = [{**CONV, "numel": 9, "layer": layer} for layer in ("a.b", "a")]
WEIGHTS = {**OUTPUT, "layer": "b", "numel": 9, "path": "1", "std": 1e-5}
NORMALIZED = {**OUTPUT, "numel": 9, "layer": "c", "module_type": "InstanceNorm2d"}
# By case: a rule, steps, and the number of its events.
EVENTS: dict[str, tuple[Any, list[Step], int]] = {
    "zeros are no reference of growth": ("exploding_gradient", values(GRADIENT, "l2", [0.0] * 30 + [5.0]), 0),
    "rounding is no reference": ("exploding_gradient", biases(1e-7), 0),
    "small gradients of a bias that becomes the largest one": ("exploding_gradient", biases(1e-3), 1),
    "norms that overflow are no reference": (
        "exploding_gradient",
        [Step(rows=[*step["rows"], {**GRADIENT, "layer": "b", "numel": 9, "l2": np.inf}]) for step in EXPLODING],
        1,
    ),
    "missing values are no reference": ("exploding_gradient", values(GRADIENT, "l2", [None, 1.0] * 15 + [500.0]), 1),
    "invalid rows of another rule": ("all_zero", values({**GRADIENT, "nan_count": 99}, "zero_fraction", [1.0] * 9), 0),
    "infinities may be a mask": ("all_zero", values({**OUTPUT, "inf_count": 30}, "zero_fraction", [1.0] * 9), 1),
    "other hook": ({"rule": "dead_units", "hook": "other"}, values(OUTPUT, "dead_fraction", [0.9] * 9), 0),
    "several hooks": ({"rule": "dead_units", "hook": ["other", "seen"]}, values(OUTPUT, "dead_fraction", [0.9] * 9), 1),
    "units of a network that learns": (
        "dead_units",
        values(OUTPUT, "dead_fraction", [0.2], loss=2.3) + values(OUTPUT, "dead_fraction", [0.9] * 9, loss=1.1),
        0,
    ),
    "a layer that is dead in a network that learns": (
        "dead_units",
        values(OUTPUT, "dead_fraction", [0.2], loss=2.3) + values(OUTPUT, "dead_fraction", [1.0] * 9, loss=1.1),
        1,
    ),
    "units after a first loss of infinity": (
        "dead_units",
        values(OUTPUT, "dead_fraction", [0.2], loss=np.inf) + values(OUTPUT, "dead_fraction", [0.9] * 9, loss=2.3),
        1,
    ),
    "units after a higher loss in a step without rows": (
        "dead_units",
        losses(2.3) + values(OUTPUT, "dead_fraction", [0.9] * 9, loss=1.1),
        0,
    ),
    "units of a network that has not learned": (
        "dead_units",
        values(OUTPUT, "dead_fraction", [0.2], loss=2.3) + values(OUTPUT, "dead_fraction", [0.9] * 9, loss=1.2),
        1,
    ),
    "zero updates have no ratio": ("update_ratio", values(UPDATE, "update_ratio", [0.0] * 60), 0),
    "saturated output of the network": ("saturated_activation", [Step(rows=[{**OUTPUT, "numel": 9}, LAST])] * 9, 0),
    "saturated gates of a network that learns": (
        "saturated_activation",
        values(OUTPUT, "saturated_fraction", [0.2], loss=2.3) + values(OUTPUT, "saturated_fraction", [0.9] * 9, loss=1.1),
        0,
    ),
    "gates saturated before": (
        "saturated_activation",
        values(OUTPUT, "saturated_fraction", [0.9], loss=2.3) + values(OUTPUT, "saturated_fraction", [0.9] * 9, loss=1.1),
        1,
    ),
    "saturated layer": ("saturated_activation", [Step(rows=[OUTPUT, LAST, {**OUTPUT, "layer": "c"}])] * 9, 1),
    "blocks limit their largest numbers": ("overflow", values(OUTPUT, "overflow_fraction", [0.01] * 9), 0),
    "large mean": ("input_not_normalized", inputs(1.2, 0.3), 1),
    "images from 0 to 1": ("input_not_normalized", [Step(rows=[{**IMAGES, "mean": 0.9, "std": 0.1, "abs_max": 1.0}])], 0),
    "normalized by the next module": ("input_not_normalized", [Step(rows=[IMAGES, *OF_CONVOLUTION, NORMALIZED])], 0),
    "normalized later": ("input_not_normalized", [Step(rows=[IMAGES, *OF_CONVOLUTION, {**OUTPUT, "layer": "d"}, NORMALIZED])], 1),
    "small rise": ("overfit", evaluated([2.3, *[0.01] * 6], [1.0, 0.1, 0.8, 0.9, 1.0, 1.1, 1.19]), 0),
    "large rise": ("overfit", evaluated([2.3, *[0.01] * 6], [1.0, 0.1, 1.3, 1.4, 1.5, 1.6, 1.7]), 1),
    "rise of a large rate": ("overfit", evaluated([2.3, *[0.01] * 6], [1.0, 0.1, 2.8, 2.4, 3.1, 1.8, 3.0]), 0),
    "converged, the lowest loss is an extreme value": ("overtraining", evaluated([1.0] * 14, [2.0, 1.1, *[1.2, 1.15] * 6]), 0),
    "negative loss": ("loss_not_decreasing", losses(0.1, -0.1, *[0.2] * 300), 0),
    "positive loss": ("loss_not_decreasing", losses(0.1, 0.0, *[0.2] * 300), 1),
    "loss that rises and falls": ("loss_not_decreasing", losses(*np.repeat(QUARTERS, 50)), 0),
    "loss that rises": ("loss_not_decreasing", losses(*np.repeat(sorted(QUARTERS), 50)), 1),
    "losses of episodes, above 5 times the median": ("loss_spike", losses(*EPISODES, *[108.0] * 3), 0),
    "spike after episodes": ("loss_spike", losses(100.0, *EPISODES, *[112.0] * 3), 1),
    "losses of a policy that follow its returns": ("loss_spike", losses(*EPISODES, *[112.0] * 3), 0),
    "single batch": ("loss_spike", losses(1.0, *[0.05, 0.06] * 15, 3.0, 0.9, *[0.05] * 9), 0),
    "losses become NaN": ("loss_spike", losses(1.0, *[0.05, 0.06] * 15, 3.0, np.nan, np.inf, np.nan), 1),
    "first losses that become NaN": ("loss_spike", losses(1.0, *[0.05, 0.06] * 15, *[np.nan] * 9), 0),
    "single batch, at once": ({"rule": "loss_spike", "for": 1}, losses(1.0, *[0.05, 0.06] * 15, 3.0, 0.05), 1),
    "rate that falls in the first steps": ("zero_learning_rate", rates(*[0.1] * 6, *[1e-5] * 120), 1),
    "last steps of a schedule": ("zero_learning_rate", rates(*[0.1] * 90, *[1e-2] * 30, *[1e-4] * 80), 0),
    "warm-up, constant rate": ("zero_learning_rate", rates(*np.linspace(0.0, 0.1, 150), *[0.1] * 50), 0),
    "short training with a falling rate": ("zero_learning_rate", rates(*[0.1] * 6, *[1e-5] * 90), 0),
    "updates that halve": (
        "update_ratio",
        values(UPDATE, "update_ratio", [0.5] * 20 + [0.8 * 0.9**step for step in range(40)]),
        0,
    ),
    "all zeros in a further item of an output": ("all_zero", values({**OUTPUT, "path": "1"}, "zero_fraction", [1.0] * 9), 0),
    "equal attention weights of one key": ("tensor_variance", values({**CONV, "path": "1"}, "std", [0.0] * 9), 0),
    "small attention weights at first": ("poor_initialization", [Step(rows=[*outputs(1.0, 0.3)[0]["rows"], WEIGHTS])], 0),
    "small last layers of branches": ("poor_initialization", outputs(1.1, 3e-5, 0.9, 1e-5, 1.0, 2e-5, 1.2, 1.0), 0),
    "one small output among equal ones": ("poor_initialization", outputs(1.0, 1.0, 1.0, 1e-5, 1.0, 1.0, 1.0, 1.0), 0),
    "small outputs before the first normalization": ("poor_initialization", outputs(1e-2, 1e-2, 1e-5, *[0.3] * 9), 0),
    "outputs that grow beyond float64": ("poor_initialization", outputs(1e-300, 1.0, 1e300, 1e305), 1),
    "outputs that grow in every second layer": ("poor_initialization", outputs(1.0, 1e-2, 1e2, 1.0, 1e4, 1e2, 1e6, 1e4), 1),
    "a metric of zero": ("all_zero", values({**OUTPUT, "path": "clip_fraction", "numel": 1}, "zero_fraction", [1.0] * 9), 0),
    "the gradient of one number": ("all_zero", values({**GRADIENT, "numel": 1}, "zero_fraction", [1.0] * 9), 1),
    "all zeros in the first item of an output": ("all_zero", values({**OUTPUT, "path": "0"}, "zero_fraction", [1.0] * 9), 1),
    "policy of equal probabilities at first": ("loss_spike", losses(2.7e-8, 4.5e-9, 9e-4, -1e-3), 0),
    "policy gradient that is always rounding": ("loss_spike", losses(*[3e-8, -3e-8] * 15, 2e-4), 0),
    "first losses of both signs": ("loss_spike", losses(-1e-3, 2e-4, 5.0), 0),
    "small losses": ("loss_spike", losses(1.0, *[1e-8] * 30, 2e-3, *[0.6] * 3), 1),
    "jump of the first losses": ("loss_spike", losses(2e-3, 1e-3, 5.0), 1),
    "first losses that explode": ("loss_spike", losses(2.3, 2.2, 2.8, 35.0, 245.0, 20780.0), 1),
    "first losses that rise with the square of the step": ("loss_spike", losses(*(1e-5 * step**2 for step in range(19))), 0),
    "first losses that rise with its fourth power from zero": ("loss_spike", losses(*(1e-5 * step**4 for step in range(19))), 0),
    "policy near zero at first": ("loss_spike", losses(1e-9, 5e3, 4e3, 6e3), 0),
    "signed loss, overfit": ("overfit", evaluated([0.1] * 9, [-0.5, *[0.9] * 8]), 0),
    "signed loss, small": ("overtraining", evaluated([-1.0] * 12, [2.0, -0.001, *[0.0] * 10]), 0),
    "signed loss, overtraining": ("overtraining", evaluated([-1.0] * 12, [2.0, -0.001, *[0.3] * 10]), 1),
    "gradients of a loss of zero": ("all_zero", values(GRADIENT, "zero_fraction", [1.0] * 9, loss=0.0), 0),
    "outputs with a loss of zero": ("all_zero", values(OUTPUT, "zero_fraction", [1.0] * 9, loss=0.0), 1),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "steps", "count"), EVENTS.values(), ids=EVENTS)
def test_rule_fires_in_these_steps_or_not(rule: Any, steps: list[Step], count: int) -> None:
    assert len(fired(rule, steps)) == count


def test_several_rows_of_a_location_count_once() -> None:
    rows = [{**OUTPUT, "numel": 9, "dead_fraction": fraction} for fraction in (0.9, 0.2)]
    assert fired("dead_units", [Step(rows=rows)] * 9) == []  # another call in the step uses the units
    rows[1]["dead_fraction"] = 0.8
    (event,) = fired("dead_units", [Step(rows=rows)] * 9)
    assert event.value == 0.8
    rows[0]["recompute"] = rows[1]["recompute"] = True
    assert fired("dead_units", [Step(rows=rows)] * 9) == []


def test_watch_reads_any_statistic_and_metric() -> None:
    below = {"watch": "seen", "stat": "std", "below": 1e-3, "for": 3}
    (event,) = fired(below, values(OUTPUT, "std", [1.0, *[1e-4] * 9]))
    assert (event.step, event.value, event.threshold) == (3, 1e-4, 1e-3)
    assert event.message.endswith("std 0.0001, below 0.001, 3 times in succession")
    custom = {"watch": "seen", "stat": "entropy", "above": 2}
    assert [event.step for event in fired(custom, values(OUTPUT, "entropy", [1.0, 3.0, 3.0, 1.0, 4.0]))] == [1, 4]
    metric = {"watch": "metrics", "stat": "grad_norm", "above": 10.0, "for": 2}
    assert [event.step for event in fired(metric, [Step(grad_norm=norm) for norm in (20, 5, 20, 20, 20)])] == [3]


def test_number_of_events_is_limited() -> None:
    steps = [Step(rows=[{**OUTPUT, "layer": str(layer), "numel": 9, "nan_count": 1} for layer in range(100)])] * 3
    events = fired("non_finite", steps)
    assert [event.severity for event in events] == ["warning", *["info"] * (MAX_EVENTS + 1)]
    assert events[-1].message == "rule r fired 21 times; further ones are not reported"


@pytest.mark.slow
def test_state_does_not_grow_with_the_steps() -> None:
    rules = rule_set(default_rules(), [])
    sizes = []
    for _ in range(3):
        feed(rules, [Step(loss=1.0, lr=0.1, rows=[{**GRADIENT, "numel": 9, "l2": 1.0, "rms": 1.0}])] * 200)
        sizes.append(len(json.dumps(rules.state_dict())))
    assert max(sizes) - min(sizes) < 64


def test_frozen_layers_and_biases_may_be_unchanged() -> None:
    events: list[RuleEvent] = []
    rules = RuleSet(parse_rules({"r": {"rule": "unchanged_parameter"}}), events.append, {"a"})
    feed(rules, parameters(*[0.5] * 9))
    assert events == []
    bias = [Step(rows=[{**row, "path": "bias"} for row in step["rows"]]) for step in parameters(*[0.5] * 9)]
    assert fired("unchanged_parameter", bias) == []


@pytest.mark.parametrize(
    ("rule", "steps", "what"),
    [
        ("update_ratio", values(UPDATE, "update_ratio", [1e-9] * 40), "updates too small"),
        ("tensor_variance", values(CONV, "std", [1e4] * 6), "huge output"),
    ],
)
def test_rule_with_two_bounds_names_the_one_that_is_exceeded(rule: str, steps: list[Step], what: str) -> None:
    (event,) = fired(rule, steps)
    assert event.message.startswith(f"{what}: at step ")


def test_first_update_that_replaces_the_weights_is_reported() -> None:
    def first(*ratios: float) -> list[Step]:
        return [Step(rows=[{**UPDATE, "layer": str(i), "numel": 9, "update_ratio": r} for i, r in enumerate(ratios)])]

    (event,) = fired("update_ratio", first(0.02, 0.97, 0.9))
    assert (event.layer, event.value, event.threshold) == ("1", 0.97, 0.5)
    assert event.message.startswith("updates too large: ")
    assert [event.value for event in fired("update_ratio", first(0.02, 9.0, 1.2))] == [
        9.0
    ]  # it is opposite to the weights
    assert fired("update_ratio", first(0.02, 1.0, 1.0 + 1e-7)) == []  # these weights start at zero
    assert fired("update_ratio", first(0.02, 0.03, 0.9)) == []


def test_loss_that_rises_until_it_is_not_finite_does_not_decrease() -> None:
    (event,) = fired("loss_not_decreasing", losses(2.3, 2.6, 40.0, 1e9, float("nan"), float("nan")))
    assert (event.step, event.value) == (4, 1e9)
    assert fired("loss_not_decreasing", losses(2.3, 2.4, float("nan"))) == []


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_scale_of_the_loss_does_not_matter(scale: float) -> None:
    gradients = [
        {**step, "loss": 2.0 * scale}
        for step in values(GRADIENT, "l2", [scale * norm for norm in NOISE])
        + values(GRADIENT, "rms", [scale * 1e-4] * 9)
    ]
    for rule in ("exploding_gradient", "vanishing_gradient"):
        assert fired(rule, map(Step, gradients)) == []
    vanished = values(GRADIENT, "rms", [scale * 1e-9] * 4, loss=2.3 * scale)
    assert len(fired("vanishing_gradient", vanished)) == 1
    (event,) = fired("loss_spike", losses(*(scale * loss for loss in [1.0, *[0.05, 0.06] * 15, *[0.9] * 3])))
    assert event.value == pytest.approx(0.9 * scale)


def test_vanishing_gradient_without_a_loss_is_relative_to_other_layers() -> None:
    rows = [{**GRADIENT, "layer": layer, "numel": 9} for layer in "ab"]
    steps = [Step(rows=[{**rows[0], "rms": 1e-14}, {**rows[1], "rms": 1e-5}])] * 3
    assert [event.layer for event in fired("vanishing_gradient", steps)] == ["a"]
    assert fired("vanishing_gradient", [Step(rows=[{**rows[0], "rms": 1e-14}, {**rows[1], "rms": 1e-13}])] * 9) == []


@pytest.mark.parametrize(
    ("rule", "about", "statistic"), [("vanishing_gradient", GRADIENT, "rms"), ("tensor_variance", CONV, "std")]
)
def test_weights_that_start_at_zero_are_not_reported(rule: str, about: dict[str, str], statistic: str) -> None:
    growing = [0.0, 0.0, *(2e-8 * step for step in range(1, 9))]
    assert fired(rule, values(about, statistic, growing, loss=2.3)) == []
    for constant in ([0.0] * 5, [0.0, 1e-8, *[0.0] * 5], [1e-3, 0.0, *[1e-8] * 5]):
        assert len(fired(rule, values(about, statistic, constant, loss=2.3))) == 1


def test_zeros_of_a_first_step_at_a_rate_of_zero_do_not_count() -> None:
    for rule, statistic, zero in (("all_zero", "zero_fraction", 1.0), ("vanishing_gradient", "rms", 0.0)):
        warm_up = values(GRADIENT, statistic, [zero], loss=2.3, lr=0.0)
        warm = values(GRADIENT, statistic, [zero] * 3, loss=2.3, lr=0.1)
        assert fired(rule, warm_up + warm[:2]) == []
        (event,) = fired(rule, warm_up + warm)
        assert event.step == 3
        (event,) = fired(rule, warm_up * 5)  # the rate is that of the first group of parameters, which may be frozen
        assert event.step == 3


def test_gradient_explodes_within_the_first_steps() -> None:
    assert fired("exploding_gradient", values(GRADIENT, "l2", [0.0, 1e-3, 1.0, 2.0])) == []
    (event,) = fired("exploding_gradient", values(GRADIENT, "l2", [1.0, 2.0, 1e6]))
    assert (event.step, event.threshold) == (2, 1.5e4)


def test_spike_of_a_signed_loss_is_compared_with_its_range() -> None:
    policy = [0.4, -0.3, 0.01, 1.1, -0.9, 0.2] * 8
    assert fired("loss_spike", losses(*policy, 4.0, *policy)) == []
    assert fired("loss_spike", losses(*policy, 40.0, *policy)) == []
    (event,) = fired("loss_spike", losses(*policy, 40.0, 50.0, 60.0, *policy))
    assert (event.step, event.value) == (len(policy) + 2, 40.0)
    text = "3 losses above 10.11; the first one was 40, far above its previous range -0.9 to 1.1"
    assert event.message == f"loss spike: at step 50: {text}"
    likelihood = [3.0 - 0.1 * step for step in range(60)]
    assert fired("loss_spike", losses(*likelihood, *[-2.9, -3.0] * 30)) == []
    assert len(fired("loss_spike", losses(*likelihood, *[-2.9, -3.0] * 30, *[5.0] * 3))) == 1


def test_loss_that_rises_by_orders_of_magnitude_is_a_spike_at_once() -> None:
    (event,) = fired("loss_spike", losses(2.3, 40.0, 4e14, 5e14))
    assert (event.step, event.value, event.threshold) == (2, 4e14, 40_000.0)
    assert event.message == "loss spike: at step 2: 4e+14, 2.3 at first"
    assert fired("loss_spike", losses(1e-6, 0.5, 200.0, 1.0)) == []
    (event,) = fired(
        "loss_spike", losses(2.0, 2.5, *(2.5 * 100.0**power for power in range(1, 6)))
    )  # by less each time
    assert (event.step, event.threshold) == (4, 125_000.0)
    assert fired("loss_spike", losses(0.0, 1e-7, *(1e-7 * 100.0**power for power in range(1, 6)))) == []


def test_classes_are_not_imbalanced_by_chance() -> None:
    random = np.random.default_rng(0)
    balanced = [Step(targets=random.integers(100, size=50).tolist()) for _ in range(40)]
    counts = np.bincount(np.concatenate([step["targets"] for step in balanced[:10]]), minlength=100)
    assert counts.max() > 10 * counts[counts > 0].min()
    assert fired("class_imbalance", balanced) == []
    rare = [Step(targets=[0] * 45 + [1] * 4 + [2] * (step % 2)) for step in range(60)]
    assert len(fired("class_imbalance", rare)) == 1


def test_samples_of_one_class_are_imbalanced() -> None:
    (event,) = fired("class_imbalance", [Step(targets=[3] * 64)] * 9)
    assert (event.step, event.value) == (7, 512.0)
    assert "all 512 samples have class 3" in event.message


def test_outputs_that_grow_up_to_a_small_last_one_are_compared_with_the_largest() -> None:
    (event,) = fired("poor_initialization", outputs(*(10.0**power for power in range(20)), 1e-3))
    assert event.message.partition(":")[2].startswith(" at step 0 in 19 output (seen): std 1e+19, but 1 in 0: ")


@pytest.mark.parametrize(("kept", "added", "count"), [(1.0, 0.5, 0), (2.0, 0.5, 1), (0.5, 0.5, 0), (4.0, 12.0, 0)])
def test_blocks_that_add_their_input_twice_are_a_poor_initialization(kept: float, added: float, count: int) -> None:
    """What normalized branches add to small embeddings is a multiple of them by chance, and mostly something else."""
    generator = np.random.default_rng(0)
    stream = generator.normal(size=1000)
    rows: list[dict[str, Any]] = []
    for block in range(3):
        before, norm = stream, np.linalg.norm(stream)
        stream = kept * before + added * norm * generator.normal(size=1000) / np.sqrt(1000)
        rows += changed_block(str(block), before, stream)
    assert [event.layer for event in fired("poor_initialization", [Step(rows=rows)])] == ["0"] * count


@pytest.mark.parametrize(("scale", "count"), [(1.0, 0), (2.0, 1)])
def test_blocks_that_normalize_small_embeddings_are_not_reported(scale: float, count: int) -> None:
    before = 0.1 * np.random.default_rng(0).normal(size=1000)
    rows = changed_block("0", before, scale * before / np.sqrt(np.mean(before**2)))
    assert len(fired("poor_initialization", [Step(rows=rows)])) == count


def changed_block(layer: str, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Return the rows of the change and of the output of a block."""
    norms = np.linalg.norm(before), np.linalg.norm(after)
    change = {
        "branch_ratio": np.linalg.norm(after - before) / norms[0],
        "input_cosine": after @ before / np.prod(norms),
    }
    output = {**OUTPUT, "layer": layer, "module_type": "Block"}
    return [{**output, "role": "change", **change}, {**output, "rms": np.sqrt(np.mean(after**2))}]


def test_equal_and_zero_weights_are_a_poor_initialization() -> None:
    def first(*weights: tuple[float, float, float, float]) -> list[Step]:
        """Return the mean and std of weights after their first update, and of the update."""
        rows = []
        for i, (mean, std, update_mean, update_std) in enumerate(weights):
            rows.append({**PARAMETER, "layer": str(i), "numel": 9, "mean": mean, "std": std})
            rows.append({**UPDATE, "layer": str(i), "numel": 9, "mean": update_mean, "std": update_std})
        return [Step(rows=rows)]

    healthy = (0.01, 0.1, 1e-4, 1e-3)
    (event,) = fired("poor_initialization", first(healthy, (0.5, 1e-3, 1e-4, 1e-3)))
    assert (event.layer, event.value) == ("1", pytest.approx(0.4999))
    (event,) = fired("poor_initialization", first(healthy, (0.0,) * 4, (0.0,) * 4))
    assert event.layer == "1"
    assert event.message.endswith("2 of 3 weights are zero")
    assert fired("poor_initialization", first(healthy, (0.0,) * 4, (1e-4, 1e-3, 1e-4, 1e-3))) == []


def test_specs_of_rules_can_be_pickled() -> None:
    """Also in a process that has not imported the rules."""
    rules = parse_rules({**default_rules(), "loss_spike": {"factor": 7.0}})
    content = pickle.dumps(rules)
    assert pickle.loads(content) == rules
    program = f"import pickle; print(pickle.loads({content!r})['loss_spike'].factor)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "7.0\n"


def test_overtraining_does_not_fire_on_noise() -> None:
    random = np.random.default_rng(0)
    series = [1.0 + random.normal(0.0, 0.05, random.integers(50, 500)) for _ in range(100)]
    assert sum(bool(fired("overtraining", evaluated([1.0] * len(each), [*each]))) for each in series) <= 1


def test_overtraining_finds_a_slow_rise_in_noise() -> None:
    random, rise = np.random.default_rng(0), np.concatenate([np.linspace(2.0, 1.0, 30), np.linspace(1.0, 1.3, 70)])
    series = [rise + random.normal(0.0, 0.02, 100) for _ in range(10)]
    assert all(fired("overtraining", evaluated([1.0] * 100, [*each])) for each in series)


def test_overtraining_fires_seldom_on_correlated_losses() -> None:
    random, series = np.random.default_rng(0), []
    for _ in range(100):
        noise = [*accumulate(random.normal(0.0, 0.05, 100), lambda last, new: 0.5 * last + new)]
        series.append(1.0 + np.array(noise))
    assert sum(bool(fired("overtraining", evaluated([1.0] * 100, [*each]))) for each in series) <= 10
