"""The samples of each batch: the rows of the table `samples`.

A batch is named before its forward pass. Its rows are written if a hook stores a tensor in its micro-step. Values on a
GPU are copied when the step ends, as all numbers are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..actions.base import Context, SampleIds, StepContext
from ..errors import ConfigError, Problem
from ..hooks.clock import take
from ..tables.kinds import KINDS
from ..tables.message_template import Column, NumberColumn, StepColumns
from ..tables.schemas import TABLES
from ..values.containers import entries

TARGET_KEYS = ("target", "targets", "label", "labels", "y")
"""The entries of a batch that is a mapping in which targets are looked up."""


@dataclass
class SampleBatch:
    """The samples of one micro-step."""

    moment: StepContext
    rank: int
    ids: SampleIds  # one id per sample: int64 [samples], integers or strings
    targets: Tensor | None  # one number per sample: [samples]; None if they are unknown or not scalar
    is_checked: bool = field(kw_only=True)  # whether a recorded tensor must have as many samples in dimension 0

    def __post_init__(self) -> None:
        if self.targets is not None:  # the loop may modify its tensors in place before the step ends
            self.targets = self.targets.detach().clone()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def numbers(self) -> list[Tensor]:
        """The tensors on a device, in order."""
        return [part for part in (self.ids, self.targets) if isinstance(part, Tensor) and not part.is_cpu]

    def rows(self, fetched: Iterator[list[Any]]) -> SampleRows:
        """Return the rows of the table. `fetched` has the values of `numbers`, in order."""
        ids = _on_host(self.ids, fetched) if isinstance(self.ids, Tensor) else self.ids
        targets = None if self.targets is None else _on_host(self.targets, fetched)
        dtype = None if self.targets is None else str(self.targets.dtype).removeprefix("torch.")
        return SampleRows(self.moment, self.rank, ids, targets, dtype)


def _on_host(tensor: Tensor, fetched: Iterator[list[Any]]) -> list[Any]:
    return tensor.tolist() if tensor.is_cpu else next(fetched)


class SampleRows(StepColumns):
    """The rows of the samples of one batch."""

    schema = TABLES["samples"].plain_schema

    def __init__(
        self, moment: StepContext, rank: int, ids: Sequence[Any], targets: Sequence[float] | None, dtype: str | None
    ) -> None:
        self.moment = moment
        self.targets = np.array([] if targets is None else targets, np.float64)
        self._rank = rank
        self._ids = ids
        self._dtype = dtype

    @property
    def latest(self) -> tuple[int, str]:
        return self.moment.step, self.moment.phase

    def __len__(self) -> int:
        return len(self._ids)

    def columns(self) -> list[Column]:
        count = len(self)
        has_names, nothing = count > 0 and isinstance(self._ids[0], str), (None,) * count
        *numbers, phase = self.moment
        return [
            *(NumberColumn(np.full(count, number)) for number in numbers),
            (phase,) * count,
            NumberColumn(np.full(count, self._rank)),
            NumberColumn(np.arange(count)),
            nothing if has_names else NumberColumn(np.array(self._ids)),
            tuple(self._ids) if has_names else nothing,
            NumberColumn(self.targets) if len(self.targets) else nothing,
            (self._dtype,) * count,
        ]


class Samples:
    """Collects the batches whose rows are written: all, or those in which a tensor is stored."""

    def __init__(self, *, of_all_batches: bool) -> None:
        self.of_all_batches = of_all_batches
        self.expects_tensors = False  # whether a scheduled hook records tensors
        self._batch: SampleBatch | None = None
        self.finished: list[SampleBatch] = []  # the batches of the step whose rows are to be written
        self._has_tensor = False  # whether a tensor was stored in this micro-step
        self._has_kept = False  # whether a tensor was kept in memory
        self._kept: list[SampleBatch] = []  # the batches of tensors in memory
        self._sizes: set[int] = set()  # of dimension 0 of the tensors of modules

    @property
    def are_kept(self) -> bool:
        """Whether the rows of a batch that begins now may be written."""
        return self.of_all_batches or self.expects_tensors

    def begin(self, batch: SampleBatch) -> None:
        """Name the samples of the current micro-step.

        Raises:
            ConfigError: They are named already.
        """
        if self._batch is not None:
            message = "the batch of this micro-step is named already"
            fix = "call probe.end_micro_step() or probe.end_step() after each batch"
            raise ConfigError(Problem("probe.batch", message, fix=fix))
        self._batch = batch

    def note_tensor(self, context: Context, shape: Sequence[int], *, is_kept: bool = False) -> None:
        """Note that a tensor was stored, or kept in memory. `shape` is that of the complete tensor in the model."""
        kind = KINDS[context.kind]
        if kind.frequency == "micro_step":
            self._has_kept |= is_kept
            self._has_tensor |= not is_kept
            if kind.family == "module" and shape:
                self._sizes.add(shape[0])

    def end(self, *, is_checked: bool = True) -> None:
        """End the micro-step.

        Raises:
            ConfigError: No recorded tensor has as many samples in dimension 0 as the loop named.
        """
        if self._batch is None and not (self._has_tensor or self._has_kept):
            return
        batch, self._batch = self._batch, None
        has_tensor, self._has_tensor = self._has_tensor, False
        has_kept, self._has_kept = self._has_kept, False
        sizes, self._sizes = self._sizes, set()
        if batch is None or not (has_tensor or has_kept or self.of_all_batches):
            return
        # The backward pass of a micro-step in a pipeline.
        if any(each.moment == batch.moment for each in self.finished):
            return
        if is_checked and batch.is_checked and sizes and len(batch) not in sizes:
            message = "the number of ids differs from the size of dimension 0 of the recorded tensors"
            raise ConfigError(Problem("ids", message, len(batch), ", ".join(map(str, sorted(sizes)))))
        if has_tensor or self.of_all_batches:
            self.finished.append(batch)
        else:
            self._kept.append(batch)

    def limit_kept(self, periods: Collection[tuple[int, str]]) -> None:
        """Forget the batches of other steps and phases than those of the tensors in memory."""
        self._kept = [batch for batch in self._kept if (batch.moment.step, batch.moment.phase) in periods]

    def take_kept(self, periods: Collection[tuple[int, str]]) -> list[SampleBatch]:
        """Remove and return the batches of these steps and phases, whose tensors are written."""
        taken: list[SampleBatch] = []
        for batch in take(self._kept):
            (taken if (batch.moment.step, batch.moment.phase) in periods else self._kept).append(batch)
        return taken


def checked_ids(ids: Any) -> Tensor | Sequence[str]:
    """Return ids as an int64 tensor [samples] or as a list of strings.

    Raises:
        ConfigError: They are neither integers nor strings, have more than one dimension, or repeat an id. The ids of a
            tensor on a device are not compared, because this would wait for the device.
    """
    sample_ids = _ids_of(ids)
    if not isinstance(sample_ids, Tensor):
        values: Sequence[int | str] = sample_ids
    elif sample_ids.is_cpu:
        values = sample_ids.tolist()
    else:
        return sample_ids
    if len(set(values)) < len(values):
        seen: dict[int | str, int] = {}
        position = next(i for i, name in enumerate(values) if seen.setdefault(name, i) != i)
        repeated = values[position]
        given = f"{repeated!r} at the positions {seen[repeated]} and {position}"
        fix = "give each sample of the batch its own id, such as its index in the dataset"
        raise ConfigError(Problem("ids", "an id occurs twice in the batch", given, fix=fix))
    return sample_ids


def _ids_of(ids: Any) -> Tensor | Sequence[str]:
    if isinstance(ids, Tensor):
        if ids.dim() == 1 and not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            return ids.detach().to(torch.int64, copy=True)
        given = f"a {str(ids.dtype).removeprefix('torch.')} tensor of shape {list(ids.shape)}"
    else:
        array = _array(ids)
        if array is not None and array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
            return torch.from_numpy(array.astype(np.int64))
        if array is not None and array.ndim == 1 and all(isinstance(name, str) for name in ids):
            return [str(name) for name in ids]
        given = repr(ids)
    raise ConfigError(
        Problem("ids", "must be integers or strings, one for each sample", given, "[samples] integers or strings")
    )


def checked_targets(targets: Any, samples: int) -> Tensor | None:
    """Return targets as a tensor [samples], or integers [samples, positions]; None if there are none.

    Raises:
        ConfigError: They are not numbers, have another shape, or are not one for each sample or position.
    """
    if targets is None:
        return None
    if not isinstance(targets, Tensor):
        array = _array(targets)
        if array is None or array.dtype.kind not in "biuf":
            allowed = f"[{samples}] numbers"
            raise ConfigError(Problem("targets", "must be numbers, one for each sample", repr(targets), allowed))
        targets = torch.from_numpy(array)
    shape, allowed = list(targets.shape), f"shape [{samples}]"
    if targets.is_complex():
        raise ConfigError(Problem("targets", "must be real numbers", str(targets.dtype).removeprefix("torch.")))
    if not shape or shape[0] != samples:
        raise ConfigError(
            Problem("targets", f"one is required for each of the {samples} ids", f"shape {shape}", allowed)
        )
    if targets.numel() != samples and (targets.dim() != 2 or targets.is_floating_point()):
        fix = "pass one number for each sample, or leave 'targets' out"
        allowed = f"{allowed}, or integers [{samples}, positions]"
        raise ConfigError(Problem("targets", "must be scalars", f"shape {shape}", allowed, fix=fix))
    numbers: Tensor = targets
    return numbers


def _array(values: Any) -> np.ndarray[Any, Any] | None:
    try:
        return np.array(values)  # a writable copy
    except (TypeError, ValueError, RuntimeError):  # items of different shapes, or tensors on a device
        return None


def targets_of(batch: Any) -> Tensor | None:
    """Return the targets of a batch of the data loader.

    These are the entry of a mapping or of an object with fields, such as a dataclass, that is named in `TARGET_KEYS`; or the second
    item of a pair.

    Returns:
        The targets, real numbers of any shape [samples, ...]; None if the batch has none.
    """
    named = dict(entries(batch))
    targets = next((named[key] for key in TARGET_KEYS if key in named), None)
    if targets is None and isinstance(batch, list | tuple) and len(batch) == 2:
        targets = batch[1]
    return targets if isinstance(targets, Tensor) and targets.dim() and not targets.is_complex() else None


def scalar_targets(targets: Tensor | None, samples: int) -> Tensor | None:
    """Return targets as a tensor [samples]; None if there is not one number for each sample."""
    if targets is None or not len(targets) == targets.numel() == samples:
        return None
    return targets.flatten()
