"""Relation: parameters that share their memory at the start stay equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..plan.modules import named_modules
from .relation import RELATIONS, Checked, Relation, all_parameters


@RELATIONS.register("tied_weights")
class TiedWeights(Relation):
    """Compares the parameters that were one parameter, or one memory, when the hooks were attached."""

    def attach(self) -> None:
        names: dict[tuple[object, ...], list[str]] = {}
        for name, parameter in all_parameters(named_modules(self.training.model).items()):
            names.setdefault(_memory(parameter), []).append(name)
        self._tied = [several for several in names.values() if len(several) > 1]

    def check(self) -> Iterator[Checked]:
        parameters = dict(all_parameters(named_modules(self.training.model).items())) if self._tied else {}
        tied = [[(name, parameters[name]) for name in names if name in parameters] for names in self._tied]
        tied += _declared(self.training.model, self.training.parameters)
        count = 0
        for (first, reference), *others in filter(None, tied):
            for name, parameter in others:
                count += 1
                if parameter is not reference and not _are_equal(parameter, reference):
                    layer, _, path = name.rpartition(".")
                    text, distance = f"{name} differs from {first}, with which it is tied", float("nan")
                    if parameter.shape == reference.shape:
                        own = parameter.detach().to(reference.device, reference.dtype)
                        distance = float((own - reference.detach()).abs().max())
                    yield Checked(False, distance, text, layer, path)
        if count:
            yield Checked(True, count, f"{count} tied parameters are equal")


def _memory(parameter: Tensor) -> tuple[object, ...]:
    if is_lazy(parameter) or type(parameter.detach()) is not Tensor or not parameter.numel() or parameter.is_meta:
        return (id(parameter),)
    return parameter.device, parameter.data_ptr(), parameter.shape, parameter.stride()


def _declared(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[list[tuple[str, nn.Parameter]]]:
    """Return the weights of both embeddings of a model of transformers that declares them tied."""
    config, get = getattr(model, "config", None), getattr(model, "get_output_embeddings", None)
    is_declared = getattr(config, "tie_word_embeddings", False) is True and getattr(model, "_tied_weights_keys", None)
    if get is None or not is_declared:
        return []
    weights = {id(getattr(each, "weight", None)) for each in (model.get_input_embeddings(), get())}  # type: ignore[operator]
    found = [(name, parameter) for name, parameter in parameters.items() if id(parameter) in weights]
    return [found] if len(found) == 2 and found[0][1].shape == found[1][1].shape else []


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (_memory(one) == _memory(other) or torch.equal(one.to(other.device), other))
