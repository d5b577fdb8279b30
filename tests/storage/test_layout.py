"""Layout of Parquet files: sorted by step and layer for pruning, with the original order preserved."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from run_folders import row, write_steps

import instrument
from instrument.analysis.plot_data import forward_order
from instrument.storage import journal, parts
from instrument.storage.row_batches import as_batch, as_table
from instrument.storage.run_files import RunFiles
from instrument.tables.schemas import TABLES

LAYERS = ["stem", "body.1", "body.0", "stem", "head"]  # in execution order, the stem twice


def write(folder: Path, steps: int, *, close: bool = True) -> Path:
    """Write a run whose rows have their write position as their mean, with an evaluation before step 2."""
    moments = [(step, phase) for step in range(steps) for phase in (("eval", "train") if step == 2 else ("train",))]
    rows = [
        {"step": step, "phase": phase, "layer": layer, "call": LAYERS[:index].count(layer)}
        for step, phase in moments
        for index, layer in enumerate(LAYERS)
    ]
    numbered = [{**cells, "mean": float(position)} for position, cells in enumerate(rows)]
    return write_steps(
        folder,
        ({"stats": numbered[start : start + len(LAYERS)]} for start in range(0, len(numbered), len(LAYERS))),
        close=close,
    )


def test_rows_are_sorted_in_files_and_loaded_in_written_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 4)
    stored = pd.read_parquet(folder / "stats")
    assert list(zip(stored.step, stored.layer, strict=True)) == sorted(zip(stored.step, stored.layer, strict=True))
    stems = stored[(stored.layer == "stem") & (stored.step == 0)]
    assert list(stems.call) == [0, 1]
    assert list(stems.position) == [0, 3]
    run = instrument.load(folder)
    assert list(run.stats["mean"]) == [float(index) for index in range(25)]
    assert list(run.read("stats", ["mean"]).columns) == ["mean"]
    assert list(run.read("stats", ["mean"])["mean"]) == [float(index) for index in range(25)]
    assert [mean for batch in run.scan("stats", ["mean"]) for mean in batch["mean"].to_pylist()] == list(range(25))
    assert forward_order(run) == ["stem", "body.1", "body.0", "head"]
    running = write(tmp_path / "running", 4, close=False)  # its rows are in a journal
    assert not (running / "stats").exists()
    pd.testing.assert_frame_equal(run.stats, instrument.load(running).stats)


def test_files_without_positions_keep_their_order(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    file = next((folder / "stats").glob("*.parquet"))
    written = pq.read_table(file)
    pq.write_table(written.take(pc.sort_indices(written["mean"])).drop_columns(["position"]), file)
    run = instrument.load(folder)
    assert list(run.stats["mean"]) == [float(index) for index in range(10)]
    assert run.stats.position.isna().all()
    assert run.problems == []


def test_row_groups_declare_their_order_and_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(journal, "STACK_BYTES", 1)
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


def test_large_step_is_split_into_row_groups_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "ROW_GROUP_ROWS", 10)
    write_steps(tmp_path, [{"stats": [{"layer": f"layer{index % 40:02d}"} for index in range(80)]}])
    about = pq.read_metadata(tmp_path / "stats" / "part-0000-000000.parquet")
    layer = TABLES["stats"].names.index("layer")
    spans = [about.row_group(number).column(layer).statistics for number in range(about.num_row_groups)]
    assert [(span.min, span.max) for span in spans] == [
        (f"layer{first:02d}", f"layer{first + 9:02d}") for first in (0, 10, 20, 30)
    ]


def test_merged_part_replaces_its_sources(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    content = (folder / "stats" / "part-0000-000000.parquet").read_bytes()
    merged = ("0000-000000-000002", "0000-000000-000001")
    for name in ("0000-000001", "0000-000002", "0001-000001", *merged, "0000-000003"):
        (folder / "stats" / f"part-{name}.parquet").write_bytes(content)
    assert [path.stem for path in parts.part_files(folder, "stats").values()] == [
        "part-0000-000000-000002",
        "part-0000-000003",
        "part-0001-000001",
    ]
    files = RunFiles(folder)
    assert files.count("stats") == 30
    assert files.problems == []


def test_rewind_needs_a_part_that_ends_at_the_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", 2)
    part = folder / "stats" / "part-0000-000000.parquet"
    part.rename(part.with_name("part-0000-000000-000003.parquet"))
    counts = dict.fromkeys(TABLES, 0) | {"stats": 4}
    parts.remove_rows_after_checkpoint(folder, 0, counts)
    assert RunFiles(folder).count("stats") == 10
    message = r"cannot resume from this checkpoint: .*part-0000-000000-000003\.parquet mixes rows from before"
    with pytest.raises(OSError, match=message):
        parts.remove_rows_after_checkpoint(folder, 0, counts | {"stats": 3})
    del counts["samples"]  # as in a checkpoint of an earlier version, which lacks this table
    parts.remove_rows_after_checkpoint(folder, 0, counts | {"stats": 0})
    assert RunFiles(folder).count("stats") == 0


@pytest.mark.slow
def test_sorting_needs_no_additional_disk_space(tmp_path: Path) -> None:
    """Positions repeat from step to step and need less than a tenth of a byte per row."""
    draw = np.random.default_rng(0)
    table = TABLES["stats"]
    layers = [f"block.{index}" for index in range(50)]
    batches = [
        as_batch(table, [row("stats", step=step, layer=layer, mean=draw.normal(), numel=8) for layer in layers])
        for step in range(200)
    ]
    rows = parts.in_order(table, as_table(table, batches))
    sizes = []
    for columns in (table.schema.names, table.names):
        file = tmp_path / "file.parquet"
        pq.write_table(rows.select(list(columns)), file, **parts._options(table))
        sizes.append(file.stat().st_size)
    assert (sizes[0] - sizes[1]) / rows.num_rows < 0.1
