"""Every statistic has every way of computing it."""

from __future__ import annotations

import math

import pytest
import torch

from instrument.actions.measurement import DERIVED
from instrument.spec.statistics import ALL, VALUE_STATISTICS
from instrument.stats.blocks import measure_blocks
from instrument.stats.device_operations import measure_by_operations
from instrument.stats.formulas import FORMULAS
from instrument.stats.measure import measure
from instrument.stats.merge import MERGED

COMPUTED = {
    "FORMULAS in instrument/stats/formulas.py, or DERIVED in instrument/actions/measurement.py": {*FORMULAS, *DERIVED},
    "MERGED and merged() in instrument/stats/merge.py": {*MERGED},
}


@pytest.mark.parametrize("where", COMPUTED)
@pytest.mark.parametrize("name", ALL)
def test_statistic_is_computed_everywhere(name: str, where: str) -> None:
    assert name in COMPUTED[where], f"statistic {name!r} is missing in {where}"


def test_statistics_are_either_of_values_or_derived() -> None:
    assert {*FORMULAS} == {*VALUE_STATISTICS}
    assert {*DERIVED} == {*ALL} - {*VALUE_STATISTICS}


@pytest.mark.parametrize("name", VALUE_STATISTICS)
def test_single_pass_blocks_and_device_agree(name: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[:3] = torch.tensor([math.nan, math.inf, 0.0])
    (one_pass,), block = measure(values, (name,)), measure_blocks(values, (name,))[name]
    assert one_pass == pytest.approx(block, rel=1e-6)
    assert measure_by_operations(values, (name,)).read() == [pytest.approx(block, rel=1e-6, abs=1e-7)]
