"""Wrappers of optimizers, as libraries write them: hooks run at the step of the wrapped optimizer, updates are those of the wrapper."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import instrument
from instrument.errors import ConfigError
from instrument.hooks.optimizer import StepHooks


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Lookahead(Optimizer):
    """Moves the parameters after the step. As in timm, the constructor of the base class is not called."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base_optimizer = optimizer
        self.param_groups, self.defaults, self.state = optimizer.param_groups, optimizer.defaults, optimizer.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base_optimizer.step(closure)
        for parameter in parameters_of(self):
            parameter.mul_(0.5)
        return loss


class Hooked(Optimizer):
    """Moves the parameters after the step, and has hooks, since it calls the constructor of the base class."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.base_optimizer = optimizer
        self.param_groups = optimizer.param_groups

    step = Lookahead.step
    _base_optimizer = property(lambda self: self.base_optimizer)


class Private(Optimizer):
    """Changes the gradients before the step, and makes none in the second call, as in Opacus with virtual batches."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.original_optimizer = optimizer
        self.calls = 0

    param_groups: Any = property(lambda self: self.original_optimizer.param_groups)

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls != 2:
            for parameter in parameters_of(self):
                parameter.grad = torch.sign(parameter.grad)
            self.original_optimizer.step()


class Swapping:
    """Swaps the parameters before and after the step, as in ScheduleFreeWrapper, and is not an Optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.base = optimizer
        self.others = [torch.ones_like(parameter) for parameter in parameters_of(optimizer)]

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, other in zip(parameters_of(self.base), self.others, strict=True):
            kept = parameter.clone()
            parameter.copy_(other)
            other.copy_(kept)

    def step(self) -> None:
        self._swap()
        self.base.step()
        self._swap()
        for parameter, other in zip(parameters_of(self.base), self.others, strict=True):
            parameter.data.lerp_(other, 0.1)


class Averager:
    step = 0

    def average_parameters(self, params: Any) -> None:
        for group in params:
            for parameter in group["params"]:
                parameter.data.mul_(0.9)


class Outer(Optimizer):
    """Wraps a wrapper, as in Accelerate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = Lookahead(optimizer)

    param_groups: Any = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Delegating:
    """Passes on all attributes, as in fastai."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.opt = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opt, name)


WRAPPERS: dict[str, Callable[[Optimizer], Any]] = {
    "lookahead": Lookahead,
    "hooked": Hooked,
    "private": Private,
    "swapping": Swapping,
    "averaging": lambda optimizer: PostLocalSGDOptimizer(optimizer, Averager()),
    "outer": Outer,
    "delegating": Delegating,
}
KEEP = {"layers": ".", "params": "weight", "action": "record", "stats": "none", "tensors": True}
SPECS = {
    "gradient": {**KEEP, "kind": "parameter_grad"},
    "update": {**KEEP, "kind": "step_post", "role": "update"},
    "after": {**KEEP, "kind": "step_post"},
    "state": {**KEEP, "kind": "step_post", "role": "state.momentum_buffer"},
}


def train(wrap: Callable[[Optimizer], Any], *, attached: bool) -> tuple[Tensor, dict[str, list[Tensor]], Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(inner)
    wanted: dict[str, list[Tensor]] = {name: [] for name in SPECS}
    with instrument.attach(model, SPECS, optimizer=optimizer) if attached else nullcontext() as probe:
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            weight, before, steps = model.weight, model.weight.detach().clone(), getattr(optimizer, "calls", 0)
            optimizer.step()
            if steps != 1:
                values = weight.grad, weight.detach() - before, weight.detach(), inner.state[weight]["momentum_buffer"]
                for name, value in zip(SPECS, values, strict=True):
                    wanted[name].append(value.clone())
            if probe is not None:
                probe.end_step()
    if probe is not None:
        rows = probe.sink.records("tensors")
        for name in SPECS:
            got = [row["values"] for row in rows if row["hook"] == name]
            assert len(got) == len(wanted[name]) > 0
            assert all(map(torch.equal, got, wanted[name]))
    return model.weight.detach(), wanted, optimizer


@pytest.mark.parametrize("name", WRAPPERS)
def test_update_is_that_of_the_wrapper(name: str) -> None:
    weight, wanted, optimizer = train(WRAPPERS[name], attached=True)
    assert len(wanted["update"]) == (2 if name == "private" else 3)
    assert torch.equal(weight, train(WRAPPERS[name], attached=False)[0])
    assert "step" not in vars(optimizer)


def test_step_of_the_wrapped_optimizer_alone_is_recorded() -> None:
    """Sharpness-aware minimization has two methods in place of `step`."""
    model = nn.Linear(3, 2)
    optimizer = Hooked(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with instrument.attach(model, SPECS, optimizer=optimizer) as probe:
        before = model.weight.detach().clone()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.base_optimizer.step()
        probe.end_step()
    (row,) = [row for row in probe.sink.records("tensors") if row["hook"] == "update"]
    assert torch.equal(row["values"], model.weight.detach() - before)


def test_scheduler_may_replace_the_step_of_the_wrapper() -> None:
    model = nn.Linear(3, 2)
    optimizer = Hooked(torch.optim.SGD(model.parameters(), lr=0.1))
    rows = []
    for steps in (2, 1):
        with instrument.attach(model, {"update": SPECS["update"]}, optimizer=optimizer) as probe:
            scheduler = StepLR(optimizer, 1)
            for _ in range(steps):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                scheduler.step()
                probe.end_step()
        rows.append(len(probe.sink.records("tensors")))
    before = model.weight.detach().clone()
    optimizer.step()
    assert rows == [2, 1]
    assert not torch.equal(model.weight, before)


def test_optimizer_that_contains_one_for_some_parameters_is_not_replaced() -> None:
    class Mixed(torch.optim.SGD):
        def __init__(self, module: nn.Linear) -> None:
            super().__init__(module.parameters(), lr=0.1)
            self.auxiliary = torch.optim.Adam([module.bias])

    model = nn.Linear(3, 2)
    optimizer = Mixed(model)
    with instrument.attach(model, {"update": SPECS["update"]}, optimizer=optimizer) as probe:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        probe.end_step()
    assert len(probe.sink.records("tensors")) == 1


def test_optimizer_without_hooks_is_refused() -> None:
    class Incomplete(Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]

    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match=r"optimizer: does not call Optimizer.__init__(.|\n)*Incomplete"):
        instrument.attach(model, {}, optimizer=Incomplete(model.parameters())).__enter__()


class Simple:
    """Scales the parameters before the step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self.optimizer):
            parameter.mul_(0.5)
        return self.optimizer.step(closure)


class ByProperty:
    step = property(lambda self: self.optimizer.step)

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


class PassingOn(Simple):
    """Passes on attributes that are assigned, such as `step`."""

    def __init__(self, optimizer: Optimizer) -> None:
        vars(self)["optimizer"] = optimizer

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.optimizer, name, value)


class Nested(torch.optim.SGD):
    """Calls `super().step()`, for which PyTorch calls the hooks as well, as soon as an `SGD` exists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            parameter.mul_(0.5)
        loss = super().step(closure)
        for parameter in parameters_of(self):
            parameter.mul_(0.5)
        return loss


def check_updates(model: nn.Linear, optimizer: Any, *others: Any, calls: int = 1) -> None:
    """Compare the recorded updates of the weight in two training steps with its differences."""
    wanted = []
    with instrument.attach(model, {"update": SPECS["update"]}, optimizer=[optimizer, *others]) as probe:
        for _ in range(2):
            before = model.weight.detach().clone()
            model.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            for _ in range(calls):
                optimizer.step()
            wanted.append(model.weight.detach() - before)
            probe.end_step()
    recorded = [row["values"] for row in probe.sink.records("tensors")]
    assert len(recorded) == 2
    assert all(map(torch.equal, recorded, wanted))


@pytest.mark.parametrize("wrap", [ByProperty, PassingOn])
def test_wrapper_that_passes_on_its_step(wrap: Callable[[Optimizer], Any]) -> None:
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(inner)
    check_updates(model, optimizer)
    assert "step" not in vars(inner) | vars(optimizer)


def test_wrapper_and_the_wrapper_in_it_are_both_passed() -> None:
    model = nn.Linear(3, 2)
    outer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
    check_updates(model, outer, outer.optimizer)


def test_step_of_another_optimizer_in_that_of_a_wrapper() -> None:
    model = nn.Linear(3, 2)
    other = torch.optim.SGD([model.weight], lr=0.1)

    class Both(Simple):
        def step(self, closure: Any = None) -> Any:
            other.step()
            return super().step(closure)

    optimizer = Both(torch.optim.SGD([model.bias], lr=0.1))
    check_updates(model, optimizer, other)


def test_signature_of_the_step_of_a_wrapper_is_kept() -> None:
    """`GradScaler.step` and libraries read it."""
    model = nn.Linear(3, 2)
    optimizer = Simple(torch.optim.SGD(model.parameters(), lr=0.1))
    signature = inspect.signature(optimizer.step)
    with instrument.attach(model, {}, optimizer=optimizer):
        assert inspect.signature(optimizer.step) == signature


def test_copy_of_a_wrapper_makes_its_own_step() -> None:
    model = nn.Linear(3, 2)
    optimizer: Any = Simple(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.step = MethodType(Simple.step, optimizer)  # replaced before, as by a scheduler
    before = model.weight.detach().clone()
    with instrument.attach(model, {"update": SPECS["update"]}, optimizer=optimizer):
        copied = copy.deepcopy(optimizer)
        copied.step()
    assert torch.equal(model.weight, before)
    assert torch.equal(parameters_of(copied.optimizer)[0], before / 2)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("by_loop", [False, True])
def test_step_that_calls_that_of_its_base_class_is_one_step(is_wrapped: bool, by_loop: bool) -> None:
    torch.optim.SGD([torch.zeros(1)])
    model = nn.Linear(3, 2)
    nested = Nested(model.parameters(), lr=0.1)
    optimizer: Any = Simple(nested) if is_wrapped else nested
    halve = {"layers": ".", "params": "weight", "kind": "parameter_grad", "action": "scale", "factor": 0.5}
    specs = {**SPECS, "before": {**KEEP, "kind": "step_pre"}, "halve": halve}
    del specs["state"]
    with instrument.attach(model, specs, optimizer=optimizer, steps_by_loop=by_loop) as probe:
        model(torch.ones(4, 3)).square().sum().backward()
        before, gradient = model.weight.detach().clone(), model.weight.grad.clone()
        if by_loop:
            probe.before_optimizer_step()
        optimizer.step()
        probe.end_step()
    rows = probe.sink.records("tensors")
    assert sorted(row["hook"] for row in rows) == ["after", "before", "gradient", "update"]
    (update,) = (row["values"] for row in rows if row["hook"] == "update")
    assert torch.equal(update, model.weight.detach() - before)
    assert torch.equal(model.weight.grad, gradient / 2)
    assert "step" not in vars(nested)


def test_parameters_are_copied_once_for_several_calls_of_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate and Opacus make no step in calls that accumulate gradients."""
    copies: list[Any] = []
    copy_parameters = StepHooks._copy_parameters
    monkeypatch.setattr(StepHooks, "_copy_parameters", lambda hooks: (copies.append(hooks), copy_parameters(hooks)))
    model = nn.Linear(3, 2)

    class Accumulating(Simple):
        calls = 0

        def step(self, closure: Any = None) -> Any:
            self.calls += 1
            return super().step(closure) if self.calls % 4 == 0 else None

    optimizer = Accumulating(torch.optim.SGD(model.parameters(), lr=0.1))
    check_updates(model, optimizer, calls=4)
    assert len(copies) == 2
