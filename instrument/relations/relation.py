"""The base class of relations, their registry, and what they read of a training."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..fields.registry import Registry
from ..hooks.clock import Clock
from ..plan.modules import named_modules
from ..values.nested import iter_tensors
from .observations import (
    AccumulatedGradient,
    BinaryLossCall,
    LoaderBatch,
    LossCall,
    PairLossCall,
    is_readable,
    version_of,
)

Source = Literal["inputs", "losses", "batches", "fingerprints"]


class Checked(NamedTuple):
    """The result of a check at one location."""

    holds: bool | None  # whether the relation holds; None if it cannot be checked
    value: float | None  # how much was compared, or how far the relation is violated
    text: str  # what was compared, how the relation is violated, or why it cannot be checked
    layer: str = ""  # the name of the module; empty for the run as a whole
    # The name of the parameter, the buffer or the loss function, or the location of a tensor; otherwise empty.
    path: str = ""


class RecordedFingerprint(NamedTuple):
    """The fingerprint of a parameter, its update or gradient, or of a part of the optimizer state that all processes have.

    Attributes:
        identity: The identity columns of the row of statistics, without the rank and the scope.
    """

    step: int
    layer: str
    kind: str
    role: str
    path: str
    identity: tuple[Any, ...]
    value: int


class ModelCall:
    """A call of the model. Its arguments are not copied.

    Attributes:
        args, kwargs: The arguments.
    """

    def __init__(self, signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        found = iter_tensors(_named(signature, args, kwargs))
        self._versions = {path: (tensor, version_of(tensor)) for path, tensor in found if is_readable(tensor)}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The dense tensors in the arguments by path, without those that were changed in place since the call."""
        return {path: tensor for path, (tensor, version) in self._versions.items() if version_of(tensor) == version}


def _named(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names in the signature of the model, or by their index."""
    try:
        named = dict(signature.bind(*args, **kwargs).arguments) if signature is not None else None
    except TypeError:
        named = None
    if named is None or signature is None:
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(name, {})
    return named


@dataclass
class Training:
    """What relations read of a training."""

    model: nn.Module
    optimizers: Sequence[Optimizer]  # possibly none
    clock: Clock  # of the probe
    scaler: GradScaler | None = None  # None without one, or if it is not enabled
    # The calls of the model in this step, and those of losses with gradients, for classes, binary targets and numbers, if the step is
    # checked and a relation reads them. At most 16 of each.
    inputs: list[ModelCall] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    binary_losses: list[BinaryLossCall] = field(default_factory=list)
    pair_losses: list[PairLossCall] = field(default_factory=list)
    # The first ones of data loaders in training, also those of earlier steps.
    batches: list[LoaderBatch] = field(default_factory=list)
    # Those that hooks recorded in earlier training steps, and that no relation has read.
    fingerprints: list[RecordedFingerprint] = field(default_factory=list)
    # The wrapper that keeps the parameters of all processes equal; None without one, or before the first call.
    replicated_by: DistributedDataParallel | None = None
    # Whether the wrapper does not average the gradients of the last call, as in its block `no_sync`.
    is_local: bool = False
    has_local_steps: bool = False  # whether an optimizer has made a step after such a call, as in local SGD
    is_checked: bool = False  # whether relations are checked in the current step
    # The gradients of a few parameters of each optimizer, if the step is checked.
    gradients: dict[Optimizer, list[AccumulatedGradient]] = field(default_factory=dict)

    @cached_property
    def signature(self) -> inspect.Signature | None:
        """The signature of the model; None for functions in C, which have none."""
        try:
            return inspect.signature(self.modules[""].forward)
        except (TypeError, ValueError):
            return None

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules of the model by layer name, in this step, without wrappers."""
        return named_modules(self.model)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the model by their first name, in this step."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in all_parameters(self.modules.items()):
            named.setdefault(id(parameter), (name, parameter))
        return dict(named.values())

    def end_step(self) -> None:
        """Forget what belongs to the step that ends."""
        for calls in (self.inputs, self.losses, self.binary_losses, self.pair_losses):
            calls.clear()
        for name in ("modules", "parameters"):
            self.__dict__.pop(name, None)


def all_parameters(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of each module by name, also those of another module. A module can be a part of itself."""
    for layer, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{layer}.{name}" if layer else name, parameter


class Relation(ABC):
    """A relation, from the start to the end of the block of a probe.

    Its methods must change nothing. Those without an implementation do nothing.

    Attributes:
        phases: The phases in which it is checked: at the end of a training step, or of an evaluation. Default: training steps.
        sources: What it reads of `training`. Default: only what is always available.
        on_all_ranks: Whether it is checked in each of several processes. Default: in the one of rank 0.
        error: The exception of a method before `check`, which reports it.
    """

    phases: ClassVar[tuple[str, ...]] = ("train",)
    sources: ClassVar[tuple[Source, ...]] = ()
    on_all_ranks: ClassVar[bool] = False

    def __init__(self, training: Training) -> None:
        self.training = training
        self.error: Exception | None = None

    def attach(self) -> None:  # noqa: B027 - optional
        """Read the model before the first step."""

    def evaluate(self) -> None:  # noqa: B027 - optional
        """Observe a call of the model in an evaluation."""

    def on_loss(self, call: LossCall) -> None:  # noqa: B027 - optional
        """Observe a call of cross-entropy in a checked step."""

    def before_step(self, optimizer: Optimizer) -> None:  # noqa: B027 - optional
        """Observe an optimizer before its step, in a checked step. It is not called if the step is compiled or captured."""

    def after_step(self, optimizer: Optimizer) -> None:  # noqa: B027 - optional
        """Observe an optimizer after its step, in a checked step. It is not called if the step is compiled or captured."""

    @abstractmethod
    def check(self) -> Iterator[Checked]:
        """Yield what does not hold, or one result that holds. Yield nothing if the relation does not apply to the step.

        It is called at the end of each step, or evaluation, with `training.is_checked`.
        """

    def check_end(self) -> Iterator[Checked]:
        """Yield what did not hold in the training as a whole. It is called after the last step, without hooks."""
        yield from ()

    def detach(self) -> None:  # noqa: B027 - optional
        """Remove what `attach` registered. It can be called several times."""


RELATIONS: Registry[type[Relation]] = Registry("relations", "relation", folder="instrument.relations")
"""The classes of relations by name, which is that of the rule that reads their rows, except for `constant_prediction`."""
