"""Runs killed with SIGKILL at random moments: completed steps are recorded exactly once, and all files are readable."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pyarrow.dataset as ds
import pytest
from fork_server import Command
from tiers import portions

import instrument
from instrument.commands import recover
from instrument.storage.parts import journals_of
from instrument.tables.schemas import TABLES


@pytest.fixture(scope="module", params=portions(4, 100, 48))
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Folders of killed runs, and the last step that each had reported as complete."""
    numbers: range = request.param
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("kill_runs.py")
    arguments = [str(folder), str(numbers.start), str(numbers.stop)]
    done = Command(folder, script, arguments, {"OMP_NUM_THREADS": "1"}, "process").wait()
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(entries) == len(numbers)
    return [(Path(entry["folder"]), entry["reported"]) for entry in entries]


def per_step(frame: pd.DataFrame) -> Counter[int]:
    return Counter(frame[frame.phase == "train"].step.tolist())


def check(run: instrument.Run, reported: int) -> None:
    """Assert that all reported steps are recorded completely and once."""
    steps = run.metrics[run.metrics.phase == "train"].step.tolist()
    assert steps == list(range(len(steps))), "steps should be consecutive"
    assert len(steps) > reported
    for table, rows in (("stats", 6), ("effects", 4)):
        counts = per_step(getattr(run, table))
        assert all(counts[step] == rows for step in range(reported + 1)), table
        assert set(counts.values()) <= {rows}
        assert max(counts, default=-1) <= reported + 1
    tensors = run.tensors()
    counts = per_step(tensors)
    assert all(counts[step] == 6 for step in range(0, reported + 1, 3))
    assert all(values.shape == shape for values, shape in zip(tensors["values"], tensors["shape"], strict=True))
    samples = run.samples[run.samples.phase == "train"]
    counts = per_step(samples)
    assert all(counts[step] in (5, 8) for step in range(0, reported + 1, 3)), "a batch has 8 samples, the last one 5"
    assert set(counts.values()) <= {5, 8}
    assert not samples.duplicated(["step", "position"]).any()
    if len(tensors) and reported >= 0:
        features = run.features("layers.0", call=0, step=0)
        assert features.ids.tolist() == sorted(samples[samples.step == 0]["sample"])


def test_killed_run_keeps_every_completed_step(killed: list[tuple[Path, int]]) -> None:
    trained = with_journals = 0
    for folder, reported in killed:
        if not (folder / "run.json").exists():
            assert reported == -1
            continue
        run = instrument.load(folder)
        assert run.info["status"] == "killed"
        if reported >= 0:
            trained += 1
            with_journals += bool(journals_of(folder))
        check(run, reported)
        assert run.problems == []
        for name in TABLES:  # Parquet files are complete
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
            assert ds.dataset(folder / name).count_rows() == len(after.read(name, [TABLES[name].names[0]]))
        check(after, reported)
    assert trained > len(killed) // 2
    assert with_journals > trained * 0.8
