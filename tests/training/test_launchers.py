"""Sweeps with the launcher presets, in real worker processes."""

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
import pytest
from conftest import REPOSITORY
from fork_server import Command
from state_comparison import assert_same_tables
from waiting import TIMEOUT, wait_until, wait_until_training

import instrument
from instrument.training.sweep_jobs import Sweep

pytestmark = pytest.mark.usefixtures("fresh_workers")

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
FAILING = (
    "+hooks.seen={layers:layers.0,kind:forward,action:record}",
    "hooks.seen.layers=layers.0,decodr,layers",
    "hooks.seen.every=2",  # a known field that no file defines
)


def folders(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if path.name.isdigit()}


def started(*arguments: str) -> Command:
    """Start `python -m instrument` in another process and the working directory."""
    return Command(Path.cwd(), "instrument", arguments, {"RAY_AUTH_MODE": "disabled"}, "sweep")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["processes", "slurm_local"])
def test_jobs_share_the_cores(cli: Cli, monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_custom_model("threads.py")
    jobs = "+model.note=0,1,2" if launcher == "processes" else "+model.note=0,1"
    at_once = ("hydra.launcher.n_jobs=2",) if launcher == "processes" else ()
    options = (f"hydra/launcher={launcher}", *at_once, "hydra.sweep.dir=out")
    answer = cli("-m", *TINY[2:], "+model._target_=threads.Net", jobs, *options).expect(0)
    notes = [file.read_text().split() for file in Path().glob("note_*")]
    assert f"{len(notes)} jobs in out" in answer.out
    assert "OMP_NUM_THREADS" not in os.environ
    cores = joblib.cpu_count() if launcher == "processes" else os.cpu_count() or 1
    threads_per_job = max(cores // 2, 1)
    assert [int(threads) for threads, _ in notes] == [threads_per_job] * len(notes)
    assert str(os.getpid()) not in {process for _, process in notes}


PROCESSES = ("hydra/launcher=processes", "hydra.launcher.n_jobs=2")


def write_custom_model(name: str) -> None:
    """Write a custom model that writes its thread count and process id to a file."""
    Path(name).write_text(
        "import os, pathlib, torch\n\n\n"
        "class Net(torch.nn.Sequential):\n"
        "    def __init__(self, note):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "        pathlib.Path(f'note_{note}').write_text(f'{torch.get_num_threads()} {os.getpid()}')\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [PROCESSES, ("hydra/launcher=slurm_local",)], ids=lambda given: given[0])
def test_refused_job_does_not_stop_others_and_sets_the_exit_code(cli: Cli, launcher: tuple[str, ...]) -> None:
    arguments = (*TINY, *FAILING, "hydra.sweep.dir=out", *launcher)
    answer = cli("-m", *arguments).expect(2)
    assert "Traceback" not in answer.err
    assert folders("out") == {"0", "1", "2"}
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    assert all(info["command"] == ["instrument", "-m", *arguments] for info in instrument.load("out").infos)
    assert "3 jobs in out: 2 done, 1 failed" in answer.err
    assert "out/1  failed  hooks.seen.layers=decodr  hooks.seen.layers: this pattern matches" in answer.err
    assert "python -m instrument.sweep out --rerun" in answer.err
    terminals = [file.read_text() for file in sorted(Path("out").glob(".submitit/*/*_log.out"))] or [answer.out]
    assert sum("out/0  hooks.seen.layers=layers.0  loss" in text for text in terminals) == 1
    assert sum("out/2  hooks.seen.layers=layers  loss" in text for text in terminals) == 1
    assert ("job output   out/.submitit" in answer.err) == (launcher is not PROCESSES)


@pytest.mark.slow
def test_interrupted_processes_of_a_sweep_are_listed(workdir: Path) -> None:
    long = ("train.steps=1000000", "seed=1,2", "hydra.sweep.dir=out")
    process = subprocess.Popen(
        [sys.executable, "-m", "instrument", "-m", *TINY[:3], *long, "hydra/launcher=processes"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until_training(process, Path("out/0"))
    os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "python -m instrument.sweep out --rerun" in err
    run = instrument.load("out/0")
    assert run.info["status"] in ("killed", "interrupted")  # joblib kills its processes, but some handle Ctrl-C first
    assert re.search(rf"out/0 +{run.info['status']} +seed=1", err), err
    assert len(run.metrics) > 0


@pytest.mark.slow
def test_jobs_in_worker_processes_give_the_same_rows(cli: Cli) -> None:
    write_custom_model("noted.py")
    hooks = (
        *("hooks=activations", "+hooks.activations.histogram=8"),
        "+hooks.tame={layers:'**',kind:parameter_grad,action:clip,norm:0.1}",
    )
    sweep_arguments = ("-m", *TINY[2:], *hooks, "+model._target_=noted.Net", "+model.note=0,1")
    assert cli(*sweep_arguments, "hydra.sweep.dir=here").code == 0
    at_once = ("hydra.launcher.pre_dispatch=1",)  # both jobs run in the same process
    answer = cli(*sweep_arguments, "hydra.sweep.dir=there", *PROCESSES, *at_once).expect(0)
    labels = [Sweep(Path("there")).label(job) for job in Sweep(Path("there")).jobs()]
    assert labels == ["model.note=0", "model.note=1"]
    lines = [line.split("  ") for line in answer.out.splitlines() if line.startswith("there/")]
    assert [line[:2] for line in lines] == [["there/0", "model.note=0"], ["there/1", "model.note=1"]]
    assert all("loss" in line[2] and "accuracy" in line[3] for line in lines)
    here, there = instrument.load("here"), instrument.load("there")
    assert str(os.getpid()) not in {Path(f"note_{note}").read_text().split()[1] for note in (0, 1)}
    tables = ("stats", "distributions", "effects", "metrics", "coverage", "layers")
    assert all(len(getattr(here, table)) for table in tables)
    assert_same_tables(here, there, *tables)


@pytest.mark.slow
def test_local_ray_cluster_runs_every_job(workdir: Path) -> None:
    answer = started("-m", *TINY, *FAILING, "hydra.sweep.dir=out", "hydra/launcher=ray_local").wait()
    assert answer.returncode == 2, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    output = answer.stdout + answer.stderr
    assert "out/0  hooks.seen.layers=layers.0  loss" in output
    assert "out/2  hooks.seen.layers=layers  loss" in output
    assert "3 jobs in out: 2 done, 1 failed" in answer.stderr


@pytest.fixture
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Ray cluster on this machine, started in another working directory."""
    folder = tmp_path_factory.mktemp("head")
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start")
    options = ("--head", "--port=0", "--num-cpus=2", "--include-dashboard=false", "--block")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(REPOSITORY)}
    log = folder / "log"
    with log.open("w") as output:
        head = subprocess.Popen([*ray, *options], cwd=folder, env=environment, stdout=output, stderr=output, text=True)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() and "--address=" in log.read_text(), head)
        address = re.search(r"--address='([^']+)'", log.read_text())
        assert address is not None, log.read_text()
        yield address[1]
    finally:
        head.terminate()
        head.wait(timeout=TIMEOUT)


@pytest.mark.slow
def test_existing_ray_cluster_runs_every_job(workdir: Path, ray_head: str) -> None:
    write_custom_model("own_net.py")
    model = ("data=digits", "train.steps=2", "+model._target_=own_net.Net", "+model.note=0,1")
    launcher = ("hydra/launcher=ray_cluster", f"hydra.launcher.ray.init.address={ray_head}")
    answer = started("-m", *model, "hydra.sweep.dir=out", *launcher).wait()
    assert answer.returncode == 0, answer.stderr
    assert list(instrument.load("out").runs.status) == ["done", "done"]
    assert instrument.load("out").runs["model.note"].tolist() == [0, 1]
    assert Path("note_0").read_text().split()[0] == "1"  # from num_cpus


@pytest.mark.slow
def test_sweep_survives_the_loss_of_a_ray_node(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = 40
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        launcher = ("hydra/launcher=ray_cluster", f"hydra.launcher.ray.init.address={cluster.address}")
        arguments = ("-m", *TINY, f"seed=range(0,{jobs})", "hydra.sweep.dir=out", *launcher)
        sweep = started(*arguments)
        wait_until(lambda: len([*Path("out").glob("*/run.json")]) >= jobs // 4, sweep)
        cluster.remove_node(lost, allow_graceful=False)
        answer = sweep.wait()
        assert answer.returncode == 0, answer.stderr
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)
    runs = instrument.load("out").runs
    assert sorted(runs["seed"]) == list(range(jobs))
    assert set(runs["status"]) == {"done"}
