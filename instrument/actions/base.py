"""What actions are given, and what they give to: the context of a firing, and the rows that it writes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..errors import ConfigError, Mistake
from ..stats.kernel import Values
from ..stats.merge import Part

UNKNOWN_CALL = -1
"""The `call` of a forward pass that is computed again where nothing tells which one it was."""


class Moment(NamedTuple):
    """When a hook runs: optimizer step (from 0), micro-step within it, epoch, and phase (`train` or `eval`)."""

    step: int
    micro_step: int
    epoch: int
    phase: str


@dataclass(slots=True)
class Context:
    """The second argument of a custom hook function: describes one call of one hook for one tensor.

    Attributes:
        hook: The name of the hook.
        kind: The hook kind.
        role: The role of the tensor, such as `output` or `grad_input`.
        layer: The name of the module; empty for the root module.
        module: The module.
        path: The path of the tensor in a nested value, or the name of the parameter within its module.
        moment: Step, micro-step, epoch and phase.
        call: The index of the module's call within the micro-step, from 0. -1 if it is unknown: a mechanism other than
            torch.utils.checkpoint recomputes one of several calls.
        backward: The index of the tensor's gradient, from 0. A double backward pass gives a second gradient, and so does a
            second pass through a retained graph. 0 for other tensors.
        recompute: Whether activation checkpointing recomputes the forward pass.
        value: For a gradient: the detached tensor that it belongs to, if available. For an update: the parameter after
            the update. Otherwise None.
        parameters: For a penalty on the loss: its parameters.
        seed: The seed of the run.
        scope: The part of the distributed tensor: `global` with one process, otherwise `local`, `averaged` or `shard`.
        rank: The rank of the process, from 0.
    """

    hook: str
    kind: str
    role: str
    layer: str
    module: nn.Module
    path: str
    moment: Moment
    call: int = 0
    backward: int = 0
    recompute: bool = False
    value: Tensor | Parameter | None = None
    parameters: tuple[Parameter, ...] = ()
    seed: int = 0
    scope: str = "global"
    rank: int = 0

    @property
    def step(self) -> int:
        """The optimizer step, from 0."""
        return self.moment.step

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a random generator for this call.

        It depends on the run's seed, the hook, the layer, the tensor and the moment, and where each of several processes has
        a tensor of its own, on the rank; on nothing else: the global random state is neither read nor moved, and a forward
        pass that is computed again gets the same numbers.

        Raises:
            LookupError: It is computed again in a way that leaves open which of several calls this is.
        """
        if self.call == UNKNOWN_CALL:
            raise LookupError(
                "the forward pass is computed again by other means than torch.utils.checkpoint, and the module was called "
                "several times: which of the calls this is cannot be told, nor which random numbers it had"
            )
        key = repr((self.seed, self.hook, self.layer, self.role, self.path, self.moment, self.call, self.backward))
        if self.rank and self.scope == "local":
            key += f" of rank {self.rank}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


@dataclass(slots=True)
class Effect:
    """What an intervention changed at one firing; the numbers may still be on the device.

    Attributes:
        numel: Elements of the tensor.
        measures: changed elements, L2 norm before, L2 norm after, as three numbers or a float64 tensor [3].
        factor: What the tensor was multiplied by, where that is one number: a number, or a tensor of one element.
    """

    numel: int
    measures: Values
    factor: float | Tensor | None = field(default=None)


class Effects(Protocol):
    """Where the effects of interventions go."""

    def add_effect(self, context: Context, effect: Effect) -> None:
        """What one intervention changed."""


class Rows(Effects, Protocol):
    """Where the rows of a firing go."""

    def add_stats(self, context: Context, names: tuple[str, ...], values: Values) -> None:
        """The statistics of one tensor, in the order of `names`."""

    def merges(self, context: Context) -> bool:
        """Whether a tensor is the part of one that several processes have, of which there is to be one row."""

    def add_part(self, context: Context, names: tuple[str, ...], part: Part, dead: Tensor | None) -> None:
        """Of such a tensor what `instrument.stats.merge` makes statistics of these names of; and which units
        are dead, bool [units], where that is asked for and has a meaning."""

    def add_sketch(self, context: Context, levels: tuple[float, ...], bins: int, sketch: Tensor) -> None:
        """Of such a tensor what it makes quantiles and a histogram of, float64 [numbers]."""

    def add_distribution(self, context: Context, levels: tuple[float, ...], bins: int, values: Values) -> None:
        """Quantiles at these levels and a histogram of so many bins, as `instrument.stats.distribution` gives them."""

    def add_tensor(
        self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        """A tensor to be kept, in a type or in its own: it is copied here and now, since it may be written to next."""


class Archive(Protocol):
    """Where the tensors of other runs are found."""

    def open(self, run: str, hook: str | None, where: str) -> None:
        """Make sure that there is such a run, with tensors of such a hook; `where` is the spec's key in the configuration.

        Raises:
            ConfigError: There is none.
        """

    def find(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """The tensor that was recorded at the layer, role, path and call of a context, of the same batch of the step.

        Args:
            run: The folder of the run.
            hook: The record hook that kept it; any without it.
            step: The step at which it was kept; the context's without it.
            context: The firing that it is wanted for.

        Raises:
            LookupError: There is none, or several.
        """


class NoArchive:
    """The archive of a loop that has none."""

    def open(self, run: str, hook: str | None, where: str) -> None:  # noqa: ARG002
        """There is no such run.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(Mistake(f"{where}.run", "this loop has no archive of other runs", written=run))

    def find(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """There is no such tensor.

        Raises:
            LookupError: Always.
        """
        raise LookupError(f"no archive of other runs holds {run}, step {step}, hook {hook}, layer {context.layer}")


class Action(Protocol):
    """What is done at every site of one spec."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """All tensors of the spec that are about to be acted on one by one, where they are at hand together."""

    def __call__(self, tensor: Tensor, context: Context) -> Tensor | None:
        """See a tensor in a context; give the tensor to put in its place, or None to leave it as it is."""
