"""What stands between Hydra and its folders: nothing goes wrong there in passing, and a job is called by its folder."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import instrument

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu", "train.steps=1")


@pytest.mark.parametrize("arguments", [("hydra.run.dir=${nothing}",), ("-m", "seed=1,2", "hydra.sweep.dir=${nothing}")])
def test_a_folder_that_cannot_be_named_is_told_once(cli: Cli, arguments: tuple[str, ...]) -> None:
    answer = cli(*arguments, *TINY)
    assert answer.code == 2
    assert answer.err.count("Interpolation key 'nothing' not found") == 1
    assert "Guard" not in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_a_sweep_whose_record_cannot_be_written_is_not_begun(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: object, file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/multirun.yaml")

    monkeypatch.setattr(OmegaConf, "save", full)
    answer = cli("-m", "seed=1,2", *TINY, "hydra.sweep.dir=out")
    assert answer.code == 1
    assert answer.err.startswith("\nout/multirun.yaml: No space left on device\n")
    assert not Path("out/0").exists()


def test_a_job_in_its_own_folder_is_called_by_that_folder(cli: Cli) -> None:
    place = ("hydra.job.chdir=true", "hydra.sweep.dir=out")
    answer = cli("-m", "seed=1,-2", *TINY, *place)
    assert answer.code == 2
    assert f"{Path.cwd()}/out/0  seed=1  loss" in answer.out
    assert f"this was the job in {Path.cwd()}/out/1; the other jobs go on" in answer.err
    assert list(instrument.load("out").runs.run) == ["0"]


def test_a_job_that_was_refused_without_a_word_failed_all_the_same(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def mute(config: object) -> None:
        raise ValueError

    monkeypatch.setattr("instrument.run.cli.launch.read_config", mute)
    answer = cli("-m", "seed=1", *TINY, "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "out/0  failed  ValueError" in answer.err


def test_a_launcher_of_ones_own_is_called_by_its_name(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("conf/hydra/launcher").mkdir(parents=True)
    Path("conf/hydra/launcher/ours.yaml").write_text("defaults: [slurm, _self_]\npartition: fast\n")
    monkeypatch.setenv("PATH", "")
    answer = cli("-m", "seed=1", *TINY, "hydra/launcher=ours")
    assert answer.code == 2
    assert "there is no Slurm here" in answer.err
    assert "    written  ours\n" in answer.err


@pytest.mark.parametrize("values", ["1,range(2,4)", "range(0,3,0)"])
def test_values_that_cannot_be_gone_through_are_named(cli: Cli, values: str) -> None:
    answer = cli("-m", *TINY, f"seed={values}", "hydra.sweep.dir=out")
    assert answer.code == 2
    assert f"    written  seed={values}\n" in answer.err
    assert "Traceback" not in answer.err
    assert not Path("out").exists()
