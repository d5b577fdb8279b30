"""How Parquet files are laid out: sorted by step and layer, so that readers can skip, with nothing of the order lost."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import instrument
from instrument.analysis.run_files import RunFiles
from instrument.analysis.series import forward_order
from instrument.capture.tables import TABLES, as_batch, as_table
from instrument.sinks import parts
from instrument.sinks.parquet import ParquetSink

LAYERS = ["stem", "body.1", "body.0", "stem", "head"]  # as they fire: the stem twice


def stats_row(step: int, layer: str, call: int, mean: float, phase: str = "train") -> tuple[Any, ...]:
    cells = {
        **{"step": step, "micro_step": 0, "epoch": 0, "phase": phase, "rank": 0, "hook": "seen", "layer": layer},
        **{"module_type": "Linear", "kind": "forward", "role": "output", "path": "", "call": call, "backward": 0},
        **{"recompute": False, "numel": 8, "mean": mean, "nan_count": 0, "inf_count": 0},
    }
    return tuple(cells.get(name) for name in TABLES["stats"].names)


def write(folder: Path, steps: int, *, close: bool = True) -> Path:
    """A run whose rows bear the place at which they were written as their mean; an evaluation before step 2."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"status": "done", "seed": 0}))
    sink = ParquetSink(folder)
    written = 0
    for step in range(steps):
        for phase in ("eval", "train") if step == 2 else ("train",):
            rows = []
            for place, layer in enumerate(LAYERS):
                rows.append(stats_row(step, layer, LAYERS[:place].count(layer), float(written), phase))
                written += 1
            sink.write("stats", rows)
            sink.end_step()
    if close:
        sink.close()
    return folder


def test_rows_in_files_are_sorted_by_step_and_layer_and_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 4)
    there = pd.read_parquet(folder / "stats")
    assert list(zip(there.step, there.layer, strict=True)) == sorted(zip(there.step, there.layer, strict=True))
    stems = there[(there.layer == "stem") & (there.step == 0)]
    assert list(stems.call) == [0, 1]
    assert list(stems.position) == [0, 3]
    run = instrument.load(folder)
    assert list(run.stats["mean"]) == [float(place) for place in range(25)]
    assert list(run.read("stats", ["mean"]).columns) == ["mean"]
    assert list(run.read("stats", ["mean"])["mean"]) == [float(place) for place in range(25)]
    assert [mean for batch in run.scan("stats", ["mean"]) for mean in batch["mean"].to_pylist()] == list(range(25))
    assert forward_order(run) == ["stem", "body.1", "body.0", "head"]


def test_rows_of_a_journal_come_in_the_same_order_and_with_the_same_positions(tmp_path: Path) -> None:
    closed, running = write(tmp_path / "closed", 4), write(tmp_path / "running", 4, close=False)
    assert not (running / "stats").exists()
    pd.testing.assert_frame_equal(instrument.load(closed).stats, instrument.load(running).stats)


def test_files_of_runs_without_positions_come_as_they_are(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    file = next((folder / "stats").glob("*.parquet"))
    written = pq.read_table(file)
    pq.write_table(written.take(pc.sort_indices(written["mean"])).drop_columns(["position"]), file)
    run = instrument.load(folder)
    assert list(run.stats["mean"]) == [float(place) for place in range(10)]
    assert run.stats.position.isna().all()
    assert run.problems == []


def test_row_groups_say_how_they_are_sorted_and_what_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(parts, "JOINED", 1)
    folder = write(tmp_path / "run", 8)
    about = pq.read_metadata(next((folder / "stats").glob("*.parquet")))
    names = about.schema.to_arrow_schema().names
    assert about.num_row_groups == 5
    ends = []
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        assert [names[key.column_index] for key in group.sorting_columns] == ["step", "layer"]
        step = group.column(names.index("step")).statistics
        ends.append((step.min, step.max))
        for label in ("layer", "hook", "kind"):
            assert "RLE_DICTIONARY" in group.column(names.index(label)).encodings
    assert all(last <= first for (_, last), (first, _) in pairwise(ends))
    assert "sorting_columns" not in parts._options(TABLES["metrics"])


def test_a_step_of_many_rows_is_several_row_groups_with_layers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 10)
    sink = ParquetSink(tmp_path)
    sink.write("stats", [stats_row(0, f"layer{place % 40:02d}", 0, 0.0) for place in range(80)])
    sink.close()
    about = pq.read_metadata(tmp_path / "stats" / "part-0000-000000.parquet")
    layer = TABLES["stats"].names.index("layer")
    spans = [about.row_group(number).column(layer).statistics for number in range(about.num_row_groups)]
    assert [(span.min, span.max) for span in spans] == [
        (f"layer{first:02d}", f"layer{first + 9:02d}") for first in (0, 10, 20, 30)
    ]


def test_a_merged_part_takes_the_place_of_those_that_it_was_made_of(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    content = (folder / "stats" / "part-0000-000000.parquet").read_bytes()
    for name in (
        "0000-000001",
        "0000-000002",
        "0001-000001",
        "0000-000000-000002",
        "0000-000000-000001",
        "0000-000003",
    ):
        (folder / "stats" / f"part-{name}.parquet").write_bytes(content)
    assert [path.stem for path in parts.parts_of(folder, "stats").values()] == [
        "part-0000-000000-000002",
        "part-0000-000003",
        "part-0001-000001",
    ]
    files = RunFiles(folder)
    assert files.count("stats") == 30
    assert files.problems == []


def test_to_go_back_needs_a_part_that_ends_where_the_checkpoint_was(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    part = folder / "stats" / "part-0000-000000.parquet"
    part.rename(part.with_name("part-0000-000000-000003.parquet"))
    counts = dict.fromkeys(TABLES, 0) | {"stats": 4}
    parts.rewind(folder, 0, counts)
    assert RunFiles(folder).count("stats") == 10
    with pytest.raises(
        OSError, match=r"part-0000-000000-000003\.parquet holds rows of before and after the checkpoint"
    ):
        parts.rewind(folder, 0, counts | {"stats": 3})
    parts.rewind(folder, 0, counts | {"stats": 0})
    assert RunFiles(folder).count("stats") == 0


def test_what_sorting_costs_on_disk_is_nothing(tmp_path: Path) -> None:
    """Positions repeat from step to step: less than a tenth of a byte a row."""
    draw = np.random.default_rng(0)
    table = TABLES["stats"]
    layers = [f"block.{place}" for place in range(50)]
    batches = [as_batch(table, [stats_row(step, layer, 0, draw.normal()) for layer in layers]) for step in range(200)]
    rows = parts.in_order(table, as_table(table, batches))
    sizes = []
    for columns in (table.schema.names, table.names):
        file = tmp_path / "file.parquet"
        pq.write_table(rows.select(list(columns)), file, **parts._options(table))
        sizes.append(file.stat().st_size)
    assert (sizes[0] - sizes[1]) / rows.num_rows < 0.1
