"""Wrappers of optimizers, as libraries write them: hooks run at the step of the wrapped optimizer, updates are those of the wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import instrument
from instrument.errors import ConfigError


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
