"""The base class of relations, their registry, and what they read of a training."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..fields.registry import Registry
from ..hooks.clock import Clock
from ..values.nested import iter_tensors
from .loader_batches import LoaderBatch, is_readable
from .loss_calls import BinaryLossCall, LossCall, PairLossCall

Source = Literal["inputs", "losses", "batches", "fingerprints"]


class Checked(NamedTuple):
    """The result of a check at one location.

    Attributes:
        holds: Whether the relation holds; None if it cannot be checked.
        value: How much was compared, or how far the relation is violated.
        text: What was compared, how the relation is violated, or why it cannot be checked.
        layer: The name of the module; empty for the run as a whole.
        path: The name of the parameter or buffer, or the location of a tensor; empty for the module as a whole.
    """

    holds: bool | None
    value: float | None
    text: str
    layer: str = ""
    path: str = ""


class RecordedFingerprint(NamedTuple):
    """The fingerprint of a parameter, its update or gradient, or of a part of the optimizer state that all processes have.

    Attributes:
        scope: `averaged`, or `local` if it is unknown how the processes train together.
        identity: The identity columns of the row of statistics, without the rank and the scope.
    """

    step: int
    layer: str
    kind: str
    role: str
    path: str
    scope: str
    identity: tuple[Any, ...]
    value: int


class ModelCall:
    """A call of the model. Its arguments are not copied.

    Attributes:
        args, kwargs: The arguments.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._versions = {
            path: (tensor, version_of(tensor))
            for path, tensor in iter_tensors(_named(model, args, kwargs))
            if is_readable(tensor)
        }

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The dense tensors in the arguments by path, without those that were changed in place since the call."""
        return {path: tensor for path, (tensor, version) in self._versions.items() if version_of(tensor) == version}


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names in the signature of the model, or by their index."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    try:
        signature = inspect.signature(model.forward)
        named = dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # such as functions in C, which have no signature
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


def version_of(tensor: Tensor) -> int:
    """Return the number of operations that have changed a tensor in place; 0 for one of `torch.inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass
class Training:
    """What relations read of a training.

    Attributes:
        model: The model.
        optimizers: The optimizers, possibly none.
        clock: The clock of the probe.
        scaler: The gradient scaler; None without one, or if it is not enabled.
        inputs, losses, binary_losses, pair_losses: The calls of the model in this step, and those of losses with gradients, for
            classes, binary targets and numbers, if the step is checked and a relation reads them. At most 16 of each.
        batches: The first batches of data loaders in training, also those of earlier steps.
        fingerprints: Those that hooks recorded in earlier training steps, and that no relation has read.
        replicated_by: The wrapper that keeps the parameters of all processes equal; None without one, or before the first call.
        is_local: Whether the wrapper does not average the gradients of the last call, as in its block `no_sync`.
        is_checked: Whether relations are checked in the current step.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    clock: Clock
    scaler: GradScaler | None = None
    inputs: list[ModelCall] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    binary_losses: list[BinaryLossCall] = field(default_factory=list)
    pair_losses: list[PairLossCall] = field(default_factory=list)
    batches: list[LoaderBatch] = field(default_factory=list)
    fingerprints: list[RecordedFingerprint] = field(default_factory=list)
    replicated_by: DistributedDataParallel | None = None
    is_local: bool = False
    is_checked: bool = True


def calls_hooks(model: nn.Module) -> bool:
    """Return whether a hook on the model is called, and changes nothing.

    TorchScript calls no hooks. PyTorch computes an encoder layer with hooks in another way.
    """
    return not isinstance(model, nn.TransformerEncoderLayer | torch.jit.ScriptModule)


class Relation(ABC):
    """A relation, from the start to the end of the block of a probe.

    Hooks that it registers must change nothing, and have to return at once if `training.clock.closed` is set.

    Attributes:
        phases: The phases in which it is checked: at the end of a training step, or of an evaluation. Default: training steps.
        sources: What it reads of `training`. Default: only what is always available.
        on_all_ranks: Whether it is checked in each of several processes. Default: in the one of rank 0.
    """

    phases: ClassVar[tuple[str, ...]] = ("train",)
    sources: ClassVar[tuple[Source, ...]] = ()
    on_all_ranks: ClassVar[bool] = False

    def __init__(self, training: Training) -> None:
        self.training = training
        self.handles: list[RemovableHandle] = []
        self.error: Exception | None = None  # that of an observed step

    def attach(self) -> None:  # noqa: B027 - optional
        """Register hooks, and read the model before the first step. `handles` are removed at the end. Default: nothing."""

    def observe_steps(
        self,
        optimizer: Optimizer,
        before: Callable[[Optimizer], None] | None = None,
        after: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """Call functions before and after each checked step of an optimizer. A compiled or captured step calls none."""
        if before is not None:
            self.handles.append(optimizer.register_step_pre_hook(partial(self._observe, before)))
        if after is not None:
            self.handles.append(optimizer.register_step_post_hook(partial(self._observe, after)))

    def _observe(self, function: Callable[[Optimizer], None], optimizer: Optimizer, *arguments: object) -> None:  # noqa: ARG002
        if not self.training.is_checked:
            return
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # no values can be read
        if not (is_compiling() or is_captured):
            try:
                function(optimizer)
            except Exception as error:  # it reads values of any optimizer, and must not end its training
                self.error = error

    @abstractmethod
    def check(self) -> Iterator[Checked]:
        """Yield what does not hold, or one result that holds. Yield nothing if the relation does not apply to the step.

        It is called at the end of each step, or evaluation, with `training.is_checked`.
        """

    def check_end(self) -> Iterator[Checked]:
        """Yield what did not hold in the training as a whole. It is called after the last step, without hooks. Default: nothing."""
        yield from ()

    def detach(self) -> None:
        """Remove what was registered. It can be called several times."""
        while self.handles:
            self.handles.pop().remove()


def as_rate(value: object) -> float | None:
    """Return a learning rate as a number; None if it is no number, such as a function or one number for each parameter."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


RELATIONS: Registry[type[Relation]] = Registry("relations", "relation", folder="instrument.relations")
"""The classes of relations by name, which is that of the rule that reads their rows."""
