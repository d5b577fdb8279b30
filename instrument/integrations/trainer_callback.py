"""Base class of the trainer callbacks: attaches hooks while a trainer runs. For times without a callback, functions are observed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config.spec_file import Specs, hook_sets
from ..errors import ConfigError, Problem
from ..probe.phase_watch import PhaseWatch
from ..runtime.deferred_interrupts import signal_safe_contextmanager, uninterrupted
from ..values.dtensor import own_rank
from . import HOOKS, OUT
from .attach import attach
from .attached_probe import AttachedProbe

Listener = Callable[[list[Tensor]], None]


class FunctionWithListeners:
    """A function of a module, or a method of a class. While there are listeners, each call passes its tensors to them first.

    The argument with this name has the tensors: one, or an iterable.
    """

    def __init__(self, owner: Any, name: str, argument: str) -> None:
        self._owner, self._name, self._argument = owner, name, argument
        self._listeners: list[Listener] = []
        self._original = self._observed = getattr(owner, name)
        self._parameters = signature(self._original)

    def _observe(self) -> None:
        """Replace the function, which other code may have replaced as well."""
        self._original = original = getattr(self._owner, self._name)
        self._listeners = listeners = list[Listener]()

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            call = self._parameters.bind(*args, **kwargs)
            given = call.arguments[self._argument]
            tensors = [given] if isinstance(given, Tensor) else list(given)
            call.arguments[self._argument] = given if isinstance(given, Tensor) else tensors  # an iterator ends
            for listener in tuple(listeners):
                listener(tensors)
            return original(*call.args, **call.kwargs)

        self._observed = observed
        setattr(self._owner, self._name, observed)

    @signal_safe_contextmanager
    def before(self, listener: Listener) -> Iterator[None]:
        """Call a listener with the tensors before each call, for the duration of a `with` block."""
        try:
            try:
                with uninterrupted():
                    if not self._listeners:
                        self._observe()
                    self._listeners.append(listener)
                yield
            finally:
                self._remove(listener)
        finally:  # a signal can arrive before `_remove` defers it
            self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with uninterrupted():
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners and getattr(self._owner, self._name) is self._observed:
                setattr(self._owner, self._name, self._original)


CLIPPING = FunctionWithListeners(torch.nn.utils, "clip_grad_norm_", "parameters")


class TrainerCallbackBase:
    """Hook specs, the output folder, and the probe after attaching. The arguments are those of `instrument.attach`.

    Without specs, as in callbacks that a trainer creates by name, the environment variable `INSTRUMENT_HOOKS` selects a YAML file or a
    hook set, and `INSTRUMENT_OUT` the folder, by default `runs/trainer`.

    Raises:
        ConfigError: There are no specs, and `INSTRUMENT_HOOKS` is not set.
    """

    _watch: PhaseWatch  # while the hooks are attached

    def __init__(
        self,
        specs: Specs | None = None,
        *,
        out: str | Path | None = None,
        overwrite: bool = False,
        seed: int = 0,
        rules: Mapping[str, Any] | Literal["default"] | None = "default",
    ) -> None:
        if specs is None:
            specs, out = os.environ.get(HOOKS, ""), out or os.environ.get(OUT, "runs/trainer")
        if specs == "":
            message = "no hooks: the environment variable is not set"
            allowed = f"a YAML file, or a hook set: {', '.join(hook_sets())}"
            raise ConfigError(Problem(HOOKS, message, allowed=allowed, fix=f"{HOOKS}=hooks.yaml, or pass specs"))
        self.specs = specs
        self.out = out
        self._options: dict[str, Any] = {"overwrite": overwrite, "seed": seed, "rules": rules}
        self._block: AbstractContextManager[None] = nullcontext()  # in which the hooks are attached
        self._probe: AttachedProbe | None = None

    @property
    def probe(self) -> AttachedProbe:
        """The probe of the current training, or of the last one.

        Raises:
            RuntimeError: Training has not started yet.
        """
        if self._probe is None:
            raise RuntimeError("no probe: training has not started yet")
        return self._probe

    @property
    def _is_attached(self) -> bool:
        return self._probe is not None and not self._probe.clock.closed

    def _attach(self, model: nn.Module, **options: Any) -> None:
        """Attach to the model until `_detach`; see `_attached`. After an exception or an interrupt, nothing is attached."""
        block = self._attached(model, **options)
        try:
            block.__enter__()
            self._block = block
        except BaseException as error:
            block.__exit__(type(error), error, error.__traceback__)
            raise

    def _detach(self, error: BaseException | None = None) -> None:
        """Detach the hooks, if they are attached. `error` is the exception that ended the training, if any."""
        self._block.__exit__(
            None if error is None else type(error), error, None if error is None else error.__traceback__
        )

    @signal_safe_contextmanager
    def _attached(
        self,
        model: nn.Module,
        *,
        clipped_by: str | None,
        around: AbstractContextManager[None] | None = None,
        **more: Any,
    ) -> Iterator[None]:
        options = self._options | more
        with (
            around or nullcontext(),
            attach(model, self.specs, out=self.out, steps_by_loop=True, **options) as self._probe,
        ):
            self._watch = self._probe.follow_model()
            if clipped_by is not None:
                self._report_clipping(self._probe, clipped_by)
            yield

    def _report_clipping(self, probe: AttachedProbe, clipped_by: str) -> None:
        """Write an event that states which gradients hooks see around the clip. Print it if there are such hooks."""
        message = (
            f"the trainer clips gradients ({clipped_by}). Hooks of kind parameter_grad and step_pre, and the rules that read "
            "them, see the gradients before the clip; kind step_post with role param_grad sees the clipped gradients"
        )
        probe.event("clipping", message, severity="info")
        specs = probe.plan.specs.values()
        if own_rank() == 0 and any(
            spec.tensor_role == "param_grad" and spec.definition.frequency == "step" for spec in specs
        ):
            print(f"instrument: {message}")

    def _write_losses(self, losses: Mapping[str, Any], *, seconds: float) -> None:
        """Write the losses of an evaluation between two steps by the name of their data set: empty if there is only one."""
        if self._is_attached and self.probe.phase == "eval":
            ends = [f"_{name}" if name else "" for name in losses]
            names = ["".join(c if f"_{c}".isidentifier() else "_" for c in f"loss{end}") for end in ends]
            self.probe.write_metrics(seconds=seconds, **dict(zip(names, losses.values(), strict=True)))

    def _end_evaluation_batch(self) -> None:
        """End the micro-step of an evaluation batch. Evaluations before and after the training are not recorded."""
        if self._is_attached and self.probe.phase == "eval":
            self.probe.end_micro_step()
