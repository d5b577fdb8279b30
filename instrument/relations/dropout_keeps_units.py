"""Relation: dropout keeps at least a tenth of the units."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn.modules.dropout import _DropoutNd

from .relation import RELATIONS, Checked, Relation

LARGEST = 0.9


@RELATIONS.register("dropout_keeps_units")
class DropoutKeepsUnits(Relation):
    """Reads the probability of each dropout module in training mode."""

    def check(self) -> Iterator[Checked]:
        parts = [(name, part) for name, part in self.training.modules.items() if isinstance(part, _DropoutNd)]
        for name, part in parts:
            if part.training and part.p > LARGEST:
                yield Checked(False, part.p, f"it drops {part.p:.4g} of its input", name)
        if parts:
            yield Checked(
                True, len(parts), f"{len(parts)} dropout modules keep at least {1 - LARGEST:.1g} of their input"
            )
