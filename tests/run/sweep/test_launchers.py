"""Sweeps through the ready launchers and Optuna's sweeper: real processes, real jobs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY
from hydra.core.config_store import ConfigStore

import instrument
from instrument.extras import pip_command

pytestmark = pytest.mark.usefixtures("fresh_workers")

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
CLIPPED = ("+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}", "hooks=activations")
FAILING = ("+hooks.seen={layers:layers.0,kind:forward,action:record}", "hooks.seen.layers=layers.0,decodr,layers")
# Optuna's grid stops with an error where the last of its trials is the one that fails.
DRAWN = (
    "hydra/sweeper=search",
    "hydra/sweeper/sampler=random",
    "hydra.sweeper.sampler.seed=0",
    "hydra.sweeper.n_trials=2",
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
        timeout=240,
    )


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
    share = max((os.cpu_count() or 1) // 2, 1)
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


@pytest.mark.parametrize("launcher", [PROCESSES, ("hydra/launcher=slurm_local",)], ids=lambda given: given[0])
def test_a_job_that_fails_stops_no_other_and_the_exit_code_says_so(cli: Cli, launcher: tuple[str, ...]) -> None:
    asked = (*TINY, *FAILING, "hydra.sweep.dir=out", *launcher)
    answer = cli("-m", *asked)
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert folders("out") == {"0", "1", "2"}
    assert list(instrument.load("out").runs.status) == ["done", "failed", "done"]
    assert all(info["command"] == ["instrument", "-m", *asked] for info in instrument.load("out").infos)
    assert "3 jobs in out: 2 done, 1 failed" in answer.err
    assert "out/1  failed  hooks.seen.layers=decodr  ConfigError: hooks.seen.layers: this pattern matches" in answer.err
    assert "python -m instrument.sweep out --rerun" in answer.err
    terminals = [file.read_text() for file in sorted(Path("out").glob(".submitit/*/*_log.out"))] or [answer.out]
    assert sum("out/0  hooks.seen.layers=layers.0  loss" in text for text in terminals) == 1
    assert sum("out/2  hooks.seen.layers=layers  loss" in text for text in terminals) == 1
    assert ("terminals    out/.submitit" in answer.err) == (launcher is not PROCESSES)


def test_the_lines_of_processes_say_which_job_each_is_of(cli: Cli) -> None:
    answer = cli("-m", *TINY, "seed=1,2,3", "hydra.sweep.dir=out", *PROCESSES)
    told = sorted(line for line in answer.out.splitlines() if line.startswith("out/"))
    assert [line.split("  ")[:2] for line in told] == [[f"out/{job}", f"seed={job + 1}"] for job in range(3)]
    assert all("loss" in line and "accuracy" in line for line in told)


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
    for _ in range(600):
        if list(Path("out").glob("0/metrics/*")):
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "python -m instrument.sweep out --rerun" in err
    run = instrument.load("out/0")
    assert run.info["status"] in ends
    assert re.search(rf"out/0 +{run.info['status']} +seed=1", err), err
    assert len(run.metrics) > 0


@pytest.mark.parametrize("launcher", ["processes", "slurm_local", "ray_local"])
def test_a_sweep_without_jobs_is_told_of_before_anything_is_started(cli: Cli, launcher: str) -> None:
    answer = cli("-m", *TINY, "seed=range(3,3)", f"hydra/launcher={launcher}")
    assert answer.code == 2
    assert "the sweep has no jobs" in answer.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("preset", "group", "plugin", "extra"),
    [
        ("processes", "launcher", "joblib", "joblib"),
        ("slurm", "launcher", "submitit_slurm", "submitit"),
        ("slurm_local", "launcher", "submitit_local", "submitit"),
        ("ray_local", "launcher", "ray", "ray"),
        ("ray_cluster", "launcher", "ray", "ray"),
        ("search", "sweeper", "optuna", "optuna"),
    ],
)
def test_a_preset_whose_plugin_is_missing_names_the_extra(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, preset: str, group: str, plugin: str, extra: str
) -> None:
    assert cli("--version").code == 0  # the plugins are found, once a process
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"][group], f"{plugin}.yaml")
    answer = cli("-m", *TINY, "seed=1,2", f"hydra/{group}={preset}")
    assert answer.code == 2
    assert answer.err == (f"\nhydra/{group}: needs a package that is not installed: {pip_command(extra)}\n\n")


def test_slurm_where_there_is_none_is_told_of(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    answer = cli("-m", *TINY, "seed=1,2", "hydra/launcher=slurm", "hydra.sweep.dir=out")
    assert answer.code == 2
    assert "srun is not on the PATH" in answer.err
    assert "slurm_local" in answer.err
    assert not Path("out").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_sweep_under_torchrun_is_refused_by_one_of_its_processes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)
    answer = cli("-m", *TINY, "seed=1,2")
    assert answer.code == 2
    assert ("each of torchrun's processes" in answer.err) == (rank == "0")
    assert list(Path.cwd().iterdir()) == []


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


@pytest.mark.parametrize(("direction", "best"), [("minimize", "idxmin"), ("maximize", "idxmax")])
def test_optuna_looks_for_the_smallest_or_the_largest(cli: Cli, direction: str, best: str) -> None:
    objective = "last(stats.l2 where layer = 'layers.0')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=4", "hydra.sweep.dir=out"),
        *(f"hydra.sweeper.direction={direction}", f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    )
    assert answer.code == 0, answer.err
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    sweep = instrument.load("out")
    numbers = pd.Series([info["objective"] for info in sweep.infos], index=sweep.runs["optimizer.lr"])
    assert len(numbers) == 4
    assert found["best_params"]["optimizer.lr"] == getattr(numbers, best)()
    assert found["best_value"] == numbers[getattr(numbers, best)()]


def test_a_study_with_a_name_and_a_place_goes_on(cli: Cli) -> None:
    study = ("hydra.sweeper.study_name=mine", "hydra.sweeper.storage=sqlite:///mine.db", "hydra.sweeper.n_trials=2")
    for place in ("first", "second"):
        swept = ("hydra/sweeper=search", *study, "optimizer.lr=interval(0.01,2.0)", f"hydra.sweep.dir={place}")
        answer = cli("-m", *TINY, *swept)
        assert answer.code == 0, answer.err
    import optuna

    assert len(optuna.load_study("mine", "sqlite:///mine.db").trials) == 4


def test_a_trial_without_a_finite_number_is_passed_over(cli: Cli) -> None:
    swept = ("optimizer.lr=choice(0.1,1e38)", *DRAWN, "hydra.sweep.dir=out")
    answer = cli("-m", *TINY, *swept)
    assert answer.code == 0, answer.err
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert found["best_params"] == {"optimizer.lr": 0.1}
    assert list(instrument.load("out").runs.status) == ["done", "done"]


def test_trials_that_fail_stop_no_other_and_the_exit_code_says_so(cli: Cli) -> None:
    answer = cli("-m", *TINY, "optimizer.lr=choice(0.1,-1)", *DRAWN, "hydra.sweep.dir=out")
    assert answer.code == 1
    assert "2 jobs in out: 1 done, 1 failed" in answer.err
    assert "--rerun" not in answer.err


def test_where_no_trial_gives_a_number_it_is_said(cli: Cli) -> None:
    objective = "max(stats.l2 where layer = 'decoder.2')"
    answer = cli(
        *("-m", *TINY, *CLIPPED, "hydra/sweeper=search", "hydra.sweeper.n_trials=2", "hydra.sweep.dir=out"),
        *(f'objective="{objective}"', "optimizer.lr=interval(0.01,2.0)"),
    )
    assert answer.code == 1
    assert f"out/1  nothing to go by: {objective}: no row that meets the condition has a number there" in answer.err
    assert "hydra_optuna_sweeper failed: ValueError: No trials are completed yet" in answer.err


def test_a_ray_cluster_of_its_own_runs_every_job(workdir: Path) -> None:
    answer = in_a_process("-m", *TINY, *FAILING, "hydra.sweep.dir=out", "hydra/launcher=ray_local")
    assert answer.returncode == 2, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "failed", "done"]
    told = answer.stdout + answer.stderr
    assert "out/0  hooks.seen.layers=layers.0  loss" in told
    assert "out/2  hooks.seen.layers=layers  loss" in told
    assert "3 jobs in out: 2 done, 1 failed" in answer.stderr


@pytest.fixture
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray cluster on this machine, which was started elsewhere than the working directory."""
    place = tmp_path_factory.mktemp("head")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray = Path(sys.executable).with_name("ray")
    options = ("--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--node-ip-address=127.0.0.1")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    with open(place / "log", "w") as log:
        head = subprocess.Popen([ray, "start", *options, "--block"], cwd=place, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(120):
            if "Ray runtime started" in (place / "log").read_text():
                break
            assert head.poll() is None, (place / "log").read_text()
            time.sleep(0.5)
        yield f"127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(timeout=60)


def test_a_ray_cluster_that_is_there_already_runs_every_job(workdir: Path, ray_head: str) -> None:
    write_own_model("own_net.py")
    own = ("data=digits", "train.steps=2", "+model._target_=own_net.Net", "+model.note=0,1")
    where = ("hydra/launcher=ray_cluster", f"hydra.launcher.ray.init.address={ray_head}")
    answer = in_a_process("-m", *own, "hydra.sweep.dir=out", *where)
    assert answer.returncode == 0, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    assert instrument.load("out").runs["model.note"].tolist() == [0, 1]
    assert Path("note_0").read_text().split()[0] == "1"  # of num_cpus
