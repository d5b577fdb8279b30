"""How often values occur in what enters a training: the targets of its losses, and the indices of its embeddings."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import suppress

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..hooks.clock import Clock, operator_name
from ..hooks.hook_group import HookGroup
from ..relations.observations import BACKWARDS, MAX_ELEMENTS, is_captured, is_readable
from ..rules.reference_ranges import BUCKETS, COUNTS
from ..rules.step_rows import RelationRow
from .program_settings import MAX_NODES, reached

EVERY, FIRST = 10, 2  # the observed steps: the multiples of a number, and the first ones
DENSE = 320  # steps after which half as many are observed, and again after each doubling: at least six in each phase of training
MAX_CALLS = 4  # of the same operator in a step that are apart
MAX_TENSORS = 256  # of a step: a loop may not end it
_LOSSES = "NllLoss NllLoss2D BinaryCrossEntropy BinaryCrossEntropyWithLogits MseLoss SmoothL1Loss HuberLoss KlDiv"
_SAVED = {f"{name}Backward0": "target" for name in _LOSSES.split()}  # what each operator saves
_SAVED |= {"GatherBackward0": "index", "EmbeddingBackward0": "indices"}


class ValueCounts(HookGroup):
    """Counts the values of the targets and indices in the backward graphs of the losses of recorded steps, before `backward`.

    The bucket of an integer is its value modulo 64. That of another number is twice its binary exponent, plus 1 if it is negative,
    modulo 64. Of a larger tensor, up to `MAX_ELEMENTS` elements are read. Compiled code has no such graph.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__((), clock)
        self._counts: Counter[str] = Counter()
        self._buckets: dict[str, list[Tensor]] = {}
        self._is_recorded = False
        self.due = sys.maxsize  # `take` does nothing at the end of earlier training steps

    def observe(self, *, is_recorded: bool) -> None:
        """Observe the losses of this step and the next ones in the process of rank 0, if hooks record in it."""
        self._is_recorded = is_recorded and self.clock.moment.phase == "train" and not self.clock.rank
        self._begin_step(self.clock.moment.step)

    def _begin_step(self, step: int) -> None:
        """Observe the losses of a step if they are counted in it."""
        self.detach()
        self.due = sys.maxsize
        if self._is_recorded and not self.clock.closed:
            interval = EVERY << (step // DENSE).bit_length()
            ahead = 0 if step < FIRST else -step % interval
            self.due = step + max(0, ahead - 1)
            if not ahead:
                BACKWARDS.add(self._on_backward)

    def detach(self) -> None:
        BACKWARDS.remove(self._on_backward)

    def take(self) -> list[RelationRow]:
        """Return the rows of a training step that ends."""
        if self.clock.moment.phase != "train":
            return []
        if self.clock.moment.step >= self.due:
            self._begin_step(self.clock.moment.step + 1)
        buckets, self._buckets = self._buckets, {}  # another thread may add to them
        self._counts.clear()
        rows = []
        for path, found in [*buckets.items()]:
            counts = torch.cat([each.cpu() for each in found]).bincount(minlength=BUCKETS).tolist()
            rows.append(RelationRow(COUNTS, "", path, None, float(sum(counts)), " ".join(map(str, counts))))
        return rows

    def _on_backward(self, loss: Tensor) -> None:
        if self.clock.moment.phase != "train" or self.clock.closed or self._counts.total() >= MAX_TENSORS:
            return
        with suppress(Exception):  # it reads values of any training, and must not end it
            if loss.grad_fn is not None and not is_captured(loss):
                self._add(loss.grad_fn)

    @torch.no_grad()
    def _add(self, root: Node) -> None:
        nodes = reached([root])
        # The class of a node of PyTorch has the name of its operator.
        kinds = {kind for kind in {*map(type, nodes)} if kind.__name__ in _SAVED}
        known = [node for node in nodes if type(node) in kinds] if kinds and len(nodes) <= MAX_NODES else []
        for node in sorted(known, key=lambda node: node._sequence_nr())[: MAX_TENSORS - self._counts.total()]:
            name = f"{operator_name(node)}.{(saved := _SAVED[operator_name(node)])}"
            values = getattr(node, f"_raw_saved_{saved}")
            # Hooks on saved tensors can compute them again.
            tensor = values.data if getattr(values, "unpack_hook", values) is None else None
            if tensor is None or tensor.requires_grad or not is_readable(tensor) or not tensor.numel():
                continue
            found, call = _buckets(tensor), min(self._counts[name], MAX_CALLS - 1)
            self._counts[name] += 1
            self._buckets.setdefault(f"{name} {call}" if call else name, []).append(found)


def _buckets(tensor: Tensor) -> Tensor:
    """Return the bucket of each element, or of evenly spaced ones, uint8 [elements]."""
    numel = tensor.numel()
    # Of an expanded tensor, `reshape` would copy all elements.
    flat = tensor.detach().take(torch.arange(0, numel, numel // MAX_ELEMENTS + 1, device=tensor.device))
    if flat.is_floating_point():
        numbers = flat.float().nan_to_num()
        flat = 2 * torch.frexp(numbers).exponent + (numbers < 0)
    return (flat.long() % BUCKETS).to(torch.uint8)
