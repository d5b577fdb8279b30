"""Preparation of experiments: checks before training, and two steps of many models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training_runs import Stateful, prepared, run_in_memory

from instrument import ConfigError
from instrument.training.experiment import Experiment

SCHEDULERS = "torch.optim.lr_scheduler"


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def prepare_experiment(model: dict[str, Any], shape: tuple[int, ...] = (1, 8, 8), **overrides: Any) -> Experiment:
    dataset = {"_target_": "instrument.training.datasets.random_tensors", "shape": list(shape), "samples": 8}
    sections = {
        "model": model,
        "data": {"dataset": dataset, "eval_slice": {"split": "test"}},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.01},
        "train": {"steps": 2, "batch_size": 4},
        "hooks": {
            "seen": {"layers": "**", "kind": "forward", "action": "record"},
            "flow": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
            "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
        },
    }
    return prepared(**{**sections, **overrides})


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "fields",
    [{"action": "record", "slice": "0:2"}, {"action": "record"}, {"action": "clip", "max": 2.0}],
    ids=["slice", "record", "clip"],
)
def test_hooks_change_no_number_of_forward_passes_before_step_0(fields: dict[str, Any]) -> None:
    """A smaller batch is tried also without a hook that may not fit it."""
    calls = []
    for hooks in ({}, {"seen": {"layers": "1", "kind": "forward", **fields}}):
        train_config = {"steps": 3, "batch_size": 3}  # of 8 samples: the last batch is smaller
        model = {"_target_": "training_runs.Stateful"}
        calls.append(prepare_experiment(model, hooks=hooks, train=train_config).model.passes)
    assert calls[0] == calls[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(
            {"_target_": "torchvision.models.resnet18", "weights": None, "num_classes": 10}, (3, 32, 32),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"_target_": "torchvision.models.vgg11_bn", "weights": None, "num_classes": 10}, (3, 32, 32),
            marks=pytest.mark.slow,
        ),
        (
            {"_target_": "torchvision.models.VisionTransformer", "image_size": 32, "patch_size": 8, "num_layers": 2,
             "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 10},
            (3, 32, 32),
        ),
        ({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]}, (1, 8, 8)),
        ({"_target_": "instrument.training.models.RNN"}, (1, 8, 8)),
        ({"_target_": "instrument.training.models.MnistCNN", "encoder": [4, 8, 8], "decoder": [16, 12]}, (1, 28, 28)),
        ({"_target_": f"{__name__}.Lazy"}, (3, 12, 12)),
    ],
    ids=lambda value: value["_target_"].rpartition(".")[2] if isinstance(value, dict) else None,
)  # fmt: skip
def test_models_train_with_hooks_on_every_layer(model: dict[str, Any], shape: tuple[int, ...]) -> None:
    experiment = prepare_experiment(model, shape)
    before = [parameter.detach().clone() for parameter in experiment.model.parameters()]
    sink, _ = run_in_memory(experiment)
    assert any(not torch.equal(a, b) for a, b in zip(before, experiment.model.parameters(), strict=True))
    frame = sink.frame("metrics")
    assert list(frame.phase) == ["train", "train", "eval"]
    assert frame.loss.notna().all()
    stats = sink.frame("stats")
    called = {
        layer.name for layer in experiment.plan.layers if id(layer.module) in experiment.inferred_by_phase["train"]
    }
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


def test_lazy_modules_are_initialized_first() -> None:
    apply = {"init": {"types": ["Linear", "LazyLinear"], "action": "fill", "value": 0.0}}
    experiment = prepare_experiment({"_target_": f"{__name__}.Lazy"}, (3, 12, 12), apply=apply)
    linear = experiment.model[4]  # type: ignore[index]
    assert linear.weight.shape == (10, 400)
    assert not linear.weight.any()
    optimized = {id(parameter) for group in experiment.optimizer.param_groups for parameter in group["params"]}
    assert optimized == {id(parameter) for parameter in experiment.model.parameters()}


def test_prepare_does_not_change_the_model_or_random_state() -> None:
    torch.manual_seed(0)
    plain = Stateful()
    state = torch.get_rng_state()
    experiment = prepare_experiment({"_target_": "training_runs.Stateful"})
    assert torch.equal(torch.get_rng_state(), state)
    for (name, a), b in zip(plain.state_dict().items(), experiment.model.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert experiment.model.training
    assert all(parameter.grad is None for parameter in experiment.model.parameters())


def test_frozen_parameters_are_not_optimized() -> None:
    apply = {"off": {"layers": "layers.0.**", "action": "freeze"}}
    experiment = prepare_experiment({"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]}, apply=apply)
    frozen = experiment.model.layers[0][0]  # type: ignore[index, union-attr]
    before = frozen.weight.clone()
    run_in_memory(experiment)
    assert torch.equal(frozen.weight, before)
    optimized = [parameter.shape for group in experiment.optimizer.param_groups for parameter in group["params"]]
    assert optimized == [(10, 16), (10,)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"apply": {"off": {"layers": "**", "action": "freeze"}}, "hooks": {}}, "model: the model has no trainable parameter"),
        ({"optimizer": {"_target_": "torch.nn.Identity"}}, "optimizer: must be a torch.optim.Optimizer, .* returned Identity"),
        ({"scheduler": {"_target_": "torch.nn.Identity"}}, "scheduler: must be .*LRScheduler.* returned Identity"),
        ({"scheduler": {"_target_": f"{SCHEDULERS}.StepLR", "step_size": 0}}, "scheduler: step 1 of .*ZeroDivisionError"),
        (
            {"scheduler": {"_target_": f"{SCHEDULERS}.OneCycleLR", "max_lr": 0.1, "total_steps": 1}},
            "scheduler: step 2 of .*OneCycleLR raises ValueError: Tried to step 2 times",
        ),
        (
            {"scheduler": {"_target_": f"{SCHEDULERS}.ExponentialLR", "gamma": -1.0}},
            r"scheduler: .*ExponentialLR sets a learning rate that is negative or not finite, after step 1\n *given *-0\.01",
        ),
    ],
)  # fmt: skip
def test_invalid_experiment_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_experiment({"_target_": "instrument.training.models.MLP", "sizes": [64, 10]}, **overrides)


def test_layer_with_a_wrong_input_shape_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        prepare_experiment({"_target_": "instrument.training.models.MnistCNN"}, (1, 20, 20))
    message = str(caught.value)
    assert "layer 'decoder.0.0' was given [4, 800]" in message
    assert "Linear with weight [64, 1568]" in message
