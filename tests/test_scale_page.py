"""docs/scale.md: its code runs on a sweep, and its numbers match the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import REPOSITORY

from instrument.commands import compact
from instrument.config.parse import parse_hooks
from instrument.plan.cost import Cost, Forecast, mesh_cost
from instrument.storage import maintenance, parts
from instrument.storage.parquet import ParquetSink
from instrument.tables.schemas import TABLES

PAGE = (REPOSITORY / "docs" / "scale.md").read_text()
SWEEP = "runs/mnist_hooks/sweep_..."


@pytest.mark.slow
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
    assert f"row groups of {parts.ROW_GROUP_ROWS:,} rows ({maintenance.ROW_GROUP_ROWS:,} when merged)" in " ".join(
        PAGE.split()
    )
    assert f"Files of {maintenance.MAX_PART_BYTES // 2**21} MB and more stay as they are" in PAGE


def test_rows_of_1000_gpus_follow_from_the_formula_of_a_plan() -> None:
    specs = parse_hooks(
        {
            "outputs": {"layers": "**", "kind": "forward", "action": "record"},
            "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
            "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
        }
    )

    def rows(sizes: dict[str, int], micro_batches: int, steps: int, *, reduces: bool) -> tuple[str, int]:
        rows_of_step = {"outputs": 1000 * micro_batches, "flow": 1000 * micro_batches, "gradients": 1500}
        costs = {name: Cost(steps, number * steps, 50 * number * steps, 0.0) for name, number in rows_of_step.items()}
        cost = mesh_cost(Forecast(costs, 1.0, 1.0), specs, sizes, shards=False, reduces=reduces, on_gpu=True)
        assert cost.bytes == 50 * cost.rows
        return f"{cost.rows:.1e}".replace("e+0", "e").replace("e+", "e"), cost.collectives

    mesh = {"pp": 4, "dp": 32, "tp": 8}
    for setting, expected, collectives in (
        ("every process, every step", rows(mesh, 8, 100_000, reduces=False), 0),
        ("every process, `every: 1000`", rows(mesh, 8, 100, reduces=False), 0),
        ("one process of each stage, `every: 100`", rows({}, 8, 1000, reduces=False), 0),
        ("`reduce=global`, `every: 10`, without pipelines", rows({"dp": 128, "tp": 8}, 1, 10_000, reduces=True), 3),
    ):
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {setting}"))
        assert (row.split("|")[2].strip(), collectives) == expected
    assert f"each of the {len(TABLES)} tables" in PAGE
    assert f"{1024 * len(TABLES):,} small files" in PAGE
