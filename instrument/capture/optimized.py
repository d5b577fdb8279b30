"""What hooks ask of the optimizers: that there is one, that one holds their parameters, that one keeps such a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError, Mistake, nearest
from ..kinds.owners import held_by
from ..plan.sites import HookPlan

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizers_of(given: Optimizers) -> tuple[Optimizer, ...]:
    """One optimizer, several or none as a tuple of those that make the steps, without what a library wrapped around them.

    Raises:
        ConfigError: One of them is something else.
    """
    several = tuple(given) if isinstance(given, list | tuple) else () if given is None else (given,)
    plain = [_plain(optimizer) for optimizer in several]
    for optimizer in plain:
        if not isinstance(optimizer, Optimizer):
            problem = "is not an optimizer"
            allowed = "a torch.optim.Optimizer, or a list of them"
            raise ConfigError(Mistake("optimizer", problem, type(optimizer).__name__, allowed))
    return tuple(dict.fromkeys(part for optimizer in plain for part in parts_of(optimizer)))


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that make the steps: those in `parts`, as `PerModule` has them, or the one that is given."""
    parts = getattr(optimizer, "parts", None)
    if not (isinstance(parts, Mapping) and parts and all(isinstance(part, Optimizer) for part in parts.values())):
        return (optimizer,)
    return tuple(each for part in parts.values() for each in parts_of(part))


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a library wrapped it (accelerate's has no hooks of its own)."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def require_optimizer(plan: HookPlan, optimizers: Sequence[Optimizer]) -> None:
    """Refuse what needs an optimizer where there is none, and a state that none of them keeps.

    Raises:
        ConfigError: With every mistake.
    """
    mistakes = []
    for name, spec in plan.specs.items():
        role = spec.tensor_role
        if not optimizers:
            if spec.definition.rhythm == "step" or role.startswith("state."):
                problem = f"kind {spec.kind} needs the optimizer for role {role}: hand it over, optimizer="
                mistakes.append(Mistake(f"hooks.{name}.kind", problem))
        elif role.startswith("state."):
            kept = [kept_state(optimizer) for optimizer in optimizers]
            names = frozenset[str]().union(*(names for names in kept if names is not None))
            if None not in kept and role.removeprefix("state.") not in names:
                roles = sorted(f"state.{key}" for key in names)
                types = " or ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
                mistakes.append(
                    Mistake(
                        f"hooks.{name}.role",
                        f"{types} keeps no such state as it is set up",
                        written=role,
                        allowed=", ".join(roles) or "none",
                        nearest=nearest(role, roles),
                    )
                )
    if mistakes:
        raise ConfigError(*mistakes)


def stale_optimizer(model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """What is wrong with optimizers that hold none of a model's parameters, in words; None where they hold some."""
    held = {key for optimizer in optimizers for key in held_by(optimizer)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not optimizers or not trained or any(id(parameter) in held for parameter in trained):
        return None
    which = "the optimizer holds" if len(optimizers) == 1 else "the optimizers hold"
    return (
        f"{which} none of the model's {len(trained)} parameters, and trains nothing of it: it was made for another "
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
