"""The MLflow sink with a file store, read back by the MLflow client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tracker_files import key, metrics, row

from instrument.errors import ConfigError
from instrument.trackers.tracking import TrackedRun, TrackingSink, open_tracker


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    from mlflow import MlflowClient

    return MlflowClient()


def open_sink(folder: Path, config: dict[str, Any] | None = None) -> TrackingSink:
    run = TrackedRun.of(folder / "runs" / "first", {"name": "tried", **(config or {})})
    return open_tracker("mlflow", run, "sink.mlflow")


def only_run(client: Any) -> Any:
    (run,) = client.search_runs([client.get_experiment_by_name("tried").experiment_id])
    return run


def values(client: Any, tag: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(only_run(client).info.run_id, tag)]


def test_run_has_its_name_metrics_and_status(client: Any, tmp_path: Path) -> None:
    sink = open_sink(tmp_path)
    for step in range(3):
        sink.write("metrics", [metrics(step, loss=step + 0.5, grad_norm=math.nan, custom={"episode_return": 2.0})])
        sink.write("stats", [row("stats", *key(step, layer=""), mean=-1.0)])
        sink.end_step()
    sink.write("events", [row("events", 1, 0, "a.0", "dead_units", "dead units: at step 1", "warning")])
    sink.write("metrics", [metrics(3, "eval", loss=9.0)])
    sink.write("stats", [row("stats", *key(3, layer="deep." * 60), mean=1.0)])
    sink.close()
    run = only_run(client)
    (long,) = [tag for tag in run.data.metrics if "deep" in tag]  # truncated at its start
    assert (len(long), long[-10:]) == (250, "deep./mean")
    assert (run.info.run_name, run.info.status) == ("runs/first", "FINISHED")
    assert run.data.tags["events/warning/1"] == "dead_units a.0: dead units: at step 1"
    own = {"train/loss", "train/grad_norm", "train/episode_return", "eval/loss", "seen/_root_/mean"}
    assert run.data.metrics.keys() == {*own, long}
    assert values(client, "train/loss") == [(0, 0.5), (1, 1.5), (2, 2.5)]
    assert values(client, "eval/loss") == [(3, 9.0)]
    assert all(math.isnan(value) for _, value in values(client, "train/grad_norm"))


@pytest.mark.parametrize(("rule", "status"), [("error", "FAILED"), ("interrupted", "KILLED")])
def test_interrupted_run_has_its_status(client: Any, tmp_path: Path, rule: str, status: str) -> None:
    sink = open_sink(tmp_path)
    sink.write("events", [row("events", 0, 0, None, rule, "it broke", "error")])
    sink.close()
    assert only_run(client).info.status == status


def test_config_is_logged_as_parameters_within_the_limits(client: Any, tmp_path: Path) -> None:
    many = {f"hook_{number}": {"kind": "forward", "layers": ["a", "b"], "every": None} for number in range(60)}
    open_sink(tmp_path, {"hooks": many, "none": {}, "long": "x" * 7000, "k" * 300: True}).close()
    params = only_run(client).data.params
    assert len(params) == 1 + 3 * 60 + 3
    assert params["hooks.hook_59.layers"] == '["a", "b"]'
    assert (params["hooks.hook_0.kind"], params["hooks.hook_0.every"], params["none"]) == ("forward", "null", "{}")
    assert params["long"] == "x" * 497 + "..."
    assert params["k" * 250] == "true"


def test_step_is_logged_in_batches_of_a_thousand(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_sink(tmp_path)
    sizes: list[int] = []
    monkeypatch.setattr(
        sink.tracker.client,  # type: ignore[attr-defined]
        "log_batch",
        lambda run, metrics: sizes.append(len(metrics)),
    )
    for count in (10, 2500):
        sink.write("stats", [row("stats", *key(0, layer=f"l{number}"), mean=1.0) for number in range(count)])
        sink.end_step()
    assert sizes == [10, 1000, 1000, 500]


def test_concurrently_created_experiment_is_shared(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_sink(tmp_path).close()
    from mlflow import MlflowClient

    find, blind = MlflowClient.get_experiment_by_name, [True]
    monkeypatch.setattr(
        MlflowClient, "get_experiment_by_name", lambda self, name: None if blind.pop() else find(self, name)
    )
    blind.insert(0, False)
    open_sink(tmp_path).close()
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert len(client.search_runs([client.get_experiment_by_name("tried").experiment_id])) == 2


def test_unavailable_store_is_reported_before_the_first_step(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nothing://nowhere")
    with pytest.raises(ConfigError, match=r"^sink\.mlflow: mlflow cannot be started: .*nothing://nowhere"):
        open_sink(tmp_path)
