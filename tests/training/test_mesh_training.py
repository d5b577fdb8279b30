"""Runs on a mesh of processes: equality with a single process, checkpoints, replays, and refused configurations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import Answer
from distributed_runs import assert_close, matched, run_processes, train
from tiers import tiered
from training_runs import compose

import instrument
from instrument.config.parallel import ParallelConfig
from instrument.config.parse import parse_config
from instrument.plan.cost import Forecast, mesh_cost
from instrument.plan.hook_plan import HookPlan
from instrument.training import dry_run
from instrument.training.experiment import prepare

PLAN = "plan: {layers.0.0: colwise, layers.1.0: rowwise}"
RUN = [
    *("device=cpu", "data=digits", "model=mlp", "model.sizes=[64,32,16,12]", "optimizer=adamw"),
    "train={steps: 3, batch_size: 16, accumulate: 3, eval_batch_size: 25, save: true}",
    *("data.slice={stop: 96}", "data.eval_slice={stop: 60}"),
    "+hooks.used={layers: '**', kind: parameter_grad, action: record}",
    "+hooks.seen={layers: '**', kind: forward, action: record, stats: [default, dead_fraction]}",
    "+hooks.back={layers: 'layers.2', kind: full_backward, action: record}",
    "+hooks.tests={layers: 'layers.*', kind: forward, action: record, phase: eval}",
    "+hooks.loss={kind: loss, action: record}",
]
MESHES = {
    "tp": (2, f"{{mesh: {{tp: 2}}, {PLAN}}}"),
    "ddp-tp": (4, f"{{mesh: {{dp: 2, tp: 2}}, {PLAN}}}"),
    "fsdp2-tp": (4, f"{{mesh: {{tp: 2, dp: 2}}, data: fsdp2, {PLAN}}}"),
    "tp4": (4, f"{{mesh: {{tp: 4}}, {PLAN}}}"),
}
SPLIT = "pipeline: {split: [layers.1]"
PIPELINES = {
    "1f1b": (2, f"{{mesh: {{pp: 2}}, {SPLIT}}}}}"),
    "gpipe-dp": (4, f"{{mesh: {{pp: 2, dp: 2}}, {SPLIT}, schedule: gpipe}}}}"),
    "three-stages": (3, "{mesh: {pp: 3}, pipeline: {split: [layers.1, layers.2], schedule: gpipe}}"),
    "tp": (4, f"{{mesh: {{pp: 2, tp: 2}}, plan: {{layers.0.0: {{style: colwise, output: replicate}}}}, {SPLIT}}}}}"),
}
KEYS = ["step", "micro_step", "phase", "hook", "layer", "kind", "role", "path", "call", "backward"]
VALUES = ["mean", "std", "rms", "min", "max", "abs_max", "l2"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return train(tmp_path_factory.mktemp("one"), "one", *RUN)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Forecast, HookPlan]:
    """The estimated cost of a single process."""
    with contextlib.chdir(tmp_path_factory.mktemp("plan")), pytest.MonkeyPatch.context() as patched:
        patched.setattr(dry_run, "SECONDS", 0.1)
        _, raw = compose(*RUN)
        experiment = prepare(parse_config(raw))
        return dry_run.dry_run(experiment), experiment.plan


def assert_planned(planned: tuple[Forecast, HookPlan], parallel: str, run: instrument.Run, reduces: bool) -> None:
    """Assert that the plan predicts the number of rows of a run, and at least their bytes."""
    given = ParallelConfig.model_validate(yaml.safe_load(parallel))
    forecast, plan = planned
    cost = mesh_cost(forecast, plan.specs, given.sizes, shards=given.data == "fsdp2", reduces=reduces)
    assert cost.rows == len(run.stats)
    assert cost.collectives == (4 if reduces else 0)  # one gathers the dead units


def assert_same_training(one: instrument.Run, other: instrument.Run) -> None:
    """Assert that losses, gradient norms and final weights are equal, except for the order of sums in float32."""
    both = matched(one.metrics, other.metrics, ["step", "phase"])
    for name in ("loss", "accuracy", "grad_norm"):
        assert_close(both, name)
    here, there = (torch.load(run.path / "weights.pt") for run in (one, other))
    assert here.keys() == there.keys()
    for name, weights in here.items():
        torch.testing.assert_close(there[name], weights, rtol=1e-5, atol=1e-6)


def assert_same_rows(one: Any, other: Any) -> None:
    """Assert that each row of one process has an equal one: counts exactly, values except for the order of sums."""
    both = matched(one.stats, other.stats, KEYS)
    for name in ("numel", "zero_fraction", "dead_fraction"):
        assert both[name].equals(both[f"{name}_there"]), name
    for name in VALUES:
        scale = both["abs_max"] if name in ("min", "max", "mean") else both[name].abs()
        assert ((both[name] - both[f"{name}_there"]).abs() <= 1e-5 * scale + 1e-9).all(), name


@pytest.mark.parametrize("name", tiered(MESHES, ["tp", "fsdp2-tp"]))
def test_training_on_a_mesh_equals_a_single_process(
    one: instrument.Run, planned: tuple[Forecast, HookPlan], tmp_path: Path, name: str
) -> None:
    processes, parallel = MESHES[name]
    run = train(tmp_path, name, *RUN, f"train.parallel={parallel}", "reduce=global", processes=processes)
    assert_same_training(one, run)
    assert_planned(planned, parallel, run, reduces=True)
    rows = run.stats
    assert set(rows["rank"][rows["hook"] != "loss"]) == {0}
    in_one, in_run = (SimpleNamespace(stats=each.stats.query("hook != 'loss'")) for each in (one, run))
    assert_same_rows(in_one, in_run)
    assert run.coverage.eval("fired == expected").all()
    compared = instrument.diff(one.path, run.path)
    assert compared.is_within_tolerance


@pytest.mark.parametrize("name", tiered(PIPELINES, ["1f1b"]))
def test_pipeline_equals_a_single_process(
    one: instrument.Run, planned: tuple[Forecast, HookPlan], tmp_path: Path, name: str
) -> None:
    processes, parallel = PIPELINES[name]
    run = train(tmp_path, name, *RUN, f"train.parallel={parallel}", processes=processes)
    assert_same_training(one, run)
    assert_planned(planned, parallel, run, reduces=False)
    assert run.coverage.eval("fired == expected").all()
    by_layer = run.stats.groupby("layer")["rank"].agg(set)
    stage = processes // (3 if name == "three-stages" else 2)  # the number of processes of a stage
    assert by_layer["layers.0.0"] == {*range(stage)}
    assert by_layer[""] == {*range(processes - stage, processes)}
    if stage == 1:
        assert_same_rows(one, run)
        assert set(run.stats["scope"]) == {"global"}
        assert instrument.diff(one.path, run.path).unmatched_rows == (0, 0)
        seen = (
            run.stats.query("hook == 'seen' and layer == ''"),
            run.stats.query("hook == 'back'"),
        )
        assert all(rows["micro_step"].tolist() == [0, 1, 2] * 3 for rows in seen)


@pytest.mark.parametrize("processes", tiered([2, 4], [2]))
def test_experts_of_several_processes_equal_one_process(tmp_path: Path, processes: int) -> None:
    command = [each for each in RUN if not each.startswith(("model", "+hooks.back", "+hooks.tests"))]
    command.append("model={_target_: distributed_models.MixtureOfExperts}")
    one = train(tmp_path, "one", *command)
    style = "{_target_: distributed_models.ExpertParallel}"
    parallel = f"train.parallel={{mesh: {{dp: {processes}}}, experts: {{experts: {style}}}}}"
    run = train(tmp_path, "experts", *command, parallel, "train.checkpoint.every=3", processes=processes)
    assert_same_training(one, run)
    shards = run.stats.query("hook == 'used' and layer == 'experts'")
    assert {(*shape,) for shape in shards["shape"]} == {(4 // processes, 16, 16)}
    sums = shards.assign(squares=shards["l2"] ** 2).groupby("step")["squares"].sum().pow(0.5)
    expected = one.stats.query("hook == 'used' and layer == 'experts'")["l2"]
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize("name", tiered(["ddp-tp", "fsdp2-tp", "1f1b"], ["fsdp2-tp"]))
def test_resumed_run_on_a_mesh_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    processes, parallel = {**MESHES, **PIPELINES}[name]
    command = [*RUN, f"train.parallel={parallel}", "train.checkpoint={every: 1, keep: null}"]
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


def test_plan_shows_the_output_of_all_processes(cli: Callable[..., Answer], planned: tuple[Forecast, HookPlan]) -> None:
    forecast, _ = planned
    rows = sum(cost.rows for cost in forecast.cost.values())
    for parallel, expected in (
        (
            f"{{mesh: {{pp: 2, dp: 2, tp: 2}}, {PLAN}, {SPLIT}}}}}",
            f"on 8 processes (pp 2 dp 2 tp 2): {4 * rows:,} rows, at most",
        ),
        ("ddp", f"on each process (ddp): {rows:,} rows"),
    ):
        answer = cli(*RUN, f"train.parallel={parallel}", "plan=true").expect(0)
        assert f"{expected}" in " ".join(answer.out.split())
        assert "hooks add no collective operations" in answer.out
    for parallel, key, given in (
        ("{mesh: {tp: 2}, plan: {layers.0.o: colwise}}", "plan: this pattern matches no module", "layers.0.o"),
        ("{mesh: {dp: 2}, experts: {layers.0.o: {_target_: torch.nn.ReLU}}}", "experts: this pattern", "layers.0.o"),
        (
            "{mesh: {pp: 2}, pipeline: {split: [layers.9]}}",
            "pipeline.split: this pattern matches no module",
            "layers.9",
        ),
    ):
        answer = cli(*RUN, f"train.parallel={parallel}", "train.accumulate=2", "plan=true").expect(2)
        assert f"train.parallel.{key}" in answer.err
        assert f"given    {given}" in answer.err
    assert not Path("runs").exists()
    answer = cli(*RUN, f"train.parallel={PIPELINES['1f1b'][1]}", "reduce=global", "plan=true").expect(2)
    assert "reduce" in answer.err
