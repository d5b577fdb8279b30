"""Exports of runs: to experiment trackers, and tables as CSV."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import Call, contents
from run_folders import write_run
from tracker_files import history, keep_data_local, key, metrics, read_tensorboard, read_wandb, row

import instrument
from instrument.analysis.replay import replay
from instrument.commands import export
from instrument.fields.pip_extras import pip_command
from instrument.storage.memory import MemorySink
from instrument.storage.parquet import ParquetSink
from instrument.storage.parts import Part
from instrument.storage.row_batches import as_batch
from instrument.storage.run_files import RunFiles
from instrument.storage.table_writer import TableWriter
from instrument.tables.schemas import TABLES

Cli = Callable[..., Any]
ALL = [name for name, table in TABLES.items() if table.names[0] == "step" and name != "tensors"]


def make_run(folder: Path, *, close: bool = True, status: str = "done") -> Path:
    """Write a run of three steps."""
    write_run(folder, config={"name": "tried"}, status=status)
    sink = ParquetSink(folder)
    for step in range(3):
        sink.write("metrics", [metrics(step, loss=step + 0.5, skipped=False)])
        sink.write("stats", [row("stats", *key(step), numel=8, mean=0.1 * step)])
        sink.write("distributions", [row("distributions", *key(step), low=-1.0, high=1.0, counts=[1, step])])
        sink.keep(key(step), [2, 4, 4], torch.full((2, 4, 4), float(step)))
        if step == 2:
            sink.write("events", [row("events", 2, 0, None, "budget", 'less, "often"', "info")])
        sink.end_step()
    if close:
        sink.close()
    return folder


def test_replay_returns_rows_in_step_order(tmp_path: Path) -> None:
    sink = MemorySink()
    replay(RunFiles(make_run(tmp_path / "run", close=False)), sink, tables=ALL)
    assert sink.steps == 3
    assert [cells["loss"] for cells in sink.records("metrics")] == [0.5, 1.5, 2.5]
    assert sink.records("distributions")[1]["counts"] == [1, 1]
    assert [cells["message"] for cells in sink.records("events")] == ['less, "often"']


def test_replay_filters_by_step_and_table(tmp_path: Path) -> None:
    sink = MemorySink()
    replay(RunFiles(make_run(tmp_path / "run")), sink, tables=["metrics", "stats"], since=2)
    assert {name: len(rows) for name, rows in sink.rows.items() if rows} == {"metrics": 1, "stats": 1}


def test_replay_sorts_rows_of_ranks_and_early_evaluations(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    for rank in (1, 0):
        log = TableWriter(folder, TABLES["metrics"], journal_bytes=1)
        log.part = Part(rank, 0)
        for step, phase in ((0, "train"), (2, "eval"), (1, "train"), (2, "train")):
            log.append(as_batch(TABLES["metrics"], [row("metrics", step, 0, phase, rank, loss=1.0)]))
        log.close()
    all_ranks = MemorySink()
    replay(RunFiles(folder), all_ranks, tables=["metrics"])
    assert [(c["step"], c["phase"], c["rank"]) for c in all_ranks.records("metrics")] == [
        (0, "train", 0), (0, "train", 1), (1, "train", 0), (1, "train", 1),
        (2, "eval", 0), (2, "train", 0), (2, "eval", 1), (2, "train", 1),
    ]  # fmt: skip
    of_rank_1 = MemorySink()
    replay(RunFiles(folder), of_rank_1, tables=["metrics"], since=1, rank=1)
    assert [(c["step"], c["phase"], c["rank"]) for c in of_rank_1.records("metrics")] == [
        (1, "train", 1), (2, "eval", 1), (2, "train", 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_tensorboard_export_equals_live_logging(cli: Cli, tmp_path: Path) -> None:
    outputs = "{layers: '**', kind: forward, action: record, histogram: 16, quantiles: true, every: 3}"
    evaluated = (
        "{layers: '**', types: [Linear], kind: forward, action: record, phase: eval, dtype: bfloat16, tensors: true}"
    )
    hooks = {"look": outputs, "evaluated": evaluated}
    answer = cli(
        "model=mnist_cnn", "data=random", "hooks=gradients", *(f"+hooks.{name}={spec}" for name, spec in hooks.items()),
        "+hooks.half={layers: '**', types: [Linear], kind: forward, action: scale, factor: 0.5}",
        "+data.slice.stop=64", "+data.eval_slice.stop=96", "train.batch_size=16", "train.accumulate=2", "train.steps=7",
        "train.eval_every=3", "train.eval_batch_size=48", "sink.tensorboard=true", "hydra.run.dir=out",
    )  # fmt: skip
    assert answer.code == 0, answer.err
    assert export.main(["out", "--to", "tensorboard", "--out", "again"]) == 0
    live, exported = read_tensorboard(Path("out/tensorboard")), read_tensorboard(Path("again"))
    assert {kind: len(tags) > 0 for kind, tags in live.items()} == {
        "scalars": True, "histograms": True, "texts": False,
    }  # fmt: skip
    assert live.keys() == exported.keys()
    for kind, tags in live.items():
        assert tags.keys() == exported[kind].keys()
        for tag, points in tags.items():
            assert points == exported[kind][tag], tag
    assert any(tag.startswith("evaluated.eval/") for tag in live["scalars"])


@pytest.mark.slow
def test_export_creates_runs_in_wandb_and_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_data_local(monkeypatch, tmp_path)
    folder = make_run(tmp_path / "run", status="failed")
    assert export.main([str(folder), "--to", "wandb"]) == 0
    records = read_wandb(folder)
    assert [cells["train/loss"] for cells in history(records).values()] == [0.5, 1.5, 2.5]
    assert records[-1].exit.exit_code == 1, "the run has failed"
    assert export.main([str(folder), "--to", "mlflow"]) == 0
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tried").experiment_id])
    assert (run.info.status, run.data.metrics["train/loss"]) == ("FAILED", 2.5)


def test_tracker_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    from instrument.trackers.tensorboard import TensorBoard

    def fail(*args: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(TensorBoard, "log", fail)
    answer = call(export.main, make_run(tmp_path / "run"), "--to", "tensorboard").expect(1)
    assert "tensorboard failed: ConnectionError: connection refused" in answer.err


def test_csv_has_one_file_per_table_with_equal_values(tmp_path: Path, call: Call) -> None:
    folder = make_run(tmp_path / "run")
    answer = call(export.main, folder, "--to", "csv").expect(0)
    assert "recorded tensors are not included: instrument.load(RUN).tensors() reads them" in answer.out
    assert {file.name for file in (folder / "csv").iterdir()} == {f"{name}.csv" for name in TABLES if name != "tensors"}
    run = instrument.load(folder)
    for name in ("stats", "metrics"):
        read, there = pd.read_csv(folder / "csv" / f"{name}.csv"), getattr(run, name)
        assert list(read.columns) == list(there.columns)
        for column in ("step", "phase", *there.select_dtypes("float").columns):
            assert read[column].equals(there[column].astype(read[column].dtype)), column
    distributions = pd.read_csv(folder / "csv" / "distributions.csv")
    assert [json.loads(cell) for cell in distributions.counts] == [[1, 0], [1, 1], [1, 2]]
    assert list(pd.read_csv(folder / "csv" / "events.csv").message) == ['less, "often"']
    assert list(pd.read_csv(folder / "csv" / "effects.csv").columns) == TABLES["effects"].schema.names


@pytest.mark.parametrize("to", ["tensorboard", "csv"])
def test_export_does_not_overwrite_files(tmp_path: Path, to: str, call: Call) -> None:
    folder = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "empty")]) == 0
    before = contents(tmp_path / "empty")
    assert before
    answer = call(export.main, folder, "--to", to, "--out", tmp_path / "empty").expect(2)
    assert "--out: already exists, and existing files are not overwritten" in answer.err
    assert contents(tmp_path / "empty") == before
    (tmp_path / "file").write_text("mine")
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


def test_failed_export_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")

    def raise_disk_full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    scan = RunFiles.scan
    monkeypatch.setattr(RunFiles, "scan", lambda *a, **k: raise_disk_full() if a[1] == "events" else scan(*a, **k))
    assert export.main([str(folder), "--to", "csv", "--out", str(tmp_path / "out")]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_every_run_of_a_sweep_has_its_own_export_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in range(2):
        make_run(tmp_path / "sweep" / str(job))
    assert export.main([str(tmp_path / "sweep"), "--to", "tensorboard"]) == 0
    assert export.main([str(tmp_path / "sweep"), "--to", "csv", "--out", str(tmp_path / "out")]) == 0
    for job in range(2):
        assert read_tensorboard(tmp_path / "sweep" / str(job) / "tensorboard")["scalars"]["train/loss"][-1] == (2, 2.5)
        assert (tmp_path / "out" / str(job) / "metrics.csv").exists()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_killed_and_damaged_run_is_exported_as_far_as_readable(tmp_path: Path, call: Call) -> None:
    folder = make_run(tmp_path / "run", close=False, status="running")
    assert export.main([str(folder), "--to", "csv", "--out", str(tmp_path / "first")]) == 0
    (journal,) = (folder / "journal").glob("stats-*")
    journal.write_bytes(b"nothing" + journal.read_bytes())
    for to in ("tensorboard", "csv"):
        assert f"journal/{journal.name}" in call(export.main, folder, "--to", to).expect(1).err
    assert list(pd.read_csv(folder / "csv" / "metrics.csv").loss) == [0.5, 1.5, 2.5]
    shown = read_tensorboard(folder / "tensorboard")
    assert shown["scalars"]["train/loss"] == [(0, 0.5), (1, 1.5), (2, 2.5)]


def test_export_errors_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    folder = make_run(tmp_path / "run")
    assert "folder not found" in call(export.main, tmp_path / "nowhere", "--to", "csv").expect(2).err
    answer = call(export.main, folder, "--to", "mlflow", "--out", "here").expect(2)
    assert "--out: not supported for mlflow, which is configured by its environment variables" in answer.err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert f"fix      {pip_command('wandb')}" in call(export.main, folder, "--to", "wandb").expect(2).err
    with pytest.raises(SystemExit) as stop:
        export.main([str(folder), "--to", "excel"])
    assert stop.value.code == 2
