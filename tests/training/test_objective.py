"""Objectives of sweeps: parsing before training starts, and their values."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from run_folders import write_run
from training_runs import train_here

import instrument
from instrument.commands.validation_callback import check_objective
from instrument.config.hydra_internals import config_loader
from instrument.errors import ConfigError
from instrument.training.sweep_objective import read_objective, score_job

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=3", "train.eval_every=1")
ONE_STEP = "train.steps=1"
RECORDED = (*TINY, "+hooks.seen={layers:layers.0,kind:forward,action:record,stats:[abs_max,l2]}")


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("objective_text", "expected"),
    [
        ("acuracy", ["unknown metric", "similar  accuracy"]),
        ("grad_norm", ["unknown metric"]),  # a metric of steps, not of evaluations
        ("max(stats.abs_max", ["cannot parse the objective", "max(stats.abs_max where layer = 'decoder.2')"]),
        ("maxx(stats.l2)", ["no aggregate is named maxx", "similar  max"]),
        ("max(stat.l2)", ["no table is named stat", "similar  stats"]),
        ("max(stats.absmax)", ["no numeric column of stats is named absmax", "similar  abs_max"]),
        ("max(stats.layer)", ["no numeric column of stats is named layer"]),
        ("max(stats.l2 where layr = 'x')", ["cannot parse the condition", "layr", "similar  layer"]),
        ("max(stats.l2 where layer = = 'x')", ["cannot parse the condition", "syntax error"]),
        ("max(stats.l2 where layer = 'x') or (1 = 1)", ["cannot parse the condition", "syntax error"]),
        ("max(stats.l2 where 1 = 1); select (1)", ["cannot parse the condition", "syntax error"]),
        ("max(stats.l2 where step > 1 group by step)", ["cannot parse the condition"]),
    ],
)
def test_invalid_objective_is_reported(objective_text: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^objective: ") as refused:
        read_objective(objective_text)
    for words in expected:
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ('"max(stats.l2 where layr = 1)"', "\nobjective: cannot parse the condition"),
        (
            "last(stats.l2)",
            """fix      quote the value twice, for the shell and for Hydra: 'objective="last(stats.l2)"'""",
        ),
    ],
)
def test_invalid_objective_creates_no_folder(cli: Cli, objective: str, expected: str) -> None:
    assert expected in cli(*TINY, f"objective={objective}").expect(2).err
    assert list(Path.cwd().iterdir()) == []


def test_error_of_all_jobs_is_reported_once_before_the_first(cli: Cli) -> None:
    for more in ((), ("hydra/sweeper=search", "hydra.sweeper.n_trials=3")):
        answer = cli("-m", *TINY, *more, "optimizer.lr=choice(0.1,0.2)", 'objective="last(stats.l3)"').expect(2)
        assert answer.err.count("no numeric column of stats is named l3") == 1
        assert list(Path.cwd().iterdir()) == []


def test_objective_that_differs_between_jobs_is_not_checked_before_the_sweep() -> None:
    for objective in ("objective=acuracy,loss", "objective=${name}"):
        check_objective(config_loader().load_configuration("config", [*TINY, objective], RunMode.MULTIRUN))


@pytest.mark.slow
def test_objectives_that_differ_between_jobs_are_checked_per_job(cli: Cli) -> None:
    answer = cli("-m", *TINY, ONE_STEP, "objective=acuracy,loss", "hydra.sweep.dir=out").expect(2)
    assert answer.err.count(" was refused\n") == 1
    assert list(instrument.load("out").runs.status) == ["done"]


def test_objective_without_duckdb_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert read_objective("loss").query is None
    with pytest.raises(ConfigError, match=r"pip install .*\[sql\]"):
        read_objective("max(stats.l2)")


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("objective_text", "expected"),
    [
        ("accuracy", lambda run: run.info["metrics"]["accuracy"]),
        ("max(stats.abs_max where layer = 'layers.0')", lambda run: run.stats.abs_max.max()),
        ("min(stats.l2 where step > 0)", lambda run: run.stats[run.stats.step > 0].l2.min()),
        ("mean(metrics.loss where phase = 'train')", lambda run: train(run).loss.mean()),
        ("MAX(Stats.abs_max WHERE layer = 'layers.0' -- the first)", lambda run: run.stats.abs_max.max()),
        ("median(metrics.loss)", lambda run: run.metrics.loss.median()),
        ("sum(stats.l2)", lambda run: run.stats.l2.sum()),
        ("std(metrics.loss where phase = 'train')", lambda run: train(run).loss.std(ddof=0)),
        ("first(metrics.grad_norm)", lambda run: train(run).sort_values("step").grad_norm.iloc[0]),
        ("last(stats.l2)", lambda run: run.stats[run.stats.step == 2].l2.mean()),
    ],
)
def test_objective_value_matches_pandas(
    finished: Path, objective_text: str, expected: Callable[[instrument.Run], float]
) -> None:
    run = instrument.load(finished)
    value, reason = read_objective(objective_text).value_of(finished, run.info["metrics"])
    assert value == pytest.approx(expected(run), rel=1e-12)
    assert reason == ""


@pytest.mark.slow
def test_recomputed_rows_count_once(tmp_path: Path) -> None:
    rows = {"stats": [{"l2": 3.0}, {"l2": 3.0, "recompute": True}], "metrics": [{"loss": 1.0}]}
    write_run(tmp_path / "run", rows=rows)
    assert read_objective("sum(stats.l2)").value_of(tmp_path / "run", {}) == (3.0, "")
    assert read_objective("sum(metrics.loss)").value_of(tmp_path / "run", {}) == (1.0, "")


@pytest.mark.slow
def test_objective_can_be_a_custom_metric(tmp_path: Path) -> None:
    custom = [{"episode_return": 4.0, "length": 1.0}, {"episode_return": 6.0, "length": 3.0}, None]
    write_run(tmp_path / "run", rows={"metrics": [{"step": i, "custom": each} for i, each in enumerate(custom)]})
    for text, value in {
        "max(metrics.episode_return)": 6.0,
        "last(metrics.Episode_Return where length < 2)": 4.0,
        "mean(metrics.episode_return)": 5.0,
    }.items():
        assert read_objective(text).value_of(tmp_path / "run", {}) == (value, "")
    assert read_objective("episode_return").value_of(tmp_path / "run", {"episode_return": 7.0}) == (7.0, "")
    value, reason = read_objective("perplexity").value_of(
        tmp_path / "run", {"loss": 1.0, "recall": 0.5, "accuracy": None}
    )
    assert (value, reason) == (None, "the last evaluation has no value for it; it has loss, recall")
    reason = read_objective("epsiode_return").value_of(tmp_path / "run", {"loss": 1.0, "episode_return": 7.0})[1]
    assert reason.endswith("it has loss, episode_return; similar: episode_return")
    for text in ("max(metrics.epsiode_return)", "max(metrics.length where epsiode_return > 2)"):
        value, reason = read_objective(text).value_of(tmp_path / "run", {})
        assert value is None
        assert 'column "epsiode_return" not found' in reason
        assert "it has step, " in reason
        assert reason.endswith("similar: episode_return")
    for misspelled in ("max(metrics.acuracy)", "max(metrics.length where phas = 'eval')"):
        with pytest.raises(ConfigError, match="similar"):
            read_objective(misspelled)


def train(run: instrument.Run) -> Any:
    return run.metrics[run.metrics.phase == "train"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run."""
    return train_here(tmp_path_factory.mktemp("finished") / "out", *RECORDED).path


@pytest.fixture
def mine(finished: Path, tmp_path: Path) -> Path:
    """Copy of the folder `finished` that a test may change."""
    return shutil.copytree(finished, tmp_path / "mine")


@pytest.mark.parametrize(
    ("objective_text", "metrics", "expected"),
    [
        ("loss", {"loss": float("nan")}, "the value is nan"),
        ("loss", {"loss": float("inf")}, "the value is inf"),
        ("accuracy", {"loss": 1.0, "accuracy": None}, "the last evaluation has no value for it"),
        ("max(stats.l2 where layer = 'decoder.2')", {}, "no row that meets the condition"),
        ("max(stats.dead_fraction)", {}, "no row that meets the condition"),  # not among the recorded statistics
        ("max(stats.l2 where layer::int = 3)", {}, "the query failed: Conversion Error"),
    ],
)
def test_missing_or_non_finite_objective_has_a_reason(
    finished: Path, objective_text: str, metrics: dict[str, float | None], expected: str
) -> None:
    value, reason = read_objective(objective_text).value_of(finished, metrics)
    assert value is None
    assert reason.startswith(expected)


def test_objective_is_stored_in_the_remote_copy(cli: Cli, tmp_path: Path) -> None:
    """This also works if the rows were removed locally."""
    objective = "max(stats.abs_max where layer = 'layers.0')"
    sent = (f"sink.remote=file://{tmp_path}/there", f'objective="{objective}"')
    answer = cli("-m", *RECORDED, ONE_STEP, *sent, "sink.keep_local=true,false", "hydra.sweep.dir=out").expect(0)
    assert "the objective has no value" not in answer.err
    for job in ("0", "1"):
        remote = instrument.load(f"file://{tmp_path}/there/out/{job}")
        number = remote.stats.abs_max.max()
        assert f"out/{job}  {objective} = {number:.6g}" in answer.out
        assert json.loads(Path("out", job, "run.json").read_text())["objective"] == number
        assert remote.info["objective"] == number
    assert [len(list(Path("out", job).rglob("*.parquet"))) > 0 for job in ("0", "1")] == [True, False]


def test_incomplete_rows_give_no_objective(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    objective, record = read_objective("max(stats.abs_max)"), json.loads((mine / "run.json").read_text())
    moved = {"config": {**record["config"], "sink": {"keep_local": False}}, "remote": f"file://{mine}/there"}
    for more, reason in (
        ({"recording_stopped": "the disk is full"}, "recording stopped: the disk is full"),
        (moved, f"some of the rows are not in file://{mine}/there"),
    ):
        (mine / "run.json").write_text(json.dumps({**record, **more}))
        assert score_job(objective, mine, {}) is None
        assert f"the objective has no value: max(stats.abs_max): {reason}" in capfd.readouterr().err
        assert json.loads((mine / "run.json").read_text())["objective"] is None


def test_search_reports_a_missing_objective(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A missing value is only reported in a search."""
    for searched, expected in ((False, ""), (True, f"{mine}  the objective has no value: loss: the value is nan\n")):
        assert score_job(read_objective("loss"), mine, {"loss": float("nan")}, searched=searched) is None
        assert capfd.readouterr().err == expected
