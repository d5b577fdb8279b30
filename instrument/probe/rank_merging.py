"""Merging of the parts of several processes into one row, which rank 0 writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..actions.base import EFFECT, Context, Effect
from ..stats.device_copy import HostCopy
from ..stats.exact_integers import remainders
from ..stats.measure import Measured, sums_on_device
from ..stats.merge import Array, merge_units, pack_units
from ..stats.sums import COLUMNS, EXTREMES, INDEX, extremes, merged, totals
from ..stats.table_rows import Measure
from ..tables.kinds import KINDS
from ..tables.sink_interface import Row
from ..tables.statistics import DEAD, UNITS
from ..values.dtensor import own_rank
from .collectives import LocalReducer, Piece, Ranks, without_numbers
from .slab_rows import MOMENT_INDEX, Keys, Layout, Slots, Taken

_RANK_AT = 4  # the index of the rank among the identity columns
_NOTHING = torch.empty(0, dtype=torch.float64)
_NO_KEYS: Keys = np.empty(0, np.int64)
_UNCONDITIONAL = -1.0  # stands for no condition in a maximum over `held`, which is 0 or 1


@dataclass
class MergedRow:
    """A row of the tables `stats` or `effects` that is merged from all processes; see `Taken.others`. Numbers are set on the host.

    `order` is that of its `Piece`.
    """

    table: str
    identity: Row
    names: tuple[str, ...]
    order: float
    values: Array | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    numbers: ClassVar[tuple[Tensor, ...]] = ()  # on a device: all rows together have them, see `MergedRows`

    def complete(self, row: Array, fetched: object) -> Mapping[str, float]:  # noqa: ARG002
        row[:] = self.values
        return self.custom


@dataclass
class MergedRows:
    """The merged rows of a step. Their numbers may still be on a device.

    Attributes:
        pieces, identities: This process's part of each row that is not in the block, and the identity columns of the row.
        rows: The rows of the pieces in the tables `stats` and `effects`.
        copies: The sums [rows, COLUMNS], those of the block first, the effects [rows, EFFECT], and what is gathered [ranks, numbers].
    """

    pieces: Sequence[Piece]
    identities: Sequence[Row]
    rows: list[MergedRow]
    copies: tuple[HostCopy, HostCopy, HostCopy]
    ranks: int
    block: Taken | None

    @property
    def is_complete(self) -> bool:
        """Whether all numbers can be read without waiting."""
        return all(copy.is_complete for copy in self.copies)

    def fetch(self, stats_rows: Array) -> Iterator[tuple[str, Row]]:
        """Set the numbers of the rows, and return the rows of other tables. Waits for the copies.

        The rows of the block are the last ones of `stats_rows`, the numbers of the table `stats`, float64 [rows, COLUMNS].
        """
        stats, effects, gathered = (copy.wait().numpy() for copy in self.copies)
        sums, changes = iter(stats.reshape(-1, len(COLUMNS))), iter(effects.reshape(-1, len(EFFECT)))
        if self.block is not None:
            stats_rows[len(stats_rows) - len(self.block) :] = [next(sums) for _ in range(len(self.block))]
        columns, rows = gathered.reshape(self.ranks, -1), iter(self.rows)
        others: list[tuple[str, Row]] = []
        for piece, identity in zip(self.pieces, self.identities, strict=True):
            own, columns = np.split(columns, [len(piece.gathered)], axis=1)
            if piece.table == "stats":
                (names, units, extreme_count), row = piece.shape, next(rows)
                row.values = next(sums)
                extremes_of_ranks, dead = np.split(own, [extreme_count], axis=1)
                if units:
                    row.values[[INDEX[DEAD.name], INDEX[UNITS.name]]] = merge_units(dead), units
                if extreme_count:
                    row.custom = remainders(extremes_of_ranks.tolist(), names, row.values)
            elif piece.table == "effects":
                next(rows).values = next(changes)
            else:
                others.append((piece.table, (*identity, *piece.shape.merged(own))))
        return iter(others)

    def order(self, count: int) -> Keys:
        """Return the indices of the `count` rows of the table `stats` in the order in which hooks fired.

        The last rows are the merged ones, those of the block at the end. They come first: other rows are mostly those of parameters.
        """
        merged = [row.order for row in self.rows if row.table == "stats"]
        block = range(0 if self.block is None else len(self.block))
        own = [math.inf] * (count - len(merged) - len(block))
        return np.argsort([*own, *merged, *block], kind="stable")


@dataclass
class Block:
    """This process's parts of the rows of a slab."""

    taken: Taken
    layout: Layout

    @property
    def key(self) -> object:
        """A value whose `repr` is the same in all processes that have the same rows in the same order."""
        return self.layout.digest, self.taken.moments, self.taken.keys[:, MOMENT_INDEX].tobytes()

    @cached_property
    def sums(self) -> list[tuple[Keys, Tensor]]:
        """The numbers by device: the indices of rows, and float64 [rows, COLUMNS]."""
        device_rows = [(each.rows, each.device_numbers(self.taken.numbers)) for each in self.taken.device_rows]
        rows_on_device = np.concatenate([_NO_KEYS, *(rows for rows, _ in device_rows)])
        on_host = np.setdiff1d(np.arange(len(self.taken)), rows_on_device)
        return [(on_host, torch.from_numpy(self.taken.numbers[on_host])), *device_rows]

    @property
    def device(self) -> torch.device | None:
        """The device of any numbers; None if all are on the host."""
        return next((each.device for each in self.taken.device_rows if each.device.type != "cpu"), None)

    def matrix(self, device: torch.device | None) -> Tensor:
        """Return all numbers on a device, float64 [rows, COLUMNS]."""
        matrix = torch.empty((len(self.taken), len(COLUMNS)), dtype=torch.float64, device=device)
        for rows, numbers in self.sums:
            matrix[torch.from_numpy(rows).to(matrix.device)] = numbers.to(matrix.device)
        return matrix

    def pieces(self) -> list[Piece]:
        parts: dict[int, Tensor] = {}
        for rows, numbers in self.sums:
            parts.update(zip(rows.tolist(), numbers, strict=True))
        rows_of_layout = zip(self.taken.moments_of_rows, self.layout.sites, self.layout.names, strict=True)
        return [
            Piece("stats", (*moment, *site[1:]), (names, 0, 0), parts[row], _NOTHING, row)
            for row, (moment, site, names) in enumerate(rows_of_layout)
        ]

    def merged(self, slots: Slots, *, is_local: bool) -> Taken:
        """Return the merged rows, without their numbers. If local, they are merged from the parts of this process only."""
        merged_slots = None if is_local else self.layout.merged_slots
        if merged_slots is None:
            sites = self.layout.sites if is_local else [(0, *site[1:-1], "global") for site in self.layout.sites]
            merged_slots = np.array([*map(slots.slot, sites, self.layout.names)], np.int64)
            if not is_local:
                self.layout.merged_slots = merged_slots
        keys = np.full_like(self.taken.keys, -1)
        keys[:, 0], keys[:, MOMENT_INDEX] = merged_slots, self.taken.keys[:, MOMENT_INDEX]
        return Taken(np.full_like(self.taken.numbers, math.nan), keys, _NO_KEYS, self.taken.moments)


class RowMerger:
    """Merges the rows that rank 0 writes for all processes: `reduce: global`. Without `ranks`, each process writes its own rows."""

    def __init__(self, ranks: Ranks | None, slots: Slots) -> None:
        self.ranks = ranks
        self._slots = slots
        self._pieces: list[Piece] = []
        self._block: Block | None = None

    def identity(self, context: Context) -> Row:
        """Return the identity columns. The scope is global if one row stands for identical tensors in all processes."""
        columns = identity_columns(context)
        return (*columns[:-1], "global") if self.ranks is not None and context.scope == "averaged" else columns

    def merges(self, context: Context) -> bool:
        """Return whether all processes contribute to one row.

        Each process has a batch shard of a module's tensors, and its shard of a sharded tensor. Parameter gradients
        that are not averaged yet, losses, buffers and tensors of unknown placement are not merged: each rank writes its own row.
        """
        if self.ranks is None:
            return False
        is_part = context.scope == "local" and KINDS[context.kind].family == "module"
        return (is_part or context.scope == "shard") and context.shards.is_known

    def is_duplicate(self, context: Context) -> bool:
        """Return whether another process writes the same row: rank 0, or the first one on the mesh."""
        is_first = context.shards.is_first if context.shards.mesh else self.ranks is None or self.ranks.is_rank_zero
        return self.ranks is not None and not is_first and context.scope == "averaged"

    def add(self, piece: Piece, context: Context) -> None:
        """Add this process's part of a row: without numbers, if another process has the same part."""
        self._pieces.append(piece if context.shards.is_first else without_numbers(piece))

    @property
    def statistics_on_device(self) -> int:
        """The number of pieces of the table `stats` whose sums are on a device."""
        return sum(piece.table == "stats" and piece.device is not None for piece in self._pieces)

    def add_rows(self, taken: Taken, layout: Layout) -> None:
        self._block = Block(taken, layout)

    def merge(self, *, any_scheduled: bool, local_only: bool) -> MergedRows | None:
        """Merge the pieces of the step over all processes. None without any, or if another process writes the rows.

        See `Recorder.end_step` for the arguments.
        """
        block = self._block
        if self.ranks is None or not (any_scheduled or self._pieces or block is not None):
            return None
        pieces = [
            piece._replace(gathered=piece.gathered()) if callable(piece.gathered) else piece for piece in self._pieces
        ]
        reducer = LocalReducer() if local_only else self.ranks
        parts = RankNumbers.of(pieces, block)
        are_same, maxima = reducer.agree(pieces, None if block is None else block.key, parts.ends)
        if not are_same:
            pieces, block = self.ranks.align([*pieces, *(() if block is None else block.pieces())]), None
            parts = RankNumbers.of(pieces, None)
        merged_rows = merge(pieces, reducer, block, parts.to(reducer.device), maxima, self._slots)
        self._pieces, self._block = [], None  # not cleared earlier, since other processes may fail
        return merged_rows


def identity_columns(context: Context) -> Row:
    """Return the identity columns of a row: when and where it was recorded."""
    return (*context.moment, *context.site)


def identity_without_rank(context: Context) -> Row:
    row = identity_columns(context)
    return row[:_RANK_AT] + row[_RANK_AT + 1 :]


def statistics_piece(
    context: Context, names: tuple[str, ...], part: Measured, dead: Tensor | None, order: float
) -> Piece:
    """Return this process's part of a row of statistics; see `instrument.actions.base.Rows.add_part`."""
    integers = _NOTHING if part.exact_extremes is None else part.exact_extremes
    units = _NOTHING if dead is None else pack_units(dead)
    gathered = torch.cat([each for each in (integers, units) if len(each)] or [_NOTHING])
    shape = names, 0 if dead is None else len(dead), len(integers)
    return Piece("stats", identity_without_rank(context), shape, part, gathered, order)


def measured_piece(table: str, context: Context, measure: Measure, tensor: Tensor) -> Piece:
    return Piece(table, identity_without_rank(context), measure, (), measure.part(tensor, context.shards))


def effect_piece(context: Context, effect: Effect) -> Piece:
    """Return this process's part of a row of effects: numbers in the order of `EFFECT`, NaN for None."""
    changed, *both = effect.measures
    if isinstance(changed, Tensor):
        # Does not wait for the device, unlike a copy.
        part = changed.new_full((len(EFFECT),), effect.numel, dtype=torch.float64)
        part[1] = changed
        part[2], part[3] = (each.statistic("l2") for each in both if isinstance(each, Measured))
        part[4], part[5] = (math.nan if number is None else number for number in (effect.factor, effect.held))
        return Piece("effects", identity_without_rank(context), (), part, _NOTHING)
    # A factor can be a tensor in the memory of the host.
    numbers = effect.row(iter([number.reshape(-1).tolist() for number in effect.numbers]))
    return Piece("effects", identity_without_rank(context), (), numbers, _NOTHING)


@dataclass
class RankNumbers:
    """This process's numbers of the rows of a step, on one device: sums [rows, COLUMNS], those of the block first, effects [rows, EFFECT],
    and the numbers that are gathered, those of all pieces concatenated; float64.
    """

    sums: Tensor
    effects: Tensor
    gathered: Tensor

    @classmethod
    def of(cls, pieces: Sequence[Piece], block: Block | None) -> RankNumbers:
        """Stack the numbers of pieces and of a block."""
        parts = (*pieces, *(() if block is None else (block,)))
        device = next((device for part in parts if (device := part.device) is not None), None)
        stats, effects = ([piece for piece in pieces if piece.table == table] for table in ("stats", "effects"))
        sums = _stacked(stats, len(COLUMNS), device)
        if block is not None:
            sums = torch.cat([block.matrix(device), sums])
        gathered = torch.cat([_NOTHING.to(device), *(piece.gathered.to(device) for piece in pieces)])
        return cls(sums, _stacked(effects, len(EFFECT), device), gathered)

    def to(self, device: torch.device | None) -> RankNumbers:
        """Return the numbers on a device; None keeps theirs."""
        return RankNumbers(*(each.to(device) for each in self._all))

    @property
    def _all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.sums, self.effects, self.gathered

    @property
    def flat(self) -> Tensor:
        """All numbers, float64 [numbers]."""
        return torch.cat([each.flatten() for each in self._all])

    def of_process(self, flat: Tensor) -> RankNumbers:
        """Return the numbers of another process, given its `flat`."""
        numbers = flat.split([each.numel() for each in self._all])
        return RankNumbers(*(own.view_as(each) for own, each in zip(numbers, self._all, strict=True)))

    @property
    def ends(self) -> Tensor:
        """The numbers of which the maximum over all processes is computed, float64 [numbers]."""
        factors = self.effects[:, 4:5].nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf)
        held = self.effects[:, 5:].nan_to_num(nan=_UNCONDITIONAL)
        of_effects = torch.cat([factors, torch.where(factors.isinf(), factors, -factors), held], dim=1)
        return torch.cat([of_effects.flatten(), extremes(self.sums).flatten()])

    def totals(self, maxima: Tensor) -> Tensor:
        """Return the numbers of which the sum over all processes is computed, float64 [numbers], given the maxima of `ends`."""
        counts = torch.cat([self.effects[:, :2], self.effects[:, 2:4].square()], dim=1).nan_to_num(nan=0.0)
        return torch.cat([counts.flatten(), totals(self.sums, self._split_ends(maxima)[1]).flatten()])

    def merged(self, maxima: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return sums and effects of all processes, given the maxima of `ends` and the sum of `totals`.

        The factor of an effect is NaN if it differs between processes. A condition held if it held in any process.
        """
        (ends, maxima), (counts, total) = self._split_ends(maxima), self._split(total, 4, len(COLUMNS))
        factor = torch.where(ends[:, 0] == -ends[:, 1], ends[:, 0], math.nan)
        held = torch.where(ends[:, 2:] == _UNCONDITIONAL, math.nan, ends[:, 2:])
        return merged(maxima, total), torch.cat([counts[:, :2], counts[:, 2:4].sqrt(), factor[:, None], held], dim=1)

    def _split_ends(self, ends: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(ends, 3, EXTREMES)

    def _split(self, numbers: Tensor, of_effect: int, of_row: int) -> tuple[Tensor, Tensor]:
        """Divide numbers into those of effects, [effects, of_effect], and those of sums, [rows, of_row]."""
        count = len(self.effects) * of_effect
        return numbers[:count].view(-1, of_effect), numbers[count:].view(-1, of_row)


def merge(
    pieces: Sequence[Piece],
    reducer: LocalReducer | Ranks,
    block: Block | None,
    parts: RankNumbers,
    maxima: Tensor | None,
    slots: Slots,
) -> MergedRows | None:
    """Merge pieces and a block, the same in all processes, in the same order. None if another process writes the rows.

    This is one collective operation, or two if the `maxima` of `parts.ends` are unknown; see `Ranks.should_gather`.
    """
    if not pieces and block is None:
        return None
    numbers, own = parts.flat, parts.gathered
    if isinstance(reducer, LocalReducer) or reducer.should_gather(numbers, own, maxima):
        received = reducer.gather(numbers)
        if received is None:
            return None
        of_processes = [parts.of_process(each) for each in received]
        maxima = torch.stack([each.ends for each in of_processes]).amax(0)
        total = torch.stack([each.totals(maxima) for each in of_processes]).sum(0)
        gathered = torch.stack([each.gathered for each in of_processes])
    else:
        maxima = reducer.reduce(parts.ends, dist.ReduceOp.MAX) if maxima is None else maxima
        places = own.new_zeros((reducer.world_size, len(own)))
        places[reducer.rank] = own
        totals_of_rank = parts.totals(maxima)
        total = reducer.reduce(torch.cat([totals_of_rank, places.flatten()]), dist.ReduceOp.SUM)
        if not reducer.is_rank_zero:
            return None
        gathered = total[len(totals_of_rank) :].view(places.shape)
        total = total[: len(totals_of_rank)]
    sums, effects = parts.merged(maxima, total)
    is_local = isinstance(reducer, LocalReducer)
    identities = [
        (*key[:_RANK_AT], own_rank() if is_local else 0, *key[_RANK_AT:-1], key[-1] if is_local else "global")
        for key in (piece.key for piece in pieces)
    ]
    rows = [
        MergedRow(piece.table, identity, piece.shape[0] if piece.table == "stats" else (), piece.order)
        for piece, identity in zip(pieces, identities, strict=True)
        if piece.table in ("stats", "effects")
    ]
    copies = HostCopy(sums), HostCopy(effects), HostCopy(gathered)
    merged_block = None if block is None else block.merged(slots, is_local=is_local)
    return MergedRows(pieces, identities, rows, copies, reducer.world_size, merged_block)


def _stacked(pieces: Sequence[Piece], numbers: int, device: torch.device | None) -> Tensor:
    """Stack the pieces, float64 [rows, numbers]. Numbers on the host are copied to the device at once."""
    missing = [math.nan] * numbers
    on_host = [part.row if isinstance(part, Measured) else part for part in (piece.part for piece in pieces)]
    rows = [missing if part is None or isinstance(part, Tensor) else part for part in on_host]
    matrix = torch.tensor(np.array(rows, np.float64)).view(-1, numbers).to(device)
    on_device = {
        at: piece.part if isinstance(piece.part, Tensor) else sums_on_device([piece.part])[0]
        for at, piece in enumerate(pieces)
        if isinstance(piece.part, Tensor) or (isinstance(piece.part, Measured) and piece.part.on_device is not None)
    }
    if on_device:
        matrix[[*on_device]] = torch.stack([*on_device.values()]).to(matrix)
    return matrix
