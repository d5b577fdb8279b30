"""kill -9 at any moment: every step whose end was announced is there, once, and every reader reads."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from forked import Command
from tiers import portions

import instrument
from instrument import recover
from instrument.capture.tables import TABLES
from instrument.sinks.parts import journals_of


@pytest.fixture(scope="module", params=portions(10, 100, 45))
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Folders of runs that were killed, and the last step that each had announced."""
    numbers: range = request.param
    place = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed.py")
    arguments = [str(place), str(numbers.start), str(numbers.stop)]
    done = Command(place, script, arguments, {"OMP_NUM_THREADS": "1"}, "process").wait()
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(numbers)
    return [(Path(entry["folder"]), entry["announced"]) for entry in told]


def per_step(frame: pd.DataFrame) -> Counter[int]:
    return Counter(frame[frame.phase == "train"].step.tolist())


def check(run: instrument.Run, announced: int) -> None:
    """All announced steps are there, whole and once."""
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


def test_every_step_that_was_announced_is_there_after_a_kill(killed: list[tuple[Path, int]]) -> None:
    trained = with_journals = 0
    for folder, announced in killed:
        if not (folder / "run.json").exists():
            assert announced == -1
            continue
        run = instrument.load(folder)
        assert run.info["status"] == "killed"
        if announced >= 0:
            trained += 1
            with_journals += bool(journals_of(folder))
        check(run, announced)
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
    assert trained > len(killed) // 2
    assert with_journals > trained * 0.8
