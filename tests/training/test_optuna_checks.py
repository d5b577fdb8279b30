"""Optuna searches: errors before the first trial, the best trial at the end, and existing studies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from _pytest.mark import ParameterSet
from omegaconf import OmegaConf
from run_folders import write_run

import instrument
from instrument.commands.sweep import main
from instrument.config.spec_file import conf_folder
from instrument.errors import ConfigError
from instrument.training.sweep_jobs import RESULTS, SweepJob, best_trial
from instrument.training.sweep_objective import check_search

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu", "train.steps=1")
CLIPPED = ("+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}", "hooks=activations")
# The grid sampler of Optuna stops with an error if the last trial fails.
RANDOM = (
    *("hydra/sweeper=search", "hydra.sweeper.n_trials=2"),
    *("hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=0"),
)
L2 = "last(stats.l2 where layer = 'layers.0')"
SEARCH = ("-m", *TINY, "hydra/sweeper=search", "hydra.sweeper.n_trials=3", "optimizer.lr=interval(0.01,1.0)")


def slow(*values: Any) -> ParameterSet:
    """Return a slow case, for a sweep whose parts other tests cover."""
    return pytest.param(*values, marks=pytest.mark.slow)


def checked(**settings: Any) -> None:
    """Check a search with these settings of its sweeper; the others are those of the preset."""
    preset = OmegaConf.load(conf_folder() / "hydra" / "sweeper" / "search.yaml")
    plugin = {"n_jobs": 1, "max_failure_rate": 0.0, "storage": None, "study_name": None}
    given = {key: value for key, value in preset.items() if key != "defaults"}
    check_search(OmegaConf.create({"sweeper": {**plugin, **given, **settings}}))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"direction": "maximise"}, ["must be one direction", "given    maximise", "similar  maximize"]),
        ({"direction": ["minimize", "maximize"]}, ["must be one direction", "allowed  minimize, maximize"]),
        ({"n_trials": 0}, ["hydra.sweeper.n_trials: must be at least 1", "given    0"]),
        ({"n_jobs": -1}, ["hydra.sweeper.n_jobs: must be at least 1", "given    -1"]),
        ({"max_failure_rate": 2}, ["hydra.sweeper.max_failure_rate: must be a fraction of the trials", "allowed  0 to 1"]),
        ({"storage": "nonsense"}, ["hydra.sweeper.storage: the study storage cannot be used", "allowed  such as sqlite:///"]),
        ({"storage": "mysql://me:hush@host/db"}, ["it must not contain a password", "hydra.sweeper.storage='${oc.env:NAME}'"]),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_sweeper_setting_is_refused(settings: dict[str, Any], expected: list[str]) -> None:
    checked()
    with pytest.raises(ConfigError) as refused:
        checked(**settings)
    for words in expected:
        assert words in str(refused.value)
    assert "hush" not in str(refused.value)


def test_invalid_sweeper_setting_is_reported_before_the_start(cli: Cli) -> None:
    answer = cli(*SEARCH, "hydra.sweeper.storage=mysql://me:hush@host/db").expect(2)
    assert "it must not contain a password" in answer.err
    assert "hush" not in answer.err
    assert "jobs in" not in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_study_with_another_direction_is_refused(workdir: Path) -> None:
    import optuna

    study = {"study_name": "mine", "storage": "sqlite:///mine.db"}
    optuna.create_study(**study, direction="maximize")
    with pytest.raises(ConfigError) as refused:
        checked(**study)
    assert "the study mine already exists with another direction" in str(refused.value)
    assert "    given    minimize\n    allowed  maximize\n" in f"{refused.value}\n"
    checked(**study, direction="maximize")


def test_error_of_the_sweeper_starts_no_job(cli: Cli) -> None:
    answer = cli(*SEARCH, "hydra/sweeper/sampler=grid", "hydra.sweep.dir=out").expect(1)
    assert "GridSampler only supports discrete distributions" in answer.err
    assert "no job was started in out\n" in answer.err
    assert "0 jobs" not in answer.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "objective"),
    [("maximize", L2), slow("minimize", L2), slow("maximize", "accuracy"), slow("minimize", "accuracy")],
)
def test_best_trial_is_printed_with_its_value(
    cli: Cli, capfd: pytest.CaptureFixture[str], direction: str, objective: str
) -> None:
    search = ("hydra.sweeper.n_trials=2", f"hydra.sweeper.direction={direction}", f'objective="{objective}"')
    answer = cli(*SEARCH, *CLIPPED, *search, "hydra.sweep.dir=out").expect(0)
    sweep = instrument.load("out")
    values = pd.Series([info.get("objective", info["metrics"]["accuracy"]) for info in sweep.infos])
    assert len(values) == 2
    best = values.idxmax() if direction == "maximize" else values.idxmin()
    found = yaml.safe_load(Path("out", RESULTS).read_text())
    assert found["best_value"] == values[best]
    assert found["best_params"]["optimizer.lr"] == sweep.runs["optimizer.lr"][best]
    learning_rate = found["best_params"]["optimizer.lr"]
    line = f"best        out/{best}  optimizer.lr={learning_rate}  {objective} = {values[best]:.6g}\n"
    assert line in answer.out
    assert f"written to  out/{RESULTS}\n" in answer.out
    assert "A new study" not in answer.err
    assert main(["out"]) == 0
    assert line in capfd.readouterr().out


@pytest.mark.slow
def test_failed_trial_does_not_stop_the_search(cli: Cli) -> None:
    answer = cli("-m", *TINY, "optimizer.lr=choice(0.1,-1)", *RANDOM, "hydra.sweep.dir=out").expect(1)
    assert "2 jobs in out: 1 done, 1 failed" in answer.err
    assert "--rerun" not in answer.err
    assert answer.err.count("\nbest         out/") == 1
    assert "  optimizer.lr=0.1  loss = " in answer.err


@pytest.mark.slow
def test_stored_study_is_continued(cli: Cli) -> None:
    import optuna

    storage = "sqlite:///mine.db"
    study = optuna.create_study(study_name="mine", storage=storage)
    study.optimize(lambda trial: 1e-9 * trial.suggest_float("optimizer.lr", 0.01, 1.0), n_trials=1)
    stored = ("hydra.sweeper.study_name=mine", f"hydra.sweeper.storage={storage}", "hydra.sweeper.n_trials=1")
    answer = cli(*SEARCH, *stored, "hydra.sweep.dir=out").expect(0)
    assert (
        f"best        from an earlier sweep of the study  optimizer.lr={study.best_params['optimizer.lr']}"
        in answer.out
    )
    assert len(optuna.load_study("mine", storage).trials) == 2


@pytest.mark.slow
def test_trial_without_a_finite_objective_is_ignored(cli: Cli) -> None:
    arguments = ("optimizer.lr=choice(0.1,1e38)", *RANDOM, "hydra.sweep.dir=out")
    cli("-m", *TINY, *arguments).expect(0)
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert found["best_params"] == {"optimizer.lr": 0.1}
    assert list(instrument.load("out").runs.status) == ["done", "done"]


@pytest.mark.slow
def test_search_without_any_objective_value_fails(cli: Cli) -> None:
    objective = "max(stats.l2 where layer = 'decoder.2')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=1", "hydra.sweep.dir=out"),
        *(f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    ).expect(1)
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


@pytest.mark.parametrize(
    ("best_value", "expected"),
    [
        (0.25, "{folder}/1  optimizer.lr=0.1  loss = 0.25"),  # of two trials with equal values, by its objective
        (0.125, "from an earlier sweep of the study  optimizer.lr=0.1  objective = 0.125"),
    ],
)
def test_best_trial_is_found_by_its_objective(
    tmp_path: Path, jobs: list[SweepJob], best_value: float, expected: str
) -> None:
    (tmp_path / RESULTS).write_text(f"best_params: {{optimizer.lr: 0.1}}\nbest_value: {best_value}\n")
    expected = expected.format(folder=tmp_path)
    assert best_trial(tmp_path, jobs) == {"best": expected, "written to": str(tmp_path / RESULTS)}


@pytest.mark.parametrize("text", ["solutions: [{params: {a: 1}, values: [1, 2]}]\n", "", "best_value: {", None])
def test_missing_best_trial_prints_nothing(tmp_path: Path, jobs: list[SweepJob], text: str | None) -> None:
    if text is not None:
        (tmp_path / RESULTS).write_text(text)
    assert best_trial(tmp_path, jobs) == {}
