"""The base class of relations, their registry, and what they read of a training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..fields.registry import Registry
from ..hooks.clock import Clock

Source = Literal["inputs"]


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


@dataclass
class Training:
    """What relations read of a training.

    Attributes:
        model: The model.
        optimizers: The optimizers, possibly none.
        clock: The clock of the probe.
        scaler: The gradient scaler; None without one, or if it is not enabled.
        inputs: The positional and the keyword arguments of the calls of the model in this step, if it is checked and a relation
            reads them. At most 16 calls.
        is_checked: Whether relations are checked in the current step.
    """

    model: nn.Module
    optimizers: Sequence[Optimizer]
    clock: Clock
    scaler: GradScaler | None = None
    inputs: list[tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=list)
    is_checked: bool = True


class Relation(ABC):
    """A relation, from the start to the end of the block of a probe.

    Hooks that it registers must change nothing, and have to return at once if `training.clock.closed` is set.

    Attributes:
        phases: The phases in which it is checked: at the end of a training step, or of an evaluation. Default: training steps.
        sources: What it reads of `training`. Default: only what is always available.
    """

    phases: ClassVar[tuple[str, ...]] = ("train",)
    sources: ClassVar[tuple[Source, ...]] = ()

    def __init__(self, training: Training) -> None:
        self.training = training
        self.handles: list[RemovableHandle] = []

    def attach(self) -> None:  # noqa: B027 - optional
        """Register hooks, and read the model before the first step. `handles` are removed at the end. Default: nothing."""

    @abstractmethod
    def check(self) -> Iterator[Checked]:
        """Yield what does not hold, or one result that holds. Yield nothing if the relation does not apply to the step.

        It is called at the end of each step, or evaluation, with `training.is_checked`.
        """

    def detach(self) -> None:
        """Remove what was registered. It can be called several times."""
        while self.handles:
            self.handles.pop().remove()


RELATIONS: Registry[type[Relation]] = Registry("relations", "relation", folder="instrument.relations")
"""The classes of relations by name, which is that of the rule that reads their rows."""
