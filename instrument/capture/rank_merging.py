"""Merging of the parts of several processes into one row, which rank 0 writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..actions.base import Context, Effect
from ..spec.kinds import KINDS
from ..stats.device_numbers import DeviceNumbers
from ..stats.merge import (
    MERGED,
    PARTIAL_STATISTICS,
    Array,
    PartialStatistics,
    extremes,
    merge_units,
    merged,
    pack_units,
    sums,
)
from ..stats.table_rows import Measure
from .collectives import LocalReducer, Piece, Ranks, Reducer, own_rank
from .row_cells import changes, fetched_statistics, identity_columns
from .sink_interface import Row

_RANK_AT = 4  # the index of the rank among the identity columns
_NOTHING = torch.empty(0, dtype=torch.float64)
_EFFECT = ("numel", "changed", "norm_before", "norm_after", "factor", "held")
_UNCONDITIONAL = -1.0  # stands for no condition in a maximum over `held`, which is 0 or 1


class MergedRows(NamedTuple):
    """The merged rows of a step. Their numbers may still be on a device.

    Attributes:
        numbers: The numbers of the rows.
        build: Converts these numbers, as lists, to tables and rows.
    """

    numbers: tuple[Tensor, ...]
    build: Callable[..., Iterator[tuple[str, Row]]]


class LocalRowMerger:
    """Merger for the rows of a single process, or of processes that each write their own rows."""

    def identity(self, context: Context) -> Row:
        """Return the identity columns of a row."""
        return identity_columns(context)

    def merges(self, context: Context) -> bool:  # noqa: ARG002
        """Return whether the row is computed from the pieces of all processes."""
        return False

    def is_duplicate(self, context: Context) -> bool:  # noqa: ARG002
        """Return whether another process writes the same row."""
        return False

    def add(self, piece: Piece) -> None:  # noqa: ARG002
        """Add this process's part of a row. Only called if `merges` is true."""
        raise AssertionError("rows of a single process have no parts")

    def merge(self, *, any_scheduled: bool, local_only: bool) -> MergedRows | None:  # noqa: ARG002
        """Merge the pieces of the step; None if there are none, or if another process writes the rows."""
        return None


class GlobalRowMerger(LocalRowMerger):
    """Merger for rows that rank 0 writes for all processes: `reduce: global`.

    Args:
        ranks: The processes.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._pieces: list[Piece] = []

    def identity(self, context: Context) -> Row:
        """Return the identity columns. The scope is global if one row stands for identical tensors in all processes."""
        columns = identity_columns(context)
        return (*columns[:-1], "global") if context.scope == "averaged" else columns

    def merges(self, context: Context) -> bool:
        """Return whether all processes contribute to one row.

        Each process has a batch shard of a module's tensors, and its shard of a sharded tensor. Parameter gradients
        that are not averaged yet, losses and buffers are not merged: each rank writes its own row.
        """
        is_part = context.scope == "local" and KINDS[context.kind].family == "module"
        return is_part or context.scope == "shard"

    def is_duplicate(self, context: Context) -> bool:
        """Return whether rank 0 writes the same row."""
        return not self.ranks.is_rank_zero and context.scope == "averaged"

    def add(self, piece: Piece) -> None:
        """Add this process's part of a row."""
        self._pieces.append(piece)

    def merge(self, *, any_scheduled: bool, local_only: bool) -> MergedRows | None:
        """Merge the pieces of the step over all processes.

        Args:
            any_scheduled: Whether any hook was scheduled; equal in all processes.
            local_only: Whether the other processes are gone. Rows are then computed from the pieces of this one.
        """
        if not any_scheduled and not self._pieces:
            return None
        own = [
            piece._replace(gathered=piece.gathered()) if callable(piece.gathered) else piece for piece in self._pieces
        ]
        pieces = own if local_only else self.ranks.align(own)
        merged_rows = merge(pieces, LocalReducer() if local_only else self.ranks)
        self._pieces = []  # not cleared earlier, since other processes may fail
        return merged_rows


def identity_without_rank(context: Context) -> Row:
    """Return the identity columns without the rank."""
    row = identity_columns(context)
    return row[:_RANK_AT] + row[_RANK_AT + 1 :]


def statistics_piece(context: Context, names: tuple[str, ...], part: PartialStatistics, dead: Tensor | None) -> Piece:
    """Return this process's part of a row of statistics; see `instrument.actions.base.Rows.add_part`."""
    gathered = _NOTHING if dead is None else pack_units(dead)
    return Piece("stats", identity_without_rank(context), (names, 0 if dead is None else len(dead)), part, gathered)


def measured_piece(table: str, context: Context, measure: Measure, tensor: Tensor) -> Piece:
    """Return this process's part of a row that a measure computes."""
    return Piece(table, identity_without_rank(context), measure, (), measure.part(tensor))


def effect_piece(context: Context, effect: Effect) -> Piece:
    """Return this process's part of a row of effects: numbers in the order of `_EFFECT`, NaN for None."""
    measures = effect.measures
    factor, held = (math.nan if number is None else number for number in (effect.factor, effect.held))
    if isinstance(measures, DeviceNumbers):
        changes_on_device = measures.on_device()
        part = changes_on_device.new_full((len(_EFFECT),), effect.numel)  # does not wait for the device, unlike a copy
        part[1:4] = changes_on_device
        part[4], part[5] = factor, held
        return Piece("effects", identity_without_rank(context), (), part, _NOTHING)
    numbers = [math.nan if number is None else number for number in measures]
    all_numbers = (effect.numel, *numbers, float(factor), float(held))
    return Piece("effects", identity_without_rank(context), (), all_numbers, _NOTHING)


def merge(pieces: Sequence[Piece], reducer: Reducer) -> MergedRows | None:
    """Merge the pieces of a step over all processes. None if another process writes the rows.

    Args:
        pieces: The pieces, in the same order in all processes.
        reducer: The processes. `LocalReducer` uses only the pieces of this one.
    """
    stats, effects = ([piece for piece in pieces if piece.table == table] for table in ("stats", "effects"))
    statistics, changed = _numbers(stats, effects, reducer) if stats or effects else (_NOTHING, _NOTHING)
    gathered = _gathered(pieces, reducer)
    if not reducer.is_rank_zero or not pieces:
        return None
    build = partial(_rows, pieces, reducer.world_size, isinstance(reducer, LocalReducer))
    return MergedRows((statistics, changed, gathered), build)


def _numbers(stats: Sequence[Piece], effects: Sequence[Piece], reducer: Reducer) -> tuple[Tensor, Tensor]:
    """Return statistics, float64 [rows, MERGED], and changes, [rows, EFFECT], by one maximum and one sum over all pieces.

    The factor is NaN if it differs between processes. A condition held if it held in any process.
    """
    devices = (piece.part.device for piece in (*stats, *effects) if isinstance(piece.part, Tensor))
    device = reducer.device or next(devices, None)
    stat_parts, effect_parts = _stacked(stats, len(PARTIAL_STATISTICS), device), _stacked(effects, len(_EFFECT), device)
    factors = effect_parts[:, 4:5].nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf)
    held = effect_parts[:, 5:].nan_to_num(nan=_UNCONDITIONAL)
    factor_ends = torch.cat([factors, torch.where(factors.isinf(), factors, -factors), held], dim=1)
    maxima, factor_ends = _reduce_two(reducer.all_reduce_max, extremes(stat_parts), factor_ends)
    counts = torch.cat([effect_parts[:, :2], effect_parts[:, 2:4].square()], dim=1).nan_to_num(nan=0.0)
    total, counts = _reduce_two(reducer.all_reduce_sum, sums(stat_parts, maxima), counts)
    factor = torch.where(factor_ends[:, 0] == -factor_ends[:, 1], factor_ends[:, 0], math.nan)
    changed = [counts[:, :2], counts[:, 2:4].sqrt(), factor[:, None], factor_ends[:, 2:]]
    return merged(maxima, total), torch.cat(changed, dim=1)


def _reduce_two(reduce: Callable[[Tensor], Tensor], one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce two tensors in one collective operation."""
    reduced = reduce(torch.cat([one.flatten(), other.flatten()]))
    first, second = reduced.split([one.numel(), other.numel()])
    return first.view_as(one), second.view_as(other)


def _stacked(pieces: Sequence[Piece], numbers: int, device: torch.device | None) -> Tensor:
    """Stack the pieces, float64 [rows, numbers]. Numbers on the host are copied to the device at once."""
    on_device = [piece.part for piece in pieces if isinstance(piece.part, Tensor)]
    on_host = torch.tensor([piece.part for piece in pieces if not isinstance(piece.part, Tensor)], dtype=torch.float64)
    if not on_device:
        return on_host.view(-1, numbers).to(device)
    rows, others = iter(on_device), iter(on_host.to(device))
    return torch.stack([next(rows) if isinstance(piece.part, Tensor) else next(others) for piece in pieces])


def _gathered(pieces: Sequence[Piece], reducer: Reducer) -> Tensor:
    """Gather the numbers of all pieces, concatenated, float64 [ranks, numbers].

    Empty if another process receives them.
    """
    parts = [piece.gathered for piece in pieces if len(piece.gathered)]
    if not parts:
        return _NOTHING
    device = reducer.device or parts[0].device
    gathered = reducer.gather(torch.cat([part.to(device) for part in parts]))
    return _NOTHING if gathered is None else gathered


def _rows(
    pieces: Sequence[Piece],
    ranks: int,
    local_only: bool,
    statistics: list[float],
    changed: list[float],
    gathered: list[float],
) -> Iterator[tuple[str, Row]]:
    """Build the rows from the merged numbers."""
    stats = iter(np.array(statistics).reshape(-1, len(MERGED)).tolist())
    effects = iter(np.array(changed).reshape(-1, len(_EFFECT)).tolist())
    columns = np.array(gathered).reshape(ranks, -1)
    for piece in pieces:
        rank, scope = (own_rank(), piece.key[-1]) if local_only else (0, "global")
        row = (*piece.key[:_RANK_AT], rank, *piece.key[_RANK_AT:-1], scope)
        piece_columns, columns = np.split(columns, [len(piece.gathered)], axis=1)
        if piece.table == "stats":
            yield piece.table, (*row, *_statistics_cells(piece, next(stats), piece_columns))
        elif piece.table == "effects":
            numel, count, norm_before, norm_after, factor, held = next(effects)
            effect = changes(
                int(numel),
                int(count),
                norm_before,
                norm_after,
                None if math.isnan(factor) else factor,
                None if held == _UNCONDITIONAL else bool(held),
            )
            yield piece.table, (*row, *effect)
        else:
            yield piece.table, (*row, *piece.shape.merged(piece_columns))


def _statistics_cells(piece: Piece, values: list[float], masks: Array) -> list[float | None]:
    names, units = piece.shape
    statistics = dict(zip(MERGED, values, strict=True))
    if units:
        statistics["dead_fraction"] = merge_units(masks, units)
    return fetched_statistics(names, [statistics.get(name, math.nan) for name in names])
