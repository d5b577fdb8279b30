"""Means of a run for each location and statistic, compared with pandas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import write_run

import instrument
from instrument.analysis.config_key_effects import LOCATION_COLUMNS, MEASURED_TABLES, Means, means_of
from instrument.tables.schemas import TABLES

CELL = st.one_of(st.none(), st.sampled_from([math.nan, math.inf, -math.inf]), st.floats(-1e9, 1e9))


class Batches(instrument.Run):
    """A run that returns its rows in batches of a given size."""

    rows: int

    def scan(self, table: str, columns: Any, condition: Any = None) -> Any:
        for batch in super().scan(table, columns, condition):
            yield from pa.Table.from_batches([batch]).to_batches(max_chunksize=self.rows)


def mean_of(means: Means, table: str, location: dict[str, str], name: str) -> float | None:
    (i,) = [i for i, found in enumerate(means.locations) if set(location.values()) <= set(found)]
    column = TABLES[table].numbers.index(name)
    return float(means.values[i, column]) if means.counts[i, column] else None


@settings(max_examples=10)
@given(rows=st.lists(st.tuples(st.sampled_from("ab"), CELL, CELL), min_size=1, max_size=30), size=st.integers(1, 31))
def test_mean_is_over_all_rows_of_a_location(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, float | None, float | None]], size: int
) -> None:
    cells = [{"step": i, "layer": layer, "l2": l2, "std": std} for i, (layer, l2, std) in enumerate(rows)]
    folder = write_run(tmp_path_factory.mktemp("means") / "run", rows={"stats": cells})
    run = Batches(folder, [folder])
    run.rows = size
    means = means_of(run, "stats")
    assert sorted(location[LOCATION_COLUMNS.index("layer")] for location in means.locations) == sorted(
        {row[0] for row in rows}
    )
    for layer in {row[0] for row in rows}:
        for column, name in enumerate(("l2", "std"), start=1):
            known = [row[column] for row in rows if row[0] == layer and row[column] is not None]
            got = mean_of(means, "stats", {"layer": layer}, name)
            if not known:
                assert got is None
            elif all(map(math.isfinite, known)):
                assert got == pytest.approx(math.fsum(known) / len(known), rel=1e-12, abs=1e-6)
            else:
                assert got is not None
                assert not math.isfinite(got)
    assert (means.counts[:, TABLES["stats"].numbers.index("rms")] == 0).all()


def test_locations_differ_by_hook_layer_kind_role_path_phase(tmp_path: Path) -> None:
    usual = {"l2": 1.0}
    others = [{"hook": "h"}, {"layer": "b"}, {"kind": "tensor"}, {"role": "input"}, {"path": "0"}, {"phase": "eval"}]
    cells = [usual, *({**usual, **other, "l2": 2.0 + i} for i, other in enumerate(others))]
    means = means_of(instrument.load(write_run(tmp_path / "run", rows={"stats": cells})), "stats")
    assert len(means.locations) == 7
    assert sorted(means.values[:, TABLES["stats"].numbers.index("l2")]) == [1.0, *(2.0 + i for i in range(6))]


def test_recomputed_rows_are_excluded_from_means(tmp_path: Path) -> None:
    cells = [{"l2": 1.0}, {"l2": 2.0, "call": 1}, {"l2": 6.0, "micro_step": 1}, {"l2": 100.0, "recompute": True}]
    means = means_of(instrument.load(write_run(tmp_path / "run", rows={"stats": cells})), "stats")
    assert mean_of(means, "stats", {"layer": "a"}, "l2") == 3.0


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("steps", "train", "last"),
    [
        ((None, None), 4.5, 30.0),
        ((2, 6), 3.5, 10.0),
        ((5, None), 7.0, 30.0),
        ((None, 3), 1.0, None),
        ((20, 30), None, None),
    ],
)
def test_steps_are_half_open_and_the_last_evaluation_counts(
    tmp_path: Path, steps: tuple[int | None, int | None], train: float | None, last: float | None
) -> None:
    training = [{"step": i, "phase": "train", "loss": float(i), "skipped": i % 2 == 0} for i in range(10)]
    evaluations = [{"step": step, "phase": "eval", "loss": loss} for step, loss in ((5, 10.0), (10, 30.0), (8, 20.0))]
    cells = [{"step": i, "l2": float(i)} for i in range(10)]
    rows = {"metrics": [*training, *evaluations], "stats": cells}
    run = instrument.load(write_run(tmp_path / "run", rows=rows))
    for table, name, phase, expected in (
        ("metrics", "loss", "train", train), ("metrics", "loss", "eval", last), ("stats", "l2", "train", train),
    ):  # fmt: skip
        means = means_of(run, table, steps)
        found = [mean_of(means, table, {"phase": phase}, name) for location in means.locations if phase in location]
        assert found == ([] if expected is None else [expected])


def test_training_metrics_are_before_those_of_evaluations(tmp_path: Path) -> None:
    rows = [{"step": 2, "phase": "eval", "loss": 1.0}, {"step": 2, "phase": "train", "loss": 2.0}]
    run = instrument.load(write_run(tmp_path / "run", rows={"metrics": rows}))
    assert means_of(run, "metrics").locations == [("train",), ("eval",)]


def test_every_numeric_column_is_averaged(tmp_path: Path) -> None:
    cells = {
        name: 1 if name in ("numel", "changed") else True if name == "held" else 0.5
        for name in TABLES["effects"].numbers
    }
    run = instrument.load(write_run(tmp_path / "run", rows={"effects": [cells, cells]}))
    means = means_of(run, "effects")
    assert means.values.tolist() == [[cells[name] for name in TABLES["effects"].numbers]]
    names = ("numel", "changed", "changed_fraction", "norm_before", "norm_after", "factor", "held")
    assert TABLES["effects"].numbers == names
    assert {"loss", "accuracy", "grad_norm", "lr", "skipped"} <= set(TABLES["metrics"].numbers)
    numbers = run.effects[list(TABLES["effects"].numbers)]
    assert np.array_equal(means.values[0], numbers.mean().to_numpy())


def test_empty_table_has_no_means(tmp_path: Path) -> None:
    run = instrument.load(write_run(tmp_path / "run"))
    for table in MEASURED_TABLES:
        names = TABLES[table].numbers
        means = means_of(run, table)
        assert (means.locations, means.values.shape, means.counts.shape) == ([], (0, len(names)), (0, len(names)))
    assert isinstance(run.stats, pd.DataFrame)
