"""Sweeps through the ready launchers: real processes, real jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import joblib
import pandas as pd
import pytest
from conftest import REPOSITORY
from waiting import HANGS, until, until_it_trains

import instrument

pytestmark = pytest.mark.usefixtures("fresh_workers")

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
FAILING = (
    "+hooks.seen={layers:layers.0,kind:forward,action:record}",
    "hooks.seen.layers=layers.0,decodr,layers",
    "hooks.seen.every=2",  # which is written nowhere else
)
TIMES = ["seconds", "samples_per_second"]


def folders(place: str) -> set[str]:
    return {path.name for path in Path(place).iterdir() if path.name.isdigit()}


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m instrument` in a process of its own, in the working directory."""
    return subprocess.run(
        [sys.executable, "-m", "instrument", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_AUTH_MODE": "disabled", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["processes", "slurm_local"])
def test_every_job_has_its_share_of_the_cores(cli: Cli, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_own_model("threads.py")
    jobs = "+model.note=0,1,2" if launcher == "processes" else "+model.note=0,1"
    at_once = ("hydra.launcher.n_jobs=2",) if launcher == "processes" else ()
    where = (f"hydra/launcher={launcher}", *at_once, "hydra.sweep.dir=out")
    answer = cli("-m", *TINY[2:], "+model._target_=threads.Net", jobs, *where)
    assert answer.code == 0, answer.err
    noted = [file.read_text().split() for file in Path().glob("note_*")]
    assert f"{len(noted)} jobs in out" in answer.out
    cores = joblib.cpu_count() if launcher == "processes" else os.cpu_count() or 1
    share = max(cores // 2, 1)
    assert [int(threads) for threads, _ in noted] == [share] * len(noted)
    assert str(os.getpid()) not in {process for _, process in noted}


PROCESSES = ("hydra/launcher=processes", "hydra.launcher.n_jobs=2")


def write_own_model(name: str) -> None:
    """A model of the user's own, in the working directory, which leaves a note of where it was made."""
    Path(name).write_text(
        "import os, pathlib, torch\n\n\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, note):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "        pathlib.Path(f'note_{note}').write_text(f'{torch.get_num_threads()} {os.getpid()}')\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PROCESSES, ("hydra/launcher=slurm_local",)], ids=lambda given: given[0])
def test_a_job_that_fails_stops_no_other_and_the_exit_code_says_so(cli: Cli, launcher: tuple[str, ...]) -> None:
    asked = (*TINY, *FAILING, "hydra.sweep.dir=out", *launcher)
    answer = cli("-m", *asked)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert folders("out") == {"0", "1", "2"}
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    assert all(info["command"] == ["instrument", "-m", *asked] for info in instrument.load("out").infos)
    assert "3 jobs in out: 2 done, 1 failed" in answer.err
    assert "out/1  failed  hooks.seen.layers=decodr  hooks.seen.layers: this pattern matches" in answer.err
    assert "python -m instrument.sweep out --rerun" in answer.err
    terminals = [file.read_text() for file in sorted(Path("out").glob(".submitit/*/*_log.out"))] or [answer.out]
    assert sum("out/0  hooks.seen.layers=layers.0  loss" in text for text in terminals) == 1
    assert sum("out/2  hooks.seen.layers=layers  loss" in text for text in terminals) == 1
    assert ("terminals    out/.submitit" in answer.err) == (launcher is not PROCESSES)


@pytest.mark.slow
def test_a_job_that_is_killed_is_told_of_and_what_was_done_stays(cli: Cli) -> None:
    Path("killing.py").write_text(
        "import os, signal\n\n\ndef kill(tensor, context, at):\n"
        "    if context.step == at:\n        os.kill(os.getpid(), signal.SIGKILL)\n    return tensor\n"
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:killing.kill,at:9}}"
    swept = ("hooks.mine.fn.at=9,1", "hydra.sweep.dir=out", *PROCESSES)
    answer = cli("-m", *TINY, "device=cpu", "train.steps=2", hook, *swept)
    assert answer.code == 1
    assert "hydra_joblib_launcher failed: TerminatedWorkerError" in answer.err
    assert "Traceback" not in answer.err
    assert instrument.load("out/1").info["status"] == "killed"
    assert "1 killed" in answer.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ends"),
    # joblib kills its processes, some of which are faster: they get Ctrl-C too
    [("basic", {"interrupted"}), ("processes", {"killed", "interrupted"})],
)
def test_a_sweep_that_is_interrupted_says_what_is_left(workdir: Path, launcher: str, ends: set[str]) -> None:
    long = ("train.steps=1000000", "seed=1,2", "hydra.sweep.dir=out")
    process = subprocess.Popen(
        [sys.executable, "-m", "instrument", "-m", *TINY[:3], *long, f"hydra/launcher={launcher}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until_it_trains(process, Path("out/0"))
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "python -m instrument.sweep out --rerun" in err
    run = instrument.load("out/0")
    assert run.info["status"] in ends
    assert re.search(rf"out/0 +{run.info['status']} +seed=1", err), err
    assert len(run.metrics) > 0


def test_jobs_of_another_process_are_those_of_this_one(cli: Cli) -> None:
    write_own_model("noted.py")
    swept = ("-m", *TINY[2:], "hooks=activations", "+model._target_=noted.Net", "+model.note=0,1")
    assert cli(*swept, "hydra.sweep.dir=here").code == 0
    at_once = ("hydra.launcher.pre_dispatch=1",)  # the second job goes to the process that did the first one
    answer = cli(*swept, "hydra.sweep.dir=there", *PROCESSES, *at_once)
    assert answer.code == 0, answer.err
    told = [line.split("  ") for line in answer.out.splitlines() if line.startswith("there/")]
    assert [line[:2] for line in told] == [["there/0", "model.note=0"], ["there/1", "model.note=1"]]
    assert all("loss" in line[2] and "accuracy" in line[3] for line in told)
    here, there = instrument.load("here"), instrument.load("there")
    assert str(os.getpid()) not in {Path(f"note_{note}").read_text().split()[1] for note in (0, 1)}
    for table in ("stats", "metrics", "coverage", "layers"):
        left, right = (getattr(sweep, table).drop(columns=TIMES, errors="ignore") for sweep in (here, there))
        assert len(left) > 0
        pd.testing.assert_frame_equal(left, right, check_exact=True)


@pytest.mark.slow
def test_the_same_configuration_seed_and_threads_give_the_same_rows_to_the_bit(workdir: Path) -> None:
    common = ("+exp=mnist_hooks", "data=digits", "data.dataset.size=28", "train.steps=6", "hooks.digit_maps.steps=[0]")
    for place, launcher in (("basic", ()), ("processes", PROCESSES)):
        swept = ("hooks.tame.norm=0.1,1", "seed=1,2", f"hydra.sweep.dir={place}")
        answer = in_a_process("-m", *common, *swept, *launcher, OMP_NUM_THREADS="1")
        assert answer.returncode == 0, answer.stderr
    one, other = instrument.load("basic"), instrument.load("processes")
    for table in ("stats", "distributions", "effects", "metrics", "coverage", "layers"):
        left, right = (getattr(sweep, table).drop(columns=TIMES, errors="ignore") for sweep in (one, other))
        assert len(left) > 0
        pd.testing.assert_frame_equal(left, right, check_exact=True)


@pytest.mark.slow
def test_a_ray_cluster_of_its_own_runs_every_job(workdir: Path) -> None:
    answer = in_a_process("-m", *TINY, *FAILING, "hydra.sweep.dir=out", "hydra/launcher=ray_local")
    assert answer.returncode == 2, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    told = answer.stdout + answer.stderr
    assert "out/0  hooks.seen.layers=layers.0  loss" in told
    assert "out/2  hooks.seen.layers=layers  loss" in told
    assert "3 jobs in out: 2 done, 1 failed" in answer.stderr


@pytest.fixture
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster on this machine, which was started elsewhere than the working directory."""
    place = tmp_path_factory.mktemp("head")
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start")
    options = ("--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--block")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    log = place / "log"
    with log.open("w") as told:
        head = subprocess.Popen([*ray, *options], cwd=place, env=environment, stdout=told, stderr=told, text=True)
    try:
        until(lambda: "Ray runtime started" in log.read_text() and "--address=" in log.read_text(), head)
        address = re.search(r"--address='([^']+)'", log.read_text())
        assert address is not None, log.read_text()
        yield address[1]
    finally:
        head.terminate()
        head.wait(timeout=HANGS)


@pytest.mark.slow
def test_a_ray_cluster_that_is_there_already_runs_every_job(workdir: Path, ray_head: str) -> None:
    write_own_model("own_net.py")
    own = ("data=digits", "train.steps=2", "+model._target_=own_net.Net", "+model.note=0,1")
    where = ("hydra/launcher=ray_cluster", f"hydra.launcher.ray.init.address={ray_head}")
    answer = in_a_process("-m", *own, "hydra.sweep.dir=out", *where)
    assert answer.returncode == 0, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    assert instrument.load("out").runs["model.note"].tolist() == [0, 1]
    assert Path("note_0").read_text().split()[0] == "1"  # of num_cpus
