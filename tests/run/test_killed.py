"""kill -9 at any moment: every step whose end was announced is there, once, and every reader reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

import instrument
from instrument import recover
from instrument.capture.tables import TABLES
from instrument.sinks.parts import journals_of

REPOSITORY = Path(__file__).parents[2]
KILLS = 100


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Folders of runs that were killed, and the last step that each had announced."""
    place = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(Path(__file__).with_name("killed.py")), str(place), str(KILLS), "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [(Path(entry["folder"]), entry["announced"]) for entry in told]


def per_step(frame: pd.DataFrame) -> Counter[int]:
    return Counter(frame[frame.phase == "train"].step.tolist())


def check(run: instrument.Run, announced: int) -> int:
    """All announced steps are there, whole and once; gives the number of steps."""
    steps = run.metrics[run.metrics.phase == "train"].step.tolist()
    assert steps == list(range(len(steps))), "no gap, no duplicate, in order"
    assert len(steps) > announced
    for table, rows in (("stats", 6), ("effects", 4)):
        counts = per_step(getattr(run, table))
        assert all(counts[step] == rows for step in range(announced + 1)), table
        assert set(counts.values()) <= {rows}
        assert max(counts, default=-1) <= announced + 1
    tensors = run.tensors()
    counts = per_step(tensors)
    assert all(counts[step] == 6 for step in range(0, announced + 1, 3))
    assert all(values.shape == shape for values, shape in zip(tensors["values"], tensors["shape"], strict=True))
    return len(steps)


def test_every_step_that_was_announced_is_there_after_a_kill(
    killed: list[tuple[Path, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    in_all = with_journals = 0
    for folder, announced in killed:
        if not (folder / "run.json").exists():
            assert announced == -1
            continue
        run = instrument.load(folder)
        assert run.info["status"] == "killed"
        with_journals += bool(journals_of(folder))
        in_all += check(run, announced)
        assert run.problems == []
        for name in TABLES:  # whatever is in Parquet already is whole
            if list((folder / name).glob("*")):
                pd.read_parquet(folder / name)
        before = run.stats, run.metrics, run.effects
        assert recover.main([str(folder)]) == 0
        after = instrument.load(folder)
        assert after.info["status"] == "killed"
        assert not (folder / "journal").exists()
        for old, new in zip(before, (after.stats, after.metrics, after.effects), strict=True):
            pd.testing.assert_frame_equal(old, new)
        for name in TABLES:
            assert len(pd.read_parquet(folder / name)) == len(after.read(name, [TABLES[name].names[0]]))
        check(after, announced)
    with capsys.disabled():
        print(f"\n{len(killed)} runs killed, {with_journals} with a journal, {in_all} steps, none lost", end=" ")
    assert len(killed) == KILLS
    assert with_journals > KILLS * 0.8
