"""Relation: the recorded fingerprints of tensors that all processes have are equal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..plan.modules import Layers
from ..rules.step_rows import location_name
from .exchange import Exchange, has_processes
from .relation import RELATIONS, Checked, RecordedFingerprint, Relation, Training
from .replicas_equal import SIZE, compare_ranks, hash_of, keeps_all_equal, replicated_parameters


@RELATIONS.register("replicas_differ")
class ReplicasDiffer(Relation):
    """Compares the fingerprints that the hooks of all processes recorded in each training step, one step later."""

    sources = ("fingerprints",)
    on_all_ranks = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._exchange: Exchange | None = None
        self._are_replicas = False  # according to earlier steps of the optimizer
        self._last = b""  # the equal fingerprints after such a step
        self._excluded: set[tuple[str, str]] | None = None  # see `_not_replicated`
        self._recorded: dict[int, list[RecordedFingerprint]] = {}  # by step

    def check(self) -> Iterator[Checked]:
        recorded, self.training.fingerprints = self.training.fingerprints, []
        wrapper = self.training.replicated_by
        if not (recorded and has_processes()):
            return
        if wrapper is not None and (self.training.has_local_steps or not keeps_all_equal(wrapper)):
            yield Checked(None, None, "the wrapper does not keep the parameters of all processes equal in each step")
            return
        if self._excluded is None:
            self._excluded = set() if wrapper is None else _not_replicated(self.training.model, wrapper)
        self._exchange = self._exchange or Exchange()
        for step, group in groupby(recorded, lambda each: each.step):
            if not (rows := [row for row in group if (row.layer, row.path) not in self._excluded]):
                continue
            self._recorded[step] = rows
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
        if are_equal or self._are_replicas or self.training.replicated_by is not None:
            yield from results
        if are_equal and any(row.kind == "step_post" for row in rows):
            self._are_replicas |= self._last not in (b"", values[0])
            self._last = values[0]

    def check_end(self) -> Iterator[Checked]:
        yield from self.check()
        for step, values in () if self._exchange is None else self._exchange.finish():
            yield from self._compare(step, values)


def _not_replicated(model: nn.Module, wrapper: DistributedDataParallel) -> set[tuple[str, str]]:
    kept = replicated_parameters(model, wrapper)
    owned = ((layer.owner.name, *each) for layer in Layers.of(model) for each in layer.own_parameters())
    return {(layer, name) for layer, name, parameter in owned if id(parameter) not in kept}
