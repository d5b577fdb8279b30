"""The page of sweeps: every command on it can be meant, and every preset and status has its place there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from conftest import REPOSITORY
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from instrument.run.cli.reading import read_config
from instrument.run.cli.search_path import config_loader
from instrument.run.sweep.jobs import BASIC, composed
from instrument.run.sweep.objective import AGGREGATES, METRICS, read_objective

PAGE = (REPOSITORY / "docs" / "sweeps.md").read_text()
COMMANDS = [
    line.strip()
    for line in re.sub(r" \\\n\s+", " ", PAGE).splitlines()
    if line.startswith("    python -m instrument -m ")
]


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 7


@pytest.mark.parametrize("command", COMMANDS)
def test_every_job_of_every_command_can_be_composed(command: str, workdir: Path) -> None:
    overrides = shlex.split(command.removeprefix("python -m instrument -m "))
    loader = config_loader()
    sweep = loader.load_configuration("config", overrides=overrides, run_mode=RunMode.MULTIRUN)
    if sweep.hydra.sweeper["_target_"] != BASIC:
        overrides = [re.sub(r"=(?:tag\(log,)?(?:interval|choice)\(([^,]+),.*", r"=\1", each) for each in overrides]
        jobs = [tuple(override for override in overrides if not override.startswith("hydra"))]
    else:
        jobs = composed(sweep.hydra)
    for job in (jobs[0], jobs[-1]):
        config = loader.load_sweep_config(sweep, list(job))
        parsed, _ = read_config(config)
        read_objective(parsed.objective)


@pytest.mark.parametrize("written", re.findall(r'^\| `"(.+)"` \|', PAGE, re.M))
def test_every_objective_is_understood(written: str) -> None:
    assert read_objective(written).query is not None


def test_every_preset_aggregate_metric_and_status_is_told_of() -> None:
    presets = [file.stem for file in (REPOSITORY / "conf" / "hydra").rglob("*.yaml")]
    statuses = ["done", "failed", "interrupted", "killed", "running", "missing"]
    assert len(presets) == 6
    assert [name for name in (*presets, *AGGREGATES, *METRICS, *statuses) if f"`{name}`" not in PAGE] == ["search"]
    assert "`hydra/sweeper=search`" in PAGE
    assert not GlobalHydra.instance().is_initialized()
