"""Runs on a mesh of processes: equality with a single process, checkpoints, replays, and refused configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed_runs import assert_close, matched, run_processes, train
from tiers import tiered

import instrument

PLAN = "plan: {layers.0.0: colwise, layers.1.0: rowwise}"
RUN = [
    *("device=cpu", "data=digits", "model=mlp", "model.sizes=[64,32,16,12]", "optimizer=adamw"),
    "train={steps: 3, batch_size: 25, accumulate: 2, eval_batch_size: 25, save: true}",
    *("data.slice={stop: 60}", "data.eval_slice={stop: 50}"),
]
HOOKS = [
    "+hooks.used={layers: '**', kind: parameter_grad, action: record}",
    "+hooks.seen={layers: 'layers.2', kind: forward, action: record}",
]
MESHES = {
    "tp": (2, f"{{mesh: {{tp: 2}}, {PLAN}}}"),
    "ddp-tp": (4, f"{{mesh: {{dp: 2, tp: 2}}, {PLAN}}}"),
    "fsdp2-tp": (4, f"{{mesh: {{dp: 2, tp: 2}}, data: fsdp2, {PLAN}}}"),
    "tp4": (4, f"{{mesh: {{tp: 4}}, {PLAN}}}"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return train(tmp_path_factory.mktemp("one"), "one", *RUN, *HOOKS)


def assert_same_training(one: instrument.Run, other: instrument.Run) -> None:
    """Assert that losses, gradient norms and final weights are equal, except for the order of sums in float32."""
    both = matched(one.metrics, other.metrics, ["step", "phase"])
    for name in ("loss", "accuracy", "grad_norm"):
        assert_close(both, name)
    here, there = (torch.load(run.path / "weights.pt") for run in (one, other))
    assert here.keys() == there.keys()
    for name, weights in here.items():
        torch.testing.assert_close(there[name], weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", tiered(MESHES, ["tp", "fsdp2-tp"]))
def test_training_on_a_mesh_equals_a_single_process(one: instrument.Run, tmp_path: Path, name: str) -> None:
    processes, parallel = MESHES[name]
    run = train(tmp_path, name, *RUN, *HOOKS, f"train.parallel={parallel}", processes=processes)
    assert_same_training(one, run)
    squared = run.stats.query("hook == 'used' and layer == 'layers.0.0' and path == 'weight'").assign(
        squares=lambda rows: rows["l2"] ** 2
    )
    copies = 2 if name == "ddp-tp" else 1  # each shard is in two processes
    sums = squared.groupby("step")["squares"].sum().div(copies).pow(0.5)
    expected = one.stats.query("hook == 'used' and layer == 'layers.0.0' and path == 'weight'").set_index("step")["l2"]
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", tiered(["ddp-tp", "fsdp2-tp"], ["fsdp2-tp"]))
def test_resumed_run_on_a_mesh_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    processes, parallel = MESHES[name]
    command = [*RUN, *HOOKS, f"train.parallel={parallel}", "train.checkpoint={every: 1, keep: null}"]
    whole = train(tmp_path, "whole", *command, processes=processes)
    for file in sorted((tmp_path / "whole" / "checkpoints").glob("step-00000003*")):
        file.unlink()
    expected, weights = whole.stats, torch.load(whole.path / "weights.pt")
    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    (tmp_path / "whole" / "run.json").write_text(json.dumps({**record, "status": "failed"}))
    done = run_processes(tmp_path, "resume=whole", processes=processes)
    assert done.returncode == 0, done.stderr
    resumed = instrument.load(tmp_path / "whole")
    assert resumed.events["rule"].eq("resumed").any()
    assert expected.equals(resumed.stats)
    for layer, tensor in torch.load(resumed.path / "weights.pt").items():
        assert torch.equal(tensor, weights[layer])
    loaded = train(tmp_path, "loaded", *RUN, f"init_from={tmp_path / 'whole'}", "train.steps=1")
    assert loaded.info["init_from"]["tensors"] == len(weights)
