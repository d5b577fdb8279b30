"""Shape inference: what it records, its errors for a batch that does not fit, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn
from torch.nn import functional as F

from instrument.errors import ConfigError, Problem
from instrument.plan.shape_inference import ModuleTensors, TensorInfo, infer_shapes, materialize


class Noisy(nn.Module):
    """Everything that a forward pass can change: batch norm, dropout, three random states, a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Sequential(nn.Linear(4, 4)).eval()
        self.unused = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(2))
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count += random.random() + np.random.rand() + torch.rand(())
        self.last = x.detach()  # a tensor of another shape replaces the buffer
        self.mean = x.mean(0)
        return self.frozen(self.drop(self.norm(x)))


def pair() -> nn.Module:
    """Return a model with nested inputs and outputs that calls one module twice."""
    return Calls(lambda fc, x, *, mask: {"first": fc(x), "rest": (fc(x[:2]), mask, None)}, fc=nn.Linear(4, 4))


def traces(model: nn.Module) -> dict[str, Any]:
    """Return everything that shape inference could have changed."""
    return {
        **{name: value.clone() for name, value in model.state_dict().items()},
        "buffers": [id(buffer) for buffer in model.buffers()],
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        same = value.equal(other[name]) if isinstance(value, Tensor) else value == other[name]
        assert same, name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [True, False])
def test_shape_inference_leaves_no_trace(training: bool, mode: bool) -> None:
    model = Noisy().train(mode)
    model.frozen.eval()
    before = traces(model)
    seen: list[bool] = []

    def forward() -> None:
        seen.append(model.training)
        model(torch.randn(8, 4, requires_grad=True))

    inferred = infer_shapes(model, forward, training=training)
    assert id(model.unused) not in inferred
    assert id(model.drop) in inferred
    assert seen == [training]
    assert_same(traces(model), before)


def test_failed_shape_inference_leaves_no_trace() -> None:
    model = Noisy()
    before = traces(model)
    with pytest.raises(ConfigError):
        infer_shapes(model, lambda: model(torch.randn(8, 4)) @ torch.randn(7, 7), training=True)
    assert_same(traces(model), before)


def test_shape_inference_works_under_no_grad_and_in_inference_mode() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        inferred = infer_shapes(model, lambda: model(torch.ones(1, 4)), training=True)
        assert not torch.is_grad_enabled()
    assert inferred[id(model)].outputs[0][0].requires_grad
    inferring = Calls(torch.inference_mode()(lambda layer, x: layer(x)), layer=model)
    inferred = infer_shapes(inferring, lambda: inferring(torch.ones(1, 4)), training=True)
    assert not inferred[id(model)].outputs[0][0].requires_grad


def test_shape_inference_records_every_tensor_of_every_call() -> None:
    model = pair()
    x, mask = torch.zeros(3, 4), torch.zeros(3, dtype=torch.bool)
    inferred = infer_shapes(model, lambda: model(x, mask=mask), training=True)
    seen = TensorInfo("0", (3, 4), torch.float32, False)
    assert inferred == {
        id(model): ModuleTensors(
            inputs=[[seen, TensorInfo("mask", (3,), torch.bool, False)]],
            outputs=[
                [
                    TensorInfo("first", (3, 4), torch.float32, True),
                    TensorInfo("rest.0", (2, 4), torch.float32, True),
                    TensorInfo("rest.1", (3,), torch.bool, False),
                ]
            ],
        ),
        id(model.fc): ModuleTensors(
            inputs=[[seen], [TensorInfo("0", (2, 4), torch.float32, False)]],
            outputs=[
                [TensorInfo("", (3, 4), torch.float32, True)],
                [TensorInfo("", (2, 4), torch.float32, True)],
            ],
        ),
    }


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_shape_inference_pads_nested_tensors(layout: torch.layout) -> None:
    model = nn.Linear(3, 2)
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(5, 3)], layout=layout)
    (calls,) = infer_shapes(model, lambda: model(nested), training=True).values()
    assert ([calls.inputs[0][0].shape], [calls.outputs[0][0].shape]) == ([(2, 5, 3)], [(2, 5, 2)])


def misfit_problem(model: nn.Module, forward: Callable[[], Any]) -> Problem:
    with pytest.raises(ConfigError) as caught:
        infer_shapes(model, forward, training=True)
    (problem,) = caught.value.problems
    return problem


def test_misfit_names_the_first_layer_and_both_shapes() -> None:
    model = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(784, 8)), nn.ReLU(), nn.Linear(9, 10))
    problem = misfit_problem(model, lambda: model(torch.zeros(5, 1, 8, 8)))
    assert problem.where == "data, model"
    assert "layer '0.1' was given [5, 64]" in problem.message
    assert "Linear with weight [8, 784], bias [8]" in problem.allowed
    assert "RuntimeError" in str(problem.given)
    problem = misfit_problem(model, lambda: model(torch.zeros(5, 1, 28, 28)))
    assert "layer '2' was given [5, 8]" in problem.message
    assert "weight [10, 9]" in problem.allowed


def test_misfit_of_a_layer_without_parameters_shows_its_repr() -> None:
    problem = misfit_problem(nn.MaxPool2d(4), lambda: nn.MaxPool2d(4)(torch.zeros(1, 1, 2, 2)))
    assert problem.where == "task"
    pool = nn.Sequential(nn.MaxPool2d(4))
    problem = misfit_problem(pool, lambda: pool(torch.zeros(1, 1, 2, 2)))
    assert "layer '0' was given [1, 1, 2, 2]" in problem.message
    assert "MaxPool2d(kernel_size=4" in problem.allowed


def test_error_in_a_custom_forward_names_its_line() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3, 7)

    problem = misfit_problem(model := Mine(), lambda: model(torch.zeros(2, 2)))
    assert "layer '.' was given [2, 2]" in problem.message
    assert "test_shape_inference.py:" in problem.message
    assert ", forward)" in problem.message


def test_loss_error_is_attributed_to_the_task() -> None:
    model = nn.Linear(4, 3)
    problem = misfit_problem(model, lambda: F.cross_entropy(model(torch.zeros(2, 4)), torch.tensor([0, 7])))
    assert problem.where == "task"
    assert "cannot compute the loss" in problem.message
    problem = misfit_problem(model, lambda: {}["prompts"])
    assert (problem.where, problem.given) == ("task", "KeyError: 'prompts'")
    assert "the error occurs before the task calls the model" in problem.message


def test_error_caught_by_the_model_is_not_blamed_later() -> None:
    def careful(fussy: nn.Module, plain: nn.Module, x: Tensor) -> Any:
        try:
            return fussy(x)
        except RuntimeError:
            return plain(x)

    model = Calls(careful, fussy=nn.Linear(9, 9), plain=nn.Linear(4, 4))
    problem = misfit_problem(model, lambda: model(torch.zeros(2, 4)) + torch.zeros(7))
    assert problem.where == "task"
    inferred = infer_shapes(model, lambda: model(torch.zeros(2, 4)), training=True)
    assert [len(inferred[id(module)].outputs) for module in (model, model.fussy, model.plain)] == [1, 0, 1]


def test_lazy_modules_are_materialized_without_random_draws() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    state, mode = torch.get_rng_state(), [module.training for module in model.modules()]
    materialize(model, lambda: model(torch.zeros(2, 1, 6, 6)))
    assert torch.get_rng_state().equal(state)
    assert [module.training for module in model.modules()] == mode
    assert type(model[3]) is nn.Linear
    weights = {
        "0.weight": [2, 1, 3, 3],
        "0.bias": [2],
        "1.weight": [2],
        "1.bias": [2],
        "3.weight": [5, 32],
        "3.bias": [5],
    }
    assert {name: list(value.shape) for name, value in model.named_parameters()} == weights
    assert model[1].num_batches_tracked == 0
    assert model[1].running_mean.abs().sum() == 0


def test_model_that_is_not_lazy_does_not_run() -> None:
    runs: list[str] = []
    materialize(nn.Linear(2, 2), lambda: runs.append("not lazy"))
    assert not runs
    lazy = nn.LazyLinear(2)
    materialize(lazy, lambda: (runs.append("lazy"), lazy(torch.zeros(1, 3))))
    assert runs == ["lazy"]


def test_batch_that_does_not_fit_a_lazy_model_is_reported() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"layer '1' was given \[2, 5\]"):
        materialize(model, lambda: model(torch.zeros(2, 3)))
