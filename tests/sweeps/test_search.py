"""A search by Optuna: mistakes are told before its first trial, and at its end which trial came out best."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from swept import job as made

import instrument
from instrument.sweep import main
from instrument.sweeps.jobs import SweepJob
from instrument.sweeps.search import RESULTS, best_trial

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu", "train.steps=1")
CLIPPED = ("+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}", "hooks=activations")
# Optuna's grid stops with an error where the last of its trials is the one that fails.
DRAWN = (
    "hydra/sweeper=search",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=0",
    "hydra.sweeper.n_trials=2",
)
SEARCH = ("-m", *TINY, "hydra/sweeper=search", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.01,1.0)")


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("direction=maximise", ["there is no such direction", "written  maximise", "nearest  maximize"]),
        ("direction=[minimize,maximize]", ["objective is one number", "allowed  minimize, maximize"]),
        ("n_trials=0", ["hydra.sweeper.n_trials: there has to be one at least", "written  0"]),
        pytest.param(
            *("n_jobs=-1", ["hydra.sweeper.n_jobs: there has to be one at least", "written  -1"]),
            marks=pytest.mark.slow,
        ),
        ("max_failure_rate=2", ["hydra.sweeper.max_failure_rate: this is no share", "allowed  0 to 1"]),
        ("storage=nonsense", ["hydra.sweeper.storage: no study can be kept there", "allowed  such as sqlite:///"]),
        ("storage=mysql://me:hush@host/db", ["it may hold no password", "hydra.sweeper.storage='${oc.env:NAME}'"]),
    ],
)
def test_what_the_sweeper_would_not_take_is_told_before_a_folder_is_made(
    cli: Cli, written: str, told: list[str]
) -> None:
    answer = cli(*SEARCH, f"hydra.sweeper.{written}")
    assert answer.code == 2
    for words in told:
        assert words in answer.err
    assert "hush" not in answer.err
    assert "jobs in" not in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_a_study_that_goes_another_way_is_told_of(cli: Cli) -> None:
    import optuna

    storage = "sqlite:///mine.db"
    optuna.create_study(study_name="mine", storage=storage, direction="maximize")
    study = ("hydra.sweeper.study_name=mine", f"hydra.sweeper.storage={storage}", "hydra.sweep.dir=out")
    answer = cli(*SEARCH, *study)
    assert answer.code == 2
    assert "the study mine is there already, and goes another way" in answer.err
    assert "    written  minimize\n    allowed  maximize\n" in answer.err
    assert not Path("out").exists()


def test_what_the_sweeper_finds_wrong_itself_begins_no_job(cli: Cli) -> None:
    answer = cli(*SEARCH, "hydra/sweeper/sampler=grid", "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "GridSampler only supports discrete distributions" in answer.err
    assert "no job was begun in out\n" in answer.err
    assert "0 jobs" not in answer.err


def test_the_best_trial_is_told_with_its_number(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
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


def test_where_a_trial_failed_the_others_go_on_and_the_best_is_told_too(cli: Cli) -> None:
    answer = cli("-m", *TINY, "optimizer.lr=choice(0.1,-1)", *DRAWN, "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "2 jobs in out: 1 done, 1 failed" in answer.err
    assert "--rerun" not in answer.err
    assert answer.err.count("\nbest         out/") == 1
    assert "  optimizer.lr=0.1  loss = " in answer.err


@pytest.mark.parametrize(
    ("direction", "best"), [("minimize", "idxmin"), pytest.param("maximize", "idxmax", marks=pytest.mark.slow)]
)
def test_optuna_looks_for_the_smallest_or_the_largest(cli: Cli, direction: str, best: str) -> None:
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


def test_a_study_with_a_name_and_a_place_goes_on(cli: Cli) -> None:
    study = ("hydra.sweeper.study_name=mine", "hydra.sweeper.storage=sqlite:///mine.db", "hydra.sweeper.n_trials=1")
    for place in ("first", "second"):
        swept = ("hydra/sweeper=search", *study, "optimizer.lr=interval(0.01,2.0)", f"hydra.sweep.dir={place}")
        answer = cli("-m", *TINY, *swept)
        assert answer.code == 0, answer.err
    import optuna

    assert len(optuna.load_study("mine", "sqlite:///mine.db").trials) == 2


def test_a_trial_without_a_finite_number_is_passed_over(cli: Cli) -> None:
    swept = ("optimizer.lr=choice(0.1,1e38)", *DRAWN, "hydra.sweep.dir=out")
    answer = cli("-m", *TINY, *swept)
    assert answer.code == 0, answer.err
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert found["best_params"] == {"optimizer.lr": 0.1}
    assert list(instrument.load("out").runs.status) == ["done", "done"]


def test_where_no_trial_gives_a_number_it_is_said(cli: Cli) -> None:
    objective = "max(stats.l2 where layer = 'decoder.2')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=out"),
        *(f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    )
    assert answer.code == 1
    assert f"out/0  nothing to go by: {objective}: no row that meets the condition has a number there" in answer.err
    assert "hydra_optuna_sweeper failed: ValueError: No trials are completed yet" in answer.err


@pytest.fixture
def jobs(tmp_path: Path) -> list[SweepJob]:
    """Two trials with the same learning rate, and numbers of their own."""
    for name, number in (("0", 0.5), ("1", 0.25)):
        made(tmp_path / name, config={"objective": "loss"}, metrics={"loss": number})
    return [SweepJob(name, tmp_path / name, ("optimizer.lr=0.1", "seed=1"), "done", None) for name in ("0", "1")]


def test_of_trials_with_the_same_values_the_number_tells(tmp_path: Path, jobs: list[SweepJob]) -> None:
    (tmp_path / RESULTS).write_text("best_params: {optimizer.lr: 0.1}\nbest_value: 0.25\n")
    told = {"best": f"{tmp_path}/1  optimizer.lr=0.1  loss = 0.25", "written to": str(tmp_path / RESULTS)}
    assert best_trial(tmp_path, jobs) == told


def test_the_best_of_a_study_may_be_of_an_earlier_sweep(tmp_path: Path, jobs: list[SweepJob]) -> None:
    (tmp_path / RESULTS).write_text("best_params: {optimizer.lr: 0.1}\nbest_value: 0.125\n")
    told = "in an earlier sweep of the study  optimizer.lr=0.1  objective = 0.125"
    assert best_trial(tmp_path, jobs)["best"] == told


@pytest.mark.parametrize("text", ["solutions: [{params: {a: 1}, values: [1, 2]}]\n", "", "best_value: {", None])
def test_where_there_is_not_one_best_nothing_is_told(tmp_path: Path, jobs: list[SweepJob], text: str | None) -> None:
    if text is not None:
        (tmp_path / RESULTS).write_text(text)
    assert best_trial(tmp_path, jobs) == {}
