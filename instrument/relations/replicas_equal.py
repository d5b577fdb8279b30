"""Relation: the parameters of all processes are equal in data-parallel training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from ..stats.fingerprint import fingerprint
from .exchange import Exchange, has_processes
from .observations import sampled_fingerprint
from .relation import RELATIONS, Checked, Relation, Training

SIZE = 8  # bytes of a hash
_NONE = bytes(2 * SIZE)


@RELATIONS.register("replicas_equal")
class ReplicasEqual(Relation):
    """Compares the bits of the trained parameters of all processes after a step, in data-parallel training."""

    sources = ("inputs",)
    on_all_ranks = True

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._exchange: Exchange | None = None
        self._gradients: list[Tensor] = []  # the fingerprints of those before the steps of the optimizers; 0 for zeros
        self._is_synchronized = False  # by the loop

    def before_step(self, optimizer: Optimizer) -> None:
        if self.training.replicated_by is None and has_processes():
            held = (each for group in optimizer.param_groups for each in group["params"] if type(each) is Parameter)
            gradients = (each.grad for each in held if type(each.grad) is Tensor and each.grad.layout is torch.strided)
            self._gradients += (fingerprint(each) * each.any() for each in gradients)

    def check(self) -> Iterator[Checked]:
        wrapper = self.training.replicated_by
        gradients, self._gradients = self._gradients, []
        if wrapper is None and not gradients:
            return
        named, evidence = [*self.training.parameters.items()], _NONE
        if wrapper is not None and keeps_all_equal(wrapper) and not self.training.is_local:
            replicated = replicated_parameters(self.training.model, wrapper)
            named = [(name, each) for name, each in named if id(each) in replicated]
        elif wrapper is None and all(type(each) is Parameter for _, each in named):
            tensors = [each for call in self.training.inputs[:1] for each in call.tensors.values()]
            numbers = _numbers(gradients)  # zeros are no evidence, and count as different
            evidence = hash_of(repr([*map(sampled_fingerprint, tensors)]).encode())
            evidence += hash_of(numbers.tobytes() if numbers.any() else str(self.training.clock.rank).encode())
        else:
            return
        self._exchange = self._exchange or Exchange()
        parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        layout = repr([(name, tuple(each.shape), each.dtype) for name, each in parameters.items()])
        bits = _numbers([*map(fingerprint, parameters.values())]).tobytes()
        digests = evidence + hash_of(layout.encode()) + bits
        for step, values in self._exchange.post(self.training.clock.moment.step, digests):
            inputs, equal = {value[:SIZE] for value in values}, {value[SIZE : 2 * SIZE] for value in values}
            self._is_synchronized |= len(inputs) == len(values) and len(equal) == 1
            if wrapper is not None or self._is_synchronized:
                names = [(name, *name.rpartition(".")[::2]) for name in parameters]
                yield from compare_ranks("parameters", names, step, [value[2 * SIZE :] for value in values])


def replicated_parameters(model: nn.Module, wrapper: DistributedDataParallel) -> set[int]:
    """Return the `id` of each parameter that a wrapper in the model, or otherwise the one around it, keeps equal."""
    wrappers = [each for each in model.modules() if isinstance(each, DistributedDataParallel)] or [wrapper]
    return {
        id(parameter)
        for each in wrappers
        for name, parameter in each.module.named_parameters()
        if name not in each.parameters_to_ignore
    }


def keeps_all_equal(wrapper: DistributedDataParallel) -> bool:
    """Return whether a wrapper synchronizes several processes, which are all processes, in each step."""
    states = [type(state).__name__ for _, state in getattr(wrapper, "_comm_hooks", ())]
    is_complete = wrapper.process_group.size() == dist.get_world_size() > 1
    return is_complete and "PostLocalSGDState" not in states


def _numbers(bits: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    return torch.stack([each.to(bits[0].device) for each in bits]).cpu().numpy() if bits else np.empty(0, np.int64)


def hash_of(value: bytes) -> bytes:
    """Return a hash of `SIZE` bytes."""
    return hashlib.blake2b(value, digest_size=SIZE).digest()


def compare_ranks(
    what: str, names: Sequence[tuple[str, str, str]], step: int, values: Sequence[bytes]
) -> Iterator[Checked]:
    """Compare the numbers of tensors in all processes.

    Args:
        what: The tensors, such as `parameters`.
        names: The label, the layer and the path of each tensor.
        values: For each rank, a hash of what its numbers describe, and the numbers, int64 [tensors].
    """
    if any(value[:SIZE] != values[0][:SIZE] for value in values):
        return  # the processes train other parameters
    numbers = np.stack([np.frombuffer(value[SIZE:], np.int64) for value in values])
    differs = numbers != numbers[0]
    for at in np.flatnonzero(differs.any(0)).tolist():
        ranks = np.flatnonzero(differs[:, at]).tolist()
        label, layer, path = names[at]
        text = f"{label} of rank {', '.join(map(str, ranks))} differs from that of rank 0 after step {step}"
        yield Checked(False, len(ranks), text, layer, path)
    yield Checked(True, len(names), f"{len(names)} {what} are equal in {len(values)} processes")
