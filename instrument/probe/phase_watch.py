"""The phase of a trainer, read from the model at each call: whether it is in training mode and computes gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..hooks.clock import Clock
from ..hooks.hook_group import InertWhenCopied
from ..runtime.lazy_compiler import excluded_method
from .scheduled_hooks import ScheduledHooks


class PhaseWatch(InertWhenCopied):
    """Sets the phase from the mode of the model at each call: `train` or `eval`.

    Between two steps, the phase is `eval` from a call in evaluation mode or without gradients until the next other call.
    Within a step, a call in evaluation mode interrupts the training for its duration.

    A phase that other code sets stays until that code restores the previous one.
    """

    def __init__(
        self, model: nn.Module, clock: Clock, scheduled: ScheduledHooks, set_phase: Callable[[str], None]
    ) -> None:
        super().__init__((), clock)
        self.model = model
        self.scheduled = scheduled
        self.modules = list(entry_modules(model))  # whose calls are observed
        self._set_phase = set_phase
        self._phase = clock.moment.phase
        self._in_step = False
        self._trains_in_eval_mode = False
        self._is_interrupted = False
        self._interruption_hook: RemovableHandle | None = None  # its hook ends the interruption
        self._compiled_call: Callable[..., Any] | None = None

    def attach(self) -> None:
        """Attach the hooks. For a model compiled by `model.compile()`, wrap the compiled call: a hook would be part of its graph."""
        model, *parts = self.modules
        if model._compiled_call_impl is None:
            self.handles.append(model.register_forward_pre_hook(excluded_method(self.before_call), prepend=True))
        else:
            self._wrap_compiled_call()
        for part in parts:
            self.handles.append(part.register_forward_pre_hook(self.before_call_of_part, prepend=True))

    def _wrap_compiled_call(self) -> None:
        """Observe the calls of a compiled model; again after it was compiled once more."""
        call = self.model._compiled_call_impl
        if call is not None and call != self._call_compiled:
            self._compiled_call, self.model._compiled_call_impl = call, self._call_compiled

    def _unwrap_compiled_call(self) -> None:
        """Restore the compiled call. Watches of other probes may have wrapped this one."""
        call, outer = self.model._compiled_call_impl, None
        while call != self._call_compiled and isinstance(watch := getattr(call, "__self__", None), PhaseWatch):
            call, outer = watch._compiled_call, watch
        if call == self._call_compiled and outer is None:
            self.model._compiled_call_impl = self._compiled_call
        elif call == self._call_compiled and outer is not None:
            outer._compiled_call = self._compiled_call

    def begin_step(self, *, training_mode: bool = True) -> None:
        """Begin a training step of the trainer, which trains the model in training mode or not."""
        if self._compiled_call is not None:
            self._wrap_compiled_call()
        self._in_step, self._trains_in_eval_mode = True, not training_mode
        self._change("train")

    def end_step(self) -> None:
        self._end_interruption()  # compiled code may not call the hook that ends it
        self._in_step = False

    def observe(self) -> None:
        """Set the phase from the current mode of the model. Call it between two calls of the model."""
        self._change(self._phase_of_model())

    def before_call(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """The forward pre hook, which runs before all others of the module."""
        if self._begin_call():
            hook = excluded_method(self.after_call)
            self._interruption_hook = module.register_forward_hook(hook, always_call=True)

    def _begin_call(self) -> bool:
        """Set the phase of a call that begins. Return whether the call interrupts the training."""
        if self.clock.closed or self._is_interrupted:
            return False
        if not self._in_step:
            self.observe()
        elif self._phase_of_model() == "eval" and self.clock.moment.phase == self._phase:
            self.scheduled.interrupt("eval")
            self._is_interrupted = True
            return True
        return False

    def _call_compiled(self, *args: Any, **kwargs: Any) -> Any:
        assert self._compiled_call is not None, "only calls of a compiled model are replaced"
        interrupts = self._begin_call()
        try:
            return self._compiled_call(*args, **kwargs)
        finally:
            if interrupts and not self.clock.closed:
                self._end_interruption()

    def before_call_of_part(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The forward pre hook of a child. In a compiled model, it does nothing, and the graph has no break."""
        is_usual = torch.compiler.is_compiling() or self.clock.closed or (self._in_step and self.model.training)
        if not is_usual:
            self.before_call(module, args)

    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """The forward hook of a call that interrupts the training."""
        if not self.clock.closed:
            self._end_interruption()

    def _end_interruption(self) -> None:
        if self._interruption_hook is not None:
            self._interruption_hook.remove()
            self._interruption_hook = None
        if self._is_interrupted:
            self._is_interrupted = False
            self.scheduled.end_interruption()

    def _phase_of_model(self) -> str:
        if self._in_step:
            return "train" if self.model.training or self._trains_in_eval_mode else "eval"
        return "train" if self.model.training and torch.is_grad_enabled() else "eval"

    def _change(self, phase: str) -> None:
        if phase != self._phase and self.clock.moment.phase == self._phase:
            self._phase = phase
            self._set_phase(phase)

    def detach(self) -> None:
        """Remove the hooks, and restore the compiled call."""
        if self._interruption_hook is not None:
            self._interruption_hook.remove()
        if self._compiled_call is not None:
            self._unwrap_compiled_call()
        super().detach()


def entry_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a trainer or a method of the model calls: the model and its children.

    The children of a container without forward method take its place. Encoder layers are left out: PyTorch computes them in
    another way if they have hooks. So are TorchScript modules, which call no hooks.
    """
    yield model
    for child in model.children():
        if isinstance(child, nn.TransformerEncoderLayer | torch.jit.ScriptModule):
            continue
        if type(child).forward is nn.Module.forward:
            yield from list(entry_modules(child))[1:]
        else:
            yield child
