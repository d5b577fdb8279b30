"""Hooks with `together: true`: they act on all tensors of a call at once.

The gradients of several tensors arrive one after the other. A node of the graph joins them: it passes all tensors on, and
gets all of their gradients at once. Its outputs are views of its inputs. PyTorch refuses to modify such views in place, so
that a hook never misses a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..config.modify import FunctionSpec
from ..plan.hook_plan import Site
from ..stats.flatten import unreadable
from ..values.nested import iter_tensors, map_tensors
from ..values.sparse import alias_of
from .attached_hook import AttachedHook, fire_all
from .clock import FiringIndex

Item = TypeVar("Item")
GradientsHook = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
JOINED_IN_PLACE_ERROR = (
    "JoinedGradients"  # part of PyTorch's error message if a tensor of the call is modified in place
)
JOINED_IN_PLACE_FIX = "Use an operation that is not in-place, or a hook without 'together'"


def groups_of(items: Iterable[Item], is_together: Callable[[Item], bool]) -> list[list[Item]]:
    """Split hooks into groups that act in the order of the list: those with `together: true` alone, the others with their
    neighbors.

    Args:
        items: The hooks, or objects that contain them.
        is_together: Whether a hook has `together: true`.
    """
    groups: list[list[Item]] = []
    may_join = False
    for item in items:
        is_alone = is_together(item)
        if may_join and not is_alone:
            groups[-1].append(item)
        else:
            groups.append([item])
        may_join = not is_alone
    return groups


def is_together(attached: AttachedHook) -> bool:
    """Return whether a hook has `together: true`."""
    return attached.together is not None


def act_together(
    attached: AttachedHook, value: Any, firing: FiringIndex, root: str = "", *, in_place: Any = ()
) -> tuple[Any, str | None]:
    """Run a hook on all tensors of a value.

    Args:
        attached: The hook.
        value: A tensor or nested tensors.
        firing: Which of several firings this is.
        root: The path of the value.
        in_place: See `map_tensors`.

    Returns:
        The new value; and why the hook did not run, or None.
    """
    accepted = {path: tensor for path, tensor in iter_tensors(value, root) if attached.accepts(tensor, path)}
    obstacles = {path: reason for path, tensor in accepted.items() if (reason := unreadable(tensor)) is not None}
    tensors = {path: tensor for path, tensor in accepted.items() if path not in obstacles}
    if not tensors:
        return value, next(iter(obstacles.values()), None) or attached.no_tensor_reason(value, root)
    new = attached.fire_together(tensors, firing)
    return map_tensors(value, new.get, root, in_place=in_place), None


def act_on_tensors(
    attached_hooks: Sequence[AttachedHook], value: Any, firing: FiringIndex, in_place: Any = ()
) -> tuple[Any, set[AttachedHook], dict[AttachedHook, str]]:
    """Run hooks on all tensors of a value, in the order of the configuration.

    Args:
        attached_hooks: The hooks, with `together: true` or without.
        value: A tensor or nested tensors.
        firing: Which of several firings this is.
        in_place: See `map_tensors`.

    Returns:
        The new value, the hooks that fired, and why hooks could not act on a tensor.
    """
    fired: set[AttachedHook] = set()
    obstacles: dict[AttachedHook, str] = {}

    def act(group: Sequence[AttachedHook], path: str, tensor: Tensor) -> Tensor:
        accepting = [attached for attached in group if attached.accepts(tensor, path)]
        if accepting and (reason := unreadable(tensor)) is not None:
            obstacles.update(dict.fromkeys(accepting, reason))
            return tensor
        fired.update(accepting)
        return fire_all(accepting, tensor, path, firing)

    for group in groups_of(attached_hooks, is_together):
        if not is_together(group[0]):
            value = map_tensors(value, partial(act, group), in_place=in_place)
            continue
        value, obstacle = act_together(group[0], value, firing, in_place=in_place)
        if obstacle is None:
            fired.add(group[0])
        else:
            obstacles[group[0]] = obstacle
    return value, fired, obstacles


class JoinedGradients(torch.autograd.Function):
    """A node that passes tensors on, and changes all of their gradients at once.

    `apply` takes the function that gets the gradients, None for those that are undefined, and the tensors, which require
    gradients. It returns their aliases.
    """

    @staticmethod
    def forward(ctx: Any, hook: GradientsHook, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return aliases of the tensors."""
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tuple(alias_of(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the changed gradients."""
        return (None, *ctx.hook(gradients))


def joined_in_place_message(sites: Sequence[Site], step: int) -> str:
    """Return the message for a tensor of a joined call that was modified in place.

    Args:
        sites: All sites of the plan. Those with `together: true` on gradients are named.
        step: The optimizer step.
    """
    joined = [site for site in sites if joins_gradients(site)]
    names = ", ".join(dict.fromkeys(f"{site.label!r} ({site.layer.type})" for site in joined))
    spec = joined[0].spec
    return (
        f"hook {spec.name!r} ({spec.kind}) at step {step}: with 'together', an operation must not modify a tensor of the "
        f"call in place, but one does; the layers are {names}. {JOINED_IN_PLACE_FIX}"
    )


def joins_gradients(site: Site) -> bool:
    """Return whether the hook of a site joins the gradients of several tensors."""
    spec = site.spec
    return isinstance(spec, FunctionSpec) and spec.together and spec.definition.gradient and spec.via == "tensor"
