"""Detection of modules and parameters that are replaced during training."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import Clock
from ..hooks.hook_group_interface import InertWhenCopied
from ..tables.reasons import REPLACED


class ModuleWatch:
    """Detects hooked modules that are no longer part of the model."""

    def __init__(self, model: nn.Module, attached_hooks: Sequence[AttachedHook]) -> None:
        self.sites: dict[nn.Module, list[AttachedHook]] = {}
        for attached in attached_hooks:
            self.sites.setdefault(attached.site.layer.module, []).append(attached)
        self.slots = [
            (parent._modules, key, child)
            for parent in model.modules()
            if not isinstance(parent, torch.jit.ScriptModule)  # its modules cannot be replaced
            for key, child in parent._modules.items()
            if not isinstance(child, weakref.ProxyTypes) and child in self.sites
        ]

    def replaced(self) -> list[AttachedHook]:
        """Return the sites at modules that were replaced since the last call. Their coverage states it from now on."""
        gone = [(children, key, child) for children, key, child in self.slots if children.get(key) is not child]
        if not gone:
            return []
        self.slots = [slot for slot in self.slots if slot not in gone]
        attached_hooks = [attached for _, _, child in gone for attached in self.sites.pop(child, [])]
        for attached in attached_hooks:
            attached.default_reason = REPLACED
        return attached_hooks


class LoadWatch(InertWhenCopied):
    """Reports loaded state dicts. `assign=True` replaces parameters."""

    def __init__(self, model: nn.Module, clock: Clock, on_load: Callable[[], None]) -> None:
        super().__init__((), clock)
        self.model = model
        self.on_load = on_load

    def attach(self) -> None:
        """Register the hook."""
        self.handles.append(self.model.register_load_state_dict_post_hook(self.loaded))

    def loaded(self, module: nn.Module, incompatible: object) -> None:  # noqa: ARG002
        """The hook after a state dict was loaded."""
        if not self.clock.closed:
            self.on_load()
