"""Launchers without worker processes: jobs are pickled and run in this process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import joblib
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import DictConfig
from run_folders import write_run
from state_comparison import assert_same_tables
from tiers import tiered

import instrument
from instrument.commands.validation_callback import prepare_launcher
from instrument.config.hydra_internals import config_loader
from instrument.fields.pip_extras import pip_command

Cli = Callable[..., Any]
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
# With one job at a time, joblib starts no process.
IN_PROCESS = ("hydra/launcher=processes", "hydra.launcher.n_jobs=1")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), IN_PROCESS], ids=["basic", "processes"])
def test_refused_job_does_not_stop_others_and_sets_the_exit_code(cli: Cli, launcher: tuple[str, ...]) -> None:
    hook = ("+hooks.seen={layers:layers.0,kind:forward,action:record}", "hooks.seen.layers=decodr,layers.0")
    arguments = (*TINY, *hook, "hydra.sweep.dir=out", *launcher)
    answer = cli("-m", *arguments).expect(2)
    assert "Traceback" not in answer.err
    assert list(instrument.load("out").runs.status) == ["done"]
    assert all(info["command"] == ["instrument", "-m", *arguments] for info in instrument.load("out").infos)
    assert "\nhooks.seen.layers: this pattern matches no module" in answer.err
    assert "job out/0 was refused\n" in answer.err
    assert "2 jobs in out: 1 done, 1 failed" in answer.err
    assert "out/0  failed  hooks.seen.layers=decodr  hooks.seen.layers: this pattern matches" in answer.err
    assert "python -m instrument.sweep out --rerun" in answer.err
    assert answer.out.count("out/1  hooks.seen.layers=layers.0  loss") == 1
    assert "job output" not in answer.err


def composed(*overrides: str) -> DictConfig:
    return config_loader().load_configuration("config", [*TINY, *overrides], RunMode.MULTIRUN)


@pytest.mark.slow
def test_ray_presets_ask_for_one_core_per_job() -> None:
    remote = ("hydra/launcher=ray_cluster", "hydra.launcher.ray.init.address=host:1")
    for preset, address in ((("hydra/launcher=ray_local",), "local"), (remote, "host:1")):
        config = composed("seed=1,2", *preset)
        prepare_launcher(config)
        assert config.hydra.launcher.ray.init.address == address
        assert not config.hydra.launcher.ray.init.get("include_dashboard")
        assert config.hydra.launcher.ray.remote == {"num_cpus": 1, "max_retries": 3}


def test_local_jobs_share_the_cores_unless_the_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("seed=1,2", "hydra/launcher=slurm_local")
    before = list(config.hydra.overrides.hydra)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    prepare_launcher(config)
    assert config.hydra.overrides.hydra == before
    monkeypatch.delenv("OMP_NUM_THREADS")
    prepare_launcher(config)
    share = max((os.cpu_count() or 1) // 2, 1)
    assert config.hydra.overrides.hydra == [*before, f"++hydra.job.env_set.OMP_NUM_THREADS='{share}'"]


def test_dead_worker_is_reported_and_finished_jobs_are_kept(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    def dies(parallel: joblib.Parallel, jobs: Any) -> Any:
        next(iter(jobs))
        write_run(Path("out/0"), status="running")
        raise TerminatedWorkerError("A worker process managed by the executor was unexpectedly terminated")

    monkeypatch.setattr(joblib.Parallel, "__call__", dies)
    answer = cli("-m", *TINY, "seed=1,2", "hydra.sweep.dir=out", *IN_PROCESS).expect(1)
    assert "hydra_joblib_launcher failed: TerminatedWorkerError" in answer.err
    assert "Traceback" not in answer.err
    assert "2 jobs in out: 1 killed, 1 missing" in answer.err


@pytest.mark.slow
@pytest.mark.parametrize("every", tiered([0, 2], [2]))
def test_job_that_its_launcher_starts_again_completes(cli: Cli, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("stopping.py").write_text(
        "import os, signal\n\n\ndef stop(tensor, context):\n"
        "    if context.step == 3 and 'STOP' in os.environ:\n        signal.raise_signal(signal.SIGTERM)\n    return tensor\n"
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:stopping.stop}}"
    sweep = ("-m", *TINY[:3], "train.steps=5", f"train.checkpoint.every={every}", "seed=1,2", hook)
    assert cli(*sweep, "hydra.sweep.dir=whole").code == 0
    launched: list[Any] = []
    run_jobs = joblib.Parallel.__call__

    def run_twice(parallel: joblib.Parallel, jobs: Any) -> Any:
        launched.extend(jobs)
        monkeypatch.setenv("STOP", "1")
        with pytest.raises(SystemExit):
            run_jobs(parallel, launched[:1])
        monkeypatch.delenv("STOP")
        run_jobs(parallel, launched[:1])
        return run_jobs(parallel, launched)

    monkeypatch.setattr(joblib.Parallel, "__call__", run_twice)
    answer = cli(*sweep, "hydra.sweep.dir=out", *IN_PROCESS).expect(0)
    run, whole = instrument.load("out"), instrument.load("whole")
    assert list(run.runs.status) == ["done", "done"]
    assert_same_tables(run, whole, "metrics")
    assert answer.out.count("out/0  seed=1  loss") == 1  # a finished job is not repeated
    assert ("resumed" in instrument.load("out/0").info) == (every > 0)
    assert [path.name for path in Path("out/.aside").glob("*")] == ([] if every else ["0.1"])


@pytest.mark.slow
def test_job_that_a_rule_stopped_is_not_repeated(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    run_jobs, launched = joblib.Parallel.__call__, []

    def run_twice(parallel: joblib.Parallel, jobs: Any) -> Any:
        launched.extend(jobs)
        run_jobs(parallel, launched)
        return run_jobs(parallel, launched)

    monkeypatch.setattr(joblib.Parallel, "__call__", run_twice)
    rule = "+rules.late={watch: metrics, stat: loss, above: 0, then: stop}"
    checkpoints = ("train.steps=5", "train.checkpoint.every=1")
    cli("-m", *TINY[:3], *checkpoints, rule, "seed=1,2", "hydra.sweep.dir=out", *IN_PROCESS).expect(3)
    run = instrument.load("out")
    assert list(run.runs.status) == ["stopped", "stopped"]
    assert not [info for info in run.infos if "resumed" in info]
    assert set(run.metrics["step"]) == {0}


@pytest.mark.slow
def test_other_job_in_the_same_folder_is_refused(cli: Cli) -> None:
    answer = cli("-m", *TINY, "seed=1,2", "hydra.sweep.dir=out", "hydra.sweep.subdir=same").expect(2)
    assert "the folder already contains a run" in answer.err
    assert instrument.load("out/same").info["seed"] == 1


@pytest.mark.slow
def test_interrupted_sweep_lists_the_remaining_jobs(cli: Cli) -> None:
    Path("stopping.py").write_text(
        "import signal\n\n\ndef stop(tensor, context):\n"
        "    if context.step == 2:\n        signal.raise_signal(signal.SIGINT)\n    return tensor\n"
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:stopping.stop}}"
    answer = cli("-m", *TINY[:3], "train.steps=9", hook, "seed=1,2", "hydra.sweep.dir=out").expect(130)
    assert "Traceback" not in answer.err
    assert "python -m instrument.sweep out --rerun" in answer.err
    assert re.search(r"out/0 +interrupted +seed=1", answer.err), answer.err
    assert "2 jobs in out: 1 interrupted, 1 missing" in answer.err
    assert instrument.load("out/0").metrics.step.tolist() == [0, 1]


@pytest.mark.spread(1)
@pytest.mark.parametrize("launcher", tiered(["basic", "processes", "slurm_local", "ray_local"], ["basic", "processes"]))
def test_sweep_without_jobs_is_refused_before_the_launch(cli: Cli, launcher: str) -> None:
    answer = cli("-m", *TINY, "seed=range(3,3)", f"hydra/launcher={launcher}").expect(2)
    assert "the sweep has no jobs" in answer.err
    assert "seed=range(3,3)" in answer.err
    assert not Path("runs").exists()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("preset", "group", "plugin", "extra"),
    [
        ("processes", "launcher", "joblib", "joblib"),
        ("slurm", "launcher", "submitit_slurm", "submitit"),
        pytest.param("slurm_local", "launcher", "submitit_local", "submitit", marks=pytest.mark.slow),
        pytest.param("ray_local", "launcher", "ray", "ray", marks=pytest.mark.slow),
        ("ray_cluster", "launcher", "ray", "ray"),
        ("search", "sweeper", "optuna", "optuna"),
    ],
)
def test_preset_without_its_plugin_names_the_extra(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, preset: str, group: str, plugin: str, extra: str
) -> None:
    Plugins.instance()  # imports the plugins
    monkeypatch.delitem(ConfigStore.instance().repo["hydra"][group], f"{plugin}.yaml")
    answer = cli("-m", *TINY, "seed=1,2", f"hydra/{group}={preset}").expect(2)
    message = f"hydra/{group}: requires a package that is not installed\n    fix      {pip_command(extra)}"
    assert answer.err == f"\n{message}\n\n"


@pytest.mark.slow
def test_missing_slurm_is_reported(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    answer = cli("-m", *TINY, "seed=1,2", "hydra/launcher=slurm", "hydra.sweep.dir=out").expect(2)
    assert "srun is not on the PATH" in answer.err
    assert "slurm_local" in answer.err
    assert not Path("out").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_sweep_under_torchrun_is_refused_by_rank_0(cli: Cli, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", rank)
    answer = cli("-m", *TINY, "seed=1,2").expect(2)
    assert ("each process of torchrun" in answer.err) == (rank == "0")
    assert list(Path.cwd().iterdir()) == []
