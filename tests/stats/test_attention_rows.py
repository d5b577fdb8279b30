"""Statistics of the rows of attention weights."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, record, refused, run_step
from torch import Tensor, nn

from instrument.actions.measurement import measure_in_context
from instrument.stats.sums import extremes, merged, needs_of, statistics_of, totals

NAMES = ("row_entropy", "row_uniformity", "first_fraction")
CONTEXT: Any = SimpleNamespace()


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril().logical_not()


def weights_of(*shape: int, mask: Tensor | None = None, sharpness: float = 1.0) -> Tensor:
    scores = sharpness * torch.randn(*shape, dtype=torch.float64)
    return (scores if mask is None else scores.masked_fill(mask, -math.inf)).softmax(-1)


def expected(weights: Tensor) -> list[float]:
    """Return the statistics of float64 weights by SciPy. Rows of zeros and rows with NaN are left out."""
    rows = [row for row in weights.reshape(-1, weights.shape[-1]).numpy() if row.sum() > 0]
    wide = [row for row in rows if (row > 0).sum() > 1]
    return [
        np.mean([scipy.stats.entropy(row) for row in rows]),
        np.mean([scipy.stats.entropy(row) / math.log((row > 0).sum()) for row in wide]),
        np.mean([row[0] for row in wide]),
    ]


@pytest.mark.spread(4)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
)
@pytest.mark.parametrize("mask", [None, causal(5, 5), causal(5, 9)])
def test_statistics_of_rows_equal_scipy(
    monkeypatch: pytest.MonkeyPatch, mask: Tensor | None, dtype: torch.dtype, tolerance: float, on_device: bool
) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    torch.manual_seed(0)
    weights = weights_of(2, 3, *(mask.shape if mask is not None else (4, 7)), mask=mask)
    weights[0, 0, 1], weights[1, 2, 3] = math.nan, 0.0
    measured = measure_in_context(weights.to(dtype), CONTEXT, needs_of(NAMES), None)
    assert measured.statistics(NAMES) == pytest.approx(expected(weights), rel=tolerance)


def test_uniform_and_certain_rows_have_the_extremes() -> None:
    measured = measure_in_context(torch.full((2, 3, 8), 1 / 8), CONTEXT, needs_of(NAMES), None)
    assert measured.statistics(NAMES) == pytest.approx([math.log(8), 1.0, 1 / 8])
    measured = measure_in_context(torch.eye(4)[None], CONTEXT, needs_of(NAMES), None)
    assert measured.statistics(NAMES) == [0.0, None, None]  # one weight is not zero


@pytest.mark.parametrize("shape", [(2, 0, 4), (0, 4), (2, 3, 0)])
def test_rows_without_weights_have_no_statistics(shape: tuple[int, ...]) -> None:
    assert measure_in_context(torch.zeros(shape), CONTEXT, needs_of(NAMES), None).statistics(NAMES) == [None] * 3


def test_parts_of_a_batch_are_merged_to_the_statistics_of_the_batch() -> None:
    torch.manual_seed(0)
    weights = torch.cat([weights_of(2, 5, 5, mask=causal(5, 5)), weights_of(6, 5, 5, sharpness=4.0)])
    parts = [measure_in_context(part, CONTEXT, needs_of(NAMES), None) for part in (weights[:1], weights[1:])]
    rows = [torch.from_numpy(part.row)[None] for part in parts]
    most = torch.stack([extremes(row) for row in rows]).amax(dim=0)
    total = torch.stack([totals(row, most) for row in rows]).sum(dim=0)
    found = [column.item() for column in statistics_of(merged(most, total), NAMES)]
    assert found == pytest.approx(expected(weights), rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_of_rows_require_attention_weights(name: str) -> None:
    message = refused(nn.Linear(2, 2), {"h": record("forward", stats=name)})
    assert f"statistic {name} requires kind function, role attention" in message
    _, probe = run_step(
        Calls(lambda x: x.softmax(-1)), {"h": record("function", role="attention", stats="all")}, torch.ones(1, 1, 2, 2)
    )
    (row,) = probe.sink.records("stats")
    assert row[name] is not None
