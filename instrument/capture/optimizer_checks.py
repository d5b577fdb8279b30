"""Checks of the optimizers: one exists if hooks require it, holds their parameters, and keeps the requested state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, Problem, similar_names
from ..kinds.optimizer_owners import parameter_ids
from ..plan.sites import HookPlan

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizers_of(given: Optimizers) -> tuple[Optimizer, ...]:
    """Return one optimizer, several or none as a tuple of the optimizers that make the steps.

    Wrappers of libraries are replaced by the wrapped optimizer.

    Raises:
        ConfigError: An item is not an optimizer.
    """
    several = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    plain = [_plain(optimizer) for optimizer in several]
    for optimizer in plain:
        if not isinstance(optimizer, Optimizer):
            message = "is not an optimizer"
            allowed = "a torch.optim.Optimizer, or a list of them"
            raise ConfigError(Problem("optimizer", message, type(optimizer).__name__, allowed))
    return tuple(dict.fromkeys(part for optimizer in plain for part in parts_of(optimizer)))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that make the steps: those in `parts`, as in `PerModule`, or the given one."""
    parts = getattr(optimizer, "parts", None)
    if not (isinstance(parts, Mapping) and parts and all(isinstance(part, Optimizer) for part in parts.values())):
        return (optimizer,)
    return tuple(each for part in parts.values() for each in parts_of(part))


def _plain(optimizer: Optimizer) -> Optimizer:
    """Return the wrapped optimizer of a library's wrapper. The one of accelerate has no hooks."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def require_optimizer(plan: HookPlan, optimizers: Sequence[Optimizer]) -> None:
    """Refuse hooks that require a missing optimizer, or a state that no optimizer keeps.

    Raises:
        ConfigError: With every problem.
    """
    problems = []
    for name, spec in plan.specs.items():
        role = spec.tensor_role
        if not optimizers:
            if spec.definition.frequency == "step" or role.startswith("state."):
                message = f"kind {spec.kind} with role {role} requires the optimizer; pass optimizer="
                problems.append(Problem(f"hooks.{name}.kind", message))
        elif role.startswith("state."):
            kept = [kept_state(optimizer) for optimizer in optimizers]
            names = frozenset[str]().union(*(names for names in kept if names is not None))
            if None not in kept and role.removeprefix("state.") not in names:
                roles = sorted(f"state.{key}" for key in names)
                types = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
                problems.append(
                    Problem(
                        f"hooks.{name}.role",
                        f"{types} keeps no such state with its current options",
                        given=role,
                        allowed=", ".join(roles) or "none",
                        similar=similar_names(role, roles),
                    )
                )
    if problems:
        raise ConfigError(*problems)


def stale_optimizer(model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Return a message if the optimizers hold none of the model's parameters; None otherwise."""
    held = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not optimizers or not trained or any(id(parameter) in held for parameter in trained):
        return None
    which = "the optimizer holds" if len(optimizers) == 1 else "the optimizers hold"
    return (
        f"{which} none of the model's {len(trained)} parameters, so the model is not trained; it was created for another "
        "model, or before the parameters were replaced (fully_shard, to_empty, apply)"
    )


def kept_state(optimizer: Optimizer) -> frozenset[str] | None:
    """Return the names of the optimizer's state for a parameter, found by a step of a copy with a temporary parameter.

    None if they cannot be found, because the optimizer requires more than a gradient (a closure, a certain shape).
    """
    kept = {str(key) for state in optimizer.state.values() for key in state}
    try:
        for group in optimizer.param_groups:
            kept |= _kept_with(optimizer, group)
    # The optimizer's own code, which can raise anything for a parameter that it does not support.
    except Exception:
        return frozenset(kept) or None
    return frozenset(kept)


def _kept_with(optimizer: Optimizer, group: dict[str, object]) -> set[str]:
    """Return the names of the state with the options of a parameter group."""
    like = next((parameter for parameter in optimizer.param_groups[0]["params"]), None)
    options = {key: value for key, value in group.items() if key != "params"}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(2, 2, device=None if like is None else like.device))
        parameter.grad = torch.zeros_like(parameter)
        copy = type(optimizer)([{**options, "params": [parameter]}], **optimizer.defaults)
        copy.step()
    return {str(key) for key in copy.state.get(parameter, {})}
