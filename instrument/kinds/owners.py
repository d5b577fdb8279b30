"""Which of several optimizers a site around an optimizer's step belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from .live import LiveSite


class Owners:
    """Finds the sites of each of the optimizers that train one model.

    A parameter belongs to the optimizers that hold it, and a buffer to those that hold a parameter of its module. Sites
    that belong to none go with the first optimizer. Nothing is kept between steps, since a loop may add parameter groups.

    Args:
        optimizers: The optimizers, at least one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)

    def sites_of(self, optimizer: Optimizer, lives: Iterable[LiveSite]) -> list[LiveSite]:
        """The sites that act when this optimizer makes its step, in the order given."""
        if len(self.optimizers) == 1:
            return list(lives)
        held = held_by(optimizer)
        elsewhere = {key for other in self.optimizers if other is not optimizer for key in held_by(other)}
        is_first = optimizer is self.optimizers[0]
        return [
            live
            for live in lives
            if not held.isdisjoint(keys := _parameters(live)) or (is_first and elsewhere.isdisjoint(keys))
        ]


def held_by(optimizer: Optimizer) -> set[int]:
    """The parameters that an optimizer holds, by their `id`."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _parameters(live: LiveSite) -> set[int]:
    """The parameter of a site, or those of the module whose buffer it sees, by their `id`."""
    if live.site.spec.tensor_role == "buffer":
        return {id(parameter) for parameter in live.site.layer.module._parameters.values()}
    return {id(live.current_parameter())}
