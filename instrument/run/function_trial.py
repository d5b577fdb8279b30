"""A trial call of the functions that `fn: {_target_: ...}` names, so that a result that does not fit is found before step 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..actions.base import Context, Effect, Moment, NoArchive
from ..actions.intervention import Intervention
from ..actions.modify import Modify
from ..errors import ConfigError, InstrumentError, Mistake
from ..kinds.live import Clock, LiveSite
from ..nested import leaves
from ..plan.sites import HookPlan, Site
from ..spec.functions import FunctionSpec
from ..spec.schedule import Schedule


class FunctionTrial:
    """Calls each function once for each tensor at each of its sites, on a copy. Nothing is recorded or changed.

    It belongs inside a trial forward pass, which keeps the random states.

    A gradient has the shape of its tensor, and the tensor stands in for it. What an optimizer keeps is not there yet, and is
    not tried.

    Args:
        plan: The sites.
        seed: The seed of the run.

    Raises:
        ConfigError: A function does not exist, or cannot be called. From all methods: it fails, or its result cannot take
            the tensor's place.
    """

    def __init__(self, plan: HookPlan, seed: int) -> None:
        sites = [site for site in plan.sites if isinstance(site.spec, FunctionSpec)]
        actions = {site.spec.name: _action(site) for site in sites}
        self.lives = [
            LiveSite(site, actions[site.spec.name], Clock(_first(site.spec.schedule), seed), tried=True)
            for site in sites
        ]
        self.seen: set[tuple[LiveSite, str]] = set()
        self.by_module: dict[int, list[LiveSite]] = {}
        for live in self.lives:
            if live.site.spec.definition.family == "module":
                self.by_module.setdefault(id(live.site.layer.module), []).append(live)

    def see(self, module: nn.Module, role: str, value: Any, phase: str = "train") -> None:
        """Try the functions at a module on the tensors that go in or come out (`role`: `input` or `output`)."""
        for live in self.by_module.get(id(module), ()):
            spec = live.site.spec
            if spec.phase != phase or role != ("input" if "input" in spec.tensor_role else "output"):
                continue
            for path, tensor in leaves(value):
                if live.takes(tensor, path) and (tensor.requires_grad or not spec.definition.gradient):
                    self._call(live, tensor, path)

    def see_loss(self, loss: Tensor) -> None:
        """Try the functions on the loss."""
        for live in self.lives:
            if live.site.spec.kind == "loss":
                self._call(live, loss, "")

    def see_parameters(self) -> None:
        """Try the functions at parameters, buffers and entries of state dicts."""
        for live in self.lives:
            site = live.site
            if site.spec.definition.family in ("module", "loss") or site.spec.tensor_role.startswith("state."):
                continue
            module = site.layer.module
            tensor = {**module._parameters, **module._buffers}[site.own_name]
            if tensor is not None and not nn.parameter.is_lazy(tensor) and live.takes(tensor, site.own_name):
                value = tensor if site.spec.definition.family == "parameter" else None
                self._call(live, tensor.detach(), site.own_name, value)

    def _call(self, live: LiveSite, tensor: Tensor, path: str, value: Tensor | None = None) -> None:
        if (live, path) in self.seen:
            return
        self.seen.add((live, path))
        spec = live.site.spec
        is_gradient = spec.definition.gradient
        copy = tensor.detach().clone()
        if tensor.requires_grad and not is_gradient:
            copy = copy.requires_grad_().clone()  # no leaf, so that writing to it in place is seen for what it is
        if is_gradient and spec.definition.family == "module":
            value = tensor.detach().clone()
        try:
            with torch.set_grad_enabled(copy.requires_grad):
                live.fire(copy, path, value=value)
        except InstrumentError as error:
            assert isinstance(spec, FunctionSpec), "others are not tried"
            problem = f"tried on a copy before the run: {error}"
            allowed = "fn(tensor, context), which gives a new tensor of the same shape and dtype"
            raise ConfigError(Mistake(f"hooks.{spec.name}.fn", problem, spec.fn.target, allowed)) from error


def _action(site: Site) -> Intervention:
    assert isinstance(site.spec, FunctionSpec), "others are not tried"
    return Intervention(Modify(site.spec, NoArchive()), _NoRows())


def _first(schedule: Schedule) -> Moment:
    """The first moment at which a schedule is due."""
    return Moment(schedule.start if schedule.steps is None else min(schedule.steps), 0, 0, schedule.phase)


class _NoRows:
    """Keeps the effects of a trial nowhere."""

    def add_effect(self, context: Context, effect: Effect) -> None:
        """Nothing."""
