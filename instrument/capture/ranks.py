"""The processes that train together, and how they come to one row of what each has a part of.

Where `reduce` is `global`, each process brings what it has measured of its part of a tensor, and the first one writes the row:
a maximum and a sum over all tensors of a step, and one gathering for quantiles, histograms and dead units, when the step has
ended. No tensor that was hooked is ever sent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from math import nan
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..actions.base import Context
from ..kinds.scope import Parallel
from ..spec.kinds import KINDS
from ..stats.merge import Part
from .sink import Row


def own_rank() -> int:
    """Which of several processes this is, from 0: as the process group knows it, or, before there is one, torchrun."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


class Piece(NamedTuple):
    """What one process brings to one row.

    Attributes:
        table: Whose row it is.
        key: The row's columns of identity, without the rank and the scope: the same in all processes.
        shape: What decides how many numbers there are: the same in all processes.
        part: Numbers that are merged by sums and maxima; a float64 tensor where they are on a device.
        gathered: Numbers that are gathered from all; float64, perhaps none.
    """

    table: str
    key: Row
    shape: tuple[Any, ...]
    part: Part
    gathered: Tensor


class Over(Protocol):
    """Whom sums, maxima and gatherings are formed over."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes what is the same in all of them."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def device(self) -> torch.device | None:
        """Where numbers are merged; where they are without it."""

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of these numbers, in every process."""

    def maximum(self, numbers: Tensor) -> Tensor:
        """Their maximum, in every process."""

    def gather(self, numbers: Tensor) -> Tensor | None:
        """[ranks, numbers] in the first process, None in the others."""


class Alone:
    """One process for itself."""

    leads, size, device = True, 1, None

    def sum(self, numbers: Tensor) -> Tensor:
        """The numbers."""
        return numbers

    def maximum(self, numbers: Tensor) -> Tensor:
        """The numbers."""
        return numbers

    def gather(self, numbers: Tensor) -> Tensor | None:
        """The numbers, [1, numbers]."""
        return numbers[None]


class Ranks:
    """The processes of a training, one of which this is; made in all of them at once, in an initialised process group.

    Args:
        parallel: How they train together.
        reduces: Whether the first one writes rows for all of them.
        control: A group for messages between the CPUs of all of them; one is made where it is needed.
        merged_metrics: Whether the loop gives each of them the metrics of all, of which one row is enough.

    Attributes:
        rank: Which one this is, from 0.
        bytes_sent: For statistics, by this process, so far; what is summed up counts twice, as in a ring.
        differences: Where processes have not seen the same tensors, in words, by hook, layer and rank.
    """

    def __init__(self, parallel: Parallel, *, reduces: bool, merged_metrics: bool = False, control: Any = None) -> None:
        self.parallel = parallel
        self.reduces = reduces
        self.merged_metrics = merged_metrics
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self.bytes_sent = 0
        self._device = torch.device("cpu")
        self.differences: dict[tuple[str, str, int], str] = {}
        self._control: Any = None
        if reduces:
            # It goes with the world: one that ends before it, or outlives it, may abort the process when that ends.
            self._control = control or dist.new_group(backend="gloo")
        self._numbers: dict[tuple[Any, ...], int] = {}

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes what is the same in all of them."""
        return self.rank == 0

    @property
    def size(self) -> int:
        """How many there are."""
        return self._size

    @property
    def device(self) -> torch.device:
        """Where the numbers of this step are merged."""
        return self._device

    def merges(self, context: Context) -> bool:
        """Whether there is to be one row of what all processes have a part of.

        Each has a part of the batch that goes through a module, and its shard of a tensor. A parameter's gradient that is not
        averaged yet, a loss, and a buffer are no parts: their rows stay those of each rank.
        """
        is_part = context.scope == "local" and KINDS[context.kind].family == "module"
        return self.reduces and (is_part or context.scope == "shard")

    def repeats(self, context: Context) -> bool:
        """Whether another process writes the same row."""
        return self.reduces and not self.leads and context.scope == "averaged"

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum of these numbers, in every process."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def maximum(self, numbers: Tensor) -> Tensor:
        """Their maximum, in every process."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def gather(self, numbers: Tensor) -> Tensor | None:
        """[ranks, numbers] in the first process, None in the others."""
        parts = [torch.empty_like(numbers) for _ in range(self._size)] if self.leads else None
        dist.gather(numbers, parts, group=self._group(numbers))
        self.bytes_sent += numbers.nbytes
        return None if parts is None else torch.stack(parts)

    def _reduce(self, numbers: Tensor, operation: Any) -> Tensor:
        result = numbers.clone()
        dist.all_reduce(result, operation, group=self._group(result))
        self.bytes_sent += 2 * result.nbytes
        return result

    def _group(self, numbers: Tensor) -> Any:
        return self._control if numbers.is_cpu else None

    def state_dict(self) -> dict[str, Any]:
        """What has to be known to go on between two steps."""
        return {"differences": [(*key, message) for key, message in self.differences.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.differences = {(hook, layer, rank): message for hook, layer, rank, message in state["differences"]}

    # ------------------------------------------------------------------------------------------------ agreement

    def align(self, pieces: Sequence[Piece]) -> list[Piece]:
        """A step's pieces in an order that is the same in all processes; of what this one has not seen one without numbers."""
        moment = pieces[0].key[:4] if pieces else ()
        seen = repr((moment, [(piece.key[1], self._number(piece)) for piece in pieces]))
        digest = int.from_bytes(hashlib.blake2b(seen.encode(), digest_size=7).digest(), "little")
        on_device = any(isinstance(part, Tensor) and not part.is_cpu for piece in pieces for part in piece[-2:])
        told = torch.tensor([digest, -digest, on_device])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        self._device = torch.device("cuda", torch.cuda.current_device()) if told[2] else torch.device("cpu")
        if told[0] == -told[1]:
            return list(pieces)
        blank = [
            piece._replace(part=(nan,) * len(piece.part), gathered=torch.full_like(piece.gathered, nan, device="cpu"))
            for piece in pieces
        ]
        of_all: list[list[Piece]] = [[] for _ in range(self._size)]
        dist.all_gather_object(of_all, blank, group=self._control)
        union = {_name(piece): piece for seen_by_one in of_all for piece in seen_by_one}
        for rank, names in enumerate({_name(piece) for piece in seen_by_one} for seen_by_one in of_all):
            for piece in (piece for name, piece in union.items() if name not in names):
                self._note(piece, rank)
        own = {_name(piece): piece for piece in pieces}
        return [own.get(name, piece) for name, piece in union.items()]

    def _note(self, piece: Piece, rank: int) -> None:
        step, hook, layer = piece.key[0], piece.key[4], piece.key[5] or "."
        message = f"hook '{hook}' saw nothing at '{layer}' on rank {rank} in step {step}, where other ranks did"
        self.differences.setdefault((hook, layer, rank), message)

    def _number(self, piece: Piece) -> int:
        """What stands for a piece whatever its moment; the same in all processes."""
        of = (piece.table, *piece.key[3:], piece.shape)
        found = self._numbers.get(of)
        if found is None:
            found = int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little")
            self._numbers[of] = found
        return found


def _name(piece: Piece) -> tuple[Any, ...]:
    return piece.table, piece.key, piece.shape
