"""Checkpoints of several processes: a run that died and goes on leaves what the one leaves that never died."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from several import start
from states import identical
from tiers import tiered

import instrument
from instrument import compact
from instrument.training.checkpoint import Checkpoints

CLOCK = ["seconds", "samples_per_second"]
STEPS = {"ddp": 30, "fsdp2": 20}  # the second one is killed once, the first one twice
EVERY, AFTER = 5, 27


def arguments(name: str, parallel: str, reduce: str, dies: int, device: str = "cpu") -> list[str]:
    return [
        f"device={device}",
        "data=digits",
        f"model={{_target_: dying.Dying, rank: {dies}, how: kill, after: {AFTER}}}",
        "optimizer=adam",
        f"train={{steps: {STEPS[parallel]}, batch_size: 30, accumulate: 2, eval_every: 10, checkpoint: {{every: {EVERY}}}}}",
        "+hooks.seen={layers: '**', kind: forward, action: record}",
        "+hooks.moved={layers: '**', kind: step_post, role: update, action: record}",
        "+hooks.kept={layers: '5', kind: forward, action: record, stats: none, tensors: true, every: 7}",
        "+hooks.noisy={layers: '1', kind: parameter_grad, action: modify, fn: noise, std: 0.01}",
        "+hooks.tests={layers: '5', kind: forward, action: record, phase: eval}",
        f"train.parallel={parallel}",
        f"reduce={reduce}",
        f"hydra.run.dir={name}",
    ]


WAYS = [("ddp", "global"), ("fsdp2", "none")]


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param((*way, "cpu"), id="-".join(way)) for way in WAYS),
        *(pytest.param((*way, "cuda"), id="-".join((*way, "cuda")), marks=pytest.mark.gpu) for way in WAYS),
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A run that nobody stops, one of which a process is killed again and again, and what was told when it was done."""
    parallel, reduce, device = request.param
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("there are fewer GPUs than processes")
    place = tmp_path_factory.mktemp("resumed")
    whole = start(place, *arguments("whole", parallel, reduce, -1, device), processes=2)
    assert whole.returncode == 0, whole.stderr
    steps: list[int] = []
    done = start(place, *arguments("killed", parallel, reduce, 1, device), processes=2)
    while done.returncode:
        assert len(steps) < 4, done.stderr
        assert instrument.load(place / "killed").info["failed_rank"] == 1
        steps.append(Checkpoints(place / "killed").load()["step"])
        if len(steps) == 1:
            assert compact.main([str(place / "killed")]) == 0  # which keeps apart what is taken back
        done = start(place, "resume=killed", processes=2)
    assert steps == [10, 20][: STEPS[parallel] // 10 - 1]
    return place / "whole", place / "killed", done.stdout.splitlines()


def test_rows_are_those_of_the_run_that_never_stopped(runs: tuple[Path, Path, list[str]]) -> None:
    whole, killed = map(instrument.load, runs[:2])
    assert (whole.info["status"], killed.info["status"]) == ("done", "done")
    assert "failed_rank" not in killed.info
    for name in ("stats", "effects", "coverage", "layers"):
        one, other = (getattr(run, name) for run in (whole, killed))
        assert len(one)
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    pd.testing.assert_frame_equal(whole.metrics.drop(columns=CLOCK), killed.metrics.drop(columns=CLOCK))
    steps = whole.info["config"]["train"]["steps"]
    assert len(whole.metrics) == steps + steps // 10
    one, other = (run.tensors().sort_values(["rank", "step", "layer", "micro_step"]) for run in (whole, killed))
    assert set(one["rank"]) == {0, 1}
    assert [values.tobytes() for values in one["values"]] == [values.tobytes() for values in other["values"]]
    assert list(killed.events.query("rule == 'resumed' and rank == 0").message) == [
        f"goes on after {after} steps" for after in range(10, steps, 10)
    ]
    assert any(f"step {steps}/{steps}" in line for line in runs[2])


def test_checkpoints_are_those_of_the_run_that_never_stopped(runs: tuple[Path, Path, list[str]]) -> None:
    whole, killed = runs[:2]
    steps = instrument.load(whole).info["config"]["train"]["steps"]
    names = sorted(file.name for file in (killed / "checkpoints").iterdir())
    assert names == [f"step-000000{steps}-0001.pt", f"step-000000{steps}.pt"]
    for rank in (0, 1):
        one, other = (Checkpoints(folder).load(rank) for folder in (whole, killed))
        for name in ("model", "optimizer", "random", "batches"):
            assert identical(one[name], other[name]), name


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two processes, one of which died."""
    place = tmp_path_factory.mktemp("dead")
    assert start(place, *arguments("out", "ddp", "none", 0), processes=2).returncode != 0
    return place / "out"


@pytest.mark.parametrize("processes", tiered([1, 3], [1]))
def test_as_many_processes_go_on_as_there_were(tmp_path: Path, dead: Path, processes: int) -> None:
    shutil.copytree(dead, tmp_path / "out")
    before = sorted(tmp_path.glob("out/**/*"))
    done = start(tmp_path, "resume=out", processes=processes)
    assert done.returncode != 0
    assert f"this time it is {processes}" in done.stderr
    assert "resume: this run was begun by 2 processes" in done.stderr
    assert "torchrun --nproc-per-node 2 -m instrument resume=out" in done.stderr
    assert "instrument/run/" not in done.stderr  # no traceback of ours
    assert sorted(tmp_path.glob("out/**/*")) == before


def test_a_file_of_a_checkpoint_that_is_gone_is_told(tmp_path: Path, dead: Path) -> None:
    shutil.copytree(dead, tmp_path / "out")
    (tmp_path / "out" / "checkpoints" / "step-00000010-0001.pt").unlink()
    done = start(tmp_path, "resume=out", processes=2)
    assert done.returncode != 0
    assert "step-00000010-0001.pt" in done.stderr
    assert "No such file" in done.stderr
    assert Checkpoints(tmp_path / "out").load()["step"] == 10
