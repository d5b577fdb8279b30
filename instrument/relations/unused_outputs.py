"""Relation: the targets of a classifier are not only in the lower half of its classes."""

from __future__ import annotations

from collections.abc import Iterator

from .relation import RELATIONS, Checked, Relation, Training
from .token_targets import token_targets

SAMPLES_PER_CLASS, MIN_SAMPLES, MIN_CLASSES = 16, 200, 3


@RELATIONS.register("unused_outputs")
class UnusedOutputs(Relation):
    """Compares the largest target of cross-entropy in all checked steps with the number of classes.

    With n samples, the probability that none is in the upper half, which has a share s of the data, is (1 - s) ^ n: 4e-5 for 5% of the data
    and 200 samples. It is decided after 16 samples per class, and at least 200.
    """

    sources = ("inputs", "losses")

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._seen: dict[
            int, tuple[int, int]
        ] = {}  # the number of samples and the largest target, by number of classes

    def check(self) -> Iterator[Checked]:
        if token_targets(self.training):  # a vocabulary has tokens that a text does not use
            return
        for call in self.training.losses:
            classes = call.shape[1] if len(call.shape) > 1 else 0
            targets = call.targets[call.targets != call.ignore_index]
            if not call.is_mean or classes < MIN_CLASSES or not len(targets):
                continue
            count, largest = self._seen.get(classes, (0, -1))
            count, largest = count + len(call.targets), max(largest, int(targets.max()))
            self._seen[classes] = count, largest
            if count < max(SAMPLES_PER_CLASS * classes, MIN_SAMPLES):
                continue
            if 2 * (largest + 1) <= classes:
                text = f"the largest of {count} targets is {largest}, and the model has outputs for {classes} classes"
                yield Checked(False, largest, text)
            else:
                yield Checked(True, largest, f"the largest of {count} targets is {largest}, of {classes} classes")
