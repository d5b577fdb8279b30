"""Checks of the optimizers: one exists if hooks require it, holds their parameters, and keeps the requested state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..hooks.optimizer import parameter_ids
from ..plan.hook_plan import HookPlan
from ..relations.observations import is_readable, sampled_fingerprint
from ..values.dtensor import local_shard

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizers_of(optimizers: Optimizers) -> tuple[Optimizer, ...]:
    """Return one optimizer, several or none as a tuple of the optimizers that make the steps.

    Raises:
        ConfigError: An item is not an optimizer.
    """
    return tuple(
        dict.fromkeys(part for optimizer in given_optimizers(optimizers) for part in flatten_optimizer(optimizer))
    )


def given_optimizers(optimizers: Optimizers) -> tuple[Any, ...]:
    """Return one optimizer, several or none as a tuple. Wrappers of libraries are kept."""
    return tuple(optimizers) if isinstance(optimizers, list | tuple) else () if optimizers is None else (optimizers,)


def flatten_optimizer(optimizer: Any, outer: tuple[Any, ...] = ()) -> tuple[Optimizer, ...]:
    """Return the optimizers that make the steps: the given one, or those that it wraps, as `PerModule` and wrappers of libraries do.

    Raises:
        ConfigError: It is not an optimizer, or not one with hooks.
    """
    outer = (*outer, optimizer)
    wrapped = [
        each for each in _values(optimizer) if isinstance(each, Optimizer) and all(each is not one for one in outer)
    ]
    is_optimizer = isinstance(optimizer, Optimizer)
    has_hooks = is_optimizer and hasattr(optimizer, "_optimizer_step_pre_hooks")  # of its constructor
    if wrapped and not (has_hooks and set().union(*map(parameter_ids, wrapped)) != parameter_ids(optimizer)):
        return tuple(part for each in wrapped for part in flatten_optimizer(each, outer))
    if not has_hooks:
        problem = "does not call Optimizer.__init__, so it has no hooks" if is_optimizer else "is not an optimizer"
        allowed = "a torch.optim.Optimizer, a wrapper of one, or a list of them"
        given = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"  # fastai has another class Optimizer
        raise ConfigError(Problem("optimizer", problem, given, allowed))
    return (optimizer,)


def _values(optimizer: Any) -> Iterator[Any]:
    """Yield the attributes of an object, and the items of those that are containers."""
    for value in getattr(optimizer, "__dict__", {}).values():
        yield from (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
        )


def check_optimizers(plan: HookPlan, optimizers: Sequence[Optimizer]) -> None:
    """Refuse hooks that require a missing optimizer, or a state that no optimizer keeps.

    Raises:
        ConfigError: With every problem.
    """
    problems = []
    for name, spec in plan.specs.items():
        role = spec.tensor_role
        if not optimizers:
            if spec.definition.frequency == "step" or role.startswith("state."):
                message = f"kind {spec.kind} with role {role} requires the optimizer"
                fix = f'pass optimizer=, or remove the hook: "{name}": None'
                problems.append(Problem(f"hooks.{name}.kind", message, fix=fix))
        elif role.startswith("state."):
            state_names = [optimizer_state_names(optimizer) for optimizer in optimizers]
            names = frozenset[str]().union(*(names for names in state_names if names is not None))
            if None not in state_names and role.removeprefix("state.") not in names:
                roles = sorted(f"state.{key}" for key in names)
                types = list(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
                options = "does not keep with its" if len(types) == 1 else "do not keep with their"
                message = f"role {role!r} requires optimizer state that {' and '.join(types)} {options} current options"
                similar, allowed = similar_names(role, roles), ", ".join(roles) or "none"
                problems.append(Problem(f"hooks.{name}.role", message, given=role, allowed=allowed, similar=similar))
    raise_problems(problems)


def stale_optimizer(model: nn.Module, optimizers: Sequence[Optimizer]) -> str | None:
    """Return a message if the optimizers hold none of the model's parameters; None otherwise."""
    optimized_ids = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not optimizers or not trainable or any(id(parameter) in optimized_ids for parameter in trainable):
        return None
    which = "the optimizer holds" if len(optimizers) == 1 else "the optimizers hold"
    return (
        f"{which} none of the model's {len(trainable)} parameters: it was created for another model, or before the "
        "parameters were replaced (fully_shard, to_empty, apply), or it holds copies of them"
    )


class UnheldParameters:
    """Parameters that are reported since no known optimizer holds them. A new optimizer, or the program itself, may change them."""

    def __init__(self) -> None:
        self._new: list[tuple[str | None, list[Tensor]]] = []
        self._observed: list[tuple[str | None, list[tuple[Tensor, int | None]]]] = []

    def add(self, layer: str | None, parameters: Iterable[Tensor]) -> None:
        """Add parameters of a layer, or of the model for None."""
        self._new.append((layer, [*parameters]))

    def end_step(self) -> None:
        """Observe the values of new parameters, which the program may have initialized in this step."""
        while self._new:
            layer, parameters = self._new.pop()
            self._observed.append((layer, [(each, _fingerprint_of(each)) for each in parameters]))

    def changed(self) -> Iterator[str | None]:
        """Yield the layers of which a parameter has changed since."""
        for layer, observed in self._observed:
            if any(_fingerprint_of(each) not in (None, earlier) for each, earlier in observed if earlier is not None):
                yield layer


def _fingerprint_of(parameter: Tensor) -> int | None:
    try:
        shard = local_shard(parameter).detach()
        return sampled_fingerprint(shard) if is_readable(shard) else None
    except Exception:  # it has no values yet, its memory is freed, or the device failed: this must not end a training
        return None


def optimizer_state_names(optimizer: Optimizer) -> frozenset[str] | None:
    """Return the names of the optimizer's state for a parameter, found by a step of a copy with a temporary parameter.

    None if they cannot be found: the step requires more than a gradient, such as a closure, or is not one of PyTorch. The states of others
    may depend on the shape, the gradient and earlier steps.
    """
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return None
    names = {str(key) for state in optimizer.state.values() for key in state}
    try:
        for group in optimizer.param_groups:
            names |= _state_names_of_group(optimizer, group)
    # The optimizer's own code, which can raise anything for a parameter that it does not support.
    except Exception:
        return frozenset(names) or None
    return frozenset(names)


def _state_names_of_group(optimizer: Optimizer, group: dict[str, object]) -> set[str]:
    """Return the names of the state with the options of a parameter group."""
    like = next((parameter for parameter in optimizer.param_groups[0]["params"]), None)
    options = {key: value for key, value in group.items() if key != "params"}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        parameter = torch.nn.Parameter(torch.zeros(2, 2, device=None if like is None else like.device))
        parameter.grad = torch.zeros_like(parameter)
        copy = type(optimizer)([{**options, "params": [parameter]}], **optimizer.defaults)
        copy.step()
    return {str(key) for key in copy.state.get(parameter, {})}
