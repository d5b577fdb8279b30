"""What hooks ask of the optimizer: that there is one, that it holds their parameters, that it keeps such a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, Mistake, nearest
from ..kinds.live import LiveSite
from ..plan.sites import HookPlan


def require_optimizer(plan: HookPlan, optimizer: Optimizer | None) -> None:
    """Refuse what needs an optimizer where there is none, and a state that the one there is does not keep.

    Raises:
        ConfigError: With every mistake.
    """
    mistakes = []
    for name, spec in plan.specs.items():
        role = spec.tensor_role
        if optimizer is None:
            if spec.definition.rhythm == "step" or role.startswith("state."):
                problem = f"kind {spec.kind} needs the optimizer for role {role}: hand it over, optimizer="
                mistakes.append(Mistake(f"hooks.{name}.kind", problem))
        elif role.startswith("state."):
            kept = kept_state(optimizer)
            if kept is not None and role.removeprefix("state.") not in kept:
                roles = sorted(f"state.{key}" for key in kept)
                mistakes.append(
                    Mistake(
                        f"hooks.{name}.role",
                        f"{type(optimizer).__name__} keeps no such state as it is set up",
                        written=role,
                        allowed=", ".join(roles) or "none",
                        nearest=nearest(role, roles),
                    )
                )
    if mistakes:
        raise ConfigError(*mistakes)


def leave_out_what_is_not_optimized(lives: Sequence[LiveSite], optimizer: Optimizer) -> None:
    """A parameter that the optimizer does not hold has no gradient that it will use."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for live in lives:
        if live.site.spec.kind == "parameter_grad" and id(live.current_parameter()) not in held:
            live.optimized = False


def stale_optimizer(model: nn.Module, optimizer: Optimizer) -> str | None:
    """What is wrong with an optimizer that holds none of a model's parameters, in words; None where it holds some."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained or any(id(parameter) in held for parameter in trained):
        return None
    return (
        f"the optimizer holds none of the model's {len(trained)} parameters, and trains nothing of it: it was made for another "
        "model, or before something put others in their place (fully_shard, to_empty, apply)"
    )


def kept_state(optimizer: Optimizer) -> frozenset[str] | None:
    """The names of what an optimizer keeps for a parameter, from a step of its like with a parameter to be thrown away.

    None where that cannot be found out: it asks for more than a gradient (a closure, a certain shape).
    """
    kept = {str(key) for state in optimizer.state.values() for key in state}
    try:
        for group in optimizer.param_groups:
            kept |= _kept_with(optimizer, group)
    except Exception:  # of whatever kind: it is the optimizer's own code, with a parameter that it was not made for
        return frozenset(kept) or None
    return frozenset(kept)


def _kept_with(optimizer: Optimizer, group: dict[str, object]) -> set[str]:
    """What it keeps with a group's options."""
    like = next((parameter for parameter in optimizer.param_groups[0]["params"]), None)
    options = {key: value for key, value in group.items() if key != "params"}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(2, 2, device=None if like is None else like.device))
        parameter.grad = torch.zeros_like(parameter)
        copy = type(optimizer)([{**options, "params": [parameter]}], **optimizer.defaults)
        copy.step()
    return {str(key) for key in copy.state.get(parameter, {})}
