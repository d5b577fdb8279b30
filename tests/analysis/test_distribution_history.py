"""Distributions over steps in bounded memory."""

from __future__ import annotations

import pyarrow as pa
import pytest

from instrument.analysis import step_history
from instrument.analysis.plot_data import RecordedSeries
from instrument.analysis.step_history import DISTRIBUTION_COLUMNS, DistributionHistory

AT = RecordedSeries("spread", "forward", "output", "train"), "0"


def rows(steps: list[int]) -> pa.Table:
    cells = {"levels": [0.5], "quantiles": [1.0], "low": 0.0, "high": 1.0, "counts": [1, 2, 3]}
    found = [{"step": step, **cells, "high": float(i)} for i, step in enumerate(steps)]
    return pa.Table.from_pylist(found).select(["step", *DISTRIBUTION_COLUMNS])


def test_all_steps_are_kept_at_first() -> None:
    history = DistributionHistory()
    history.add(AT, rows([0, 5, 5, 10]), 1)
    history.add(AT, rows([15]), 2)
    (found,) = history.locations.values()
    assert [(step, version, row["high"]) for step, version, row in found.rows.values()] == [
        (0, 1, 0.0), (5, 1, 1.0), (10, 1, 3.0), (15, 2, 0.0),
    ]  # fmt: skip
    assert (found.step_count, found.has_several) == (4, True)
    assert history.rebuilt == 1


@pytest.mark.parametrize("pieces", [1, 100])
def test_kept_steps_are_bounded_and_include_the_last(pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_history, "MAX_NUMBERS", 64)
    history = DistributionHistory()
    size = 1_000 // pieces
    for piece in range(pieces):
        history.add(AT, rows(list(range(piece * size, (piece + 1) * size))), piece + 1)
    (found,) = history.locations.values()
    assert found.width == 64
    assert [step for step, *_ in found.rows.values()] == [*range(63, 1_000, 64), 999]
    assert history.rebuilt
