"""docs/sweeps.md has every objective, preset and status. Its commands are tested in test_commands.py."""

from __future__ import annotations

import re

import pytest
from conftest import REPOSITORY
from hydra.core.global_hydra import GlobalHydra

from instrument.training.sweep_objective import AGGREGATES, METRICS, read_objective

PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text()


@pytest.mark.parametrize("written", re.findall(r'^\| `"(.+)"` \|', PAGE, re.M))
def test_objectives_of_the_page_are_valid(written: str) -> None:
    assert read_objective(written).query is not None


def test_page_has_every_preset_aggregate_metric_and_status() -> None:
    groups = [REPOSITORY / "conf" / "hydra" / group for group in ("launcher", "sweeper")]
    presets = [file.stem for group in groups for file in group.glob("*.yaml")]
    statuses = ["done", "failed", "interrupted", "killed", "running", "missing"]
    assert len(presets) == 6
    assert [name for name in (*presets, *AGGREGATES, *METRICS, *statuses) if f"`{name}`" not in PAGE] == ["search"]
    assert "`hydra/sweeper=search`" in PAGE
    assert not GlobalHydra.instance().is_initialized()
