"""What has to be watched while a loop runs: steps that a gradient scaler skips, modules and parameters that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..kinds.causes import REPLACED
from ..kinds.live import Clock, LiveSite, Uncopied


class ScalerWatch:
    """Knows what a gradient scaler multiplies the loss by, and whether it let the optimizer make its step."""

    def __init__(self, scaler: GradScaler, optimizer: Optimizer | None) -> None:
        self.scaler = scaler
        self.stepped = False
        self.found_inf: Tensor | None = None
        self.handle: RemovableHandle | None = None
        if optimizer is not None:
            self.handle = optimizer.register_step_pre_hook(self.before_step)

    def scale(self) -> Tensor:
        """The factor, on the scaler's device."""
        current = self.scaler._get_scale_async()  # the public get_scale waits for the device
        return torch.ones(()) if current is None else current

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The optimizer is called; one that unscales by itself is told by a tensor whether to do anything."""
        self.stepped = True
        self.found_inf = getattr(optimizer, "found_inf", None)

    def take(self) -> Tensor | float:
        """Whether the step that has just ended was skipped, as 0 or 1, perhaps still on the device."""
        stepped, found = self.stepped, self.found_inf
        self.stepped, self.found_inf = False, None
        if not stepped:
            return 1.0
        return 0.0 if found is None else (found > 0).to(torch.float32)

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()


class RateWatch:
    """Knows the learning rate that the optimizer's last step was made with, whatever a scheduler has set since."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.used: Tensor | float | None = None
        self.handle = optimizer.register_step_pre_hook(self.before_step)

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The optimizer is about to use it."""
        rate = optimizer.param_groups[0]["lr"]
        self.used = rate.clone() if isinstance(rate, Tensor) else rate

    def take(self) -> Tensor | float:
        """Of the first parameter group, in the step that has just ended; what is set now where none was made."""
        used, self.used = self.used, None
        return self.optimizer.param_groups[0]["lr"] if used is None else used

    def detach(self) -> None:
        """Remove the hook."""
        self.handle.remove()


class ModuleWatch:
    """Notices modules that hooks are on and that stand in the model no more."""

    def __init__(self, model: nn.Module, lives: Sequence[LiveSite]) -> None:
        self.sites: dict[nn.Module, list[LiveSite]] = {}
        for live in lives:
            self.sites.setdefault(live.site.layer.module, []).append(live)
        self.slots = [
            (parent._modules, key, child)
            for parent in model.modules()
            for key, child in parent._modules.items()
            if child in self.sites
        ]

    def replaced(self) -> list[LiveSite]:
        """The sites at modules that were replaced since the last time; their ledger says so from now on."""
        gone = [(children, key, child) for children, key, child in self.slots if children.get(key) is not child]
        if not gone:
            return []
        self.slots = [slot for slot in self.slots if slot not in gone]
        lives = [live for _, _, child in gone for live in self.sites.pop(child, [])]
        for live in lives:
            live.absent = REPLACED
        return lives


class LoadWatch(Uncopied):
    """Tells when a state dict has been loaded: `assign=True` puts new parameters in the place of the old ones."""

    def __init__(self, model: nn.Module, clock: Clock, tell: Callable[[], None]) -> None:
        self.clock = clock
        self.tell = tell
        self.handle = model.register_load_state_dict_post_hook(self.loaded)

    def loaded(self, module: nn.Module, incompatible: object) -> None:  # noqa: ARG002
        """PyTorch's hook."""
        if not self.clock.closed:
            self.tell()

    def detach(self) -> None:
        """Remove the hook."""
        self.handle.remove()
