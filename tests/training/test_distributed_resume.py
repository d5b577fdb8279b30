"""Checkpoints of distributed runs: a killed and resumed run equals an uninterrupted run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import run_processes, start, train
from state_comparison import assert_same_tables, identical
from tiers import tiered

import instrument
from instrument.commands import compact
from instrument.training.checkpoint import Checkpoints
from instrument.training.distributed.process_group import FAILURE, Processes


def arguments(parallel: str, reduce: str, failing_rank: int, device: str, *, steps: int, every: int) -> list[str]:
    """Return arguments of a run with checkpoints every few steps. It is killed after two, in the middle of a step."""
    return [
        *(f"device={device}", "data=digits"),
        f"model={{_target_: failing_model.FailingModel, rank: {failing_rank}, how: kill, after: {11 * every // 2}}}",
        "optimizer=adam",
        f"train={{steps: {steps}, batch_size: 30, accumulate: 2, eval_every: {2 * every}, checkpoint: {{every: {every}}}}}",
        "+hooks.seen={layers: '**', kind: forward, action: record}",
        "+hooks.moved={layers: '**', kind: step_post, role: update, action: record}",
        "+hooks.kept={layers: '5', kind: forward, action: record, stats: none, tensors: true, every: 7}",
        "+hooks.noisy={layers: '1', kind: parameter_grad, action: modify, fn: noise, std: 0.01}",
        "+hooks.called={layers: '*', kind: function, functions: '*', action: record}",
        "+hooks.arriving={layers: '*', kind: function_grad, functions: '*', action: record, every: 3}",
        "+hooks.shaken={layers: '1', kind: function, functions: linear, action: modify, fn: noise, std: 0.01}",
        "+hooks.damped={layers: '5', kind: function_grad, functions: linear, action: scale, factor: 0.5, start: 7}",
        "+hooks.tests={layers: '5', kind: forward, action: record, phase: eval}",
        *(f"train.parallel={parallel}", f"reduce={reduce}"),
    ]


STRATEGIES = [("ddp", "global"), ("fsdp2", "none")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((*STRATEGIES[1], "cpu", 1, 2), id="fsdp2-none"),
        pytest.param((*STRATEGIES[0], "cpu", 1, 5), id="ddp-global", marks=pytest.mark.slow),
        pytest.param((*STRATEGIES[1], "cpu", 2, 5), id="fsdp2-none-killed-twice", marks=pytest.mark.slow),
        *(
            pytest.param((*strategy, "cuda", 1, 5), id="-".join((*strategy, "cuda")), marks=pytest.mark.gpu)
            for strategy in STRATEGIES
        ),
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Folders of an uninterrupted run and of a run with a rank killed once or twice, and the output of the latter.

    The folder of the killed run before it was resumed is next to them, with the name `dead`.
    """
    parallel, reduce, device, kills, every = request.param
    steps = 2 * every * (kills + 1)
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer GPUs than processes")
    folder = tmp_path_factory.mktemp("resumed")
    train(folder, "whole", *arguments(parallel, reduce, -1, device, steps=steps, every=every), processes=2)
    kept: list[int] = []  # the steps of the checkpoints
    killed = arguments(parallel, reduce, 1, device, steps=steps, every=every)
    done = start(folder, "killed", *killed, processes=2)
    shutil.copytree(folder / "killed", folder / "dead")
    while done.returncode:
        assert len(kept) < 4, done.stderr
        assert instrument.load(folder / "killed").info["failed_rank"] == 1
        kept.append(Checkpoints(folder / "killed").load()["step"])
        if len(kept) == 1:
            assert compact.main([str(folder / "killed")]) == 0  # compaction keeps rows of steps to be repeated apart
        done = run_processes(folder, "resume=killed", processes=2)
    assert kept == [2 * every * number for number in range(1, kills + 1)]
    return folder / "whole", folder / "killed", done.stdout.splitlines()


@pytest.mark.slow
def test_resumed_rows_equal_an_uninterrupted_run(runs: tuple[Path, Path, list[str]]) -> None:
    uninterrupted, killed = map(instrument.load, runs[:2])
    assert (uninterrupted.info["status"], killed.info["status"]) == ("done", "done")
    assert "failed_rank" not in killed.info
    assert len(uninterrupted.stats)
    assert len(uninterrupted.effects)
    assert_same_tables(uninterrupted, killed, "stats", "effects", "coverage", "layers", "metrics")
    train = uninterrupted.info["config"]["train"]
    steps, between = train["steps"], train["eval_every"]
    assert len(uninterrupted.metrics) == steps + steps // between
    one, other = (run.tensors().sort_values(["rank", "step", "layer", "micro_step"]) for run in (uninterrupted, killed))
    assert set(one["rank"]) == {0, 1}
    assert [values.tobytes() for values in one["values"]] == [values.tobytes() for values in other["values"]]
    assert list(killed.events.query("rule == 'resumed' and rank == 0").message) == [
        f"training continues after {after} steps" for after in range(between, steps, between)
    ]
    assert any(f"step {steps}/{steps}" in line for line in runs[2])


@pytest.mark.spread(1)
def test_resumed_checkpoints_equal_an_uninterrupted_run(runs: tuple[Path, Path, list[str]]) -> None:
    uninterrupted, killed = runs[:2]
    steps = instrument.load(uninterrupted).info["config"]["train"]["steps"]
    names = sorted(file.name for file in (killed / "checkpoints").iterdir())
    assert names == [f"step-{steps:08}-0001.pt", f"step-{steps:08}.pt"]
    for rank in (0, 1):
        one, other = (Checkpoints(folder).load(rank) for folder in (uninterrupted, killed))
        for name in ("model", "optimizer", "random", "batches"):
            assert identical(one[name], other[name]), name


@pytest.fixture
def dead(runs: tuple[Path, Path, list[str]], tmp_path: Path) -> Path:
    """Folder of a run of two processes, one of which was killed."""
    return Path(shutil.copytree(runs[1].with_name("dead"), tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("processes", tiered([1, 3], [1]))
def test_resume_with_another_number_of_processes_is_refused(dead: Path, processes: int) -> None:
    before = sorted(dead.glob("**/*"))
    done = run_processes(dead.parent, "resume=out", processes=processes)
    assert done.returncode != 0
    assert "resume: the run was started with 2 processes, and the same number is required" in done.stderr
    assert f"given    {processes}\n" in done.stderr
    assert "torchrun --nproc-per-node 2 -m instrument resume=out" in done.stderr
    assert "/instrument/" not in done.stderr  # no traceback of this package
    assert sorted(dead.glob("**/*")) == before


@pytest.mark.slow
def test_missing_checkpoint_file_of_a_rank_is_reported(dead: Path) -> None:
    (missing,) = (dead / "checkpoints").glob("*-0001.pt")
    step = Checkpoints(dead).load()["step"]
    missing.unlink()
    done = run_processes(dead.parent, "resume=out", processes=2)
    assert done.returncode != 0
    assert missing.name in done.stderr
    assert "No such file" in done.stderr
    assert Checkpoints(dead).load()["step"] == step


def test_restarted_processes_do_not_read_the_failure_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts failed processes again with the same store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    found = []
    for restarts in range(2):
        for name, value in {**address, **ranks, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
            monkeypatch.setenv(name, str(value))
        processes = Processes.open()
        found.append(processes.store.compare_set(FAILURE, "", f"failure {restarts}"))
        processes.close()
    assert found == [b"failure 0", b"failure 1"]
