"""Configurations of meshes, plans and pipelines that are refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_runs import start
from torch import Tensor, nn
from training_runs import CONFIG

from instrument.config.parallel import LayerStyle, ParallelConfig, PipelineConfig
from instrument.config.parse import parse_config
from instrument.errors import ConfigError
from instrument.training.distributed.pipeline import Pipeline
from instrument.training.distributed.strategies import DataParallel, choose_strategy, pipeline_problems
from instrument.training.distributed.tensor_parallel import parallelize
from instrument.training.experiment import Experiment
from instrument.training.terminal import Terminal

PLAN = {"layers.0.0": "colwise", "layers.1": "rowwise"}
PIPELINE = {"split": ["layers.1"]}


def config(parallel: Any, **train: Any) -> Any:
    return parse_config({**CONFIG, "train": {"steps": 3, "batch_size": 16, "parallel": parallel, **train}})


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ("fsdp", r"train.parallel: must be ddp, fsdp2, or a mapping"),
        ({"mesh": {"dp": 2, "mp": 2}}, r"'mp' is not a dimension of a mesh; allowed: pp \(pipeline\), dp \(data\), tp"),
        ({"mesh": {"cp": 2}}, r"'cp': context_parallel of PyTorch has no attention kernel for CPU and fails there with"),
        ({"mesh": {"dp": 0}}, r"train.parallel.mesh.dp"),
        ({"mesh": {"tp": 2}}, r"the dimension tp of 'mesh' requires 'plan'"),
        ({"mesh": {"dp": 2}, "plan": PLAN}, r"'plan' requires the dimension tp in 'mesh'"),
        ({"plan": PLAN}, r"'plan' requires the dimension tp in 'mesh'"),
        ({"mesh": {"tp": 2}, "data": "fsdp2", "plan": PLAN}, r"'data: fsdp2' requires the dimension dp in 'mesh'"),
        ({"mesh": {"tp": 2}, "plan": {"layers.0.0": "columnwise"}}, r"train.parallel.plan[\s\S]*columnwise[\s\S]*colwise"),
        ({"mesh": {"tp": 2}, "plan": {"a": {"style": "colwise", "input": "split(1)"}}}, r"split\(1\)"),
        ({"mesh": {"tp": 2}, "plan": {"a": {"style": "sequence", "output": "shard(1)"}}}, r"same layout before and after"),
        ({"mesh": {"tp": 2}, "plan": {"a..b": "colwise"}}, r"empty segment"),
        ({"placement": {"a": {}}}, r"'placement' requires 'mesh'"),
        ({"mesh": {"tp": 2}, "placement": {"a": {"output": {"tp": "shard"}}}}, r"train.parallel.placement.a.output.tp[\s\S]*shard"),
        ({"mesh": {"pp": 2}}, r"the dimension pp of 'mesh' requires 'pipeline'"),
        ({"mesh": {"pp": 3}, "pipeline": PIPELINE}, r"3 stages require 2 layers in pipeline.split, got 1"),
        ({"mesh": {"pp": 2}, "pipeline": {**PIPELINE, "schedule": "zb"}}, r"train.parallel.pipeline.schedule[\s\S]*zb[\s\S]*1f1b"),
        ({"mesh": {"pp": 2, "dp": 2}, "data": "fsdp2", "pipeline": PIPELINE}, r"'data: fsdp2' does not support pp"),
    ],
)  # fmt: skip
def test_invalid_mesh_is_refused(parallel: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        config(parallel)


def test_dimensions_are_sorted_and_short_forms_are_meshes() -> None:
    parallel = config({"mesh": {"tp": 2, "dp": 3}, "data": "fsdp2", "plan": PLAN}).train.parallel
    assert [*parallel.sizes] == ["dp", "tp"]
    assert parallel.size == 6
    assert str(parallel) == "{mesh: {dp: 3, tp: 2}, data: fsdp2}"
    assert parallel.label == "dp 3 tp 2"
    assert config("fsdp2").train.parallel == ParallelConfig(data="fsdp2")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("parallel", "stage", "expected"),
    [
        ("fsdp2", None, "trainable parameters on cpu in 2 processes (fsdp2), seed"),
        ({"mesh": {"tp": 2}, "plan": PLAN}, None, "trainable parameters on cpu in 2 processes (tp 2), seed"),
        (
            {"mesh": {"pp": 2}, "pipeline": PIPELINE},
            "a stage",
            "trainable parameters of the first stage on cpu in 2 processes (pp 2), seed",
        ),
    ],
)
def test_terminal_shows_the_mesh(
    parallel: Any, stage: Any, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    experiment = Experiment(parse_config({**CONFIG, "device": "cpu"}))
    train = experiment.config.train.model_copy(update={"parallel": config(parallel, accumulate=2).train.parallel})
    strategy: Any = SimpleNamespace(ranks=SimpleNamespace(world_size=2), pipeline=stage)
    config_of_mesh = experiment.config.model_copy(update={"train": train})
    experiment.config, experiment.strategy = config_of_mesh, strategy
    Terminal().begin(experiment, tmp_path)
    assert expected in " ".join(capsys.readouterr().out.split())


def test_mesh_of_another_number_of_processes_is_refused() -> None:
    expected = r"train.parallel.mesh: the mesh has 4 processes, but torchrun started 3[\s\S]*\{'dp': 2, 'tp': 2\}[\s\S]*product is 3"
    group: Any = SimpleNamespace(size=3, rank=0, is_rank_zero=True)
    with pytest.raises(ConfigError, match=expected):
        choose_strategy(config({"mesh": {"dp": 2, "tp": 2}, "plan": PLAN}), group)


def test_failure_of_one_process_is_exchanged_before_parameters_are_sent() -> None:
    """Otherwise the other processes would wait for the parameters of that process."""

    def exchange(value: object) -> None:
        raise RuntimeError("rank 1 failed")

    strategy = object.__new__(DataParallel)  # There is no process group.
    strategy.parallel = ParallelConfig(mesh={"tp": 2}, plan={"layers.1": "rowwise"})
    strategy.mesh = {"tp": None}  # type: ignore[assignment]
    strategy.processes = SimpleNamespace(exchange=exchange)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="rank 1 failed"):
        strategy.shard(Model(), lambda: None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh()), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)
        )
        self.conv = nn.Conv1d(1, 1, 1)
        self.skip = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[1](self.layers[0](x))
        hidden = self.layers[3](self.layers[2](hidden + self.skip(x) if self.skips else hidden))
        scores: Tensor = self.layers[4](hidden)
        return scores * self.scale if self.skips else scores


def loss_of(model: nn.Module) -> Callable[[], Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    return lambda: model(x).square().mean()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"layer.0": "colwise"}, r"train.parallel.plan: this pattern matches no module[\s\S]*layer.0[\s\S]*similar +layers.0"),
        ({"layers.0.0": "colwise"}, r"plan.layers.0.0: out_features of layer layers.0.0 \(Linear\) is not divisible by tp=2[\s\S]*9"),
        ({"layers.1": "rowwise"}, r"in_features of layer layers.1 \(Linear\) is not divisible"),
        ({"conv": "colwise"}, r"style colwise does not exist for layer conv \(Conv1d\)[\s\S]*Linear, Embedding"),
        ({"layers.3": "colwise"}, r"layer layers.3 \(Linear\) shares a parameter with another layer"),
        ({"layers.4": "rowwise", "layers.*": "sequence"}, r"the glob 'layers.4' gives layer layers.4 a style too"),
        ({"layers.4": {"_target_": "torch.nn.ReLU"}}, r"must be a ParallelStyle, but torch.nn.ReLU returned ReLU"),
    ],
)  # fmt: skip
def test_plan_that_does_not_fit_the_model_is_refused(plan: Any, expected: str) -> None:
    model = Model()
    model.tied = nn.Linear(4, 4)
    model.tied.weight = model.layers[3].weight
    parallel = ParallelConfig(mesh={"tp": 2}, plan=plan)
    mesh: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ConfigError, match=expected):
        parallelize(model, mesh, parallel.plan, loss_of(model))


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pipeline]:
    """Builds a stage of two. No process communicates before the first step."""
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)

    def build(model: nn.Module, split: str, stage: int = 1) -> Pipeline:
        monkeypatch.setattr(dist, "get_rank", lambda _: stage)
        return Pipeline(model, PipelineConfig(split=(split,)), None, loss_of(model))

    return build


@pytest.mark.parametrize(
    ("split", "skips", "expected"),
    [
        ("layer.1", False, r"train.parallel.pipeline.split: this pattern matches no module[\s\S]*similar +layers.1"),
        ("conv", False, r"the layers are not called, in this order[\s\S]*given +\['conv'\]"),
        ("layers.0", False, r"stage 0 has no trainable parameter"),
        ("layers.3", True, r"parameter scale is used in stage 1, but its module has layers of several stages"),
    ],
)
def test_pipeline_that_cannot_be_split_is_refused(
    two_stages: Callable[..., Pipeline], split: str, skips: bool, expected: str
) -> None:
    model = Model()
    model.skips = skips
    with pytest.raises(ConfigError, match=expected):
        two_stages(model, split)


def test_shared_parameters_of_two_stages_are_refused(two_stages: Callable[..., Pipeline]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"parameter 0.weight is used in stages 0, 1[\s\S]*untie shared parameters"):
        two_stages(model, "2")


class Gated(nn.Module):
    """A model whose last layer is multiplied by the output of the first one."""

    def __init__(self, *, is_detached: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.is_detached = is_detached

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        scores: Tensor = self.last(hidden.tanh()) * (hidden.detach() if self.is_detached else hidden)
        return scores


@pytest.mark.parametrize(
    ("is_detached", "expected"),
    [
        (True, r"stage 1 needs more than the input of its first layer"),
        (False, r"parameter first.weight is used in stages 0, 1"),
    ],
)
def test_second_tensor_between_stages_is_refused(
    two_stages: Callable[..., Pipeline], is_detached: bool, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        two_stages(Gated(is_detached=is_detached), "last")


@pytest.mark.parametrize("stage", [0, 1])
def test_stage_keeps_its_parameters_only(two_stages: Callable[..., Pipeline], stage: int) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))
    two_stages(model, "2", stage)
    kept = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert kept == {f"{layer}.{name}" for layer in ([0], [2, 3])[stage] for name in ("weight", "bias")}
    assert all(parameter.numel() == 0 for name, parameter in model.named_parameters() if name not in kept)


@pytest.mark.parametrize(
    ("train", "others", "expected"),
    [
        (
            {},
            {},
            r"train.accumulate: schedule 1f1b requires a micro-batch for each stage[\s\S]*given +1\n[\s\S]*2 or more",
        ),
        ({"accumulate": 2, "precision": "bf16"}, {}, r"train.precision: the stages of a pipeline send float32"),
        ({"accumulate": 2, "compile": True}, {}, r"train.compile"),
        ({"accumulate": 2}, {"reduce": "global"}, r"reduce: each stage of a pipeline has its own rows"),
        ({"accumulate": 2}, {"mode": "forward"}, r"mode: a pipeline only trains"),
    ],
)
def test_unsupported_options_of_a_pipeline_are_refused(train: Any, others: Any, expected: str) -> None:
    parsed = config({"mesh": {"pp": 2}, "pipeline": PIPELINE}, **train)
    (problem,) = pipeline_problems(parsed.model_copy(update=others))
    with pytest.raises(ConfigError, match=expected):
        raise ConfigError(problem)


def test_pipeline_requires_equal_micro_batches() -> None:
    strategy = object.__new__(DataParallel)  # There is no process group.
    strategy.parallel = ParallelConfig(mesh={"pp": 2}, pipeline=PipelineConfig(split=("layers.1",)))
    batches: Any = SimpleNamespace(batch_size=16, accumulate=2, length=64)
    strategy.check_batches(batches)
    batches.length = 80
    with pytest.raises(
        ConfigError, match=r"data.slice: the 80 samples of an epoch are not a multiple of the 32 of a step"
    ):
        strategy.check_batches(batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("{layers.0.0: colwise}", "train.parallel.plan: the model fails with this plan"),
        ("{layers.0.0: {style: colwise, output: replicate}, layers.1.0: rowwise}", "train.parallel.plan: the model fails"),
        ("{layers.2: {style: sequence, input: shard(0)}}", "train.parallel.plan: the"),
        ("{layers.0.0: colwise, layers.1.0: rowwise}, placement: {layers.0: {input: {dp: partial}}}", "placement.layers.0.input: the mesh"),
    ],
)  # fmt: skip
def test_plan_that_changes_the_model_is_refused_before_the_first_step(tmp_path: Path, plan: str, expected: str) -> None:
    arguments = ["device=cpu", "data=digits", "model=mlp", "model.sizes=[64,32,16,12]", "train.steps=2"]
    plan = plan.replace("shard(0)", "'shard(0)'")
    done = start(tmp_path, "out", *arguments, f"train.parallel={{mesh: {{tp: 2}}, plan: {plan}}}", processes=2)
    assert done.returncode
    assert expected in done.stderr
    assert not list(tmp_path.glob("out/stats/*"))


def test_layer_style_is_a_word_or_a_mapping() -> None:
    plan = config(
        {"mesh": {"tp": 2}, "plan": {"a": "colwise", "b": {"style": "rowwise", "output": "shard(-1)"}}}
    ).train.parallel.plan
    assert plan == {"a": LayerStyle(style="colwise"), "b": LayerStyle(style="rowwise", output="shard(-1)")}
