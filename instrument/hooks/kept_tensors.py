"""The tensors that hooks with `keep_as` kept in a step, and which of them a hook function may use.

A pass that activation checkpointing recomputes has its own tensors, so an intervention inside a checkpoint cannot use kept ones.
Gradients are not recomputed: their hooks use the tensors of the original pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from ..actions.base import KeptTensors, NotKeptError


class Kept(NamedTuple):
    """A kept tensor. `has_lost_graph`: whether it belongs to the first pass of a reentrant checkpoint, which has no graph."""

    tensor: Tensor
    has_lost_graph: bool


class TensorStore:
    """The kept tensors of a step, by name and location."""

    def __init__(self) -> None:
        self._by_thread: dict[int, dict[str, dict[str, Kept]]] = {}

    def clear(self) -> None:
        self._by_thread.clear()

    @property
    def original(self) -> dict[str, dict[str, Kept]]:
        """The kept tensors. Those of this thread take precedence over those of other threads."""
        own = self._by_thread.get(get_ident(), {})
        if own and len(self._by_thread) == 1:
            return own
        kept: dict[str, dict[str, Kept]] = {}
        for by_name in (*self._by_thread.copy().values(), own):
            for name in [*by_name]:
                kept.setdefault(name, {}).update(by_name[name])
        return kept

    def keep(self, name: str, location: str, tensor: Tensor, *, has_lost_graph: bool) -> None:
        """Keep a copy of a tensor, since it may be modified in place later."""
        kept = self._by_thread.setdefault(get_ident(), {}).setdefault(name, {})
        kept[location] = Kept(tensor.clone(), has_lost_graph)

    def all(self) -> KeptTensors:
        """Return the tensors of the original pass."""
        return KeptTensors({name: _tensors(by_location) for name, by_location in self.original.items()})

    def for_intervention(self, *, in_checkpoint: bool) -> KeptTensors:
        """Return the tensors that an intervention in a forward pass may use. The others raise an error when it uses them.

        Args:
            in_checkpoint: Whether activation checkpointing recomputes this part of the pass, now or later.
        """
        needs_graph = torch.is_grad_enabled()
        result = KeptTensors()
        for name, by_location in self.original.items():
            refused = {
                location
                for location, kept in by_location.items()
                if in_checkpoint or (needs_graph and kept.has_lost_graph)
            }
            tensors = _tensors(by_location)
            result[name] = _UsableTensors(name, tensors, refused) if refused else tensors
        return result


class _UsableTensors(Mapping[str, Tensor]):
    """The tensors of one name, some of which cannot be used."""

    def __init__(self, name: str, tensors: dict[str, Tensor], refused: set[str]) -> None:
        self.name, self.tensors, self.refused = name, tensors, refused

    def __getitem__(self, location: str) -> Tensor:
        if location in self.refused:
            raise self._error([location])
        return self.tensors[location]

    def __iter__(self) -> Iterator[str]:
        raise self._error(sorted(self.refused))

    def __len__(self) -> int:
        raise self._error(sorted(self.refused))

    def _error(self, locations: list[str]) -> NotKeptError:
        layers = ", ".join(repr(location or ".") for location in locations)
        return NotKeptError(
            f"the tensor that was kept as {self.name!r} at {layers} cannot be used with this activation checkpoint: the "
            "gradients would be wrong; disable checkpointing"
        )


def _tensors(by_location: Mapping[str, Kept]) -> dict[str, Tensor]:
    return {location: kept.tensor for location, kept in by_location.items()}
