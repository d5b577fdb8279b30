"""Runs on a mesh of processes: equality with a single process, checkpoints, replays, and refused configurations."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import own_experts
import own_pipeline
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
from instrument.training.experiment import Experiment
from instrument.training.verification import Fingerprint, first_difference, joined

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
    "tp": (2, f"{{mesh: {{tp: 2}}, {PLAN}, placement: {{layers.0: {{output: {{tp: 'shard(-1)'}}}}}}}}"),
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
        experiment = Experiment(parse_config(raw))
        return dry_run.dry_run(experiment), experiment.plan


def assert_planned(planned: tuple[Forecast, HookPlan], parallel: str, run: instrument.Run, reduces: bool) -> None:
    """Assert that the plan predicts the number of rows of a run, and at least their bytes."""
    given = ParallelConfig.model_validate(yaml.safe_load(parallel))
    forecast, plan = planned
    cost = mesh_cost(forecast, plan.specs, given.sizes, shards=given.data == "fsdp2", reduces=reduces)
    assert cost.rows == len(run.stats)
    assert cost.collectives == (2 if reduces else 0)


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


@pytest.mark.parametrize("name", tiered(MESHES, ["ddp-tp"]))
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    seen = run.stats.query("hook == 'seen'")
    assert {*seen["placement"]} == {"shard(0)"}
    assert {*seen["rank"]} == {*range(processes)}


@pytest.mark.parametrize("name", tiered(["ddp-tp", "fsdp2-tp", "1f1b"], []))
def test_resumed_and_replayed_runs_on_a_mesh_are_equal(tmp_path: Path, name: str) -> None:
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
    replay = ["whole", "--steps", "1", "hydra.run.dir=again"]
    done = run_processes(tmp_path, *replay, processes=processes, module="instrument.replay")
    assert done.returncode == 0, done.stderr
    certificate = json.loads((tmp_path / "again" / "certificate.json").read_text())
    assert (certificate["begin"], certificate["holds"]) == (1, True)
    loaded = train(tmp_path, "loaded", *RUN, f"init_from={tmp_path / 'whole'}", "train.steps=1")
    assert loaded.info["init_from"]["missing"] == loaded.info["init_from"]["unexpected"] == []


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
        assert "no collective operations for rows" in " ".join(answer.out.split())
        assert "that hooks change" not in answer.out
    change = "+hooks.half={layers: '**', kind: parameter_grad, action: scale, factor: 0.5}"
    answer = cli(*RUN, change, "train.parallel=fsdp2", "reduce=global", "plan=true").expect(0)
    expected = "2 collective operations for rows in each step with scheduled hooks, and others for each shard that hooks change"
    assert expected in " ".join(answer.out.split())
    assert not Path("runs").exists()
    answer = cli(*RUN, f"train.parallel={PIPELINES['1f1b'][1]}", "reduce=global", "plan=true").expect(2)
    assert "reduce" in answer.err


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ("{mesh: {tp: 2}, plan: {layer.0: colwise}}", "train.parallel.plan: this pattern matches no module"),
        ("{mesh: {tp: 3}, plan: {layers.0.0: colwise}}", "plan.layers.0.0: out_features of layer layers.0.0"),
        ("{mesh: {pp: 2}, pipeline: {split: [layer.1]}}", "train.parallel.pipeline.split: this pattern matches no"),
        (
            "{mesh: {dp: 2}, experts: {expert: {_target_: distributed_models.ExpertParallel}}}",
            "train.parallel.experts: this pattern matches no",
        ),
    ],
)
def test_plan_checks_the_modules_of_a_mesh(parallel: str, expected: str) -> None:
    _, raw = compose(*RUN, f"train.parallel={parallel}", "plan=true")
    with pytest.raises(instrument.ConfigError, match=expected):
        Experiment(parse_config(raw))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [MESHES["tp"][1], PIPELINES["1f1b"][1]])
def test_verification_compares_all_processes(tmp_path: Path, parallel: str) -> None:
    command = [*RUN, f"train.parallel={parallel}", "hydra.run.dir=out"]
    done = run_processes(tmp_path, *command, processes=2, module="instrument.verify")
    assert done.returncode == 0, done.stderr
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["holds"]
    assert certificate["evaluations"] == 1


def test_difference_of_one_process_is_found() -> None:
    key, place = ("the parameter", "fc.weight"), ("the random state", "")
    one, same, other = (Fingerprint(0, "train", {key: 1, place: number}) for number in (2, 2, 3))
    difference = first_difference([joined([one, same])], [joined([one, other])])
    assert str(difference) == "step 0: the random state of rank 1 differs"
    assert [*joined([one, other]).bits.values()] == [1, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_of_a_custom_loop_equal_a_single_process(tmp_path: Path, schedule: str) -> None:
    program = Path(own_pipeline.__file__)
    done = run_processes(tmp_path, schedule, processes=2, module=program)
    assert done.returncode == 0, done.stderr
    run = instrument.load(tmp_path / "runs" / "mine")
    model = own_pipeline.create()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [each.chunk(own_pipeline.MICRO_BATCHES) for each in own_pipeline.batch()]
    with instrument.attach(model, own_pipeline.HOOKS, optimizer=optimizer) as probe:
        for _ in range(own_pipeline.STEPS):
            optimizer.zero_grad()
            for inputs, targets in zip(*parts, strict=True):
                own_pipeline.loss_of(model(inputs), targets).backward()
            optimizer.step()
            probe.end_step()
    assert_same_rows(probe, run)
    assert run.coverage.eval("fired == expected").all()
    assert run.stats.groupby("layer")["rank"].agg(set).to_dict() == {"0": {0}, "1": {0}, "2": {1}, "3": {1}, "4": {1}}


@pytest.mark.slow
def test_experts_of_a_custom_loop_equal_a_single_process(tmp_path: Path) -> None:
    done = run_processes(tmp_path, processes=2, module=Path(own_experts.__file__))
    assert done.returncode == 0, done.stderr
    unknown, declared = (instrument.load(tmp_path / "runs" / name) for name in ("unknown", "declared"))
    one = own_experts.train(own_experts.create(), own_experts.batch())
    assert_same_rows(one, declared)
    assert "placement" not in {*declared.events["rule"]}
    # A style of experts does not tell whether the processes have the same samples.
    rows = unknown.stats.query("kind == 'forward'")
    assert {*rows["placement"]} == {"unknown"}
    assert {*rows["rank"]} == {0, 1}
    assert (unknown.events["rule"] == "placement").any()
