"""Relation: the samples of a batch differ, also in their classes, and so do the batches of a training on more data than one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from .observations import sampled_fingerprint
from .relation import RELATIONS, Checked, Relation, Training

TIMES_IN_BATCH, TIMES = 3, 4  # checked steps in succession
MIN_SAMPLES = 4
TIMES_OF_CLASS, MIN_OF_CLASS = 5, 8  # checked batches of one class, and their samples


@RELATIONS.register("samples_vary")
class SamplesVary(Relation):
    """Compares the samples in the first input of the model in a step, and this input with that of earlier steps."""

    sources = ("inputs", "batches", "losses")

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._previous: tuple[int, ...] = ()
        self._times = self._times_in_batch = 0
        self._classes: Counter[int] = Counter()  # checked batches of one class, by class
        self._mixed = 0  # those of several classes
        self._last = -1  # the last class
        self._returns = 0  # how often a class came again after another one
        self._is_in_order = False  # whether the targets are those of a loader that does not shuffle

    def check(self) -> Iterator[Checked]:
        yield from self._check_classes()
        tensors = [each for call in self.training.inputs[:1] for each in call.tensors.values()]
        step, batches = self.training.clock.moment.step, self.training.batches
        of_step = [batch for batch in batches if batch.step == step]
        if not tensors or not any(batch.batches is None or batch.batches > 1 for batch in of_step):
            self._times = self._times_in_batch = 0
            return
        prints = tuple(map(sampled_fingerprint, tensors))
        several = [batch for batch in batches if batch.batches != 1]
        is_loaded = any(each in batch.fingerprints for batch in several for each in prints)
        is_repeated = prints == self._previous
        self._times = self._times + 1 if is_repeated else 1
        is_varied = is_loaded or not is_repeated  # otherwise, it can be a constant input
        self._times_in_batch = self._times_in_batch + 1 if is_varied and _are_equal(tensors) else 0
        self._previous = prints
        if self._times_in_batch == TIMES_IN_BATCH:
            text = f"all {len(tensors[0])} samples of a batch are equal, in {TIMES_IN_BATCH} steps in succession"
            yield Checked(False, len(tensors[0]), text)
        elif self._times == TIMES and is_loaded:
            recent = [batch for batch in batches if batch.step > step - TIMES]
            differ = len({batch.fingerprints for batch in recent}) > 1
            if not differ and any(batch.number or batch.may_repeat for batch in recent):
                return  # the data repeat
            why = "although the data loader gives others" if differ else "although the data loader has several"
            yield Checked(False, TIMES, f"the model gets the same batch in {TIMES} steps in succession, {why}")
        elif self._times == 1 and not self._times_in_batch and tensors[0].ndim and len(tensors[0]) >= MIN_SAMPLES:
            yield Checked(True, len(tensors[0]), "the samples of a batch differ")

    def _check_classes(self) -> Iterator[Checked]:
        if len(self.training.losses) != 1 or self.training.losses[0].targets.ndim != 1:
            return
        (call,) = self.training.losses
        targets = call.targets[call.targets != call.ignore_index]
        if len(targets) < MIN_OF_CLASS:
            return
        if any(batch.in_order for batch in self.training.batches):
            fingerprint = sampled_fingerprint(call.targets.long())
            self._is_in_order |= any(fingerprint in batch.in_order for batch in self.training.batches)
        lowest, highest = (int(each) for each in targets.aminmax())
        if lowest == highest:
            self._returns += lowest in self._classes and lowest != self._last
            self._classes[lowest] += 1
            self._last = lowest
        else:
            self._mixed += 1
        count = self._classes.total()
        is_sorted = count >= 2 * self._mixed and self._returns < 2  # it also returns in the next epoch
        if count >= TIMES_OF_CLASS and is_sorted and self._is_in_order and len(self._classes) > 1:
            of_all = f"{count} of {count + self._mixed} checked batches"
            text = (
                f"the data loader does not shuffle: {of_all} have targets of one class, of {len(self._classes)} classes"
            )
            yield Checked(False, count, text)


def _are_equal(tensors: list[Tensor]) -> bool:
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(sizes) > 1 or min(sizes) < MIN_SAMPLES or not any(tensor.numel() > len(tensor) for tensor in tensors):
        return False
    return all(bool((tensor[1:] == tensor[:1]).all()) for tensor in tensors)
