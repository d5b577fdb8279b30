"""Experiments made ready: models of every make, checked before a step is made, and two steps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instrument import ConfigError, MemorySink, Probe
from instrument.dry_run.dry_run import rehearse
from instrument.spec.parse import parse_config
from instrument.training.experiment import Experiment, prepare
from instrument.training.loop import train

CONF = Path(__file__).parents[2] / "conf"


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


class Stateful(nn.Module):
    """A model whose forward pass moves a counter, a buffer and the random state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.norm = nn.BatchNorm1d(10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.dropout(self.norm(self.linear(images.flatten(1))), 0.5, self.training)


def made(model: dict[str, Any], shape: tuple[int, ...] = (1, 8, 8), **over: Any) -> Experiment:
    dataset = {"_target_": "instrument.training.datasets.random_tensors", "shape": list(shape), "samples": 8}
    raw = {
        "model": model,
        "data": {"dataset": dataset, "eval_slice": {"split": "test"}},
        "task": {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "train": {"steps": 2, "batch_size": 4},
        "hooks": {
            "seen": {"layers": "**", "kind": "forward", "action": "record"},
            "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
            "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
        },
        **over,
    }
    torch.manual_seed(0)
    return prepare(parse_config(raw))


def trained(experiment: Experiment) -> MemorySink:
    sink = MemorySink()
    with Probe(experiment.plan, sink, optimizer=experiment.optimizer) as probe:
        train(experiment, probe, lambda progress: None)
    return sink


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ({"_target_": "torchvision.models.resnet18", "weights": None, "num_classes": 10}, (3, 32, 32)),
        pytest.param(
            {"_target_": "torchvision.models.vgg11_bn", "weights": None, "num_classes": 10}, (3, 32, 32),
            marks=pytest.mark.slow,
        ),
        (
            {"_target_": "torchvision.models.VisionTransformer", "image_size": 32, "patch_size": 8, "num_layers": 2,
             "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 10},
            (3, 32, 32),
        ),
        ({"_target_": "instrument.training.models.LeNet"}, (1, 28, 28)),
        ({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]}, (1, 8, 8)),
        ({"_target_": "instrument.training.models.MnistCNN", "encoder": [4, 8, 8], "decoder": [16, 12]}, (1, 28, 28)),
        ({"_target_": f"{__name__}.Lazy"}, (3, 12, 12)),
    ],
    ids=lambda value: value["_target_"].rpartition(".")[2] if isinstance(value, dict) else None,
)  # fmt: skip
def test_models_of_every_make_train_with_hooks_on_every_layer(model: dict[str, Any], shape: tuple[int, ...]) -> None:
    experiment = made(model, shape)
    before = [parameter.detach().clone() for parameter in experiment.model.parameters()]
    sink = trained(experiment)
    assert any(not torch.equal(a, b) for a, b in zip(before, experiment.model.parameters(), strict=True))
    frame = sink.frame("metrics")
    assert list(frame.phase) == ["train", "train", "eval"]
    assert frame.loss.notna().all()
    stats = sink.frame("stats")
    called = {layer.name for layer in experiment.plan.layers if id(layer.module) in experiment.trials["train"]}
    assert set(stats[stats.hook == "seen"].layer) == called
    parameters = [name for name, _ in experiment.model.named_parameters()]
    gradients = stats[(stats.hook == "gradients") & (stats.step == 1)]
    assert [".".join(filter(None, key)) for key in zip(gradients.layer, gradients.path, strict=True)] == parameters
    coverage = sink.frame("coverage")
    short = coverage[coverage.fired < coverage.expected]
    assert set(short.layer) <= {layer.name for layer in experiment.plan.layers} - called
    assert not any(
        vars(module)[name] for module in experiment.model.modules() for name in vars(module) if name.endswith("_hooks")
    )


def test_lazy_modules_get_their_shapes_before_anything_else_needs_them() -> None:
    apply = {"init": {"types": ["Linear", "LazyLinear"], "action": "fill", "value": 0.0}}
    experiment = made({"_target_": f"{__name__}.Lazy"}, (3, 12, 12), apply=apply)
    linear = experiment.model[4]  # type: ignore[index]
    assert linear.weight.shape == (10, 400)
    assert not linear.weight.any()
    optimized = {id(parameter) for group in experiment.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in experiment.model.parameters()}


def test_making_ready_runs_the_model_and_leaves_no_trace_of_it() -> None:
    torch.manual_seed(0)
    plain = Stateful()
    state = torch.get_rng_state()
    experiment = made({"_target_": f"{__name__}.Stateful"})
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(plain.state_dict().items(), experiment.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert experiment.model.training
    assert all(parameter.grad is None for parameter in experiment.model.parameters())


def test_frozen_parameters_are_not_optimized() -> None:
    apply = {"off": {"layers": "layers.0.**", "action": "freeze"}}
    experiment = made({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]}, apply=apply)
    frozen = experiment.model.layers[0][0]  # type: ignore[index, union-attr]
    before = frozen.weight.clone()
    trained(experiment)
    assert torch.equal(frozen.weight, before)
    optimized = [parameter.shape for group in experiment.optimizer.param_groups for parameter in group["params"]]
    assert optimized == [(10, 16), (10,)]


@pytest.mark.parametrize(
    ("over", "told"),
    [
        ({"apply": {"off": {"layers": "**", "action": "freeze"}}, "hooks": {}}, "model: no parameter trains"),
        ({"optimizer": {"_target_": "torch.nn.Identity"}}, "optimizer: torch.nn.Identity gave a Identity"),
        ({"scheduler": {"_target_": "torch.nn.Identity"}}, "scheduler: torch.nn.Identity gave a Identity"),
    ],
)
def test_what_cannot_be_trained_is_refused(over: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made({"_target_": "instrument.training.models.MLP", "sizes": [64, 10]}, **over)


def test_the_first_layer_that_a_batch_does_not_fit_is_named_with_both_shapes() -> None:
    with pytest.raises(ConfigError) as caught:
        made({"_target_": "instrument.training.models.MnistCNN"}, (1, 20, 20))
    told = str(caught.value)
    assert "layer 'decoder.0.0' was given [4, 800]" in told
    assert "Linear with weight [64, 1568]" in told


def test_the_cost_foretells_the_rows() -> None:
    experiment = made({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]})
    foretold = {name: cost.rows for name, cost in rehearse(experiment).cost.items()}
    experiment = made({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]})
    assert trained(experiment).frame("stats").hook.value_counts().to_dict() == foretold
