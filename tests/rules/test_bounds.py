"""Rules decide the same as without bounds of the values that they do not read."""

import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instrument.config.rules import default_rules
from instrument.errors import HookError
from instrument.rules.bounds import keep_step
from instrument.rules.rule_set import RuleEvent
from tests.rule_rows import GRADIENT, INPUT, OUTPUT, PARAMETER, UPDATE, Step, feed, rule_set

WATCH = {"watch": "seen", "stat": "mean", "above": 4.0, "for": 2}
RULES: dict[str, Any] = {
    **default_rules(),
    "watched": WATCH,
    "sensitive": {"rule": "exploding_gradient", "factor": 3, "window": 6, "after": 3},
}
SITES = [
    OUTPUT,
    OUTPUT,  # a module that runs twice in a step
    {**OUTPUT, "layer": "b", "module_type": "ReLU"},
    {**OUTPUT, "layer": "c", "module_type": "Softmax"},
    GRADIENT,
    {**GRADIENT, "layer": "b", "path": "bias"},
    UPDATE,
    INPUT,
]
STATISTICS = ("mean", "std", "rms", "abs_max", "l2", "zero_fraction", "update_ratio", "dead_fraction")
FAULTS: list[dict[str, float | None]] = [
    {"l2": 60.0, "abs_max": 900.0},
    {"l2": 1e9},
    {"l2": 0.0},
    {"l2": None, "abs_max": None},
    {"abs_max": 0.0, "zero_fraction": 1.0},
    {"std": 1e-12},
    {"std": 0.0, "rms": 0.0},
    {"std": 1e8},
    {"rms": 1e-9},
    {"dead_fraction": 0.9},
    {"update_ratio": 0.5},
    {"update_ratio": 1e-9},
    {"mean": 7.0},
    {"nan_count": 1},
    {"nan_count": 80},
]
METRICS = [{"loss": 9.0}, {"loss": float("nan")}, {"lr": 0.0}, {"skipped": 1.0}, {"seconds": 1e5}, {"loss": None}]


@st.composite
def trainings(draw: st.DrawFn, most: int) -> list[Step]:
    """Return the steps of a training with faults, each of which lasts for some steps.

    Args:
        draw: Draws values.
        most: Largest number of steps.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, most))
    sites = SITES + [PARAMETER] * draw(st.booleans())
    every = draw(st.sampled_from([1, 1, 3]))
    spread = draw(st.sampled_from([0.01, 0.5]))
    scales = random.lognormal(0, 0.3, (len(sites), len(STATISTICS)))
    faults = [
        (random.integers(count), random.integers(1, 8), random.integers(len(sites)), FAULTS[number])
        for number in draw(st.lists(st.integers(0, len(FAULTS) - 1), max_size=5))
    ]
    changes = [(random.integers(count), METRICS[number]) for number in draw(st.lists(st.integers(0, 5), max_size=3))]
    steps: list[Step] = []
    for number in range(count):
        values = scales * random.lognormal(0, spread, scales.shape) * 0.01
        rows = [
            {**site, "numel": 100, "nan_count": 0, "inf_count": 0, **dict(zip(STATISTICS, cells, strict=True))}
            for site, cells in zip(sites, values.tolist(), strict=True)
        ]
        for begin, length, at, fault in faults:
            if begin <= number < begin + length:
                rows[at].update(fault)
        step = Step(rows=rows if number % every == 0 else [], step=number, loss=2.0 / (1 + 0.01 * number), lr=0.1)
        for at, change in changes:
            step.update(change if at == number else {})
        steps.append(step)
        if draw(st.integers(0, 30)) == 0:
            steps.append(Step(rows=rows[:3], step=number + 1, phase="eval", loss=2.0))
    return steps


@pytest.mark.slow
@settings(max_examples=50)
@given(trainings(most=200), st.integers(0, 200))
def test_rules_decide_the_same_with_bounds(steps: list[Step], resumed_at: int) -> None:
    expected: list[RuleEvent] = []
    direct = rule_set(RULES, expected)
    feed(direct, steps)
    events: list[RuleEvent] = []
    bounded = rule_set(RULES, events)
    feed(bounded, steps[:resumed_at], with_numbers=True)
    resumed = rule_set(RULES, events)
    resumed.load_state_dict(json.loads(json.dumps(bounded.state_dict())))
    feed(resumed, steps[resumed_at:], with_numbers=True)
    assert events == expected
    assert json.dumps(resumed.state_dict()) == json.dumps(direct.state_dict())


@pytest.mark.parametrize(("first", "rate"), [({}, 0.0), ({"nan_count": 90}, 0.1)])
@pytest.mark.parametrize(
    ("rule", "about", "statistic"), [("vanishing_gradient", GRADIENT, "rms"), ("tensor_variance", OUTPUT, "std")]
)
def test_value_that_falls_to_zero_did_not_start_at_zero(
    rule: str, about: dict[str, str], statistic: str, first: dict[str, int], rate: float
) -> None:
    events: list[RuleEvent] = []
    rules = rule_set({"small": {"rule": rule}}, events)
    row = {**about, "numel": 100, "nan_count": 0, "inf_count": 0, statistic: 1.0}
    feed(rules, [Step(rows=[{**row, **first}], loss=1.0, lr=rate)], with_numbers=True)
    steps = [Step(rows=[{**row, statistic: value}], loss=1.0, lr=0.1) for value in (1.0, 1.0, 0.0, *[1e-8] * 9)]
    feed(rules, steps, 1, with_numbers=True)
    assert len(events) == 1


@pytest.mark.parametrize("fault", [{"l2": 1e9}, {"l2": 5.0}, {"nan_count": 90}, {"rms": 1e-9}])
def test_warnings_are_written_in_the_step_of_the_fault(fault: dict[str, float]) -> None:
    events: list[RuleEvent] = []
    entries = {
        "gradients": {"rule": "exploding_gradient"},
        "small": {"rule": "vanishing_gradient", "for": 1},
        "nan": {"rule": "non_finite"},
    }
    rules = rule_set(entries, events)
    row = {**GRADIENT, "numel": 100, "nan_count": 0, "inf_count": 0, "rms": 0.01, "l2": 0.02}
    feed(rules, [Step(rows=[row], loss=1.0)] * 25, with_numbers=True)
    assert not events
    feed(rules, [Step(rows=[{**row, **fault}], loss=1.0)], 25, with_numbers=True)
    assert [event.step for event in events] == [25]


def test_loss_of_steps_within_the_bounds_is_that_of_the_step_before() -> None:
    events: list[RuleEvent] = []
    rules = rule_set({"unchanged": {"rule": "unchanged_parameter", "for": 1}}, events)
    row = {**UPDATE, "numel": 100, "nan_count": 0, "inf_count": 0, "mean": 0.0}
    steps = [Step(rows=[{**row, "l2": size}], loss=loss, lr=0.1) for size, loss in ((0.1, 2.0), (0.1, 1.5), (0.0, 1.5))]
    feed(rules, steps, with_numbers=True)
    assert not events  # the training has converged


@pytest.mark.parametrize(("layouts", "expected"), [(1, [0]), (3, [0, 1, 2])], ids=["one schedule", "three schedules"])
def test_most_rules_do_not_read_an_uneventful_step(
    layouts: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = rule_set({"gradients": {"rule": "exploding_gradient"}}, [])
    read: list[int] = []
    update = type(rules.rules[0]).update
    monkeypatch.setattr(
        type(rules.rules[0]), "update", lambda self, rows: (read.append(rows.step), update(self, rows))[1]
    )
    row = {**GRADIENT, "numel": 100, "nan_count": 0, "inf_count": 0, "l2": 0.02}
    rows = [{**row, "layer": str(layer)} for layer in range(layouts)]
    feed(rules, [Step(rows=rows[: 1 + i % layouts], loss=1.0) for i in range(90)], with_numbers=True)
    assert read == expected


def test_only_statistics_that_rules_read_later_are_kept() -> None:
    names = ("exploding_gradient", "tensor_variance", "non_finite")
    rules = rule_set({name: {"rule": name} for name in names}, [])
    row = {"numel": 100, "nan_count": 0, "inf_count": 0, "l2": 0.02, "std": 1.0}
    step = Step(rows=[{**GRADIENT, **row}, {**OUTPUT, **row, "module_type": "Linear"}], loss=1.0, lr=0.1)
    feed(rules, [step] * 5, with_numbers=True)
    assert rules.bounds._latest is not None
    count = rules.bounds._count
    assert count >= 3
    steps = np.frombuffer(rules.bounds._latest.rows[-1])[: 3 * count].reshape(count, 3)
    assert (steps == [1.0, 0.02, 0.02]).all()


def test_rule_that_reads_a_statistic_later_without_listing_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A statistic that it lists, and that no hook records, has no values."""
    entries = {"gradients": {"rule": "exploding_gradient"}, "unchanged": {"rule": "unchanged_parameter"}}
    rules = rule_set(entries, [])
    row = {"numel": 100, "nan_count": 0, "inf_count": 0, "l2": 0.02}
    feed(rules, [Step(rows=[{**GRADIENT, **row}, {**UPDATE, **row}], loss=1.0, lr=0.1)] * 3, with_numbers=True)
    rules.state_dict()
    feed(rules, [Step(rows=[{**GRADIENT, **row}, {**UPDATE, **row}], loss=1.0, lr=0.1)], 3, with_numbers=True)
    monkeypatch.setattr(type(rules.rules[0]), "remembered", lambda _: ("mean",))
    with pytest.raises(HookError, match=r"^rules\.gradients: .* reads the statistic 'l2', but .* only \['mean'\]$"):
        rules.state_dict()


def within(numbers: Any, parts: list[Any], kept: list[float] = ()) -> list[float] | None:  # type: ignore[assignment]
    """Return the kept numbers of a step, the second one of two, without its loss; None if it is outside of the bounds."""
    bounds = np.concatenate([np.empty(0), *parts]).tobytes()
    width = 1 + len(kept) * numbers.shape[1]
    rows = bounds, np.array(kept, np.float64).tobytes(), b"", (), bytearray(16 * width)
    if not keep_step(rows, 1, numbers, {}, True):
        return None
    with pytest.raises(IndexError):
        keep_step(rows, 2, numbers, {}, True)
    steps: list[list[float]] = np.frombuffer(rows[-1]).reshape(2, width).tolist()
    assert steps[0] == [0.0] * width
    return steps[1][1:]


@pytest.mark.parametrize("value", [0.5, float("nan"), 1.0, -0.1, 2.0])
def test_kernel_compares_numbers_with_bounds_as_numpy_does(value: float) -> None:
    numbers = np.array([[0.0, -1e300], [value, 1.0]])
    low, high = np.array([[0.0, -np.inf], [0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, np.inf]])
    first, second = ([[index, 2], low[index], high[index]] for index in (0, 1))
    expected = numbers.ravel().tolist() if not ((numbers < low) | (numbers > high)).any() else None
    assert within(numbers, [*first, *second], [0, 1]) == pytest.approx(expected, abs=0, nan_ok=True)
    assert within(numbers, first) == []
    assert within(numbers, second, [0, 1]) == pytest.approx(expected, abs=0, nan_ok=True)
    is_within = not ((numbers[1] < 0.0) | (numbers[1] > 1.0)).any()
    found = within(numbers, [*first, [1, 1, 0.0, 1.0]], [1])
    assert found == pytest.approx(numbers[1].tolist() if is_within else None, abs=0, nan_ok=True)


@pytest.mark.parametrize("make", [dict, MappingProxyType])
@pytest.mark.parametrize("value", [None, 0.5, 1, True, float("nan"), -0.1, 2.0])
def test_kernel_compares_metrics_with_limits_as_python_does(make: Any, value: float | None) -> None:
    limits = np.array([[0.0, -np.inf, -np.inf], [1.0, np.inf, 0.0]])
    metrics = make({"loss": value, "lr": 3.0})
    expected = value is None or 0.0 <= value <= 1.0
    for is_training in (True, False):
        rows = b"", b"", limits.tobytes(), ("loss", "lr", "missing"), bytearray(8)
        assert keep_step(rows, 0, np.empty((0, 0)), metrics, is_training) == expected
        loss = float("nan") if value is None or not is_training else float(value)
        assert np.array_equal(np.frombuffer(rows[-1]), [loss if expected else 0.0], equal_nan=True)


def test_kernel_refuses_a_metric_that_is_not_a_number() -> None:
    rows = b"", b"", np.array([0.0, 1.0]).tobytes(), ("loss",), bytearray(8)
    with pytest.raises(TypeError):
        keep_step(rows, 0, np.empty((0, 0)), {"loss": "1"}, True)
