"""Runs exported: to trackers what they would have been shown, tables as CSV, tensors as Zarr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from shown import history, key, metrics, read_tensorboard, read_wandb, row

import instrument
from instrument import export
from instrument.analysis.replay import replay
from instrument.analysis.run_files import RunFiles
from instrument.capture.tables import TABLES, as_batch
from instrument.extras import pip_command
from instrument.sinks.memory import MemorySink
from instrument.sinks.parquet import ParquetSink
from instrument.sinks.parts import Part
from instrument.sinks.table_writer import TableLog

Cli = Callable[..., Any]
ALL = [name for name, table in TABLES.items() if table.names[0] == "step"]


def make_run(folder: Path, *, close: bool = True, tensors: str = "list", **info: Any) -> Path:
    """A run of three steps."""
    folder.mkdir(parents=True)
    record = {"status": "done", "seed": 0, "overrides": {}, "metrics": {}, "config": {"name": "tried"}, **info}
    (folder / "run.json").write_text(json.dumps(record))
    sink = ParquetSink(folder, tensors=tensors)  # type: ignore[arg-type]
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


# ------------------------------------------------------------------------------------------------------------ replaying


def test_rows_come_again_in_the_order_of_the_steps(tmp_path: Path) -> None:
    sink = MemorySink()
    replay(RunFiles(make_run(tmp_path / "run", close=False)), sink, tables=ALL)
    assert sink.steps == 3
    assert [cells["loss"] for cells in sink.records("metrics")] == [0.5, 1.5, 2.5]
    assert sink.records("distributions")[1]["counts"] == [1, 1]
    assert [cells["values"].tolist() for cells in sink.records("tensors")] == [
        torch.full((2, 4, 4), float(step)).tolist() for step in range(3)
    ]
    assert [cells["message"] for cells in sink.records("events")] == ['less, "often"']


def test_rows_can_begin_at_a_step_and_be_of_some_tables(tmp_path: Path) -> None:
    sink = MemorySink()
    replay(RunFiles(make_run(tmp_path / "run")), sink, tables=["metrics", "tensors"], since=2)
    assert {name: len(rows) for name, rows in sink.rows.items() if rows} == {"metrics": 1, "tensors": 1}


def test_rows_of_several_processes_and_an_evaluation_that_came_early_are_put_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    for rank in (1, 0):
        log = TableLog(folder, TABLES["metrics"], journal_bytes=1)
        log.part = Part(rank, 0)
        for step, phase in ((0, "train"), (2, "eval"), (1, "train"), (2, "train")):
            log.append(as_batch(TABLES["metrics"], [row("metrics", step, 0, phase, rank, loss=1.0)]))
        log.close()
    found = MemorySink()
    replay(RunFiles(folder), found, tables=["metrics"])
    assert [(c["step"], c["phase"], c["rank"]) for c in found.records("metrics")] == [
        (0, "train", 0), (0, "train", 1), (1, "train", 0), (1, "train", 1),
        (2, "eval", 0), (2, "train", 0), (2, "eval", 1), (2, "train", 1),
    ]  # fmt: skip
    own = MemorySink()
    replay(RunFiles(folder), own, tables=["metrics"], since=1, rank=1)
    assert [(c["step"], c["phase"], c["rank"]) for c in own.records("metrics")] == [
        (1, "train", 1), (2, "eval", 1), (2, "train", 1),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- trackers


def test_tensorboard_shows_the_same_afterwards_as_while_the_run_went_on(cli: Cli, tmp_path: Path) -> None:
    look = "{layers: '**', kind: forward, action: record, histogram: 16, quantiles: true, every: 3}"
    maps = "{layers: '**', kind: forward, types: [Conv2d], action: record, tensors: true, samples: 2, every: 3}"
    evaluated = (
        "{layers: '**', types: [Linear], kind: forward, action: record, phase: eval, dtype: bfloat16, tensors: true}"
    )
    filters = "{layers: '**', types: [Conv2d], kind: step_post, role: param, action: record, tensors: true, every: 4}"
    hooks = {"look": look, "maps": maps, "evaluated": evaluated, "filters": filters}
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
        "scalars": True, "histograms": True, "images": True, "texts": False,
    }  # fmt: skip
    assert live.keys() == exported.keys()
    for kind, tags in live.items():
        assert tags.keys() == exported[kind].keys()
        for tag, points in tags.items():
            assert points == exported[kind][tag], tag
    assert any(tag.startswith("evaluated.eval/") for tag in live["scalars"])
    assert {"maps/encoder.0.0/image", "filters/encoder.1.0/weight/image"} <= live["images"].keys()


def test_weights_and_biases_and_mlflow_get_a_run_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DIR": "",
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    folder = make_run(tmp_path / "run", status="failed")
    assert export.main([str(folder), "--to", "wandb"]) == 0
    records = read_wandb(folder)
    assert [cells["train/loss"] for cells in history(records).values()] == [0.5, 1.5, 2.5]
    assert records[-1].exit.exit_code == 1, "it had failed"
    assert export.main([str(folder), "--to", "mlflow"]) == 0
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("tried").experiment_id])
    assert (run.info.status, run.data.metrics["train/loss"]) == ("FAILED", 2.5)


def test_a_tracker_that_fails_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from instrument.sinks.tensorboard import TensorBoard

    def fail(*args: object) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(TensorBoard, "log", fail)
    assert export.main([str(make_run(tmp_path / "run")), "--to", "tensorboard"]) == 1
    assert "tensorboard failed: ConnectionError: nobody there" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- CSV and Zarr


def test_csv_is_a_file_a_table_that_reads_back_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    assert export.main([str(folder), "--to", "csv"]) == 0
    assert "recorded tensors are not among them: --to zarr" in capsys.readouterr().out
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


def stored(folder: Path, **records: list[tuple[tuple[Any, ...], torch.Tensor]]) -> Path:
    """A run that kept tensors."""
    folder.mkdir()
    (folder / "run.json").write_text('{"status": "done"}')
    for mode, tensors in records.items():
        sink = ParquetSink(folder, tensors=mode)  # type: ignore[arg-type]
        for at, tensor in tensors:
            sink.keep(at, list(tensor.shape), tensor)
            sink.end_step()
        sink.close()
    return folder


@pytest.mark.parametrize("mode", ["list", "bytes"])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64),
        *(torch.complex32, torch.float8_e4m3fn),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_zarr_stacks_the_firings_of_a_place(tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    import zarr

    tensors = [(torch.arange(6).reshape(2, 3) + step).to(dtype) for step in range(5)]
    folder = stored(tmp_path / "run", **{mode: [(key(2 * step), tensor) for step, tensor in enumerate(tensors)]})
    assert export.main([str(folder), "--to", "zarr"]) == 0
    group = zarr.open_group(str(folder / "tensors.zarr"), mode="r")["seen/a.0/output"]
    values = group["values"]
    assert values.metadata.dimension_names == ("firing", "dim_1", "dim_2")
    assert values.attrs["coordinates"] == "step"
    expected = instrument.load(folder).tensors()
    assert values.dtype == expected["values"][0].dtype
    assert np.array_equal(values[:], np.stack(expected["values"]))
    assert group["step"][:].tolist() == [0, 2, 4, 6, 8]
    assert group["step"].metadata.dimension_names == ("firing",)
    told = dict(group.attrs)
    assert (told["hook"], told["layer"], told["phase"], told["call"], told["recompute"]) == (
        "seen",
        "a.0",
        "train",
        0,
        0,
    )


def test_zarr_has_a_coordinate_for_what_differs_and_a_group_for_each_path_shape_and_type(tmp_path: Path) -> None:
    import zarr

    records = [
        *[
            (key(step, call=call, layer="many"), torch.full((2,), 10.0 * step + call))
            for step in (0, 3)
            for call in (0, 1)
        ],
        (key(0, layer="ragged"), torch.zeros(2, 2)),
        (key(1, layer="ragged"), torch.ones(3, 2)),
        (key(2, layer="ragged"), torch.ones((), dtype=torch.int8)),
        (key(0, layer="", path="weight"), torch.zeros(0, 4)),
        (key(1, layer="", path="weight"), torch.zeros(0, 4)),
        (key(1, phase="eval"), torch.zeros(1)),
    ]
    folder = stored(tmp_path / "run", list=records)
    assert export.main([str(folder), "--to", "zarr", "--out", str(tmp_path / "s.zarr")]) == 0
    root = zarr.open_group(str(tmp_path / "s.zarr"), mode="r")
    many = root["seen/many/output"]
    assert many["values"].attrs["coordinates"] == "step call"
    assert many["step"][:].tolist() == [0, 0, 3, 3]
    assert many["call"][:].tolist() == [0, 1, 0, 1]
    assert many["values"][:].tolist() == [[0.0] * 2, [1.0] * 2, [30.0] * 2, [31.0] * 2]
    assert sorted(root["seen/ragged/output"].group_keys()) == ["float32_2x2", "float32_3x2", "int8_scalar"]
    assert root["seen/ragged/output/float32_3x2/values"][:].tolist() == [[[1.0, 1.0]] * 3]
    assert root["seen/ragged/output/int8_scalar/values"][:].tolist() == [1]
    assert root["seen/_root_/output/weight/values"].shape == (2, 0, 4)
    assert root["seen.eval/a.0/output/values"].shape == (1, 1)


def test_zarr_chunks_are_neither_small_nor_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zarr

    from instrument.analysis import zarr_export

    monkeypatch.setattr(zarr_export, "CHUNK_BYTES", 100)
    monkeypatch.setattr(zarr_export, "LARGEST_CHUNK_BYTES", 400)
    small, large = torch.arange(4.0), torch.arange(300.0).reshape(3, 100)
    records = [(key(step, layer="small"), small + step) for step in range(20)]
    records += [(key(step, layer="large"), large + step) for step in range(2)]
    folder = stored(tmp_path / "run", list=records)
    assert export.main([str(folder), "--to", "zarr"]) == 0
    root = zarr.open_group(str(folder / "tensors.zarr"), mode="r")
    assert root["seen/small/output/values"].chunks == (6, 4)
    assert root["seen/large/output/values"].chunks == (1, 3, 25)
    assert np.array_equal(root["seen/small/output/values"][:], [(small + step).numpy() for step in range(20)])
    assert np.array_equal(root["seen/large/output/values"][:], [(large + step).numpy() for step in range(2)])


def test_a_type_that_numpy_has_not_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import zarr

    records = [
        (key(0, layer="odd"), torch.zeros(2, 2, 2, dtype=torch.uint8).view(torch.bits8)),
        (key(1), torch.ones(2, 2, 2)),
    ]
    folder = stored(tmp_path / "run", bytes=records)
    assert export.main([str(folder), "--to", "zarr"]) == 1
    assert "NumPy has no type bits8" in capsys.readouterr().err
    assert list(zarr.open_group(str(folder / "tensors.zarr"), mode="r")["seen"].group_keys()) == ["a.0"]
    assert export.main([str(folder), "--to", "tensorboard"]) == 1
    assert list(read_tensorboard(folder / "tensorboard")["images"]) == ["seen/a.0/image"]


def test_a_run_without_tensors_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = stored(tmp_path / "run", list=[])
    assert export.main([str(folder), "--to", "zarr"]) == 1
    assert "this run kept no tensors: record with 'tensors: true'" in capsys.readouterr().err
    assert not (folder / "tensors.zarr").exists()


# ------------------------------------------------------------------------------------------- which runs, and what is wrong


@pytest.mark.parametrize("to", ["tensorboard", "csv", "zarr"])
def test_nothing_is_overwritten(tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "empty")]) == 0
    before = {file: file.read_bytes() for file in (tmp_path / "empty").rglob("*") if file.is_file()}
    assert before
    capsys.readouterr()
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "empty")]) == 2
    assert "--out: there is something already, and nothing is ever overwritten" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in (tmp_path / "empty").rglob("*") if file.is_file()} == before
    (tmp_path / "file").write_text("mine")
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("to", ["csv", "zarr"])
def test_what_breaks_off_leaves_nothing(tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run")

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    scan = RunFiles.scan
    monkeypatch.setattr(RunFiles, "scan", lambda *a, **k: full() if a[1] in ("events", "tensors") else scan(*a, **k))
    assert export.main([str(folder), "--to", to, "--out", str(tmp_path / "out")]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_every_run_of_a_sweep_has_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in range(2):
        make_run(tmp_path / "sweep" / str(job))
    assert export.main([str(tmp_path / "sweep"), "--to", "tensorboard"]) == 0
    assert export.main([str(tmp_path / "sweep"), "--to", "csv", "--out", str(tmp_path / "out")]) == 0
    for job in range(2):
        assert read_tensorboard(tmp_path / "sweep" / str(job) / "tensorboard")["scalars"]["train/loss"][-1] == (2, 2.5)
        assert (tmp_path / "out" / str(job) / "metrics.csv").exists()
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_run_that_was_killed_and_damaged_is_exported_as_far_as_it_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run", close=False, status="running")
    assert export.main([str(folder), "--to", "csv", "--out", str(tmp_path / "first")]) == 0
    (journal,) = (folder / "journal").glob("stats-*")
    journal.write_bytes(b"nothing" + journal.read_bytes())
    for to in ("tensorboard", "csv"):
        assert export.main([str(folder), "--to", to]) == 1
        assert f"journal/{journal.name}" in capsys.readouterr().err
    assert list(pd.read_csv(folder / "csv" / "metrics.csv").loss) == [0.5, 1.5, 2.5]
    shown = read_tensorboard(folder / "tensorboard")
    assert shown["scalars"]["train/loss"] == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert len(shown["images"]["seen/a.0/image"]) == 3


def test_mistakes_are_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "run")
    assert export.main([str(tmp_path / "nowhere"), "--to", "csv"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert export.main([str(folder), "--to", "mlflow", "--out", "here"]) == 2
    assert "--out: MLflow goes where its environment says" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "zarr", None)
    assert export.main([str(folder), "--to", "zarr"]) == 2
    assert f"allowed  {pip_command('arrays')}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        export.main([str(folder), "--to", "excel"])
    assert stop.value.code == 2
