"""Which rows of statistics are valid, and that all readers of statistics exclude the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import instrument
from instrument.analysis.config_key_effects import means_of
from instrument.analysis.findings import findings
from instrument.analysis.finite import finite_only, is_not_finite
from instrument.analysis.plot_data import matrices
from instrument.analysis.run_history import history_of
from instrument.report.charts import charts
from instrument.tables.schemas import TABLES

GRADIENT = {"kind": "parameter_grad", "role": "param_grad"}
OUTPUT = {"kind": "forward", "role": "output"}
SCORES = {"kind": "function", "role": "scores"}


def row(of: dict[str, str], numel: float | None, nan: float | None, inf: float | None) -> dict[str, Any]:
    return {**of, "numel": numel, "nan_count": nan, "inf_count": inf, "l2": 0.0, "mean": 0.0}


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    ("one", "excluded"),
    [
        (row(GRADIENT, 1000, 0, 0), False),
        (row(GRADIENT, 1000, 9, 0), False),
        (row(GRADIENT, 1000, 10, 0), True),
        (row(GRADIENT, 1000, 5, 5), True),
        (row(GRADIENT, 3, 1, 0), True),
        (row({"kind": "step_post", "role": "update"}, 100, 0, 1), True),
        (row({"kind": "full_backward", "role": "grad_input"}, 100, 1, 0), True),
        (row({"kind": "tensor", "role": "output"}, 100, 1, 0), True),
        (row(OUTPUT, 1000, 0, 499), False),
        (row(OUTPUT, 1000, 0, 500), True),
        (row(SCORES, 1000, 0, 999), False),
        (row(SCORES, 1000, 0, 1000), True),
        (row(OUTPUT, None, 1, None), True),
        (row(OUTPUT, None, None, None), False),
        (row(OUTPUT, 0, 0, 0), False),
    ],
)
def test_row_with_many_non_finite_values_is_excluded(one: dict[str, Any], excluded: bool) -> None:
    frame = pd.DataFrame([row(GRADIENT, 10, 0, 0), one], index=[7, 9])
    assert is_not_finite(frame).to_dict() == {7: False, 9: excluded}
    kept = finite_only(frame)
    assert (kept is frame) == (not excluded)
    assert math.isnan(kept["l2"][9]) == math.isnan(kept["mean"][9]) == excluded
    assert kept["l2"][7] == 0.0
    assert kept["nan_count"].equals(frame["nan_count"])


def train_broken(folder: Path, stats: str | list[str]) -> instrument.Run:
    """Return a run whose gradient is NaN except for two zeros, from step 2 on."""
    model = torch.nn.Linear(100, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hook = {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": stats}
    attached = instrument.attach(model, {"g": hook}, optimizer=optimizer, out=folder)
    with pytest.warns(instrument.errors.InstrumentWarning), attached as probe:
        for step in range(4):
            model.weight.grad = torch.full_like(model.weight, 2.0 if step < 2 else math.nan)
            model.weight.grad[0, :2] = 0.0
            optimizer.step()
            probe.end_step()
    return instrument.load(folder)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return train_broken(tmp_path_factory.mktemp("finite") / "run", "all")


NORM = 2.0 * math.sqrt(98)


def test_broken_gradient_has_no_norm_in_matrices(broken: instrument.Run) -> None:
    assert broken.stats["l2"].tolist() == pytest.approx([NORM, NORM, 0.0, 0.0])  # as measured
    table = matrices(broken.stats, ["l2", "nan_count"], [""], 4)
    np.testing.assert_allclose(table["l2"].values, [[NORM, NORM, math.nan, math.nan]])
    assert table["nan_count"].values.tolist() == [[0, 0, 98, 98]]
    together = matrices(broken.stats, ["l2"], [""], 1)["l2"]  # all steps in one group: the mean of the finite ones
    assert together.values == pytest.approx(np.array([[NORM]]))


def test_broken_gradient_is_marked_in_every_plot(broken: instrument.Run) -> None:
    from instrument.plot import compare, gradient_flow, heatmap

    assert gradient_flow(broken).axes[0].get_xlabel().splitlines()[1:] == ["not shown at step 3: 1 not finite"]
    axes = heatmap(broken, "l2").axes[0]
    (marks,) = (line for line in axes.lines if line.get_marker() == "x")
    assert marks.get_xdata().tolist() == [2.5, 3.5]
    frame = broken.stats.assign(run="one", seed=0)
    (line,) = (line for line in compare(frame, "l2", layer="weight").axes[0].lines if len(line.get_xdata()) == 4)
    np.testing.assert_allclose(line.get_ydata(), [NORM, NORM, math.nan, math.nan])
    (shown,) = charts(history_of(broken))["series"]
    assert shown["statistics"]["l2"] == [[pytest.approx(NORM, rel=1e-5)] * 2 + [None] * 2]
    assert shown["statistics"]["zero_fraction"][0][2:] == [None, None]
    assert shown["statistics"]["nan_count"] == [[0, 0, 98, 98]]


def test_broken_gradient_is_excluded_from_findings_and_means(broken: instrument.Run) -> None:
    values_by_finding = {finding.what: finding.value for finding in findings(broken)}
    assert values_by_finding["largest gradient norm"] == f"{NORM:.4g}, median at this location {NORM:.4g}"
    assert values_by_finding["first recorded non-finite value"] == "98 NaN, 0 infinite of 100"
    means = means_of(broken, "stats")
    assert math.isnan(means.values[0, TABLES["stats"].numbers.index("l2")])
    assert means.values[0, TABLES["stats"].numbers.index("nan_count")] == 49.0


@pytest.mark.spread(1)
@pytest.mark.parametrize("stats", [["l2"], ["zero_fraction", "dead_fraction"], "l1"])
def test_broken_gradient_is_reported_whatever_the_statistics(tmp_path: Path, stats: str | list[str]) -> None:
    run = train_broken(tmp_path / "run", stats)
    requested = [stats] if isinstance(stats, str) else stats
    assert run.stats[requested].notna().all(axis=None)
    assert finite_only(run.stats)[requested].isna().all(axis=1).tolist() == [False, False, True, True]
    assert {finding.what: finding.value for finding in findings(run)}["first recorded non-finite value"]
