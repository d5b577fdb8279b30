"""Runs with experiment trackers: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from state_comparison import assert_same_tables
from tracker_files import history, keep_data_local, make_older, read_tensorboard, read_wandb
from training_runs import failing_after, resume_here, train_here

import instrument
from instrument.fields.pip_extras import pip_command
from instrument.trackers.step_summary import StepSummary

Cli = Callable[..., Any]
TINY = [
    *("model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "hooks.activations.every=2"),
    *("train.steps=8", "hydra.run.dir=out"),
]


@pytest.fixture
def local_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the data of all trackers on this machine."""
    keep_data_local(monkeypatch, tmp_path)


def series(frame: pd.DataFrame, column: str) -> list[tuple[int, float]]:
    return [(int(step), pytest.approx(value)) for step, value in zip(frame["step"], frame[column], strict=True)]


def test_trackers_get_the_recorded_values_and_change_nothing(cli: Cli, workdir: Path, local_trackers: None) -> None:
    answer = cli(*TINY, "name=tried", "sink.tensorboard=true", "sink.wandb=true", "sink.mlflow=true").expect(0)
    assert "TensorBoard tensorboard --logdir out\n" in answer.out
    run = instrument.load("out")
    trained = series(run.metrics[run.metrics.phase == "train"], "loss")
    evaluated = series(run.metrics[run.metrics.phase == "eval"], "loss")
    means = series(run.stats[run.stats.layer == "layers.1"], "mean")
    assert [len(trained), len(evaluated), len(means)] == [8, 1, 4]

    scalars = read_tensorboard(Path("out/tensorboard"))["scalars"]
    assert (scalars["train/loss"], scalars["eval/loss"]) == (trained, evaluated)
    assert scalars["activations/layers.1/mean"] == means

    records = read_wandb(Path("out"))
    (logged_run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert logged_run.project == "tried"
    assert logged_run.display_name == f"{Path.cwd().name}/out"
    logged = history(records)
    assert [(step, cells["train/loss"]) for step, cells in logged.items() if "train/loss" in cells] == trained
    assert logged[8]["eval/loss"] == evaluated[0][1]

    from mlflow import MlflowClient

    client = MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("tried").experiment_id])
    assert (kept.info.status, kept.data.params["train.steps"]) == ("FINISHED", "8")
    assert [
        (m.step, m.value) for m in client.get_metric_history(kept.info.run_id, "activations/layers.1/mean")
    ] == means

    baseline = train_here(workdir / "baseline", *TINY[:-1])
    assert_same_tables(baseline, run, "metrics", "stats", "coverage", "layers", "events")


@pytest.mark.slow
def test_forward_run_is_tracked(workdir: Path) -> None:
    run = train_here(workdir / "out", *TINY[:-1], "mode=forward", "data.slice.stop=50", "sink.tensorboard=true")
    scalars = read_tensorboard(Path("out/tensorboard"))["scalars"]
    assert scalars["forward/loss"] == series(run.metrics, "loss")


@pytest.mark.slow
def test_missing_tracker_packages_are_reported_before_the_start(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tensorboard", "wandb", "mlflow")
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    answer = cli(*TINY, *(f"sink.{name}=true" for name in names)).expect(2)
    problems = [line for line in answer.err.splitlines() if line.startswith(("sink.", "    fix"))]
    for i, name in enumerate(names):
        assert problems[2 * i].startswith(f"sink.{name}: the package {name} cannot be imported")
        assert problems[2 * i + 1] == f"    fix      {pip_command(name)}"
    assert "Traceback" not in answer.err
    assert list(Path.cwd().iterdir()) == []
    assert cli(*TINY, "sink.wandb=true", "plan=true").code == 0, "the plan should not need the package"


@pytest.mark.slow
def test_unavailable_tracker_stops_the_run_and_closes_the_others(
    cli: Cli, local_trackers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instrument.trackers.tensorboard import TensorBoard

    closed: list[str] = []
    monkeypatch.setattr(TensorBoard, "close", lambda self, outcome: closed.append(outcome))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://nowhere")
    answer = cli(*TINY, "sink.tensorboard=true", "sink.mlflow=true").expect(2)
    assert "sink.mlflow: mlflow cannot be started" in answer.err
    assert "Traceback" not in answer.err
    assert closed == ["done"]
    assert not Path("out").exists()


def test_tracker_failure_is_reported_and_the_run_continues(
    cli: Cli, local_trackers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instrument.trackers.mlflow import Mlflow

    log = Mlflow.log

    def fail(self: Mlflow, step: int, summary: StepSummary) -> None:
        if step >= 3:
            raise ConnectionError("the server is gone")
        log(self, step, summary)

    monkeypatch.setattr(Mlflow, "log", fail)
    answer = cli(*TINY, "sink.mlflow=true", "sink.tensorboard=true").expect(0)
    assert "mlflow failed: ConnectionError: the server is gone; mlflow receives no more data" in answer.out
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert list(run.metrics.step) == [*range(8), 8]
    (event,) = run.events[run.events.rule == "tracking"].itertuples()
    assert (event.step, event.severity) == (3, "warning")
    assert len(read_tensorboard(Path("out/tensorboard"))["scalars"]["train/loss"]) == 8


@pytest.mark.slow
def test_resumed_run_logs_every_step_once(workdir: Path, local_trackers: None) -> None:
    every_four = ("train.checkpoint.every=4", "train.eval_every=4")
    arguments = [*TINY[:-1], *every_four, "sink.tensorboard=true", "sink.mlflow=true"]
    with failing_after(6), pytest.raises(RuntimeError, match="stopped here"):
        train_here(workdir / "out", *arguments)
    make_older(Path("out/tensorboard"))
    run = resume_here(workdir / "out")
    logged = read_tensorboard(Path("out/tensorboard"))
    assert logged["scalars"]["train/loss"] == series(run.metrics[run.metrics.phase == "train"], "loss")
    assert [step for step, _ in logged["scalars"]["eval/loss"]] == [4, 8]
    assert logged["texts"]["events/info"] == [(4, "resumed: training continues after 4 steps")]

    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("run").experiment_id], order_by=["start_time"])
    assert [kept.info.status for kept in found] == ["FAILED", "FINISHED"]
    assert [kept.info.run_name.endswith("/out from step 4") for kept in found] == [False, True]

    def steps(kept: Any, tag: str) -> Sequence[int]:
        return [metric.step for metric in client.get_metric_history(kept.info.run_id, tag)]

    assert [steps(kept, "train/loss") for kept in found] == [[0, 1, 2, 3, 4, 5], [4, 5, 6, 7]]
    assert [steps(kept, "eval/loss") for kept in found] == [[4], [4, 8]]
