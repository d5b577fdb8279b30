"""The field `when`: accepted values, and the message for each problem."""

from __future__ import annotations

from typing import Any

import pytest

from instrument.config.parse import parse_hooks
from instrument.config.schema import fields_below
from instrument.errors import ConfigError

CLIP = {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 1.0}
RECORD = {"layers": "**", "kind": "forward", "action": "record"}
L2 = {"stat": "l2", "above": 1}


def message_of(spec: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_hooks({"h": spec})
    return str(error.value)


@pytest.mark.parametrize(
    ("when", "parts"),
    [
        ({"stat": "l3", "above": 1}, ["hooks.h.when: unknown statistic", "l3", "l2"]),
        ({"stat": "numel", "above": 1}, ["hooks.h.when", "stat numel is the size of the tensor"]),
        ({"stat": "l2"}, ["requires either 'above' or 'below'"]),
        ({"stat": "l2", "above": 1, "below": 2}, ["requires either 'above' or 'below'"]),
        ({"above": 1}, ["hooks.h.when.stat", "is missing"]),
        ({**L2, "windw": 5, "times": "median"}, ["hooks.h.when: unknown field 'windw'", "window"]),
        ({**L2, "times": "mode"}, ["hooks.h.when.times", "mode", "median"]),
        ({**L2, "window": 5}, ["'window' require 'times'"]),
        ({"stat": "l2", "below": 0}, ["below (0) cannot be reached: l2 is at least 0"]),
        ({"stat": "nan_count", "below": 0}, ["cannot be reached"]),
        ({"stat": "zero_fraction", "above": 1}, ["above (1) cannot be reached: zero_fraction is at most 1"]),
        ({**L2, "above": 0, "times": "median"}, ["the factor of the median must be positive"]),
        ({**L2, "times": "std", "window": 1}, ["window of at least 2"]),
        ({**L2, "times": "median", "window": 100_000}, ["hooks.h.when.window", "10000"]),
        ({**L2, "above": "ten"}, ["hooks.h.when.above: must be a number"]),
        ({"stat": "update_ratio", "above": 1}, ["stat update_ratio of 'when' requires kind step_post, role update"]),
        (5, ["hooks.h.when", "must be a mapping"]),
    ],
)
def test_invalid_condition_is_reported(when: Any, parts: list[str]) -> None:
    message = message_of({**CLIP, "when": when})
    for part in parts:
        assert part in message


def test_fields_that_contradict_a_condition_are_reported() -> None:
    assert "one norm of all tensors" in message_of({**CLIP, "scope": "all", "when": L2})
    assert "require 'tensors: true'" in message_of({**RECORD, "keep": 2})
    kept = {**RECORD, "tensors": True, "keep": 2}
    assert "requires the name of a rule in 'when'" in message_of({**kept, "when": L2})
    assert "hooks.h.keep" in message_of({**kept, "keep": 0})


def test_norm_of_a_conditional_clip_is_that_of_each_tensor() -> None:
    specs = parse_hooks({"one": CLIP, "other": {**CLIP, "when": L2}, "rule": {**CLIP, "when": "nan"}})
    assert [spec.norm_scope for spec in specs.values()] == ["all", "tensor", "all"]


def test_condition_describes_itself() -> None:
    when = {"stat": "l2", "above": 10, "times": "median"}
    (spec,) = parse_hooks({"h": {**CLIP, "when": when}}).values()
    assert str(spec.condition) == "l2 above 10 x median"
    assert (spec.condition.window, spec.condition.after) == (50, 10)


def test_fields_of_a_condition_are_known_keys() -> None:
    assert fields_below(("hooks", "h", "when")) == ("stat", "above", "below", "times", "window", "after")
