"""The cross entropy of a language model by the position in the sequence: the table `position_losses`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, Problem
from ..values.dtensor import Shards
from ..values.nested import to_device
from .merge import Array
from .portable import constants, parts_of, softmax_of, widest
from .table_rows import HookCall, Measure

_FIX = (
    "call probe.batch(ids=ids, targets=targets) before the forward pass, with the class that each of the logits predicts: "
    "targets[n, t] is the token at position t + 1; or use a task with the method sample_targets, such as task=next_token"
)


@dataclass(frozen=True)
class PositionLosses(Measure):
    """The mean loss of the positions in each bin; see `instrument.stats.table_rows.Measure`."""

    # The first position of each bin, ascending. The last bin has no end.
    position_losses: tuple[int, ...]
    # The targets of the batch: [N, T]; or [N], those of the last position. Integers, of which -100 and others that are no class do not
    # count. None if they are unknown.
    targets: Tensor | None = field(default=None, repr=False, compare=False)  # the others are equal in all processes

    @property
    def size(self) -> int:
        return 2 * len(self.position_losses)

    def of_call(self, tensor: Tensor, call: HookCall) -> PositionLosses | None:
        """Return the measure of a call; None for a tensor that is not [N, T, classes]. See `Measure`.

        Raises:
            ConfigError: The targets are unknown, or do not match the logits.
            ValueError: The logits are sharded along their positions or classes.
        """
        if tensor.dim() != 3 or not tensor.is_floating_point() or tensor.is_nested:
            return None
        if {1, 2} & {*call.shards.dims}:
            raise ValueError("logits that are sharded along their positions or classes have no losses by position")
        targets, where = call.targets, f"hooks.{call.hook}.position_losses"
        if targets is None:
            raise ConfigError(Problem(where, "the targets of the batch are unknown", fix=_FIX))
        is_integer = not (targets.is_floating_point() or targets.is_complex())
        if not is_integer or targets.shape not in (tensor.shape[:2], tensor.shape[:1]):
            given = f"{str(targets.dtype).removeprefix('torch.')} {list(targets.shape)}"
            allowed = f"integers [{tensor.shape[0]}, {tensor.shape[1]}] or [{tensor.shape[0]}]"
            message = f"the targets of the batch do not match the logits {list(tensor.shape)}"
            raise ConfigError(Problem(where, message, given, allowed, fix=_FIX))
        return replace(self, targets=targets)

    def cells(self, values: Sequence[float | None], shape: tuple[int, ...] | None) -> tuple[Any, ...]:
        sums, counts = np.array([0.0 if value is None else value for value in values]).reshape(2, -1)
        losses = [total / count if count else None for total, count in zip(sums.tolist(), counts.tolist(), strict=True)]
        return [*self.position_losses], losses, counts.astype(int).tolist(), None if shape is None else list(shape)

    def part(self, tensor: Tensor, shards: Shards) -> Tensor:  # noqa: ARG002
        """Return the sum of the losses in each bin, and the numbers of targets."""
        assert self.targets is not None, "of_call has set them"
        logits, targets = tensor.detach(), to_device(self.targets.detach(), tensor.device)
        dtype, length = widest(logits.device), logits.shape[1]
        positions = torch.arange(length, device=logits.device)
        if targets.dim() == 1:
            logits, targets, positions = logits[:, -1:], targets[:, None], positions[-1:]
        edges = constants(tuple(map(float, self.position_losses)), dtype, logits.device)
        bins = torch.bucketize(positions.to(dtype), edges, right=True) - 1
        is_class = (targets >= 0) & (targets < logits.shape[-1])
        chosen = torch.where(is_class, targets, 0).flatten().long()
        losses = torch.empty(len(chosen), dtype=dtype, device=logits.device)
        begin = 0
        for rows in parts_of(logits.reshape(-1, logits.shape[-1])):
            part = slice(begin, begin + len(rows))
            log_partitions, _ = softmax_of(rows.to(torch.promote_types(rows.dtype, torch.float32)))
            losses[part] = log_partitions - rows.gather(1, chosen[part, None])[:, 0].to(dtype)
            begin = part.stop
        counted = is_class.flatten() & losses.isfinite() & (bins >= 0).expand(targets.shape).flatten()
        at = bins.clamp(min=0).expand(targets.shape).flatten()
        numbers = torch.zeros((2, len(edges)), dtype=dtype, device=logits.device)
        numbers[0].index_add_(0, at, torch.where(counted, losses, 0.0))
        numbers[1].index_add_(0, at, counted.to(dtype))
        return numbers.flatten()

    def merged(self, parts: Array) -> tuple[Any, ...]:
        return self.cells(np.nansum(parts, axis=0).tolist(), None)
