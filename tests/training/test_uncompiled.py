"""Optimizers that do not import the compiler: the same training, and PyTorch's own methods once something imports it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from instrument.training import uncompiled
from instrument.training.uncompiled import spare_methods, spare_step

IN_PLACE = "__dynamo_disable"
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


class Imported:
    """Stands for the check whether the compiler is imported; as long as it is not, calling it is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.imported = False
        monkeypatch.setattr(uncompiled, "compiler_imported", lambda: self.imported)
        self.real = {name: getattr(torch._dynamo, name) for name in ("disable", "graph_break")}
        for name in self.real:
            monkeypatch.setattr(torch._dynamo, name, partial(pytest.fail, f"torch._dynamo.{name} was called"))

    def arrive(self) -> None:
        self.imported = True
        for name, function in self.real.items():
            self.monkeypatch.setattr(torch._dynamo, name, function)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Imported]:
    """A process that has not imported the compiler, as far as optimizers can tell."""
    for name in METHODS:
        monkeypatch.delattr(getattr(Optimizer, name).__wrapped__, IN_PLACE, raising=False)
    spare_methods.cache_clear()
    spare_methods()
    yield Imported(monkeypatch)
    monkeypatch.undo()
    for name in METHODS:
        vars(getattr(Optimizer, name).__wrapped__).pop(IN_PLACE, None)


def trained(make: Callable[[Any], Optimizer], *, spared: bool) -> tuple[list[Tensor], dict[str, Any]]:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = make(model.parameters())
    if spared:
        spare_step(optimizer)
    schedule = StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return [parameter.detach() for parameter in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize(
    "make",
    [
        partial(SGD, lr=0.1, momentum=0.9),
        partial(Adam, lr=0.1, fused=True),
        partial(AdamW, lr=0.1, foreach=True),
        partial(RMSprop, lr=0.1),
    ],
    ids=lambda make: make.func.__name__,
)
def test_optimizers_train_the_same_without_the_compiler(make: Callable[[Any], Optimizer], compiler: Imported) -> None:
    parameters, state = trained(make, spared=True)
    compiler.arrive()
    expected, expected_state = trained(make, spared=False)
    assert all(map(torch.equal, parameters, expected))
    assert str(state) == str(expected_state)


def test_steps_call_what_pytorch_calls(compiler: Imported) -> None:
    seen: list[str] = []
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    spare_step(optimizer)
    optimizer.register_step_pre_hook(lambda *_: seen.append(f"pre, gradients {torch.is_grad_enabled()}"))
    handle = register_optimizer_step_post_hook(lambda *_: seen.append("post of all"))

    def closure() -> float:
        seen.append(f"closure, gradients {torch.is_grad_enabled()}")
        return 2.0

    assert optimizer.step(closure) == 2.0
    handle.remove()
    assert seen == ["pre, gradients True", "closure, gradients True", "post of all"]
    assert "closure" in inspect.signature(optimizer.step).parameters
    assert copy.deepcopy(optimizer).step.__self__ is not optimizer  # type: ignore[attr-defined]


def test_pytorch_takes_over_once_the_compiler_is_imported(compiler: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    spare_step(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    compiler.arrive()
    broken: list[int] = []
    monkeypatch.setattr(torch._dynamo, "graph_break", lambda: broken.append(1))
    optimizer.step()
    optimizer.zero_grad()
    assert len(broken) == 2  # in front of the step and behind it
    method = Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
    assert getattr(method, IN_PLACE)._torchdynamo_disable


class Custom(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def test_other_steps_are_left_as_they_are(compiler: Imported) -> None:
    weight = nn.Parameter(torch.ones(1))
    custom = Custom([weight])
    spare_step(custom)
    assert "step" not in vars(custom)
    patched = SGD([weight], lr=0.1)
    patched.step = own = lambda: None  # type: ignore[assignment, method-assign]
    spare_step(patched)
    assert patched.step is own
