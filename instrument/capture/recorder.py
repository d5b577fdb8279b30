"""The rows of the step that is running.

Numbers that are on a device stay there until the step ends; then all of them come over at once, and nobody waits: they
are read when the next step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..actions.base import Context, Effect
from ..kinds.live import LiveSite
from ..stats.distribution import cells
from ..stats.kernel import Values
from ..stats.merge import Part
from .cells import effect_cells, fetched_statistics, identity, statistics
from .merging import MergedRows, distribution_piece, effect_piece, merge, statistics_piece
from .ranks import Alone, Piece, Ranks
from .sink import Row, Sink
from .transfer import Transfer

NUMBER_BYTES = 4  # of one of a distribution's numbers, on disk, about


class Recorder:
    """Gathers what the actions of a step have to say, and hands it to the sink when the step ends.

    Args:
        sink: Who keeps the rows.
        watch: Called with each step's rows of statistics, once all that is known of the step has been handed over.
        ranks: The processes that train together; None for a single one.
    """

    def __init__(
        self, sink: Sink, watch: Callable[[Sequence[Row]], None] | None = None, ranks: Ranks | None = None
    ) -> None:
        self.sink = sink
        self.watch = watch
        self.ranks = ranks
        self.rows_written = 0
        self.dropped: Counter[tuple[str, str, str]] = Counter()  # tensors, by hook, layer and path
        self.bytes: Counter[tuple[str, str, str]] = Counter()  # of tensors and distributions, likewise
        self._stats: list[tuple[Row, tuple[str, ...], Values]] = []
        self._distributions: list[tuple[Row, tuple[float, ...], int, Values]] = []
        self._effects: list[tuple[Row, Effect]] = []
        self._pieces: list[Piece] = []
        self._late: list[tuple[str, Callable[[], Row]]] = []
        self._under_way: _Step | None = None

    def merges(self, context: Context) -> bool:
        """Whether a tensor is the part of one that several processes have, of which there is to be one row."""
        return self.ranks is not None and self.ranks.merges(context)

    def _repeats(self, context: Context) -> bool:
        return self.ranks is not None and self.ranks.repeats(context)

    def _key(self, context: Context) -> Row:
        """The columns of identity; of what is the same in all processes, where one row stands for them, the scope is global."""
        key = identity(context)
        stands_for_all = self.ranks is not None and self.ranks.reduces and context.scope == "averaged"
        return (*key[:-1], "global") if stands_for_all else key

    def add_part(self, context: Context, names: tuple[str, ...], part: Part, dead: Tensor | None) -> None:
        """This process's part of a row of statistics."""
        self._pieces.append(statistics_piece(context, names, part, dead))

    def add_sketch(self, context: Context, levels: tuple[float, ...], bins: int, sketch: Tensor) -> None:
        """This process's part of a row of distributions."""
        self._pieces.append(distribution_piece(context, levels, bins, sketch))
        self._count_distribution(context, levels, bins)

    def add_stats(self, context: Context, names: tuple[str, ...], values: Values) -> None:
        """The statistics of one tensor, in the order of `names`."""
        if not self._repeats(context):
            self._stats.append((self._key(context), names, values))

    def add_distribution(self, context: Context, levels: tuple[float, ...], bins: int, values: Values) -> None:
        """Quantiles at these levels and a histogram of so many bins, as `instrument.stats.distribution` gives them."""
        if not self._repeats(context):
            self._distributions.append((self._key(context), levels, bins, values))
            self._count_distribution(context, levels, bins)

    def _count_distribution(self, context: Context, levels: tuple[float, ...], bins: int) -> None:
        self.bytes[context.hook, context.layer, context.path] += NUMBER_BYTES * (2 * len(levels) + bins)

    def add_tensor(
        self, context: Context, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None
    ) -> None:
        """One tensor's values, which the sink copies; one that it has no room for is counted."""
        if self._repeats(context):
            return
        stored = self.sink.keep(self._key(context), source_shape, tensor, dtype)
        if stored is None:
            self.dropped[context.hook, context.layer, context.path] += 1
        else:
            self.rows_written += 1
            self.bytes[context.hook, context.layer, context.path] += stored

    def add_effect(self, context: Context, effect: Effect) -> None:
        """What one intervention changed."""
        if self.merges(context):
            self._pieces.append(effect_piece(context, effect))
        elif not self._repeats(context):
            self._effects.append((self._key(context), effect))

    def bytes_of(self, live: LiveSite) -> int:
        """Bytes of the tensors that were kept at a site, and about those of its quantiles and histograms."""
        return at_site(self.bytes, live)

    def state_dict(self) -> dict[str, Any]:
        """The counts, as numbers and lists."""
        counts = {"dropped": self.dropped, "bytes": self.bytes}
        return {"rows_written": self.rows_written} | {
            name: [[*key, count] for key, count in counter.items()] for name, counter in counts.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from these counts."""
        self.rows_written = state["rows_written"]
        self.dropped, self.bytes = (
            Counter({(hook, layer, path): count for hook, layer, path, count in state[name]})
            for name in ("dropped", "bytes")
        )

    def write(self, table: str, rows: list[Row]) -> None:
        """Rows of a table that no action writes to, straight to the sink."""
        self.sink.write(table, rows)
        self.rows_written += len(rows)

    def end_step(self, *, due: bool = True, alone: bool = False) -> None:
        """Hand the step's rows to the sink; of one whose numbers are on a GPU when the next step ends.

        Args:
            due: Whether any hook was due, which is the same in all processes.
            alone: The other processes are not there any more: rows are of this one's parts.
        """
        self.flush()
        merged = self._merge(due, alone)
        stats, self._stats = self._stats, []
        distributions, self._distributions = self._distributions, []
        effects, self._effects = self._effects, []
        on_device = [values for _, _, values in stats if isinstance(values, Tensor)]
        on_device += [values for *_, values in distributions if isinstance(values, Tensor)]
        for _, effect in effects:
            on_device += [part for part in (effect.measures, effect.factor) if isinstance(part, Tensor)]
        on_device += [] if merged is None else merged.numbers
        late, self._late = self._late, []
        self._under_way = _Step(stats, distributions, effects, merged, late, Transfer(on_device))
        if self._under_way.transfer.is_here and not late:
            self.flush()

    def _merge(self, due: bool, alone: bool) -> MergedRows | None:
        """The rows of what each process has a part of; None where another process writes them."""
        if self.ranks is None or not self.ranks.reduces or not (due or self._pieces):
            return None
        pieces = self._pieces if alone else self.ranks.align(self._pieces)
        merged = merge(pieces, Alone() if alone else self.ranks)
        self._pieces = []  # they are kept as long as other processes may fail
        return merged

    @property
    def is_owing(self) -> bool:
        """Whether rows of hooks are on their way, and will take time of the step that is running."""
        step = self._under_way
        return step is not None and bool(step.stats or step.distributions or step.effects or step.merged)

    def write_late(self, table: str, row: Callable[[], Row]) -> None:
        """A row that is made when the step's rows are handed over."""
        self._late.append((table, row))

    def flush(self) -> None:
        """Hand over the step whose numbers were left on their way, where there is one; waits for them."""
        step, self._under_way = self._under_way, None
        if step is None:
            return
        fetched = step.transfer.read()
        stats = [
            (
                *key,
                *(
                    fetched_statistics(names, next(fetched))
                    if isinstance(values, Tensor)
                    else statistics(names, values)
                ),
            )
            for key, names, values in step.stats
        ]
        distributions = [
            key + cells(levels, bins, next(fetched) if isinstance(values, Tensor) else values)
            for key, levels, bins, values in step.distributions
        ]
        effects = [key + effect_cells(effect, fetched) for key, effect in step.effects]
        tables = {"stats": stats, "distributions": distributions, "effects": effects}
        if step.merged is not None:
            for table, merged in step.merged.made(*(next(fetched) for _ in step.merged.numbers)):
                tables[table].append(merged)
        for table, rows in tables.items():
            if rows:
                self.write(table, rows)
        for table, row in step.late:
            self.write(table, [row()])
        if self.watch is not None:
            self.watch(stats)
        self.sink.end_step()


class _Step(NamedTuple):
    """What a step has to say, perhaps still on its way."""

    stats: list[tuple[Row, tuple[str, ...], Values]]
    distributions: list[tuple[Row, tuple[float, ...], int, Values]]
    effects: list[tuple[Row, Effect]]
    merged: MergedRows | None
    late: list[tuple[str, Callable[[], Row]]]
    transfer: Transfer


def at_site(counts: Mapping[tuple[str, str, str], int], live: LiveSite) -> int:
    """Of counts by hook, layer and path those of a site: of a module's at all paths, of a parameter's its own."""
    name, layer, own = live.site.spec.name, live.site.layer.name, live.site.own_name
    return sum(count for (hook, at, path), count in counts.items() if (hook, at) == (name, layer) and own in ("", path))
