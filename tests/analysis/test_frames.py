"""Data types of a sweep's columns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_run

import instrument
from instrument.analysis.frames import typed, typed_frame

VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text("aä0 -.", max_size=3),
    st.lists(st.integers(), max_size=2),
)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], "int64"),
        ([1, None], "Int64"),
        ([1, 0.5], "float64"),
        ([0.5, None], "float64"),
        ([True, False], "bool"),
        ([True, None], "boolean"),
        (["a", "b"], "str"),
        (["a", None], "str"),
        ([True, 1], "object"),
        (["auto", 0.1], "object"),
        ([[1], [2]], "object"),
        ([{"a": 1}, None], "object"),
        ([2**63, 1], "object"),
        ([None, None], "float64"),
        ([], "float64"),
    ],
)
def test_column_has_the_type_of_its_values(values: list[Any], dtype: str) -> None:
    assert str(typed(values).dtype) == dtype


@given(values=st.lists(VALUE, max_size=6))
def test_column_keeps_its_values(values: list[Any]) -> None:
    column = typed(values)
    for value, cell in zip(values, column, strict=True):
        assert (pd.api.types.is_scalar(cell) and pd.isna(cell)) if value is None else cell == value
        assert isinstance(cell, bool | np.bool_) == isinstance(value, bool) or value is None


def test_rows_may_have_different_keys() -> None:
    frame = typed_frame([{"a": 1}, {"b": True}])
    assert list(frame.columns) == ["a", "b"]
    assert (frame["a"].isna().tolist(), frame["b"].isna().tolist()) == ([False, True], [True, False])
    assert len(typed_frame([{}, {}])) == 2
    (written, absent) = typed_frame([{"a": {"norm": 1}}, {"a": None}, {}])["a"].iloc[1:]
    assert written is None
    assert math.isnan(absent)
    mixed = typed_frame(
        [{"a": 3, "b": True}, {"a": math.nan, "b": math.nan}]
    )  # metrics of a task, and of one that diverged
    assert (str(mixed["a"].dtype), mixed["a"][0], mixed["b"][0]) == ("float64", 3.0, True)
    assert mixed.isna().iloc[1].all()


def test_sweep_runs_have_typed_overrides(tmp_path: Path) -> None:
    large = 2**53 + 1  # not representable in float64
    others = [{"hooks.tame": {"norm": 1}, "data.slice.seed": large}, {"hooks.tame": None, "wandb": True}]
    for i, more in enumerate(others):
        overrides = {
            "train.steps": 10 * i,
            "optimizer.lr": [1, 0.5][i],
            "deterministic": i == 0,
            "model": "mlp",
            **more,
        }
        write_run(tmp_path / str(i), overrides=overrides, seed=i, metrics={"loss": 1, "lr": None})
    runs = instrument.load(tmp_path).runs
    assert {name: str(dtype) for name, dtype in runs.dtypes.items()} == {
        "run": "str", "status": "str", "warnings": "float64", "seed": "int64", "train.steps": "int64", "optimizer.lr": "float64",
        "deterministic": "bool", "model": "str", "hooks.tame": "object", "data.slice.seed": "Int64",
        "loss": "int64", "lr": "float64", "wandb": "boolean",
    }  # fmt: skip
    assert list(runs["hooks.tame"]) == [{"norm": 1}, None]
    assert runs["data.slice.seed"][0] == large


def test_search_objective_is_a_column(tmp_path: Path) -> None:
    """Also if an override has the same name, and next to runs without an objective."""
    for i, used in enumerate(({"objective": 2}, {"objective": None}, {"objective": 0.5}, {})):
        overrides = {"optimizer.lr": 0.1, "objective": "max(stats.l2)"}
        status = "done" if used else "failed"
        write_run(tmp_path / str(i), overrides=overrides, metrics={"loss": 1.0}, used=used, status=status)
    sweep = instrument.load(tmp_path)
    assert list(sweep.runs.columns) == [
        "run", "status", "warnings", "seed", "optimizer.lr", "override.objective", "loss", "objective",
    ]  # fmt: skip
    assert str(sweep.runs["objective"].dtype) == "float64"
    assert sweep.runs["objective"].fillna(-1).tolist() == [2.0, -1.0, 0.5, -1.0]
    assert set(sweep.runs["override.objective"]) == {"max(stats.l2)"}
    best = sweep.sql("select run, objective from runs where objective is not null order by objective limit 1")
    assert best.to_dict("records") == [{"run": "2", "objective": 0.5}]


def test_sweep_tables_have_typed_seed_and_override_columns(tmp_path: Path) -> None:
    """A run that takes its seed from the configuration, without an override, belongs to the same seed."""
    large = 2**53 + 1
    overrides: list[dict[str, Any]] = [{"norm": 1, "seed": 3}, {"norm": None, "seed": 3}]
    overrides += [{"norm": 1, "deterministic": True}, {"data.slice.seed": large}]
    for i, (seed, job_overrides) in enumerate(zip((3, 3, 0, 0), overrides, strict=True)):
        rows = {"metrics": [{"step": step, "loss": float(i)} for step in range(2)]}
        write_run(tmp_path / str(i), overrides=job_overrides, seed=seed, rows=rows)
    sweep = instrument.load(tmp_path)
    metrics, runs = sweep.metrics, sweep.runs
    shared = ["run", "seed", "norm", "deterministic", "data.slice.seed"]
    assert {name: metrics[name].dtype for name in shared} == {name: runs[name].dtype for name in shared}
    assert (str(metrics["norm"].dtype), str(metrics["deterministic"].dtype)) == ("Int64", "boolean")
    assert list(metrics["seed"]) == [3, 3, 3, 3, 0, 0, 0, 0]
    assert metrics["data.slice.seed"].iloc[-1] == large
    assert len(metrics.merge(runs, on=shared)) == len(metrics)
    paired = metrics[metrics["run"].isin(["0", "1"])].pivot(index=["seed", "step"], columns="run", values="loss")
    assert (paired["1"] - paired["0"]).tolist() == [1.0, 1.0]
    assert "seed" not in instrument.load(tmp_path / "0").metrics  # the table of one run has no such columns
