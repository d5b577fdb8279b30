"""Optimizers without the compiler: equal training, and PyTorch's own methods once the compiler is imported."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
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

from instrument.training.compiler import bypass_compiler_in_methods, bypass_compiler_in_step

IN_PLACE = "__dynamo_disable"
METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


class CompilerImport:
    """Replacement for the check whether the compiler is imported. Until then, calling the compiler is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.imported = False
        monkeypatch.setattr("instrument.training.compiler.compiler_imported", lambda: self.imported)
        self.real = {name: getattr(torch._dynamo, name) for name in ("disable", "graph_break")}
        for name in self.real:
            monkeypatch.setattr(torch._dynamo, name, partial(pytest.fail, f"torch._dynamo.{name} was called"))

    def import_compiler(self) -> None:
        self.imported = True
        for name, function in self.real.items():
            self.monkeypatch.setattr(torch._dynamo, name, function)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerImport]:
    """Simulate a process that has not imported the compiler."""
    for name in METHODS:
        monkeypatch.delattr(getattr(Optimizer, name).__wrapped__, IN_PLACE, raising=False)
    bypass_compiler_in_methods.cache_clear()
    bypass_compiler_in_methods()
    yield CompilerImport(monkeypatch)
    monkeypatch.undo()
    for name in METHODS:
        vars(getattr(Optimizer, name).__wrapped__).pop(IN_PLACE, None)


def trained(make: Callable[[Any], Optimizer], *, without_compiler: bool) -> tuple[list[Tensor], dict[str, Any]]:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = make(model.parameters())
    if without_compiler:
        bypass_compiler_in_step(optimizer)
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
def test_optimizers_train_equally_without_the_compiler(
    make: Callable[[Any], Optimizer], compiler: CompilerImport
) -> None:
    parameters, state = trained(make, without_compiler=True)
    compiler.import_compiler()
    expected, expected_state = trained(make, without_compiler=False)
    assert all(map(torch.equal, parameters, expected))
    assert str(state) == str(expected_state)


def test_step_calls_hooks_and_closure_like_pytorch(compiler: CompilerImport) -> None:
    calls: list[str] = []
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    bypass_compiler_in_step(optimizer)
    optimizer.register_step_pre_hook(lambda *_: calls.append(f"pre, gradients {torch.is_grad_enabled()}"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("post of all"))

    def closure() -> float:
        calls.append(f"closure, gradients {torch.is_grad_enabled()}")
        return 2.0

    assert optimizer.step(closure) == 2.0
    handle.remove()
    assert calls == ["pre, gradients True", "closure, gradients True", "post of all"]
    assert "closure" in inspect.signature(optimizer.step).parameters
    assert copy.deepcopy(optimizer).step.__self__ is not optimizer  # type: ignore[attr-defined]


def test_original_methods_are_used_once_the_compiler_is_imported(
    compiler: CompilerImport, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight], lr=0.1)
    bypass_compiler_in_step(optimizer)
    optimizer.zero_grad()
    optimizer.step()
    compiler.import_compiler()
    broken: list[int] = []
    monkeypatch.setattr(torch._dynamo, "graph_break", lambda: broken.append(1))
    optimizer.step()
    optimizer.zero_grad()
    assert len(broken) == 2  # before and after the step
    method = Optimizer.zero_grad.__wrapped__  # type: ignore[attr-defined]
    assert getattr(method, IN_PLACE)._torchdynamo_disable


class Custom(Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def test_custom_steps_are_not_replaced(compiler: CompilerImport) -> None:
    weight = nn.Parameter(torch.ones(1))
    custom = Custom([weight])
    bypass_compiler_in_step(custom)
    assert "step" not in vars(custom)
    patched = SGD([weight], lr=0.1)
    patched.step = own = lambda: None  # type: ignore[assignment, method-assign]
    bypass_compiler_in_step(patched)
    assert patched.step is own


STEP = "import sys, torch; weight = torch.nn.Parameter(torch.ones(1)); torch.optim.SGD([weight], lr=0.1).step()"


@pytest.mark.slow
def test_pytorch_still_imports_the_compiler_in_a_step() -> None:
    """If this fails, `bypass_compiler_in_step` is not needed any more."""
    check = f"{STEP}; sys.exit('torch._dynamo' not in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=120, check=False).returncode == 0
