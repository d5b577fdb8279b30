"""Attributions of a model, from passes with hooks that keep or replace the tensors of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..actions.base import Context
from ..config.experiment import output_unit_text
from ..errors import InstrumentError, Problem
from ..integrations.attach import attach
from ..integrations.attached_probe import AttachedProbe
from ..integrations.observe import call_model, errors_of_arguments
from ..plan.shape_inference import without_side_effects
from ..runtime.lazy_compiler import uncompiled
from ..tasks.model_output import OutputUnit
from ..values.nested import iter_tensors, map_tensors
from .attribution_result import GRADIENT, INTEGRATED, PATCHING, Attribution, TensorLocation, make_attribution, parts_of

Tensors = dict[TensorLocation, Tensor]


def attribution_of_model(  # noqa: PLR0917
    model: nn.Module,
    inputs: Any,
    baseline: Any,
    of: str | Callable[[Any], Tensor] | None,
    method: str,
    hook: Mapping[str, Any],
    steps: int,
    heads: int | None,
    *,
    exact: bool,
) -> Attribution:
    """Compute attributions of a model; see `instrument.interpret.attribute`. `hook` has the fields that select the tensors."""
    if not isinstance(model, nn.Module):
        raise InstrumentError(Problem("source", "must be a model or a run", type(model).__name__))
    if method == INTEGRATED and baseline is None:
        if not any(tensor.is_floating_point() for _, tensor in iter_tensors(inputs)):
            message = "is required, because the inputs have no floating-point values that can be zero"
            raise InstrumentError(Problem("baseline", message, fix="pass inputs such as padding tokens"))
        baseline = map_tensors(inputs, lambda _, each: torch.zeros_like(each) if each.is_floating_point() else each)
    if (baseline is None) != (method == GRADIENT):
        message = f"{method} has no baseline" if method == GRADIENT else f"{method} requires the corrupted inputs"
        raise InstrumentError(Problem("baseline", message))
    if steps < 1:
        raise InstrumentError(Problem("steps", "must be positive", steps))
    # The gradients are those at `start`, or on the line from there to `end`.
    start, end, sign = (baseline, inputs, -1.0) if method == PATCHING else (inputs, baseline, 1.0)
    passes = _Passes(model, of)
    with (
        errors_of_arguments(),
        without_side_effects(model, training=False),
        torch.inference_mode(False),  # enables gradients too
        uncompiled(),  # in a graph, a hook gets no tensors with a graph
        attach(model, {"attribution": {**hook, "fn": passes.keep}}, rules=None) as passes.probe,
    ):
        number, gradients = passes.run(start)
        values = {at: tensor.detach() for at, tensor in passes.kept.items()}
        with torch.no_grad():
            change = None if end is None else sign * (number - passes.run(end)[0])
        others = {at: torch.zeros_like(each) if end is None else each.detach() for at, each in passes.kept.items()}
        if {at: each.shape for at, each in values.items()} != {at: each.shape for at, each in others.items()}:
            message = "the tensors of the layers have other shapes than with the inputs"
            raise InstrumentError(Problem("baseline", message, fix="pass a baseline of the shape of the inputs"))
        if method == INTEGRATED:
            gradients = passes.mean_gradients(inputs, values, others, steps)
        effects = passes.effects(start, others, heads) if exact else {}
    scaled = {at: sign * (value.double() - others[at].double()) for at, value in values.items()}
    found = {at: [(each * gradients[at].double()).cpu().numpy()] for at, each in scaled.items()}
    name = of if isinstance(of, str) else getattr(of, "__name__", type(of).__name__)
    changes = {at: {name: sign * (number - new) + 0.0 for name, new in each.items()} for at, each in effects.items()}
    order = [layer for layer, _ in model.named_modules()]
    return make_attribution(method, name, found, order, heads, taken={}, change=change, exact=changes or None)


class _Passes:
    """Passes of a model to which `keep` is attached."""

    probe: AttachedProbe

    def __init__(self, model: nn.Module, of: str | Callable[[Any], Tensor] | None) -> None:
        self.kept: Tensors = {}
        self._model = model
        self._new: dict[TensorLocation, Callable[[Tensor], Tensor]] = {}
        try:
            self._number = of if callable(of) else OutputUnit(output_unit_text(of or ""), "of").part_of
        except ValueError as error:
            raise InstrumentError(Problem("of", str(error), of, fix="or pass a function of the output")) from None

    def keep(self, tensor: Tensor, context: Context) -> Tensor:
        """Keep a copy of a tensor, or of what replaces it, and return a copy of the copy.

        The first copy has no other use. Its gradient is therefore that of the layer, also if the layer returns its input, or if a
        later operation changes the result in place.
        """
        at = TensorLocation(context.layer, context.path, context.call)
        if at in self._new:
            tensor = self._new[at](tensor)
        self.kept[at] = (tensor if tensor.requires_grad else tensor.detach().requires_grad_()).clone()
        return self.kept[at].clone()

    def run(self, batch: Any, wanted: Sequence[TensorLocation] = ()) -> tuple[float, Tensors]:
        """Return the number for a batch and, unless gradients are disabled, those with respect to some or all tensors."""
        self.kept = {}
        result = self._number(call_model(self._model, batch))
        if not isinstance(result, Tensor) or not result.is_floating_point():
            raise InstrumentError(Problem("of", "must be a floating-point tensor", type(result).__name__))
        number = result.sum()
        gradients: Tensors = {}
        if torch.is_grad_enabled():
            if not self.kept or not number.requires_grad:
                message = "no floating-point tensor passed through these layers"
                if self.kept:
                    message = "the number does not depend on the tensors of these layers, or is detached from the graph"
                raise InstrumentError(Problem("layers", message, fix="select other layers, such as an embedding"))
            tensors = {at: self.kept[at] for at in wanted or self.kept}
            found = torch.autograd.grad(number, [*tensors.values()], allow_unused=True, materialize_grads=True)
            gradients = dict(zip(tensors, found, strict=True))
        self.probe.end_step()
        return number.item(), gradients

    def mean_gradients(self, batch: Any, values: Tensors, baseline: Tensors, steps: int) -> Tensors:
        """Return the means of the gradients on the line from the baseline to the values, float64, for each layer alone."""
        means = {at: torch.zeros_like(each, dtype=torch.float64) for at, each in values.items()}
        points, weights = np.polynomial.legendre.leggauss(steps)  # on [-1, 1]
        for layer in {at.layer: None for at in values}:
            locations = [at for at in values if at.layer == layer]
            for point, weight in zip(((points + 1) / 2).tolist(), (weights / 2).tolist(), strict=True):
                between = {at: baseline[at] + point * (values[at] - baseline[at]) for at in locations}
                self._new = {at: lambda _, new=new: new for at, new in between.items()}  # type: ignore[misc]
                for at, gradient in self.run(batch, locations)[1].items():
                    means[at] += weight * gradient.double()
        self._new = {}
        return means

    @torch.no_grad()
    def effects(self, batch: Any, others: Tensors, heads: int | None) -> dict[TensorLocation, dict[str, float]]:
        """Return the number with one part of a tensor replaced, for each part."""
        effects: dict[TensorLocation, dict[str, float]] = {}
        for at, other in others.items():
            for name, part in parts_of(heads, other.shape).items():
                mask = torch.zeros_like(other, dtype=torch.bool)
                mask[part] = True
                self._new = {at: lambda tensor, mask=mask, other=other: torch.where(mask, other, tensor)}  # type: ignore[misc]
                effects.setdefault(at, {})[name], _ = self.run(batch)
        self._new = {}
        return effects
