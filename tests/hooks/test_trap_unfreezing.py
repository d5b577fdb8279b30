"""Trap: parameters that are frozen, unfrozen, lazy, or added to or removed from the optimizer during training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import assert_equal, record
from torch import Tensor, nn

import instrument
from instrument import ConfigError, InstrumentWarning, Probe
from instrument.config.spec_file import read_specs
from instrument.plan.hook_plan import check_not_frozen, make_plan
from instrument.tables.reasons import FROZEN, NOT_OPTIMIZED

GRADIENTS = ("parameter_grad_micro", "post_accumulate_grad", "parameter_grad")
OPTIMIZER_ROLES = (
    ("step_pre", "param_grad"),
    ("step_pre", "param"),
    ("step_post", "update"),
    ("step_post", "state.momentum_buffer"),
)
HOOKS = {
    f"{kind}__{role.replace('.', '_')}": record(kind, "**", params="weight", role=role, tensors=True)
    for kind, role in [*((kind, "param_grad") for kind in GRADIENTS), *OPTIMIZER_ROLES]
}
FROZEN_TOO = {"step_pre__param", "step_post__update"}  # also recorded for a frozen parameter

Coverage = dict[str, tuple[int, int, str]]
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def make(*, frozen: bool = True) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model of two layers with the first one frozen, and an optimizer of the second layer only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    if frozen:
        model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters() if frozen else model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], None] = lambda: None
) -> Tensor | None:
    """Run a step; return the gradient of the first layer that the optimizer used."""
    optimizer.zero_grad()
    model.zero_grad()
    loss = model(torch.randn(4, 3)).square().sum()
    between()
    loss.backward()
    optimizer.step()
    gradient = model[0].weight.grad
    return None if gradient is None else gradient.clone()


def coverage_of(probe: Probe, layer: str = "0") -> Coverage:
    rows = probe.coverage()
    return {row["hook"]: (row["expected"], row["fired"], row["cause"]) for row in rows if row["layer"] == layer}


def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    hooks: dict[str, Any] = HOOKS,
    steps: int = 2,
    at: int | None = None,
    change: Callable[[Any, Any], object] = unfreeze,
) -> tuple[Probe, list[Tensor | None]]:
    """Run steps with hooks, and a change before the step `at`. Return the probe, and what each step returned."""
    found = []
    with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
        for number in range(steps):
            if number == at:
                change(model, optimizer)
            found.append(step(model, optimizer))
            probe.end_step()
    return probe, found


@pytest.mark.spread(1)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_hooks_fire_from_the_first_gradient_after_unfreezing(at: int) -> None:
    model, optimizer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstrumentWarning)
        probe, gradients = train(model, optimizer, HOOKS, 4, at)
    assert coverage_of(probe) == {name: (4, 4, "") if name in FROZEN_TOO else (4 - at, 4 - at, "") for name in HOOKS}
    seen = [row for row in probe.sink.records("tensors") if row["layer"] == "0" and row["role"] == "param_grad"]
    assert len(seen) == 4 * (4 - at)
    assert all(torch.equal(row["values"], gradients[row["step"]]) for row in seen)
    assert not model[0].weight._backward_hooks


def test_parameter_can_be_added_to_one_of_several_optimizers() -> None:
    model, first = make()
    second = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    with instrument.attach(model, HOOKS, optimizer=[first, second]) as probe:
        for number in range(3):
            if number == 1:
                unfreeze(model, second)
            step(model, first)
            second.step()
            probe.end_step()
    assert coverage_of(probe) == {name: (3, 3, "") if name in FROZEN_TOO else (2, 2, "") for name in HOOKS}
    seen = [row for row in probe.sink.records("tensors") if row["layer"] == "0"]
    assert {row["step"] for row in seen if row["kind"] == "parameter_grad"} == {1, 2}


def test_parameter_unfrozen_after_the_forward_pass_is_hooked_next() -> None:
    model, optimizer = make()
    with instrument.attach(model, {"h": record("post_accumulate_grad", "**")}) as probe:
        step(model, optimizer, lambda: unfreeze(model, optimizer))  # too late for this graph
        probe.end_step()
        step(model, optimizer)
        probe.end_step()
    assert coverage_of(probe) == {"h": (1, 1, "")}


def test_hooks_on_frozen_parameters_only_wait_for_unfreezing() -> None:
    model, optimizer = make()
    clip = {"layers": "0", "params": "weight", "kind": "parameter_grad", "action": "clip", "norm": 0.01}
    probe, (*_, gradient) = train(model, optimizer, {"tame": clip}, 3, 1)
    assert gradient.norm() <= 0.01
    assert coverage_of(probe) == {"tame": (2, 2, "")}


def test_run_refuses_hooks_on_frozen_parameters_only() -> None:
    model, _ = make()
    plan = make_plan(read_specs({"h": {**HOOKS["step_pre__param_grad"], "layers": "0"}}), model)
    with pytest.raises(ConfigError, match=r"hooks\.h\.layers: kind step_pre requires gradients"):
        check_not_frozen(plan)


def test_parameter_that_stays_frozen_is_reported() -> None:
    model, optimizer = make()
    with pytest.warns(InstrumentWarning) as warned:
        probe, _ = train(model, optimizer)
    assert coverage_of(probe) == {name: (2, 2, "") if name in FROZEN_TOO else (0, 0, FROZEN) for name in HOOKS}
    assert len(warned) == len(HOOKS) - len(FROZEN_TOO)
    assert coverage_of(probe, "1") == dict.fromkeys(HOOKS, (2, 2, ""))


def freeze_again(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(False)


def remove_parameters(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    first = {id(parameter) for parameter in model[0].parameters()}
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in first]


def replace_group(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[:] = [{**optimizer.param_groups[0], "params": list(model[1].parameters())}]


@pytest.mark.parametrize(
    ("change", "counted"),
    [(freeze_again, set(GRADIENTS)), (remove_parameters, {"parameter_grad"}), (replace_group, {"parameter_grad"})],
)
def test_hooks_are_not_expected_once_a_parameter_stops_training(change: Change, counted: set[str]) -> None:
    model, optimizer = make(frozen=False)
    hooks = {name: spec for name, spec in HOOKS.items() if spec["kind"] in GRADIENTS}
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstrumentWarning)
        probe, _ = train(model, optimizer, hooks, 3, 2, change)
    fired = {name: 2 if spec["kind"] in counted else 3 for name, spec in hooks.items()}
    assert coverage_of(probe) == {name: (count, count, "") for name, count in fired.items()}


def test_frozen_steps_do_not_hide_the_cause_of_a_miss() -> None:
    model, optimizer = make()
    unused = nn.Linear(3, 3).requires_grad_(False)
    model.register_module("unused", unused)
    model.forward = lambda x: model[1](model[0](x))
    hooks = {"h": HOOKS["post_accumulate_grad__param_grad"]}
    with pytest.warns(InstrumentWarning, match=r"fired 0 of 1 times on unused\.weight"):
        probe, _ = train(model, optimizer, hooks, 5, 3, lambda *_: unused.requires_grad_(True))
    expected, fired, cause = coverage_of(probe, "unused")["h"]
    assert (expected, fired) == (1, 0)
    assert "the parameter had no gradient" in cause


def test_parameter_outside_the_optimizer_is_reported() -> None:
    model, optimizer = make()
    model[0].requires_grad_(True)
    with pytest.warns(InstrumentWarning):
        probe, _ = train(model, optimizer, steps=1)
    assert coverage_of(probe)["parameter_grad__param_grad"] == (0, 0, NOT_OPTIMIZED)
    assert coverage_of(probe)["step_post__state_momentum_buffer"] == (0, 0, NOT_OPTIMIZED)


def lazy() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_hooks_on_lazy_modules_fire_from_the_first_step() -> None:
    buffers = {"layers": "**", "kind": "step_post", "role": "buffer", "action": "record"}
    seen = {"layers": "**", "kind": "forward", "action": "record"}
    model, optimizer = lazy()
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstrumentWarning)
        probe, gradients = train(model, optimizer, {**HOOKS, "buffers": buffers, "seen": seen})
    rows = probe.coverage()
    assert len(rows) == 3 * len(HOOKS) + 3 + 4
    assert {(row["expected"], row["fired"], row["cause"]) for row in rows} == {(2, 2, "")}
    values = [row for row in probe.sink.records("tensors") if row["layer"] == "0" and row["role"] == "param_grad"]
    assert len(values) == 2 * 4
    assert all(torch.equal(row["values"], gradients[row["step"]]) for row in values)
    assert [(row["layer"], row["module_type"], row["parameters"]) for row in probe.sink.records("layers")][1:] == [
        ("0", "Linear", 12),
        ("1", "BatchNorm1d", 6),
        ("2", "Linear", 4),
    ]
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    baseline, optimizer = lazy()
    for _ in range(2):
        step(baseline, optimizer)
    assert_equal(model.parameters(), baseline.parameters())


def test_lazy_module_that_never_runs_is_reported() -> None:
    model = nn.Sequential(nn.Linear(3, 1))
    model[0].register_module("spare", nn.LazyLinear(2))  # not called by a linear layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved: dict[str, Any] = {"saved": {"layers": "**", "kind": "state_dict_pre", "action": "record"}}
    with pytest.warns(InstrumentWarning), instrument.attach(model, HOOKS | saved, optimizer=optimizer) as probe:
        step(model, optimizer)
        model.state_dict()
        probe.end_step()
    causes = {name: cause for name, (_, fired, cause) in coverage_of(probe, "0.spare").items() if not fired}
    assert causes.keys() == HOOKS.keys() | {"saved"}
    warned = {causes["saved"], causes["step_pre__param"], causes["step_post__update"]}
    assert len(warned) == 1
    assert "it is a parameter or a buffer of a lazy module that has not run a forward pass" in warned.pop()
    (row,) = [row for row in probe.sink.records("layers") if row["layer"] == "0.spare"]
    assert (row["parameters"], row["trainable"]) == (None, None)
