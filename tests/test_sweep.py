"""`python -m instrument.sweep`: what became of a sweep's jobs, and doing again those that are not done."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import instrument
from instrument.run.sweep_jobs import Sweep
from instrument.sinks.lock import FolderLock
from instrument.sweep import main

pytestmark = pytest.mark.usefixtures("fresh_workers")

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "device=cpu")
TOUCHY = """from pathlib import Path


def touch(tensor, context, at):
    if context.step == at and Path("broken").exists():
        raise ValueError(f"broken at {at}")
    return 2 * tensor
"""
HOOK = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:touchy.touch,at:9}}"
TIMES = ["seconds", "samples_per_second"]


def listed(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code of the command, what it printed, and its errors."""
    capfd.readouterr()
    code = main(list(arguments))
    out, err = capfd.readouterr()
    return code, out, err


def rows_of(out: str) -> list[list[str]]:
    table = out[out.index("job  status") :].partition("\n\n")[0]
    return [line.split() for line in table.splitlines() if line[:1].isdigit()]


@pytest.fixture
def swept(cli: Cli) -> Path:
    """A sweep of four jobs: one failed at its first step, one at its third, behind a checkpoint, and the last was never begun."""
    Path("touchy.py").write_text(TOUCHY)
    Path("broken").touch()
    steps = ("train.steps=4", "train.checkpoint.every=2", "seed=${hydra:job.num}")
    answer = cli("-m", *TINY, HOOK, *steps, "hooks=activations", "hooks.mine.fn.at=0,2,99,100", "hydra.sweep.dir=out")
    assert answer.code == 1
    shutil.rmtree("out/3")
    Path("broken").unlink()
    return Path("out")


def test_jobs_are_listed_with_what_became_of_them(swept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = listed(capfd, "out")
    assert code == 1
    assert [row[:3] for row in rows_of(out)] == [
        ["0", "failed", "hooks.mine.fn.at=0"],
        ["1", "failed", "hooks.mine.fn.at=2"],
        ["2", "done", "hooks.mine.fn.at=99"],
        ["3", "missing", "hooks.mine.fn.at=100"],
    ]
    assert "broken at 0" in out
    assert out.splitlines()[-1] == "4 jobs in out: 1 done, 2 failed, 1 missing"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_those_not_done_are_done_again_under_their_numbers(
    swept: Path, cli: Cli, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    before = (swept / "2" / "run.json").read_bytes()
    here = Path.cwd()
    if elsewhere:
        (here / "elsewhere").mkdir()
        monkeypatch.chdir(here / "elsewhere")
    code, out, err = listed(capfd, str(Path(os.path.relpath(here)) / "out"), "--rerun")
    monkeypatch.chdir(here)
    assert code == 0, err
    assert "3 jobs done again" in out
    assert out.splitlines()[-1].endswith("out: 4 done")
    sweep = instrument.load("out")
    assert sweep.runs.run.tolist() == ["0", "1", "2", "3"]
    assert [info["config"]["seed"] for info in sweep.infos] == [0, 1, 2, 3]  # the number of each, as it was
    assert sweep.runs["hooks.mine.fn.at"].tolist() == [0, 2, 99, 100]
    assert (swept / "2" / "run.json").read_bytes() == before
    assert "resumed" in sweep.infos[1]  # from its checkpoint
    assert [path.name for path in (swept / ".aside").iterdir()] == ["0.1"]
    assert instrument.load(swept / ".aside" / "0.1").info["status"] == "failed"
    for job in range(4):
        seed = f"seed={job}"
        common = (*TINY, HOOK, "train.steps=4", "train.checkpoint.every=2", "hooks=activations")
        assert cli(*common, seed, f"hydra.run.dir=alone_{job}").code == 0
        one, other = instrument.load(swept / str(job)), instrument.load(f"alone_{job}")
        for table in ("stats", "effects", "metrics"):
            left, right = (getattr(run, table).drop(columns=TIMES, errors="ignore") for run in (one, other))
            pd.testing.assert_frame_equal(left, right, check_exact=True)


def test_what_fails_again_is_put_aside_again_and_the_others_go_on(
    swept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("broken").touch()
    for attempt in (1, 2):
        code, out, err = listed(capfd, "out", "--rerun")
        assert code == 1
        assert "broken at 0" in err
        assert out.splitlines()[-1] == "4 jobs in out: 2 done, 2 failed"
        assert len(list((swept / ".aside").glob("0.*"))) == attempt
    assert len(instrument.load("out").folders) == 4


def test_a_sweep_that_is_done_is_left_alone(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli("-m", *TINY, "train.steps=1", "seed=1,2", "hydra.sweep.dir=out").code == 0
    before = {file: file.stat().st_mtime_ns for file in Path("out").rglob("*") if file.is_file()}
    code, out, _ = listed(capfd, "out", "--rerun")
    assert code == 0
    assert "nothing to do again" in out
    assert {file: file.stat().st_mtime_ns for file in Path("out").rglob("*") if file.is_file()} == before


def test_those_not_done_are_done_again_by_the_launcher_of_the_sweep(
    cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("killing.py").write_text(
        "import os, pathlib, signal\n\n\ndef kill(tensor, context, at):\n"
        "    if context.step == at and not pathlib.Path('mended').exists():\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n    return tensor\n"
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:killing.kill,at:9}}"
    launcher = ("hydra/launcher=processes", "hydra.launcher.n_jobs=2", "hydra.launcher.pre_dispatch=1")
    answer = cli("-m", *TINY, "train.steps=2", hook, "hooks.mine.fn.at=1,8,9", "hydra.sweep.dir=out", *launcher)
    assert answer.code == 1
    assert "hydra_joblib_launcher failed: TerminatedWorkerError" in answer.err
    assert "Traceback" not in answer.err
    code, out, _ = listed(capfd, "out")
    assert code == 1
    assert rows_of(out)[0][:2] == ["0", "killed"]
    Path("mended").touch()
    code, out, err = listed(capfd, "out", "--rerun")
    assert code == 0, err
    assert [row[:2] for row in rows_of(out)] == [["0", "done"], ["1", "done"], ["2", "done"]]
    assert len(instrument.load("out").folders) == 3


def test_a_job_that_was_refused_says_why(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli("-m", *TINY, "train.steps=1", "seed=1,-2", "hydra.sweep.dir=out").code == 2
    _, out, _ = listed(capfd, "out")
    assert "seed: Input should be greater than or equal to 0" in out
    assert rows_of(out)[1][:3] == ["1", "failed", "seed=-2"]


def test_values_in_a_random_order_keep_their_numbers(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    values = range(12)
    assert cli("-m", *TINY, "train.steps=1", "seed=shuffle(range(0,12))", "hydra.sweep.dir=out").code == 0
    seeds = {path.parent.name: json.loads(path.read_text())["seed"] for path in Path("out").glob("*/run.json")}
    for job in ("2", "5", "7"):
        shutil.rmtree(f"out/{job}")
    assert listed(capfd, "out", "--rerun")[0] == 0
    again = {path.parent.name: json.loads(path.read_text())["seed"] for path in Path("out").glob("*/run.json")}
    assert sorted(again.values()) == list(values)
    assert {job: again[job] for job in again if job not in ("2", "5", "7")} == {
        job: seeds[job] for job in seeds if job not in ("2", "5", "7")
    }


def test_jobs_of_a_glob_are_known(cli: Cli) -> None:
    assert (
        cli("-m", *TINY, "train.steps=1", "scheduler=glob(*)", "hydra.sweep.dir=out", "hydra.job.chdir=false").code == 0
    )
    labels = [Sweep(Path("out")).label(job) for job in Sweep(Path("out")).jobs()]
    assert labels == ["scheduler=cosine", "scheduler=none", "scheduler=step"]


def test_jobs_that_are_swept_in_a_file_are_known(cli: Cli) -> None:
    Path("conf/exp").mkdir(parents=True)
    Path("conf/exp/mine.yaml").write_text("# @package _global_\nhydra: {sweeper: {params: {seed: '1,2'}}}\n")
    assert cli("-m", "+exp=mine", *TINY, "train.steps=1", "hydra.sweep.dir=out").code == 0
    assert [Sweep(Path("out")).label(job) for job in Sweep(Path("out")).jobs()] == ["seed=1", "seed=2"]


def test_a_sweep_that_still_goes_on_is_not_done_again(swept: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock = FolderLock(swept.resolve())
    assert lock.acquire()
    try:
        code, _, err = listed(capfd, "out", "--rerun")
    finally:
        lock.release()
    assert code == 2
    assert "this sweep still goes on, in another process" in err
    assert not (swept / ".aside").exists()


def test_trials_are_listed_and_not_done_again(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    search = ("hydra/sweeper=search", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=out")
    assert cli("-m", *TINY, "train.steps=1", "optimizer.lr=interval(0.1,1)", *search).code == 0
    code, out, _ = listed(capfd, "out")
    assert code == 0
    assert [row[1] for row in rows_of(out)] == ["done", "done"]
    assert all(row[2].startswith("optimizer.lr=0.") for row in rows_of(out))
    code, _, err = listed(capfd, "out", "--rerun")
    assert code == 2
    assert "OptunaSweeper" in err
    assert "hydra.sweeper.storage=sqlite:///" in err


def test_jobs_in_folders_of_other_names_are_listed_and_not_done_again(
    cli: Cli, capfd: pytest.CaptureFixture[str]
) -> None:
    place = ("hydra.sweep.dir=out", "hydra.sweep.subdir=job_${hydra.job.num}")
    assert cli("-m", *TINY, "train.steps=1", "seed=1,2", *place).code == 0
    assert [job.name for job in Sweep(Path("out")).jobs()] == ["job_0", "job_1"]
    code, _, err = listed(capfd, "out", "--rerun")
    assert code == 2
    assert "hydra.sweep.subdir" in err


@pytest.mark.parametrize("text", [None, "", "[", "name: run\n", "hydra: 3\n"])
def test_what_is_no_sweep_is_told_of(workdir: Path, capfd: pytest.CaptureFixture[str], text: str | None) -> None:
    Path("out").mkdir()
    if text is not None:
        Path("out/multirun.yaml").write_text(text)
    code, _, err = listed(capfd, "out")
    assert code == 2
    assert "multirun.yaml cannot be read" in err
    assert "Traceback" not in err
