"""Law 8: memory is flat; so are threads and open files. And names are never paths."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import instrument

REPOSITORY = Path(__file__).parents[2]
MOST_GROWTH = 20_000  # kB


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process holds is read from /proc")
@pytest.mark.parametrize("steps", [8_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_holds_at_its_end_what_it_held_after_a_thousand_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("steady.py")), str(tmp_path / "run"), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    early, late = (json.loads(line) for line in done.stdout.splitlines())
    assert (early["step"], late["step"]) == (1000, steps)
    grown = late["resident"] - early["resident"]
    with capsys.disabled():
        print(f"\n{steps:,} steps: {grown:,} kB more than after 1,000", end=" ")
    assert grown < MOST_GROWTH
    assert late["threads"] == early["threads"]
    assert late["files"] == early["files"]
    run = instrument.load(tmp_path / "run")
    assert len(run.metrics) == steps
    assert len(run.read("stats", ["step"])) == steps * 8
    assert len(run.read("tensors", ["step"])) == steps // 100 * 3


def test_names_of_layers_and_hooks_are_never_names_of_files(tmp_path: Path) -> None:
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
    tables = "stats|distributions|tensors|effects|metrics|coverage|layers|events"
    for file in files:
        assert re.fullmatch(rf"run/(run\.json|({tables})/part-0000-000000\.parquet)", file), file
