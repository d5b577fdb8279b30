"""Kinds around saving and loading of state dicts.

Entries of a state dict are the live weights, so an intervention replaces the entry and leaves the weights unchanged.
PyTorch copies a state dict before hooks on loading run, so the caller's dict is not modified. The run's own checkpoints
are recorded, but not changed by interventions: a run resumes from the live values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..tables.reasons import CHECKPOINT, NO_STATE
from .attached_hook import AttachedHook
from .hook_group import InertWhenCopied
from .optimizer import OptimizerHooks

_HOOKS = {  # by kind, the method that is the hook
    "state_dict_pre": "on_values",
    "state_dict_post": "on_state",
    "load_state_dict_pre": "on_state",
    "load_state_dict_post": "on_values",
}


class _HooksOfKinds(InertWhenCopied):
    """Hooks of the four state-dict kinds on a module or an optimizer."""

    def register(self, owner: nn.Module | Optimizer) -> None:
        for kind, hook in _HOOKS.items():
            if self.of_kind(kind):
                # PyTorch sets an attribute on one of them, which a bound method does not allow.
                register = getattr(owner, f"register_{kind}_hook")
                self.handles.append(register(partial(getattr(self, hook), kind)))

    def scheduled_of_kind(self, kind: str) -> list[AttachedHook]:
        """Return the scheduled sites of a kind. For the run's own checkpoint, only those that record."""
        scheduled = [attached for attached in self.of_kind(kind) if attached.is_scheduled]
        if self.clock.in_checkpoint:
            for attached in scheduled:
                if not attached.is_record_hook:
                    attached.count_exempt(CHECKPOINT)
            return [attached for attached in scheduled if attached.is_record_hook]
        return scheduled


class StateDictHooks(_HooksOfKinds):
    """The sites of the four state-dict kinds with role `entry` at one module."""

    def attach(self) -> None:
        self.register(self.attached_hooks[0].site.layer.module)

    def on_values(self, kind: str, module: nn.Module, *rest: Any) -> None:  # noqa: ARG002
        """The hook before a state dict is created, or after one was loaded: the values of the module."""
        sites = [attached.site for attached in self.of_kind(kind)]
        self.on_state(kind, module, {site.own_name: site.current_tensor for site in sites}, "")

    def on_state(self, kind: str, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG002
        """The hook after the module's entries were added to a state dict, or before one is loaded."""
        for attached in self.scheduled_of_kind(kind) if not self.clock.closed else ():
            name = attached.site.own_name
            _fire(attached, state, prefix + name, f"the state dict has no entry {name!r} of this module")


class OptimizerStateDictHooks(_HooksOfKinds, OptimizerHooks):
    """The sites of the four state-dict kinds with role `state.*`: the optimizer state of parameters."""

    def attach(self) -> None:
        self.register(self.optimizer)

    def scheduled_of_kind(self, kind: str) -> list[AttachedHook]:
        return self.scheduled(super().scheduled_of_kind(kind))

    def on_values(self, kind: str, optimizer: Optimizer) -> None:
        """The hook before a state dict is created, or after one was loaded: the state of the optimizer."""
        for attached in self.scheduled_of_kind(kind):
            parameter = attached.current_parameter()
            self._fire(attached, {} if parameter is None else optimizer.state.get(parameter, {}))

    def on_state(self, kind: str, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The hook after a state dict was created, or before one is loaded."""
        order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        entries = {key: dict(entry) for key, entry in state["state"].items()}  # the caller's entries are not modified
        for attached in self.scheduled_of_kind(kind):
            parameter = id(attached.current_parameter())
            self._fire(attached, entries.get(order.index(parameter), {}) if parameter in order else {})
        return {**state, "state": entries}

    @staticmethod
    def _fire(attached: AttachedHook, entry: dict[str, Any]) -> None:
        _fire(attached, entry, attached.role.removeprefix("state."), NO_STATE)


def _fire(attached: AttachedHook, entries: dict[str, Any], key: str, missing: str) -> None:
    """Run a hook on an entry of a state dict, or count `missing` as the reason if it does not exist."""
    if not isinstance(entries.get(key), Tensor):
        attached.count_missed_opportunity(missing)
    elif attached.count_and_check_readable(entries[key]):
        new = attached.fire(entries[key].detach(), attached.site.own_name)
        if not attached.is_record_hook:
            entries[key] = new
