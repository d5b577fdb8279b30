"""What has to be watched while a loop runs: steps that a gradient scaler skips, modules and parameters that are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..kinds.causes import REPLACED
from ..kinds.live import Clock, LiveSite, Uncopied


class ScalerWatch:
    """Knows what a gradient scaler multiplies the loss by, and whether it let the optimizers make their steps."""

    def __init__(self, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        self.scaler = scaler
        self.found: list[Tensor | None] = []  # by each step that is made in the step that is running
        self.scales = (torch.tensor(scaler.get_scale()),) * 2  # after the step before, and after this one
        self.handles = [optimizer.register_step_pre_hook(self.before_step) for optimizer in optimizers]

    def scale(self) -> Tensor:
        """The factor, on the scaler's device."""
        current = self.scaler._get_scale_async()  # the public get_scale waits for the device
        return torch.ones(()) if current is None else current

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """An optimizer is called; one that unscales by itself is told by a tensor whether to do anything."""
        self.found.append(getattr(optimizer, "found_inf", None))

    def take(self) -> Tensor | float:
        """Whether the scaler skipped every optimizer in the step that has just ended, as 0 or 1, perhaps on the device."""
        found, self.found = self.found, []
        self.scales = (self.scales[1], self.scale().clone())
        told = [each for each in found if each is not None]
        if not found or len(told) < len(found):
            return 0.0 if found else 1.0
        return torch.stack([(each > 0).to(told[0].device, torch.float32) for each in told]).amin()

    def backed_off(self) -> bool:
        """Whether the scaler met a value that is not finite in the step that has just ended.

        This waits for the device, as the scaler did to decide on the step.
        """
        before, after = self.scales
        return bool(after < before.to(after.device))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


class StepWatch:
    """Knows whether an optimizer made a step, and the learning rate of the first one, whatever a scheduler has set since."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.first = optimizers[0]
        self.stepped = False
        self.used: Tensor | float | None = None
        self.handles = [optimizer.register_step_pre_hook(self.before_step) for optimizer in optimizers]

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """An optimizer is about to make its step."""
        self.stepped = True
        if optimizer is self.first:
            rate = optimizer.param_groups[0]["lr"]
            self.used = rate.clone() if isinstance(rate, Tensor) else rate

    def take_stepped(self) -> bool:
        """Whether any optimizer made a step in the step that has just ended."""
        stepped, self.stepped = self.stepped, False
        return stepped

    def take_rate(self) -> Tensor | float:
        """Of the first optimizer's first parameter group in that step; what is set now where the optimizer made none."""
        used, self.used = self.used, None
        return self.first.param_groups[0]["lr"] if used is None else used

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()


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
