"""Relation: the logits of several classes are not functions of a single unit."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .relation import RELATIONS, Checked, Relation

MIN_CLASSES, MIN_SAMPLES = 3, 8
MIN_DIFFERENT = 3  # any two logits are on a line
TOLERANCE = 1e-4  # of the largest deviation from the mean; rounding of float32 is about 1e-6
TIMES = 2  # checked steps in succession


@RELATIONS.register("narrow_layer")
class NarrowLayer(Relation):
    """Tests whether the logits of a batch lie on a line, for models with a layer of one unit."""

    sources = ("losses",)

    _times = 0

    def attach(self) -> None:
        parts = self.training.modules.items()
        self._layers = [name for name, part in parts if isinstance(part, nn.Linear) and part.out_features == 1]

    def check(self) -> Iterator[Checked]:
        given = [call.logits for call in self.training.losses if call.is_mean and call.logits is not None]
        logits = [each for each in given if len(each) >= MIN_SAMPLES and each.shape[1] >= MIN_CLASSES]
        if not logits or not self._layers:
            return
        self._times = self._times + 1 if _are_on_a_line(logits[0]) else 0
        if self._times >= TIMES:
            text = f"the logits of {logits[0].shape[1]} classes are functions of one number, the output of a layer of one unit"
            yield Checked(False, 1, text, self._layers[0])
        elif not self._times:
            yield Checked(True, len(logits[0]), "the logits of a batch are not on a line")


def _are_on_a_line(logits: Tensor) -> bool:
    if len(logits.unique(dim=0)) < MIN_DIFFERENT:
        return False
    centered = logits.double() - logits.double().mean(0)
    norms = centered.norm(dim=1)
    largest = centered[norms.argmax()] / norms.max()
    rest = centered - (centered @ largest)[:, None] * largest
    return bool(rest.norm(dim=1).max() < TOLERANCE * norms.max())
