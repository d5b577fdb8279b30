"""Relation: the processes of a training, and the worker processes of a data loader, get different data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from .exchange import Exchange
from .observations import LoaderBatch, sampled_fingerprint
from .relation import RELATIONS, Checked, Relation, Training
from .replicas_equal import keeps_all_equal

TIMES = 3  # checked steps in succession in which two processes get equal batches, and others than before


@RELATIONS.register("distinct_data")
class DistinctData(Relation):
    """Compares the inputs of the model in all processes of `DistributedDataParallel`, and the batches of the workers of each loader.

    Processes that get the same batch in each step, such as all data, are not reported.
    """

    sources = ("inputs", "batches")
    on_all_ranks = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._exchange: Exchange | None = None
        self._previous: list[bytes] = []
        self._times: Counter[tuple[int, int]] = Counter()  # by pair of ranks

    def check(self) -> Iterator[Checked]:
        yield from self._check_workers()
        wrapper = self.training.replicated_by
        if wrapper is None or not keeps_all_equal(wrapper):
            return
        tensors = [each for call in self.training.inputs[:1] for each in call.tensors.values()]
        value = np.array([*map(sampled_fingerprint, tensors)]).tobytes()
        self._exchange = self._exchange or Exchange()
        step = self.training.clock.moment.step
        for at, values in self._exchange.post(step, value or b"-"):
            if b"-" not in values:
                yield from self._check_ranks(at, values)

    def _check_ranks(self, step: int, values: list[bytes]) -> Iterator[Checked]:
        previous, self._previous = self._previous, values
        if not previous:
            previous = [b""] * len(values)
        for one, other in combinations(range(len(values)), 2):
            is_repeated = values[one] == values[other] and values[one] != previous[one]
            self._times[one, other] = self._times[one, other] + 1 if is_repeated else 0
            if self._times[one, other] == TIMES:
                text = f"rank {one} and rank {other} get the same batch, in {TIMES} checked steps until step {step}"
                yield Checked(False, TIMES, text)
                return
        if len(set(values)) == len(values):
            yield Checked(True, len(values), f"the batches of {len(values)} processes differ")

    def _check_workers(self) -> Iterator[Checked]:
        passes: defaultdict[int, list[LoaderBatch]] = defaultdict(list)
        for batch in self.training.batches:
            if batch.workers > 1 and not batch.may_repeat and batch.number == len(passes[batch.iterator]):
                passes[batch.iterator].append(batch)
        for batches in passes.values():
            workers, prints = batches[0].workers, [batch.fingerprints for batch in batches]
            groups = [prints[at : at + workers] for at in range(0, len(prints), workers)]
            equal = sum(one == other for group in groups for one, other in pairwise(group))
            if equal >= 2 and len(set(prints)) > 1 and all(len(set(group)) == 1 for group in groups):
                text = (
                    f"the {workers} workers of a data loader give the same batches: they draw the same random numbers, or each "
                    "reads all data of an iterable dataset"
                )
                yield Checked(False, workers, text)
