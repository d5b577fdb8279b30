"""Relation: the recorded fingerprints of tensors that all processes have are equal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from ..rules.step_rows import location_name
from .exchange import Exchange, has_processes
from .relation import RELATIONS, Checked, RecordedFingerprint, Relation, Training
from .replicas_equal import SIZE, compare_ranks, hash_of


@RELATIONS.register("replicas_differ")
class ReplicasDiffer(Relation):
    """Compares the fingerprints that the hooks of all processes recorded in each training step, one step later.

    These are of parameters, their updates, gradients and optimizer states at the step of the optimizer. Shards of tensors and
    buffers are not compared. Without a wrapper, the processes may train independently, so a difference counts only if all
    fingerprints were equal after an earlier step of the optimizer.
    """

    sources = ("fingerprints",)
    on_all_ranks = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._exchange: Exchange | None = None
        self._were_equal = False  # after a step of the optimizer
        self._recorded: dict[int, list[RecordedFingerprint]] = {}  # by step

    def check(self) -> Iterator[Checked]:
        recorded, self.training.fingerprints = self.training.fingerprints, []
        if not (recorded and has_processes()):
            return
        self._exchange = self._exchange or Exchange()
        for step, group in groupby(recorded, lambda each: each.step):
            rows = self._recorded[step] = [*group]
            numbers = np.array([row.value for row in rows], np.int64)
            key = hash_of(repr([row.identity for row in rows]).encode())
            for at, values in self._exchange.post(step, key + numbers.tobytes()):
                yield from self._compare(at, values)
        if self._exchange.rank:
            self._recorded.clear()

    def _compare(self, step: int, values: list[bytes]) -> Iterator[Checked]:
        rows = self._recorded.pop(step)
        if len({value[:SIZE] for value in values}) > 1:
            yield Checked(None, None, f"the processes recorded the fingerprints of different tensors in step {step}")
        names = [(f"{row.role} {location_name(row.layer, row.path, row.kind)}", row.layer, row.path) for row in rows]
        results = [*compare_ranks("fingerprints", names, step, values)]
        are_equal = all(result.holds for result in results)
        if are_equal or self._were_equal or any(row.scope == "averaged" for row in rows):
            yield from results
        self._were_equal |= are_equal and any(row.kind == "step_post" for row in rows)

    def check_end(self) -> Iterator[Checked]:
        yield from self.check()
        for step, values in () if self._exchange is None else self._exchange.finish():
            yield from self._compare(step, values)
