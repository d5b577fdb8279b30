"""Assignment of sites around an optimizer step to one of several optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from .attached_hook import AttachedHook


class Owners:
    """Assigns sites to the optimizers that train a model.

    A parameter belongs to the optimizers that hold it, and a buffer to those that hold a parameter of its module. Sites
    without an optimizer are assigned to the first one. Nothing is cached between steps, since a loop may add parameter
    groups.

    Args:
        optimizers: The optimizers, at least one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    def sites_of(self, optimizer: Optimizer, attached_hooks: Iterable[AttachedHook]) -> list[AttachedHook]:
        """Return the sites that run when this optimizer makes its step, in the given order."""
        if len(self.optimizers) == 1:
            return list(attached_hooks)
        optimized_ids = parameter_ids(optimizer)
        elsewhere = {key for other in self.optimizers if other is not optimizer for key in parameter_ids(other)}
        is_first = optimizer is self.optimizers[0]
        return [
            attached
            for attached in attached_hooks
            if not optimized_ids.isdisjoint(keys := _parameters(attached)) or (is_first and elsewhere.isdisjoint(keys))
        ]


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the `id` of each parameter that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _parameters(attached: AttachedHook) -> set[int]:
    """Return the `id` of a site's parameter, or of all parameters of the module if the site is at a buffer."""
    if attached.role == "buffer":
        return {id(parameter) for _, parameter in attached.site.layer.own_parameters()}
    return {id(attached.current_parameter())}
