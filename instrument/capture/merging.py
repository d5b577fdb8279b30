"""One row of what each of several processes has a part of: from the pieces of a step to the rows of the first process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..actions.base import Context, Effect
from ..stats.merge import extremes, merge_distributions, merge_units, merged, pack_units, squares, sums
from .cells import changes, fetched_statistics, identity
from .ranks import Alone, Over, Piece, own_rank
from .sink import Row

_RANK_AT = 4  # of the columns of identity
_NOTHING = torch.empty(0, dtype=torch.float64)


class MergedRow(NamedTuple):
    """A row whose numbers may still be on a device.

    Attributes:
        table: Whose row it is.
        numbers: What it is made of.
        cells: Makes the row, given those numbers as lists.
    """

    table: str
    numbers: tuple[Tensor, ...]
    cells: Callable[..., Row]


def key_of(context: Context) -> Row:
    """The columns of identity without the rank."""
    row = identity(context)
    return row[:_RANK_AT] + row[_RANK_AT + 1 :]


def statistics_piece(context: Context, names: tuple[str, ...], part: Tensor, dead: Tensor | None) -> Piece:
    """What a process brings to a row of statistics; see `instrument.actions.base.Rows.add_part`."""
    gathered = part.new_empty(0) if dead is None else pack_units(dead)
    return Piece("stats", key_of(context), (names, None if dead is None else len(dead)), part, gathered)


def distribution_piece(context: Context, levels: tuple[float, ...], bins: int, sketch: Tensor) -> Piece:
    """What it brings to a row of distributions."""
    return Piece("distributions", key_of(context), (levels, bins), sketch.new_empty(0), sketch)


def effect_piece(context: Context, effect: Effect) -> Piece:
    """What it brings to a row of effects."""
    measures = effect.measures
    if not isinstance(measures, Tensor):
        measures = torch.tensor([math.nan if value is None else value for value in measures], dtype=torch.float64)
    part = torch.full((5,), math.nan, dtype=torch.float64, device=measures.device)
    part[0] = effect.numel
    part[1:4] = measures
    if effect.factor is not None:
        part[4] = effect.factor
    return Piece("effects", key_of(context), (), part, part.new_empty(0))


def merge(pieces: Sequence[Piece], over: Over) -> list[MergedRow]:
    """The rows of a step's pieces, over all processes that bring the same ones; none where another process writes them.

    Args:
        pieces: In the same order in all processes.
        over: The processes; `Alone` makes rows of this one's pieces.
    """
    stats, effects = ([piece for piece in pieces if piece.table == table] for table in ("stats", "effects"))
    numbers = _statistics(stats, over) + _effects(effects, over)
    gathered = _gathered(pieces, over)
    if gathered is None:
        return []
    alone = isinstance(over, Alone)
    by_piece = {id(piece): found for piece, found in zip([*stats, *effects], numbers, strict=True)}
    return [
        _row(piece, by_piece.get(id(piece), _NOTHING), found, alone)
        for piece, found in zip(pieces, gathered, strict=True)
    ]


def _statistics(pieces: Sequence[Piece], over: Over) -> list[Tensor]:
    """The statistics of each row, in the order of the names that are asked for."""
    if not pieces:
        return []
    parts = _stacked(pieces)
    most = over.maximum(extremes(parts))
    total = over.sum(sums(parts, most))
    found = merged(most, total, over.sum(squares(parts, most, total)))
    blank = torch.full_like(most[:, 0], math.nan)  # of dead units, which are gathered
    return [torch.stack([found.get(name, blank)[row] for name in piece.shape[0]]) for row, piece in enumerate(pieces)]


def _effects(pieces: Sequence[Piece], over: Over) -> list[Tensor]:
    """Elements, changed ones, the norms before and after, and the factor where it is the same in all processes."""
    if not pieces:
        return []
    parts = _stacked(pieces)
    factors = parts[:, 4:].nan_to_num(nan=-math.inf, neginf=-math.inf, posinf=math.inf)
    ends = over.maximum(torch.cat([factors, torch.where(factors.isinf(), factors, -factors)], dim=1))
    counts = torch.cat([parts[:, :2], parts[:, 2:4].square()], dim=1).nan_to_num(nan=0.0)
    total = over.sum(counts)
    factor = torch.where(ends[:, 0] == -ends[:, 1], ends[:, 0], math.nan)
    return list(torch.cat([total[:, :2], total[:, 2:4].sqrt(), factor[:, None]], dim=1))


def _stacked(pieces: Sequence[Piece]) -> Tensor:
    device = next((piece.part.device for piece in pieces if not piece.part.is_cpu), pieces[0].part.device)
    return torch.stack([piece.part.to(device) for piece in pieces])


def _gathered(pieces: Sequence[Piece], over: Over) -> list[Tensor] | None:
    """What was gathered for each piece, [ranks, numbers]; None where another process has it."""
    sizes = [len(piece.gathered) for piece in pieces]
    if not sum(sizes):
        # Nothing is to be sent, and the first process writes all the same.
        return [_NOTHING] * len(pieces) if over.leads else None
    device = next((p.gathered.device for p in pieces if not p.gathered.is_cpu), pieces[0].gathered.device)
    found = over.gather(torch.cat([piece.gathered.to(device) for piece in pieces]))
    return None if found is None else list(found.split(sizes, dim=1))


def _row(piece: Piece, numbers: Tensor, gathered: Tensor, alone: bool) -> MergedRow:
    rank, scope = (own_rank(), piece.key[-1]) if alone else (0, "global")
    row = (*piece.key[:_RANK_AT], rank, *piece.key[_RANK_AT:-1], scope)
    ranks = len(gathered)

    def statistics(values: list[float], masks: list[float]) -> Row:
        names, units = piece.shape
        if units:
            values[names.index("dead_fraction")] = merge_units(np.array(masks).reshape(ranks, -1), units)
        return (*row, *fetched_statistics(names, values))

    def distribution(_: list[float], sketches: list[float]) -> Row:
        levels, bins = piece.shape
        found = merge_distributions(np.array(sketches).reshape(ranks, -1), levels, bins)
        sampled, *rest = found
        return (*row, sampled if levels else None, list(levels) or None, *rest)

    def effect(values: list[float], _: list[float]) -> Row:
        numel, changed, before, after, factor = values
        return (*row, *changes(int(numel), int(changed), before, after, None if math.isnan(factor) else factor))

    made = {"stats": statistics, "distributions": distribution, "effects": effect}
    return MergedRow(piece.table, (numbers, gathered), made[piece.table])
