"""Relation: the parameters of all processes are equal in data-parallel training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .exchange import Exchange
from .relation import RELATIONS, Checked, Relation, Training


@RELATIONS.register("replicas_equal")
class ReplicasEqual(Relation):
    """Compares the bits of the trained parameters of all processes after a step, for models in `DistributedDataParallel`.

    Gradients that differ make the parameters differ in the same step. Buffers are not compared: each process updates the running
    statistics of batch normalization with its own batch, until the next forward pass. Nor are parameters outside of wrappers, those
    that DDP ignores, and those of local SGD, which averages them later. A step whose last call is in a block `no_sync` can be one of
    local SGD.
    """

    sources = ("inputs",)
    on_all_ranks = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._exchange: Exchange | None = None

    def check(self) -> Iterator[Checked]:
        wrapper = self.training.replicated_by
        if wrapper is None or self.training.is_local or not keeps_all_equal(wrapper):
            return
        self._exchange = self._exchange or Exchange()
        parts = [each for each in self.training.model.modules() if isinstance(each, DistributedDataParallel)] or [
            wrapper
        ]
        replicated = {
            id(parameter)
            for part in parts
            for name, parameter in part.module.named_parameters()
            if name not in part.parameters_to_ignore
        }
        parameters = {
            name: parameter
            for name, parameter in self.training.model.named_parameters()
            if parameter.requires_grad and id(parameter) in replicated
        }
        for step, values in self._exchange.post(self.training.clock.moment.step, _digests(parameters)):
            yield from _compare([*parameters], step, values)


def keeps_all_equal(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper synchronizes several processes, which are all processes, in each step."""
    states = [type(state).__name__ for _, state in getattr(wrapper, "_comm_hooks", ())]
    is_complete = wrapper.process_group.size() == dist.get_world_size() > 1
    return is_complete and "PostLocalSGDState" not in states


def _digests(parameters: Mapping[str, Tensor]) -> bytes:
    """Return a hash of the names and shapes, and the sum of the bits of each parameter as an integer, int64."""
    layout = repr([(name, tuple(each.shape), each.dtype) for name, each in parameters.items()])
    sums = [_sum_of_bits(parameter.detach()) for parameter in parameters.values()]
    numbers = torch.stack([each.to(sums[0].device) for each in sums]).cpu().numpy() if sums else np.empty(0, np.int64)
    return hashlib.blake2b(layout.encode(), digest_size=8).digest() + numbers.tobytes()


def _sum_of_bits(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.view(integers[real.element_size()]).sum(dtype=torch.int64)


def _compare(names: list[str], step: int, values: list[bytes]) -> Iterator[Checked]:
    if any(value[:8] != values[0][:8] for value in values):
        return  # the processes train other parameters
    numbers = np.stack([np.frombuffer(value[8:], np.int64) for value in values])
    differs = numbers != numbers[0]
    for at in np.flatnonzero(differs.any(0)):
        ranks = np.flatnonzero(differs[:, at]).tolist()
        layer, _, path = names[at].rpartition(".")
        text = f"{names[at]} of rank {', '.join(map(str, ranks))} differs from that of rank 0 after step {step}"
        yield Checked(False, len(ranks), text, layer, path)
    yield Checked(True, len(names), f"{len(names)} parameters are equal in {len(values)} processes")
