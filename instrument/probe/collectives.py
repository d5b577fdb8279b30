"""The processes that train together, and their collective operations on statistics.

With `reduce: global`, each process contributes the statistics of its part of a tensor, and rank 0 writes the row. At the
end of a step, this requires two collective operations for all tensors: a maximum, which also checks that all have the same rows, and
a sum. Quantiles, histograms, spectra and dead units are sent with the sum. Hooked tensors are never sent.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.parallel import Declared
from ..hooks.distributed_scope import Parallel
from ..runtime.own_operations import own_collectives
from ..stats.device_sums import DeviceSums
from ..stats.measure import Measured
from ..stats.merge import MAX_GATHERED
from ..tables.sink_interface import Row

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEPT_LENGTHS = 64  # steps; the message of a step has room for the maxima of each of them
_CHECKED = 3  # the numbers of a message that precede the maxima


class Piece(NamedTuple):
    """The contribution of one process to one row."""

    table: str
    key: Row  # the identity columns of the row, without the rank and the scope; equal in all processes
    # Determines how many numbers there are; equal in all processes. For a table with a `Measure`, the measure.
    shape: Any
    # Numbers that are merged by sums and maxima; a float64 tensor if they are on a device, or the sums of a tensor; None for those of a
    # tensor that this process has not seen.
    part: Sequence[float] | Tensor | Measured | None
    # Numbers that are gathered from all processes; float64, possibly empty. Or what computes them, before `agree`.
    gathered: Any
    # Sorts the rows of `stats` in the order in which hooks fired; the rows of the slab have their indices.
    order: float = 0

    @property
    def device(self) -> torch.device | None:
        """The device of any numbers; None if all are on the host."""
        part = self.part.on_device if isinstance(self.part, Measured) else self.part
        tensors = (part.row if isinstance(part, DeviceSums) else part, self.gathered)
        return next((each.device for each in tensors if isinstance(each, Tensor) and not each.is_cpu), None)


def without_numbers(piece: Piece) -> Piece:
    """Return the contribution of a process that has not seen the tensor, or has the same part as another one."""
    given = piece.gathered

    def missing() -> Tensor:
        return torch.full_like(given() if callable(given) else given, nan, device="cpu")

    return piece._replace(part=None, gathered=missing if callable(given) else missing())


class LocalReducer:
    """The collective operations of `Ranks` for a single process."""

    is_rank_zero, world_size = True, 1
    device = None  # each number is merged on its own device

    def agree(self, pieces: Sequence[Piece], other: object, ends: Tensor) -> tuple[bool, None]:  # noqa: ARG002
        return True, None

    def gather(self, numbers: Tensor) -> Tensor | None:
        return numbers[None]


class Ranks:
    """The processes of a distributed training. Created in all of them at once, with an initialized process group.

    Args:
        reduces: Whether rank 0 writes rows for all of them.
        control: A gloo group of all processes. Default: a new one if required.
        batches: The number of batch shards. Default: one for each process.
        mesh, placement, data: See `instrument.hooks.mesh_layout.MeshLayout`. Default: the mesh of the model's parameters.
        merged_metrics: Whether the loop passes the same metrics in all processes, so that one row is sufficient.
        sums_gradients: Whether gradients are summed over the processes. Default: they are averaged.

    Attributes:
        device: The device on which the numbers of this step are merged.
        bytes_sent: Bytes that this process has sent for statistics. A reduction counts twice, as in a ring.
        differences: Messages about tensors that not all processes have seen, by hook, layer and rank.
    """

    def __init__(
        self,
        parallel: Parallel,
        *,
        reduces: bool,
        merged_metrics: bool = False,
        sums_gradients: bool = False,
        control: Any = None,
        batches: int | None = None,
        mesh: DeviceMesh | None = None,
        placement: Declared | None = None,
        data: Sequence[str] = (),
    ) -> None:
        self.mesh, self.placement, self.data = mesh, placement or {}, data
        self.parallel = parallel
        self.reduces = reduces
        self.merged_metrics = merged_metrics
        self.sums_gradients = sums_gradients
        self.rank = dist.get_rank()
        self.is_rank_zero = self.rank == 0
        self.world_size = dist.get_world_size()
        self.batches = self.world_size if batches is None else batches
        self.bytes_sent = 0
        self.device = torch.device("cpu")
        self._lengths = deque([0], maxlen=KEPT_LENGTHS)
        self.differences: dict[tuple[str, str, int], str] = {}
        self._control: Any = None
        if reduces:
            # Never destroyed separately: if it ends before or after the process group, the process may abort.
            self._control = control or dist.new_group(backend="gloo")
        self._numbers: dict[tuple[Any, ...], int] = {}

    @own_collectives()
    def reduce(self, numbers: Tensor, operation: Any) -> Tensor:
        """Return the sum or the maximum over all processes, in every process."""
        dist.all_reduce(numbers, operation, group=self._group(numbers))
        self.bytes_sent += 2 * numbers.nbytes
        return numbers

    def should_gather(self, numbers: Tensor, own: Tensor, maxima: Tensor | None) -> bool:
        """Return whether rank 0 gathers the numbers of all processes, instead of a sum in which each one has a place for its `own`.

        If the maxima are unknown, another reduction precedes the sum.
        """
        is_small = self.world_size * len(numbers) <= MAX_GATHERED
        return 2 * len(own) > len(numbers) or (maxima is None and is_small)

    @own_collectives()
    def gather(self, numbers: Tensor) -> Tensor | None:
        """Return [ranks, numbers] on rank 0, None on the others."""
        parts = [torch.empty_like(numbers) for _ in range(self.world_size)] if self.is_rank_zero else None
        dist.gather(numbers, parts, group=self._group(numbers))
        self.bytes_sent += numbers.nbytes
        return None if parts is None else torch.stack(parts)

    @own_collectives()
    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set in any process."""
        if self._control is None:
            self._control = dist.new_group(backend="gloo")
        merged = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(merged, dist.ReduceOp.MAX, group=self._control)
        return [bool(flag) for flag in merged.tolist()]

    def _group(self, numbers: Tensor) -> Any:
        return self._control if numbers.is_cpu else None

    def state_dict(self) -> dict[str, Any]:
        return {"differences": [(*key, message) for key, message in self.differences.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.differences = {(hook, layer, rank): message for hook, layer, rank, message in state["differences"]}

    def agree(self, pieces: Sequence[Piece], other: object, ends: Tensor) -> tuple[bool, Tensor | None]:
        """Return whether all processes have the same pieces in the same order, and the maxima of `ends` over all of them.

        This is one collective operation. The maxima are None if the numbers are on a device, or more than in each of the last steps:
        its message then has no room for them. Sets the device on which the numbers are merged.

        Args:
            other: What else has to be the same, by its `repr`.
            ends: float64 [numbers]. Their number is the same in all processes that have the same pieces and the same `other`.
        """
        moment = pieces[0].key[:4] if pieces else ()
        fingerprint = repr((moment, [(piece.key[1], self._number(piece)) for piece in pieces], other))
        # 48 bits are exact in float64.
        digest = int.from_bytes(hashlib.blake2b(fingerprint.encode(), digest_size=6).digest(), "little")
        message = torch.full((_CHECKED + max(self._lengths),), -inf, dtype=torch.float64)
        message[:_CHECKED] = torch.tensor([digest, -digest, not ends.is_cpu])
        maxima = message[_CHECKED : _CHECKED + len(ends)]
        has_room = ends.is_cpu and len(maxima) == len(ends)
        if has_room:
            maxima.copy_(ends)
        highest, lowest, any_on_device = self.reduce(message, dist.ReduceOp.MAX)[:_CHECKED].tolist()
        self.device = torch.device("cuda", torch.cuda.current_device()) if any_on_device else torch.device("cpu")
        if highest != -lowest:
            return False, None
        if not any_on_device:
            self._lengths.append(len(ends))
        return True, None if any_on_device or not has_room else maxima

    @own_collectives()
    def align(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Sort the pieces of a step in the same order in all processes, with empty ones for tensors that this one has not seen."""
        blank = [without_numbers(each) for each in pieces]
        all_pieces: list[list[Piece]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(all_pieces, blank, group=self._control)
        union = {_name(piece): piece for pieces_of_rank in all_pieces for piece in pieces_of_rank}
        for rank, pieces_of_rank in enumerate(all_pieces):
            names = {*map(_name, pieces_of_rank)}
            for piece in (piece for name, piece in union.items() if name not in names):
                step, hook, layer = piece.key[0], piece.key[4], piece.key[5] or "."
                message = (
                    f"hook '{hook}' recorded nothing at '{layer}' on rank {rank} in step {step}, but other ranks did"
                )
                self.differences.setdefault((hook, layer, rank), message)
        local_pieces = {_name(piece): piece for piece in pieces}
        return [local_pieces.get(name, piece) for name, piece in union.items()]

    def _number(self, piece: Piece) -> int:
        """Return a hash of a piece that does not depend on its moment. Equal in all processes."""
        of = (piece.table, *piece.key[3:], piece.shape)
        if of not in self._numbers:
            self._numbers[of] = int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=8).digest(), "little")
        return self._numbers[of]


def _name(piece: Piece) -> tuple[Any, ...]:
    return piece.table, piece.key, piece.shape
