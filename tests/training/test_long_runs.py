"""Long runs: constant memory, threads and open files. Names of layers and hooks never become paths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from fork_server import Command
from tiers import tiered
from torch import nn

import instrument
from instrument.tables.schemas import TABLES

MAX_GROWTH = {1_000: 10_000, 100_000: 20_000}  # kB, by the number of steps


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="requires /proc")
@pytest.mark.parametrize("steps", tiered(MAX_GROWTH, [1_000]))
def test_resources_of_a_long_run_are_constant(tmp_path: Path, steps: int) -> None:
    script = Path(__file__).with_name("long_training.py")
    done = Command(tmp_path, script, ["run", str(steps)], {"OMP_NUM_THREADS": "1"}, "process").wait()
    assert done.returncode == 0, done.stderr
    early, late = (json.loads(line) for line in done.stdout.splitlines())
    assert (early["step"], late["step"]) == (500, steps)
    grown = late["resident"] - early["resident"]
    assert grown < MAX_GROWTH[steps]
    assert late["threads"] == early["threads"]
    assert late["files"] == early["files"]
    run = instrument.load(tmp_path / "run")
    assert len(run.metrics) == steps
    assert len(run.read("stats", ["step"])) == steps * 8
    assert len(run.read("tensors", ["step"])) == steps // 100 * 3


def test_names_of_layers_and_hooks_are_not_file_names(tmp_path: Path) -> None:
    odd = ["\x2f\x2fup", "/etc/passwd", "<script>alert(1)</script>", "a b", "%2e%2e", "con", "\u202egpj", "x" * 300]
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in odd})
    specs = {"h": {"layers": "**", "types": "Linear", "kind": "forward", "action": "record", "tensors": True}}
    with instrument.attach(model, specs, out=tmp_path / "run") as probe:
        for name in odd:
            model[name](torch.ones(1, 2))
        probe.end_step()
    run = instrument.load(tmp_path / "run")
    assert set(run.stats.layer) == set(run.tensors().layer) == set(odd)
    files = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    tables = "|".join(TABLES)
    for file in files:
        assert re.fullmatch(rf"run/(run\.json|({tables})/part-0000-000000\.parquet)", file), file
