"""Summary of a step for trackers: numbers, histograms, pictures and texts, one per tag."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from .histogram import Histogram, merge_histograms
from .tags import SCALAR_TABLES, Fold, scalars, tag_prefix

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from ..stats.device_copy import HostCopy

_KIND = TABLES["tensors"].names.index("kind")


@dataclass
class StepSummary:
    """The summary of one step, by tag."""

    # Numbers. Several values of a tag are combined as the statistic defines (`merged`), or by their mean.
    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)  # several of a tag are added
    pictures: dict[str, Image] = field(default_factory=dict)  # the first picture of each tag
    texts: dict[str, str] = field(default_factory=dict)  # events, one per line


class SummaryCollector:
    """Collects rows and tensors and returns one summary per step."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, _CollectedStep] = defaultdict(_CollectedStep)

    def add(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows of any table except `tensors`."""
        for row in rows if table in SCALAR_TABLES else ():
            for tag, step, value, fold in scalars(table, row):
                self._steps[step].scalars[tag, fold].append(value)
            if (histogram := Histogram.of(table, row)) is not None:
                self._steps[row[0]].histograms[f"{tag_prefix(row)}/histogram"].append(histogram)
        for step, _, layer, rule, message, severity, *_ in rows if table == "events" else ():
            location = f" {layer}" if layer else ""
            self._steps[step or 0].texts[f"events/{severity}"].append(f"{rule}{location}: {message}")

    def add_tensor(self, key: Row, tensor: Tensor, dtype: torch.dtype | None) -> None:
        """Copy the displayed part of a recorded tensor, if it can be drawn and is the first of its tag."""
        # PyTorch and Pillow are only imported if a tensor is drawn.
        from .tensor_tiles import tiles_of

        tag = f"{tag_prefix(key)}/image"
        known = key[0] in self._steps and tag in self._steps[key[0]].pictures
        if not known and (tiles := tiles_of(key[_KIND], tensor, dtype)) is not None:
            self._steps[key[0]].pictures[tag] = tiles

    def take(self, *, wait: bool = False) -> Iterator[tuple[int, StepSummary]]:
        """Yield the collected summaries in the order of the steps. Steps without content are omitted.

        With `wait`, wait for pictures that a GPU is still copying, and include a step of which only pictures are known.
        """
        for step in sorted(self._steps):
            if not wait and not self._steps[step].is_complete:
                return
            yield step, self._steps.pop(step).summary()


@dataclass
class _CollectedStep:
    scalars: defaultdict[tuple[str, Fold], list[float]] = field(default_factory=lambda: defaultdict(list))
    histograms: defaultdict[str, list[Histogram]] = field(default_factory=lambda: defaultdict(list))
    pictures: dict[str, HostCopy] = field(default_factory=dict)
    texts: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_complete(self) -> bool:
        if self.pictures and not self.scalars:  # the step has not ended
            return False
        return all(copy.is_complete for copy in self.pictures.values())

    def summary(self) -> StepSummary:
        drawn: dict[str, Image] = {}
        if self.pictures:
            from .tensor_tiles import draw_tiles

            drawn = {tag: draw_tiles(copy.wait().numpy()) for tag, copy in self.pictures.items()}
        return StepSummary(
            {tag: values[0] if len(values) == 1 else fold(values) for (tag, fold), values in self.scalars.items()},
            {tag: merge_histograms(several) for tag, several in self.histograms.items()},
            drawn,
            {tag: "\n\n".join(lines) for tag, lines in self.texts.items()},
        )
