"""Statistics prepared for plots: order of layers, names of locations, groups of steps, aggregation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attached_runs import train_steps
from hook_runs import Calls
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import instrument
from instrument.analysis.plot_data import (
    RecordedSeries,
    forward_order,
    groups_of,
    location_name,
    matrices,
    row_locations,
    series_in,
    statistics_in,
)


def backwards() -> nn.Module:
    """Return a model whose modules are defined in another order than they are called."""
    first, last = (nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    return Calls(lambda last, unused, first, x: last(first(x)), last=last, unused=nn.Linear(4, 4), first=first)


def recorded(folder: Path, **fields: Any) -> instrument.Run:
    hooks = {"h": {"layers": "**", "kind": "forward", "action": "record", **fields}}
    return train_steps(backwards(), hooks, [torch.randn(3, 4)], out=folder).run


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"exclude": "unused*"}, ["first.0", "first.1", "first", "last.0", "last.1", "last", "unused", ""]),
        (
            {"layers": ["first.1", "last.1"]},
            ["first.1", "last.1", "unused", ""],
        ),  # the others follow their predecessors
        (
            {"kind": "parameter_grad"},
            ["last", "last.0", "last.1", "unused", "first", "first.0", "first.1", ""],
        ),  # no outputs
    ],
)
def test_layers_are_in_execution_order_or_else_in_model_order(
    tmp_path: Path, fields: dict[str, Any], expected: list[str]
) -> None:
    order = forward_order(recorded(tmp_path / "r", **fields))
    assert [layer for layer in order if layer in expected] == expected
    assert len(order) == 8


@pytest.mark.parametrize(
    ("layer", "path", "kind", "name"),
    [
        ("a.b", "", "forward", "a.b"),
        ("", "", "forward", "."),
        ("lstm", "1.0", "forward", "lstm[1.0]"),
        ("", "0", "forward_pre", ".[0]"),
        ("a.b", "weight", "parameter_grad", "a.b.weight"),
        ("", "scale", "step_post", "scale"),
    ],
)
def test_location_has_a_readable_name(layer: str, path: str, kind: str, name: str) -> None:
    assert location_name(layer, path, kind) == name


@given(st.sets(st.integers(0, 10**6), max_size=60), st.integers(1, 20))
def test_step_groups_are_contiguous_and_of_similar_size(steps: set[int], most: int) -> None:
    groups = groups_of(steps, most)
    assert len(groups) == min(most, len(steps))
    assert list(groups.number.index) == sorted(steps)
    members = [groups.number.index[groups.number == number] for number in range(len(groups))]
    assert [group.min() for group in members] == groups.first.tolist()
    assert [group.max() for group in members] == groups.last.tolist()
    assert (np.diff(groups.number) >= 0).all()
    sizes = [len(group) for group in members]
    assert not sizes or max(sizes) - min(sizes) <= 1


def rows(*cells: tuple[str, str, int, float]) -> pd.DataFrame:
    frame = pd.DataFrame(cells, columns=["layer", "path", "step", "l2"])
    same = {"hook": "h", "kind": "forward", "role": "output", "phase": "train", "recompute": False}
    return frame.assign(max=frame["l2"], min=frame["l2"], **same)


def test_several_rows_are_aggregated_per_statistic() -> None:
    frame = rows(("b", "", 0, 1.0), ("b", "", 0, 3.0), ("b", "", 1, 5.0), ("b", "", 2, 7.0), ("a", "", 2, 2.0))
    found = matrices(frame, ["l2", "max", "min"], ["a", "b"], most=2)
    assert found["l2"].locations == ["a", "b"]
    assert found["l2"].first.tolist() == [0, 2]
    assert found["l2"].last.tolist() == [1, 2]
    assert found["l2"].is_grouped
    np.testing.assert_equal(found["l2"].values, [[math.nan, 2.0], [3.0, 7.0]])
    np.testing.assert_equal(found["max"].values, [[math.nan, 2.0], [5.0, 7.0]])
    np.testing.assert_equal(found["min"].values, [[math.nan, 2.0], [1.0, 7.0]])


def test_series_is_a_hook_in_a_phase_without_recomputation() -> None:
    frame = rows(("a", "", 0, 1.0), ("a", "", 1, 2.0))
    frame.loc[1, "phase"] = "eval"
    again = frame.assign(recompute=True)
    frame = pd.concat([frame, again], ignore_index=True)
    train, evaluation = series_in(frame)
    assert (train.label, evaluation.label) == ("h: forward output", "h: forward output (eval)")
    assert train.of(frame)["l2"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("kind", "role", "gradient", "parameters"),
    [
        ("forward", "output", False, False),
        ("full_backward", "grad_input", True, False),
        ("tensor", "output", True, False),
        ("parameter_grad", "param_grad", True, True),
        ("step_post", "update", False, True),
    ],
)
def test_series_has_its_type(kind: str, role: str, gradient: bool, parameters: bool) -> None:
    series = RecordedSeries("h", kind, role, "train")
    assert (series.is_gradient, series.is_of_parameters) == (gradient, parameters)


def test_tables_without_values_and_unknown_layers_are_allowed() -> None:
    found = matrices(rows(), ["l2"], [], most=5)["l2"]
    assert (found.locations, found.values.shape) == ([], (0, 0))
    assert statistics_in(rows(("a", "", 0, 1.0)).assign(mean=math.nan)) == ["min", "max", "l2"]
    frame = rows(("new", "", 0, 1.0), ("b", "", 0, 1.0), ("a", "", 0, 1.0))
    assert list(row_locations(frame, ["a", "b"]).cat.categories) == ["a", "b", "new"]
