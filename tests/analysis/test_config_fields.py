"""The fields in which mappings differ."""

from __future__ import annotations

from typing import Any

import pytest

from instrument.analysis.config_fields import differing_fields, split_overrides

SGD = {"_target_": "SGD", "lr": 0.1, "nested": {"a": 1, "b": [1, 2]}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 0.2], [{"k": 0.1}, {"k": 0.2}]),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], [{"k.b": 2}, {"k.b": 3}]),
        ([SGD, {**SGD, "lr": 1.0}], [{"k.lr": 0.1}, {"k.lr": 1.0}]),
        ([SGD, {**SGD, "nested": {"a": 1, "b": [2]}}], [{"k.nested.b": [1, 2]}, {"k.nested.b": [2]}]),
        ([None, {"a": 1}, {"a": 2}], [{"k": None}, {"k.a": 1}, {"k.a": 2}]),
        ([None, {"a": 1}], [{"k": None}, {"k": {"a": 1}}]),
        ([{"a": 1}, {"a": 1, "b": 2}], [{"k": {"a": 1}}, {"k.b": 2}]),
        ([{"a": 1}, {"a": 1.0}], [{"k": {"a": 1}}, {"k": {"a": 1.0}}]),
        ([{"a": 1}, {"a": True}], [{"k.a": 1}, {"k.a": True}]),
        ([{"a": None}, {}], [{"k.a": None}, {"k": {}}]),
    ],
)
def test_differing_fields_of_mappings(values: list[Any], expected: list[dict[str, Any]]) -> None:
    assert [differing_fields("k", value, values) for value in values] == expected
    assert split_overrides([{"k": value, "seed": 1} for value in values]) == [{**one, "seed": 1} for one in expected]
