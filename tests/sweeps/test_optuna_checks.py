"""Optuna searches: errors before the first trial, the best trial at the end, and existing studies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from run_folders import write_run

import instrument
from instrument.sweep import main
from instrument.sweeps.jobs import SweepJob
from instrument.sweeps.optuna_checks import RESULTS, best_trial

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu", "train.steps=1")
CLIPPED = ("+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}", "hooks=activations")
# The grid sampler of Optuna stops with an error if the last trial fails.
RANDOM = (
    "hydra/sweeper=search",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=0",
    "hydra.sweeper.n_trials=2",
)
SEARCH = ("-m", *TINY, "hydra/sweeper=search", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.01,1.0)")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("direction=maximise", ["unknown direction", "given    maximise", "similar  maximize"]),
        ("direction=[minimize,maximize]", ["only one direction is allowed", "allowed  minimize, maximize"]),
        ("n_trials=0", ["hydra.sweeper.n_trials: must be at least 1", "given    0"]),
        pytest.param(
            *("n_jobs=-1", ["hydra.sweeper.n_jobs: must be at least 1", "given    -1"]),
            marks=pytest.mark.slow,
        ),
        ("max_failure_rate=2", ["hydra.sweeper.max_failure_rate: must be a fraction of the trials", "allowed  0 to 1"]),
        (
            "storage=nonsense",
            ["hydra.sweeper.storage: the study storage cannot be used", "allowed  such as sqlite:///"],
        ),
        (
            "storage=mysql://me:hush@host/db",
            ["it must not contain a password", "hydra.sweeper.storage='${oc.env:NAME}'"],
        ),
    ],
)
def test_invalid_sweeper_setting_is_reported_before_the_start(cli: Cli, override: str, expected: list[str]) -> None:
    answer = cli(*SEARCH, f"hydra.sweeper.{override}")
    assert answer.code == 2
    for words in expected:
        assert words in answer.err
    assert "hush" not in answer.err
    assert "jobs in" not in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_study_with_another_direction_is_refused(cli: Cli) -> None:
    import optuna

    storage = "sqlite:///mine.db"
    optuna.create_study(study_name="mine", storage=storage, direction="maximize")
    study = ("hydra.sweeper.study_name=mine", f"hydra.sweeper.storage={storage}", "hydra.sweep.dir=out")
    answer = cli(*SEARCH, *study)
    assert answer.code == 2
    assert "the study mine already exists with another direction" in answer.err
    assert "    given    minimize\n    allowed  maximize\n" in answer.err
    assert not Path("out").exists()


def test_error_of_the_sweeper_starts_no_job(cli: Cli) -> None:
    answer = cli(*SEARCH, "hydra/sweeper/sampler=grid", "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "GridSampler only supports discrete distributions" in answer.err
    assert "no job was started in out\n" in answer.err
    assert "0 jobs" not in answer.err


def test_best_trial_is_printed_with_its_value(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    best_of_two = ("hydra.sweeper.n_trials=2", "hydra.sweeper.direction=maximize", "objective=accuracy")
    answer = cli(*SEARCH, *best_of_two, "hydra.sweep.dir=out")
    assert answer.code == 0
    numbers = {
        job.name: json.loads((job / "run.json").read_text())["metrics"]["accuracy"] for job in Path("out").glob("[0-9]")
    }
    best = max(sorted(numbers), key=lambda name: numbers[name])
    learning_rate = yaml.safe_load(Path("out", RESULTS).read_text())["best_params"]["optimizer.lr"]
    line = f"best        out/{best}  optimizer.lr={learning_rate}  accuracy = {numbers[best]:.6g}\n"
    assert line in answer.out
    assert f"written to  out/{RESULTS}\n" in answer.out
    assert "A new study" not in answer.err
    assert main(["out"]) == 0
    assert line in capfd.readouterr().out


def test_failed_trial_does_not_stop_the_search(cli: Cli) -> None:
    answer = cli("-m", *TINY, "optimizer.lr=choice(0.1,-1)", *RANDOM, "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "2 jobs in out: 1 done, 1 failed" in answer.err
    assert "--rerun" not in answer.err
    assert answer.err.count("\nbest         out/") == 1
    assert "  optimizer.lr=0.1  loss = " in answer.err


@pytest.mark.parametrize(
    ("direction", "best"), [("minimize", "idxmin"), pytest.param("maximize", "idxmax", marks=pytest.mark.slow)]
)
def test_optuna_minimizes_or_maximizes_the_objective(cli: Cli, direction: str, best: str) -> None:
    objective = "last(stats.l2 where layer = 'layers.0')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=3", "hydra.sweep.dir=out"),
        *(f"hydra.sweeper.direction={direction}", f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    )
    assert answer.code == 0, answer.err
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    sweep = instrument.load("out")
    numbers = pd.Series([info["objective"] for info in sweep.infos], index=sweep.runs["optimizer.lr"])
    assert len(numbers) == 3
    assert found["best_params"]["optimizer.lr"] == getattr(numbers, best)()
    assert found["best_value"] == numbers[getattr(numbers, best)()]


def test_stored_study_is_continued(cli: Cli) -> None:
    study = ("hydra.sweeper.study_name=mine", "hydra.sweeper.storage=sqlite:///mine.db", "hydra.sweeper.n_trials=1")
    for folder in ("first", "second"):
        arguments = ("hydra/sweeper=search", *study, "optimizer.lr=interval(0.01,2.0)", f"hydra.sweep.dir={folder}")
        answer = cli("-m", *TINY, *arguments)
        assert answer.code == 0, answer.err
    import optuna

    assert len(optuna.load_study("mine", "sqlite:///mine.db").trials) == 2


def test_trial_without_a_finite_objective_is_ignored(cli: Cli) -> None:
    arguments = ("optimizer.lr=choice(0.1,1e38)", *RANDOM, "hydra.sweep.dir=out")
    answer = cli("-m", *TINY, *arguments)
    assert answer.code == 0, answer.err
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert found["best_params"] == {"optimizer.lr": 0.1}
    assert list(instrument.load("out").runs.status) == ["done", "done"]


def test_search_without_any_objective_value_fails(cli: Cli) -> None:
    objective = "max(stats.l2 where layer = 'decoder.2')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=out"),
        *(f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    )
    assert answer.code == 1
    assert (
        f"out/0  the objective has no value: {objective}: no row that meets the condition has a value in this column"
        in answer.err
    )
    assert "hydra_optuna_sweeper failed: ValueError: No trials are completed yet" in answer.err


@pytest.fixture
def jobs(tmp_path: Path) -> list[SweepJob]:
    """Two trials with the same learning rate and different objective values."""
    for name, number in (("0", 0.5), ("1", 0.25)):
        write_run(tmp_path / name, config={"objective": "loss"}, metrics={"loss": number})
    return [SweepJob(name, tmp_path / name, ("optimizer.lr=0.1", "seed=1"), "done", None) for name in ("0", "1")]


def test_best_trial_among_equal_values_is_found_by_its_objective(tmp_path: Path, jobs: list[SweepJob]) -> None:
    (tmp_path / RESULTS).write_text("best_params: {optimizer.lr: 0.1}\nbest_value: 0.25\n")
    expected = {"best": f"{tmp_path}/1  optimizer.lr=0.1  loss = 0.25", "written to": str(tmp_path / RESULTS)}
    assert best_trial(tmp_path, jobs) == expected


def test_best_trial_can_be_from_an_earlier_sweep(tmp_path: Path, jobs: list[SweepJob]) -> None:
    (tmp_path / RESULTS).write_text("best_params: {optimizer.lr: 0.1}\nbest_value: 0.125\n")
    expected = "from an earlier sweep of the study  optimizer.lr=0.1  objective = 0.125"
    assert best_trial(tmp_path, jobs)["best"] == expected


@pytest.mark.parametrize("text", ["solutions: [{params: {a: 1}, values: [1, 2]}]\n", "", "best_value: {", None])
def test_missing_best_trial_prints_nothing(tmp_path: Path, jobs: list[SweepJob], text: str | None) -> None:
    if text is not None:
        (tmp_path / RESULTS).write_text(text)
    assert best_trial(tmp_path, jobs) == {}
