"""The interface of actions: the context of a call, and where actions write their rows and read recorded tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..errors import ConfigError, Problem
from ..stats.cpu_kernel import Slab
from ..stats.measure import Measured, on_host
from ..stats.table_rows import Measure
from ..values.dtensor import NOT_SHARDED, Shards, module_type
from .tensor_selection import TensorSelection

UNKNOWN_CALL = -1
"""The index of the original call of a recomputed forward pass if it is unknown."""
UNKNOWN_RECOMPUTED = "the forward pass is recomputed, but the call is unknown"
KNOWN_RECOMPUTED = "use torch.utils.checkpoint with use_reentrant=False"


Number = float | Tensor | None
"""A number, a scalar on a device, or None if it is not defined."""
Numbers = Mapping[str, Number]
"""Numbers by name."""
SampleIds = Tensor | Sequence[int] | Sequence[str]
"""One id for each sample of a batch."""


class StepContext(NamedTuple):
    """The time at which a hook runs."""

    step: int  # the optimizer step, from 0
    micro_step: int  # the index of the micro-step within the step, from 0
    epoch: int  # the epoch, from 0
    phase: str  # `train`, `forward`, `eval` or `probe`


class NotKeptError(LookupError):
    """A hook function asks for tensors that no hook has kept in this step."""


class KeptTensors(dict[str, Mapping[str, Tensor]]):
    """The tensors that hooks with `keep_as` kept in this step: by the name, then by the layer.

    For nested values, the path follows the layer and a dot. A later call or micro-step replaces the tensor.

    Raises:
        NotKeptError: No hook has kept a tensor by this name.
    """

    def __missing__(self, name: str) -> Mapping[str, Tensor]:
        kept = ", ".join(self) or "none"
        raise NotKeptError(f"no hook has kept a tensor as {name!r} in this step before this call (kept: {kept})")


@dataclass(slots=True)
class Parts:
    """The parts of a tensor that a hook with `split_dim` gets one by one, while it does."""

    whole: Tensor  # with one part per index of dimension 0
    parts: Sequence[Tensor]
    # The sums of all parts that a function of statistics has formed at once: [parts] each.
    sums: dict[Any, Sequence[Tensor]] = field(default_factory=dict)


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
        call: The index of the module's call within the micro-step, from 0. -1 if activation checkpointing recomputes a call
            whose index is unknown.
        backward: The index of the tensor's gradient, from 0. A double backward pass gives a second gradient, and so does a
            second pass through a retained graph. 0 for other tensors.
        recompute: Whether activation checkpointing recomputes the forward pass.
        origin: The index of the call that this one repeats in the backward pass, with the same random numbers. None, or the same as
            `call`, if this call repeats no other one. -1 if it is unknown.
        value: For a gradient: the detached tensor that it belongs to, if available. For an update: the parameter after
            the update. For the change of a module: a copy of its input. Otherwise None.
        parameters: For a penalty on the loss: its parameters.
        seed: The seed of the run.
        scope: The part of the distributed tensor: `global` with one process, otherwise `local`, `averaged` or `shard`.
        shards: How the tensors of several processes form the tensor of one process.
        rank: The rank of the process, from 0.
        selection: The part of the complete tensor that the hook selects: its `shape` is that of the complete tensor, and
            its method `of` returns the same part of another tensor. None for a complete tensor.
        complete: The complete tensor, if the hook selects a part of one tensor. Otherwise None.
        ids: One id for each sample of the batch: its index in the dataset, or what the loop passed to `probe.batch`. None if
            the loop named no samples.
        targets: The targets of the batch, as the task or the loop gave them: [samples], or [samples, positions]. None if unknown.
        tensors: The tensors that hooks with `keep_as: NAME` kept in this step: `tensors[NAME][LAYER]` is a copy of the
            complete tensor after the action, with its graph.
        state: What statistics of this location keep from one call to the next, by name.
        holds: Whether the condition of `when` holds: true, or on a device a bool tensor with one element, because the host
            does not wait for it. The function then runs in any case, and its result is used where the condition holds. None
            without a condition.
        unit_dim: The dimension of the units that the hook names. None for the default.
        measured: For a record hook with statistics: the sums of the tensor. Otherwise None.
        split: With `split_dim`: all parts of the tensor, and the index of this one. Otherwise None.
    """

    hook: str
    kind: str
    role: str
    layer: str
    module: nn.Module
    path: str
    moment: StepContext
    call: int = 0
    backward: int = 0
    recompute: bool = False
    origin: int | None = None
    value: Tensor | Parameter | None = None
    parameters: tuple[Parameter, ...] = ()
    seed: int = 0
    scope: str = "global"
    shards: Shards = NOT_SHARDED
    rank: int = 0
    selection: TensorSelection | None = None
    complete: Tensor | None = None
    ids: SampleIds | None = None
    targets: Tensor | None = None
    tensors: KeptTensors = field(default_factory=KeptTensors)
    state: dict[str, Any] = field(default_factory=dict)
    holds: bool | Tensor | None = None
    unit_dim: int | None = None
    measured: Measured | None = None
    split: tuple[Parts, int] | None = None

    @property
    def step(self) -> int:
        """The optimizer step, from 0."""
        return self.moment.step

    @property
    def site(self) -> tuple[Any, ...]:
        """The identity columns of a row of this call without the moment."""
        return (
            self.rank,
            self.hook,
            self.layer,
            module_type(self.module),
            self.kind,
            self.role,
            self.path,
            self.call,
            self.backward,
            self.recompute,
            self.shards.mesh,
            self.shards.placement,
            self.scope,
        )

    def without_tensors(self) -> Context:
        """Return a copy that keeps no tensor in memory."""
        nothing: dict[str, Any] = dict.fromkeys(("value", "complete", "ids", "targets", "measured", "holds"))
        return replace(self, tensors=KeptTensors(), state={}, **nothing)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return a random generator for this call.

        Its seed depends only on the run's seed, the hook, the layer, the tensor and the moment. With several processes
        whose tensors differ, it also depends on the rank. The global random state is not used. A recomputed forward
        pass gets the same numbers.

        Raises:
            LookupError: The forward pass is recomputed and the index of the call is unknown.
        """
        call = self.call if self.origin is None else self.origin
        if call == UNKNOWN_CALL:
            raise LookupError(
                f"{UNKNOWN_RECOMPUTED}: cannot reproduce the random numbers of the original call; {KNOWN_RECOMPUTED}"
            )
        step, micro_step, epoch, phase = self.moment
        # This text determines the random numbers of existing runs. It does not change with the names of classes.
        moment = f"Moment(step={step!r}, micro_step={micro_step!r}, epoch={epoch!r}, phase={phase!r})"
        before = ", ".join(map(repr, (self.seed, self.hook, self.layer, self.role, self.path)))
        key = f"({before}, {moment}, {call!r}, {self.backward!r})"
        batch = self.rank if self.shards.batch is None else self.shards.batch
        if batch and self.scope == "local":
            key += f" of rank {batch}"
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


EFFECT = ("numel", "changed", "norm_before", "norm_after", "factor", "held")
"""The numbers of an effect as a row of a slab; NaN for no value."""


@dataclass(slots=True)
class Effect:
    """The change that an intervention made in one call. The numbers may still be on the device."""

    numel: int  # the number of elements of the tensor
    # The number of changed elements, the L2 norm before and the L2 norm after; None or NaN for no value. On a device: the number, and what
    # was measured before and after.
    measures: Sequence[float | Tensor | Measured | None]
    factor: Number = None  # a number, or a tensor with one element, if the intervention multiplied the tensor by it
    held: bool | Tensor | None = None  # whether the condition of the hook held; None without a condition

    @property
    def numbers(self) -> list[Tensor]:
        """The numbers on a device: those of `measures`, then the factor, then `held`."""
        given = (each.on_device.row if isinstance(each, Measured) and each.on_device else each for each in self._given)
        return [number for number in given if isinstance(number, Tensor)]

    @property
    def _given(self) -> tuple[float | Tensor | Measured | None, ...]:
        return (*self.measures, self.factor, self.held)

    def row(self, fetched: Iterator[list[float]] | None = None) -> list[float]:
        """Return the numbers in the order of `EFFECT`. `fetched` are the `numbers` on the host; without them, these are NaN."""
        if fetched is None and self.numbers:
            return [math.nan] * len(EFFECT)
        numbers: list[float] = [self.numel]
        for number in self._given:
            if isinstance(number, Measured):
                assert fetched is not None, "the sums are on a device"
                sums = on_host([number], np.array([next(fetched)]))
                numbers.append(float(Measured(sums[0]).statistic("l2")))
            elif isinstance(number, Tensor) and fetched is not None:
                numbers += next(fetched)
            else:
                numbers.append(math.nan if number is None else float(number))
        return numbers


class Rows(Protocol):
    """Receives the rows of an action."""

    def add_effect(self, context: Context, effect: Effect) -> None:
        """Add the effect of one intervention."""

    def memory(self, device: torch.device) -> Tensor | None:
        """Return memory for the sums of one tensor on a device; None for the CPU."""

    def add_stats(
        self, context: Context, shape: tuple[int, ...], names: tuple[str, ...], measured: Measured, custom: Numbers
    ) -> None:
        """Add the statistics of one tensor: built-in ones in column order, then custom ones, which may be scalars on a device."""

    def slab_of(self, context: Context, table: str = "stats") -> Slab | None:
        """Return the slab of a table for plain tensors of a site; None if another process may write its rows, or without the kernel."""

    def slot(self, table: str, context: Context, names: tuple[str, ...], *, is_scaled: bool = False) -> int:
        """Return the slot of the rows of a call, for `slab_of` and `record_plain_effect`.

        Args:
            table: `stats` or `effects`.
            context: The call. Its moment is ignored.
            is_scaled: Whether the tensor was multiplied by the scale of the gradient scaler; see `set_scale`.
        """

    def set_scale(self, scale: Tensor) -> bool:
        """Set the scale by which scaled rows of this step are divided: always the same tensor. Call it before each of them.

        Return whether the rows of this step so far have the same scale. If not, the row has to be measured without it.
        """

    def batched_launch(self) -> AbstractContextManager[None]:
        """Return a block in which plain tensors on a device are measured with one launch per device and dtype, when it ends.

        They must not be changed or freed in the block.
        """

    def record_plain_effect(
        self, before: Tensor, after: Tensor, slot: int, moment: StepContext, factor: Number, held: bool | None
    ) -> bool:
        """Add the effect of an intervention on a plain tensor; see `Effect`. Return false if the tensors are not plain."""

    def merges(self, context: Context) -> bool:
        """Return whether the tensor is a shard or a batch shard whose row is computed from all processes."""

    def add_part(self, context: Context, names: tuple[str, ...], part: Measured, dead: Tensor | None) -> None:
        """Add this process's part of the statistics of such a tensor.

        Args:
            names: The statistics to compute from all parts; see `instrument.stats.sums`.
            part: The sums of the part.
            dead: Which units are dead, bool [units]; None if not requested, or if no two parts have the same units.
        """

    def add_line(
        self, context: Context, text: str, names: tuple[str, ...], measured: Measured, custom: Numbers
    ) -> None:
        """Add a line to print for one tensor; see `add_stats`. `text` is the description of the tensor."""

    def add_row(self, table: str, context: Context, measure: Measure, tensor: Tensor) -> None:
        """Measure a tensor for a table other than `stats`, and add a row, or this process's part of it."""

    def add_tensor(
        self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        """Copy a tensor, or a part of one with `source_shape`, before this returns: it may be modified in place afterwards."""


class Archive:
    """Provides the recorded tensors of other runs. This one, of a probe that was created without an archive, has none."""

    def __init__(self) -> None:
        self.memo: dict[Hashable, Tensor] = {}

    def open(self, run: str, hook: str | None, where: str, *, field: str = "run") -> None:  # noqa: ARG002
        """Check that a run exists and contains tensors of a hook.

        Raises:
            ConfigError: The run or its tensors do not exist.
        """
        message = "this probe was created without an archive of other runs"
        raise ConfigError(Problem(f"{where}.{field}", message, given=run))

    def find(self, run: str, hook: str | None, step: int | None, context: Context, *, pinned: bool = False) -> Tensor:
        """Return the tensor that was recorded for the same layer, role, path, call and batch.

        Args:
            step: The step at which the tensor was recorded; None for the step of `context`.
            pinned: Whether the tensor is in pinned memory, from which a GPU copies.

        Returns:
            The tensor in CPU memory. It must not be modified.

        Raises:
            LookupError: No tensor matches, or several do.
        """
        raise NotImplementedError

    def of_samples(self, run: str, hook: str | None, step: int | None, context: Context) -> Tensor:
        """Return what was recorded for the samples of the current batch, in any batch of the same layer, role, path and call.

        Args:
            step: The step at which it was recorded; None for any.
            context: The call that uses the values. Its `ids` name the samples.

        Returns:
            [samples, ...] in CPU memory, without dimensions of size 1 at the end.

        Raises:
            ConfigError: The run has no tensors with samples at this place, or several of a sample.
            LookupError: The samples have no names, or the run has no values of one of them.
        """
        raise NotImplementedError

    def tensors_at(self, run: str, hook: str | None, layer: str, context: Context, *, where: str) -> Iterator[Tensor]:
        """Yield all tensors that were recorded at a layer, with the role and the path of a call.

        Raises:
            ConfigError: There are none, or several hooks recorded them.
        """
        raise NotImplementedError


class Action:
    """The action of one spec. It is called for the tensors of all sites of the spec."""

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Receive all tensors of the spec before each call. Only kinds that have all tensors at once call it."""

    def __call__(self, tensor: Tensor, context: Context) -> Tensor | None:
        """Process one tensor. Return the tensor that replaces it, or None to keep it."""
        raise NotImplementedError
