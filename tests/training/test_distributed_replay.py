"""Replays of runs of several processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from distributed_runs import run_processes

import instrument


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "reduce"), [("ddp", "global"), ("fsdp2", "none")])
def test_replay_of_two_processes_is_exact(tmp_path: Path, parallel: str, reduce: str) -> None:
    arguments = [
        *("device=cpu", "data=digits", "data.eval_slice.stop=32"),
        "model={_target_: failing_model.FailingModel, rank: -1, how: kill, after: 0}",
        "optimizer=adam",
        "train={steps: 8, batch_size: 30, accumulate: 2, eval_every: 4, checkpoint: {every: 3, keep: null}}",
        "+hooks.noisy={layers: '1', kind: parameter_grad, action: modify, fn: noise, std: 0.01}",
        *(f"train.parallel={parallel}", f"reduce={reduce}", "hydra.run.dir=out"),
    ]
    done = run_processes(tmp_path, *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    replay = ["out", "--steps", "4:7", "hooks=gradients", "hooks.parameter_gradients.every=1"]
    replay += ["hooks.output_gradients.every=1", "--ops", "hydra.run.dir=again"]
    done = run_processes(tmp_path, *replay, processes=2, module="instrument.replay")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "again" / "certificate.json").read_text())
    assert (found["begin"], found["steps"], found["evaluations"], found["holds"]) == (3, 4, 1, True)
    replayed = instrument.load(tmp_path / "again")
    operators, stats = replayed.operators, replayed.stats
    assert set(operators["rank"]) == {0, 1}
    assert operators["fingerprint"][operators["operator"].str.startswith(("c10d.", "_c10d"))].isna().all()
    # Both ranks have equal parameters after the step. With FSDP2, each has its shard.
    written = operators[(operators["part"] == "optimizer") & operators["layer"].notna()].groupby("rank")["fingerprint"]
    (_, first), (_, second) = written
    assert (list(first) == list(second)) is (parallel == "ddp")
    assert set(stats["step"]) == {4, 5, 6}
    assert set(stats["rank"]) == ({0} if reduce == "global" else {0, 1})
    done = run_processes(tmp_path, "out", module="instrument.replay")
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 2 -m instrument.replay out" in done.stderr
