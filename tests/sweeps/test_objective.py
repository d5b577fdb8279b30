"""What a job is judged by: understood before a step is spent, and what comes of it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import run_in
from swept import job as made

import instrument
from instrument.errors import ConfigError
from instrument.sweeps.objective import read_objective
from instrument.sweeps.score import judge

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=3", "train.eval_every=1")
RECORDED = (*TINY, "+hooks.seen={layers:layers.0,kind:forward,action:record,stats:[abs_max,l2]}")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("acuracy", ["no such metric", "nearest  accuracy"]),
        ("grad_norm", ["no such metric"]),  # of a step, not of an evaluation
        ("max(stats.abs_max", ["cannot be read", "max(stats.abs_max where layer = 'decoder.2')"]),
        ("maxx(stats.l2)", ["no aggregate named maxx", "nearest  max"]),
        ("max(stat.l2)", ["no table named stat", "nearest  stats"]),
        ("max(stats.absmax)", ["no column of stats with numbers named absmax", "nearest  abs_max"]),
        ("max(stats.layer)", ["no column of stats with numbers named layer"]),
        ("max(stats.l2 where layr = 'x')", ["its condition cannot be read", "layr", "nearest  layer"]),
        ("max(stats.l2 where layer = = 'x')", ["its condition cannot be read", "syntax error"]),
        ("max(stats.l2 where layer = 'x') or (1 = 1)", ["its condition cannot be read", "syntax error"]),
        ("max(stats.l2 where 1 = 1); select (1)", ["its condition cannot be read", "syntax error"]),
        ("max(stats.l2 where step > 1 group by step)", ["its condition cannot be read"]),
    ],
)
def test_what_is_not_understood_is_told(written: str, told: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^objective: ") as refused:
        read_objective(written)
    for words in told:
        assert words in str(refused.value)


def test_what_is_not_understood_makes_no_folder(cli: Cli) -> None:
    answer = cli(*TINY, 'objective="max(stats.l2 where layr = 1)"')
    assert answer.code == 2
    assert answer.err.startswith("\nobjective: its condition cannot be read")
    assert list(Path.cwd().iterdir()) == []


def test_a_mistake_of_all_jobs_is_told_once_before_the_first(cli: Cli) -> None:
    for more in ((), ("hydra/sweeper=search", "hydra.sweeper.n_trials=3")):
        answer = cli("-m", *TINY, *more, "optimizer.lr=choice(0.1,0.2)", 'objective="last(stats.l3)"')
        assert answer.code == 2
        assert answer.err.count("there is no column of stats with numbers named l3") == 1
        assert list(Path.cwd().iterdir()) == []


def test_an_objective_that_differs_from_job_to_job_is_looked_at_by_each(cli: Cli) -> None:
    for out, objective in (
        ("first", ("objective=acuracy,loss",)),
        ("second", ("objective=${name}", "name=acuracy,loss")),
    ):
        answer = cli("-m", *TINY, *objective, f"hydra.sweep.dir={out}")
        assert answer.code == 2
        assert answer.err.count("the other jobs go on") == 1
        assert list(instrument.load(out).runs.status) == ["done"]


def test_one_without_its_quotes_says_how_they_stand(cli: Cli) -> None:
    answer = cli(*TINY, "objective=last(stats.l2)")
    assert answer.code == 2
    assert """allowed  'objective="last(stats.l2)"', in quotes twice""" in answer.err


def test_without_duckdb_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert read_objective("loss").query is None
    with pytest.raises(ConfigError, match=r"pip install 'duckdb"):
        read_objective("max(stats.l2)")


@pytest.mark.parametrize(
    ("written", "expected"),
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
def test_the_number_is_the_one_that_pandas_finds(
    finished: Path, written: str, expected: Callable[[instrument.Run], float]
) -> None:
    run = instrument.load(finished)
    value, reason = read_objective(written).of(finished, run.info["metrics"])
    assert value == pytest.approx(expected(run), rel=1e-12)
    assert reason == ""


def test_what_is_computed_again_counts_once(tmp_path: Path) -> None:
    rows = {"stats": [{"l2": 3.0}, {"l2": 3.0, "recompute": True}], "metrics": [{"loss": 1.0}]}
    made(tmp_path / "run", rows=rows)
    assert read_objective("sum(stats.l2)").of(tmp_path / "run", {}) == (3.0, "")
    assert read_objective("sum(metrics.loss)").of(tmp_path / "run", {}) == (1.0, "")


def train(run: instrument.Run) -> Any:
    return run.metrics[run.metrics.phase == "train"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is done."""
    place = tmp_path_factory.mktemp("finished")
    assert run_in(place, *RECORDED, "hydra.run.dir=out").code == 0
    return place / "out"


@pytest.fixture
def mine(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return shutil.copytree(finished, tmp_path / "mine")


@pytest.mark.parametrize(
    ("written", "metrics", "told"),
    [
        ("loss", {"loss": float("nan")}, "it is nan"),
        ("loss", {"loss": float("inf")}, "it is inf"),
        ("accuracy", {"loss": 1.0, "accuracy": None}, "the last evaluation has none"),
        ("max(stats.l2 where layer = 'decoder.2')", {}, "no row that meets the condition"),
        ("max(stats.dead_fraction)", {}, "no row that meets the condition"),  # not among the statistics asked for
        ("max(stats.l2 where layer::int = 3)", {}, "its condition failed: Conversion Error"),
    ],
)
def test_what_is_not_there_or_not_finite_is_no_number_and_says_why(
    finished: Path, written: str, metrics: dict[str, float | None], told: str
) -> None:
    value, reason = read_objective(written).of(finished, metrics)
    assert value is None
    assert reason.startswith(told)


@pytest.mark.slow
def test_a_sweeps_job_tells_its_number_and_keeps_it(cli: Cli) -> None:
    objective = "max(stats.abs_max where layer = 'layers.0')"
    answer = cli("-m", *RECORDED, "seed=1,2", f'objective="{objective}"', "hydra.sweep.dir=out")
    assert answer.code == 0, answer.err
    for job in ("0", "1"):
        kept = json.loads(Path("out", job, "run.json").read_text())["objective"]
        assert kept == instrument.load(f"out/{job}").stats.abs_max.max()
        assert f"out/{job}  {objective} = {kept:.6g}" in answer.out


def test_a_jobs_number_goes_where_its_rows_are_sent(cli: Cli, tmp_path: Path) -> None:
    """Also where the rows themselves are here no longer."""
    objective = "max(stats.abs_max where layer = 'layers.0')"
    sent = (f"sink.remote=file://{tmp_path}/there", f'objective="{objective}"')
    answer = cli("-m", *RECORDED, *sent, "sink.keep_local=true,false", "hydra.sweep.dir=out")
    assert answer.code == 0, answer.err
    assert "nothing to go by" not in answer.err
    for job in ("0", "1"):
        there = instrument.load(f"file://{tmp_path}/there/out/{job}")
        number = there.stats.abs_max.max()
        assert f"out/{job}  {objective} = {number:.6g}" in answer.out
        assert json.loads(Path("out", job, "run.json").read_text())["objective"] == number
        assert there.info["objective"] == number
    assert [len(list(Path("out", job).rglob("*.parquet"))) > 0 for job in ("0", "1")] == [True, False]


def test_a_part_of_the_rows_has_no_number(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    objective, record = read_objective("max(stats.abs_max)"), json.loads((mine / "run.json").read_text())
    moved = {"config": {**record["config"], "sink": {"keep_local": False}}, "remote": f"file://{mine}/there"}
    for more, why in (
        ({"recording_stopped": "the disk is full"}, "its recording stopped: the disk is full"),
        (moved, f"not all of its rows are in file://{mine}/there"),
    ):
        (mine / "run.json").write_text(json.dumps({**record, **more}))
        assert judge(objective, mine, {}) is None
        assert f"nothing to go by: max(stats.abs_max): {why}" in capfd.readouterr().err
        assert json.loads((mine / "run.json").read_text())["objective"] is None


def test_a_search_says_why_a_job_has_no_loss(mine: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where nobody asked for a number, that there is none is no news."""
    for searched, told in ((False, ""), (True, f"{mine}  nothing to go by: loss: it is nan\n")):
        assert judge(read_objective("loss"), mine, {"loss": float("nan")}, searched=searched) is None
        assert capfd.readouterr().err == told
