"""Kinds around saving and loading of state dicts.

Entries of a state dict are the live weights, so an intervention replaces the entry and leaves the weights unchanged.
PyTorch copies a state dict before hooks on loading run, so the caller's dict is not modified. The run's own checkpoints
are recorded, but not changed by interventions: a run resumes from the live values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..tables.reasons import CHECKPOINT, NO_STATE
from .attached_hook import AttachedHook
from .clock import Clock
from .hook_group_interface import InertWhenCopied
from .optimizer_owners import Owners

_HOOKS = {
    "state_dict_pre": "saving",
    "state_dict_post": "saved",
    "load_state_dict_pre": "loading",
    "load_state_dict_post": "loaded",
}


class _HooksOfKinds:
    """Hooks of the four state-dict kinds on a module or an optimizer: the methods in `_HOOKS`."""

    def __init__(self, owner: nn.Module | Optimizer, attached_hooks: Sequence[AttachedHook], clock: Clock) -> None:
        self.owner = owner
        self.clock = clock
        self.by_kind = {
            kind: [attached for attached in attached_hooks if attached.site.spec.kind == kind] for kind in _HOOKS
        }
        self.handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register a hook for each kind that has a site."""
        for kind, hook in _HOOKS.items():
            if self.by_kind[kind]:
                # PyTorch sets an attribute on one of them, which a bound method does not allow.
                self.handles.append(getattr(self.owner, f"register_{kind}_hook")(partial(getattr(self, hook))))

    def refresh(self) -> None:
        """Do nothing: the scheduled sites are determined when a state dict is saved or loaded."""

    def detach(self) -> None:
        """Remove the hooks in reverse order."""
        while self.handles:
            self.handles.pop().remove()


class StateDictHooks(_HooksOfKinds, InertWhenCopied):
    """The sites of the four state-dict kinds with role `entry` at one module."""

    def saving(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        """The hook before a state dict is created: the values to be saved."""
        self._fire_on_current("state_dict_pre")

    def saved(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG002
        """The hook after the module's entries were added to a state dict."""
        self._act("state_dict_post", state, prefix)

    def loading(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:  # noqa: ARG002
        """The hook before a state dict is loaded."""
        self._act("load_state_dict_pre", state, prefix)

    def loaded(self, module: nn.Module, incompatible: Any) -> None:  # noqa: ARG002
        """The hook after a state dict was loaded: the new values of the module."""
        self._fire_on_current("load_state_dict_post")

    def _fire_on_current(self, kind: str) -> None:
        if self.clock.closed:
            return
        sites = [attached.site for attached in self.by_kind[kind]]
        self._act(kind, {site.own_name: site.current_tensor for site in sites}, "")

    def _act(self, kind: str, state: dict[str, Any], prefix: str) -> None:
        for attached in [] if self.clock.closed else _scheduled(self.by_kind[kind], self.clock):
            key = prefix + attached.site.own_name
            if isinstance(state.get(key), Tensor):
                if not attached.count_and_check_readable(state[key]):
                    continue
                new = attached.fire(state[key].detach(), attached.site.own_name)
                if not attached.is_record_hook:
                    state[key] = new
            else:
                attached.count_opportunity()
                attached.count_miss(f"the state dict has no entry {attached.site.own_name!r} of this module")


class OptimizerStateDictHooks(_HooksOfKinds):
    """The sites of the four state-dict kinds with role `state.*`: the optimizer state of parameters."""

    def __init__(
        self, optimizer: Optimizer, owners: Owners, attached_hooks: Sequence[AttachedHook], clock: Clock
    ) -> None:
        super().__init__(optimizer, attached_hooks, clock)
        self.owners = owners

    def saving(self, optimizer: Optimizer) -> None:
        """The hook before a state dict is created."""
        self._fire_on_current("state_dict_pre", optimizer)

    def saved(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The hook after a state dict was created."""
        return self._act("state_dict_post", optimizer, state)

    def loading(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """The hook before a state dict is loaded."""
        return self._act("load_state_dict_pre", optimizer, state)

    def loaded(self, optimizer: Optimizer) -> None:
        """The hook after a state dict was loaded."""
        self._fire_on_current("load_state_dict_post", optimizer)

    def _fire_on_current(self, kind: str, optimizer: Optimizer) -> None:
        for attached in self._scheduled(kind, optimizer):
            parameter = attached.current_parameter()
            self._fire(attached, {} if parameter is None else optimizer.state.get(parameter, {}))

    def _act(self, kind: str, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        entries = {key: dict(entry) for key, entry in state["state"].items()}  # the caller's entries are not modified
        for attached in self._scheduled(kind, optimizer):
            parameter = id(attached.current_parameter())
            self._fire(attached, entries.get(order.index(parameter), {}) if parameter in order else {})
        return {**state, "state": entries}

    def _scheduled(self, kind: str, optimizer: Optimizer) -> list[AttachedHook]:
        return self.owners.sites_of(optimizer, _scheduled(self.by_kind[kind], self.clock))

    @staticmethod
    def _fire(attached: AttachedHook, entry: dict[str, Any]) -> None:
        name = attached.role.removeprefix("state.")
        if not isinstance(entry.get(name), Tensor):
            attached.count_opportunity()
            attached.count_miss(NO_STATE)
        elif attached.count_and_check_readable(entry[name]):
            new = attached.fire(entry[name].detach(), attached.site.own_name)
            if not attached.is_record_hook:
                entry[name] = new


def _scheduled(attached_hooks: Iterable[AttachedHook], clock: Clock) -> list[AttachedHook]:
    """Return the scheduled sites. For the run's own checkpoint, only those that record."""
    scheduled = [attached for attached in attached_hooks if attached.is_scheduled]
    if clock.in_checkpoint:
        for attached in scheduled:
            if not attached.is_record_hook:
                attached.count_exempt(CHECKPOINT)
        return [attached for attached in scheduled if attached.is_record_hook]
    return scheduled
