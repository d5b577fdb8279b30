"""docs/scale.md: its code runs on a sweep, and its numbers match the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY

from instrument.commands import compact
from instrument.storage import compaction, parts
from instrument.storage.parquet import ParquetSink
from instrument.tables.schemas import TABLES

PAGE = (REPOSITORY / "docs" / "scale.md").read_text()
SWEEP = "runs/mnist_hooks/sweep_..."


def test_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in range(18):
        folder = tmp_path / SWEEP / str(job)
        folder.mkdir(parents=True)
        info = {"status": "done", "seed": job, "overrides": {"hooks.tame.norm": job / 10}, "metrics": {}}
        (folder / "run.json").write_text(json.dumps(info))
        sink = ParquetSink(folder)
        place = {"layer": "decoder.1", "kind": "parameter_grad", "phase": "train"}
        cells = {"step": 3, "rank": 0, **place, "l2": float(job)}
        sink.write("stats", [tuple(cells.get(name) for name in TABLES["stats"].names)])
        sink.close()
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    *lines, by_norm, curve, states, lazy = code.strip().split("\n")
    known: dict[str, object] = {}
    exec("\n".join(lines), known)
    answers = [eval(line, known) for line in (by_norm, curve, states, lazy)]
    assert [len(answer) for answer in answers] == [18, 1, 1, 18]
    assert answers[1].iloc[0].tolist() == [3, 17.0]
    assert f"python -m instrument.compact {Path(SWEEP).parent}" in PAGE
    assert compact.main([str(Path(SWEEP).parent)]) == 0


def test_numbers_of_the_page_match_the_code() -> None:
    assert f"row groups of {parts.ROW_GROUP_ROWS:,} rows ({compaction.ROW_GROUP_ROWS:,} when merged)" in " ".join(
        PAGE.split()
    )
    assert f"Files of {compaction.MAX_PART_BYTES // 2**21} MB and more stay as they are" in PAGE
