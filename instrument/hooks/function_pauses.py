"""Pauses of the modes that see the torch functions of modules; see `instrument.plan.mode_pauses`."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from ..plan.function_calls import module_frame
from ..plan.mode_pauses import needs_pause, register_pauses
from ..runtime.lazy_compiler import is_compiled_module
from ..tables.reasons import FAST_PATH, PARTLY_COMPILED
from .clock import Clock
from .functions import FunctionThreads
from .hook_group_interface import InertWhenCopied


class FunctionPauses(InertWhenCopied):
    """The hooks that pause the modes of all threads in modules that would compute something else with a mode.

    They are never suspended: an encoder layer without hooks takes PyTorch's fast path, which rounds differently.

    Args:
        modules: The modules whose functions are hooked.
        clock, threads: See `FunctionHooks`.
    """

    def __init__(self, modules: Iterable[nn.Module], clock: Clock, threads: FunctionThreads) -> None:
        super().__init__((), clock)
        self.modules = modules
        self.threads = threads

    def attach(self) -> None:
        """Register the hooks."""
        hooks = (FunctionPauses.pause, FunctionPauses.end, FunctionPauses.resume)
        pause, end, resume = (MethodType(hook, self) for hook in hooks)
        self.handles.extend(register_pauses(self.modules, pause, end, resume))

    def pause(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre hook of a module that may need a pause."""
        if is_compiling() or self.clock.closed or not self.threads.mode.running:
            return
        if (frame := module_frame()[0]) is not None and needs_pause(module, args, kwargs):
            self.threads.mode.pause(frame, PARTLY_COMPILED if is_compiled_module(module) else FAST_PATH)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """The forward hook of this module."""
        if not (is_compiling() or self.clock.closed):
            self.threads.mode.leave(module_frame()[0], is_paused=True)

    def resume(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """The forward pre hook of the first layer of an encoder."""
        if not (is_compiling() or self.clock.closed):
            self.threads.mode.resume()
