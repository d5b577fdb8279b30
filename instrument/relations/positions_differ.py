"""Relation: the tokens of a sample have different positions."""

from __future__ import annotations

from collections.abc import Iterator

from .relation import RELATIONS, Checked, Relation

MIN_POSITIONS = 4


@RELATIONS.register("positions_differ")
class PositionsDiffer(Relation):
    """Reads the argument `position_ids` of the model, [..., positions]."""

    sources = ("inputs",)

    def check(self) -> Iterator[Checked]:
        for call in self.training.inputs:
            ids = call.tensors.get("position_ids")
            if ids is None or not ids.ndim or ids.shape[-1] < MIN_POSITIONS or not ids.numel():
                continue
            if bool((ids == ids.flatten()[0]).all()):
                text = f"position_ids are {int(ids.flatten()[0])} for all {ids.shape[-1]} tokens: the model cannot use their order"
                yield Checked(False, ids.shape[-1], text, self._layer())
            else:
                yield Checked(True, ids.shape[-1], "position_ids differ")

    def _layer(self) -> str:
        for name, part in self.training.modules.items():
            kind = type(part).__name__.lower()
            last = name.rpartition(".")[2].lower()
            if "rotary" in kind or "position" in kind or last == "wpe" or "position" in last:
                return name
        return ""
