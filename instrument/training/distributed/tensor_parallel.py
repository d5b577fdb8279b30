"""Tensor parallel models: the modules of `train.parallel.plan`, with the styles of `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from ...config.parallel import LayerStyle
from ...errors import ConfigError, Problem, raise_problems, user_code_location
from ...fields.field_types import Target
from ...fields.targets import build
from ...formatting import shorten
from ...plan.hook_plan import no_such_layer
from ...plan.modules import Layer, Layers
from ...plan.shape_inference import without_side_effects
from ...runtime.own_operations import own_collectives
from ...values.dtensor import full_tensor

WHERE = "train.parallel.plan"
_TOLERANCE = 1e-3  # of float32: the sums of a product are added in another order
_ABSOLUTE = 1e-6
_DIVIDED = {  # the attributes of a module that have to be divisible, by style
    ("colwise", nn.Linear): "out_features",
    ("colwise", nn.Embedding): "embedding_dim",
    ("rowwise", nn.Linear): "in_features",
    ("rowwise", nn.Embedding): "num_embeddings",
}


def _effect_of(model: nn.Module, loss: Callable[[], Tensor | None]) -> tuple[float, dict[str, float]] | None:
    """Return what a model computes in eval mode, with its state restored; None without a loss that has a gradient.

    It is the loss of a batch, and the norm of the gradient of each parameter that the loss depends on.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with without_side_effects(model, training=False), torch.enable_grad():
        value = loss()
        if value is None or not value.requires_grad:
            return None
        gradients = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    norms = {name: _norm(each) for name, each in zip(trained, gradients, strict=True) if each is not None}
    return float(full_tensor(value.detach())), norms


@own_collectives()
def _norm(gradient: Tensor) -> float:
    return float(full_tensor(torch.linalg.vector_norm(gradient)))


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, LayerStyle | Target],
    loss: Callable[[], Tensor | None],
    *,
    where: str = WHERE,
) -> None:
    """Parallelize the modules of a plan in place, and check that the model computes the same as before.

    Args:
        mesh: The dimension `tp`, or for experts `dp`.
        loss: Computes the loss of the same batch in all processes of the dimension `tp`: a scalar.
        where: The configuration key of the plan. Gradients are compared for the default only: over `dp`, the gradients of experts
            are sums over all batch shards.

    Raises:
        ConfigError: The plan does not fit the model, see `styles_of`; the model fails with it, or computes something else.
    """
    styles = styles_of(Layers.of(model), mesh.size(), plan, where)
    expected = _effect_of(model, loss)
    for module, style in styles:
        parallelize_module(module, mesh, style)
    try:
        found = _effect_of(model, loss)
    except Exception as error:
        message = f"the model fails with this plan: {type(error).__name__}: {error}{user_code_location(error)}"
        fix = "check that a colwise module is followed by a rowwise one, and that the model does not use fixed sizes between them"
        raise ConfigError(Problem(where, message, [*plan], fix=fix)) from error
    if expected is None or found is None:
        return
    fix = "a style of a neighbouring layer is missing or does not fit: check input and output of the layers in the plan"
    (loss_before, norms_before), (loss_after, norms) = expected, found
    if not _is_close(loss_before, loss_after, abs(loss_before)):
        message = f"the loss of the first batch is {loss_after:.6g} with this plan, but {loss_before:.6g} without it"
        raise ConfigError(Problem(where, message, [*plan], fix=fix))
    largest, names = max(norms_before.values(), default=0.0), sorted(norms_before | norms) if where == WHERE else []
    if far := [each for each in names if not _is_close(norms_before.get(each, 0.0), norms.get(each, 0.0), largest)]:
        message = f"the gradients of the first batch differ from those without this plan, at {shorten(far, 4)}"
        raise ConfigError(Problem(where, message, [*plan], fix=fix))


def styles_of(
    layers: Layers, size: int, plan: Mapping[str, LayerStyle | Target], key: str = WHERE
) -> list[tuple[nn.Module, ParallelStyle]]:
    """Return the modules of a plan for `size` processes, and their styles. Raise ConfigError for a plan that does not fit the model."""
    problems: list[Problem] = []
    found: dict[int, tuple[nn.Module, ParallelStyle, str]] = {}
    for pattern, entry in plan.items():
        where = f"{key}.{pattern}"
        matched = [layer for layer in layers if layer.is_named([pattern])]
        if not matched:
            problems.append(no_such_layer(pattern, layers, key))
            continue
        style = _style(entry, where)
        for layer in matched:
            if (other := found.get(id(layer.module))) is not None:
                message = f"the glob {other[2]!r} gives layer {layer.label} a style too"
                problems.append(Problem(where, message, given=pattern, fix="change one of the two globs"))
            found[id(layer.module)] = (layer.module, style, pattern)
        if isinstance(entry, LayerStyle):
            problems += [each for layer in matched if (each := _misfit(layer, layers, entry, size, where))][:1]
    raise_problems(problems)
    return [(module, style) for module, style, _ in found.values()]


def _style(entry: LayerStyle | Target, where: str) -> ParallelStyle:
    if isinstance(entry, Target):
        style = build(entry, where)
        if not isinstance(style, ParallelStyle):
            message = f"must be a ParallelStyle, but {entry.target} returned {type(style).__name__}"
            raise ConfigError(Problem(where, message, entry.target))
        return style
    given, returned = _placement(entry.input), _placement(entry.output)
    if entry.style == "sequence":
        return SequenceParallel() if given is None else SequenceParallel(sequence_dim=given.dim)
    made = ColwiseParallel if entry.style == "colwise" else RowwiseParallel
    return made(input_layouts=given, output_layouts=returned)


def _placement(layout: str | None) -> Any:
    if layout in (None, "replicate"):
        return layout and Replicate()
    return Shard(int(layout.removeprefix("shard(").rstrip(")")))


def _misfit(layer: Layer, layers: Layers, entry: LayerStyle, size: int, where: str) -> Problem | None:
    module, style = layer.module, entry.style
    names: dict[int, list[str]] = {id(each): [] for each in module.parameters()}
    for name, parameter in layers.model.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            names[id(parameter)].append(name)
    if tied := next((each for each in names.values() if len(each) > 1), None):
        message = f"layer {layer.label} ({layer.type}) shares a parameter with another layer; with a style, it would have its own"
        return Problem(where, message, tied, fix="untie them in the model, or leave this layer out of the plan")
    if style == "sequence":
        return None
    attribute = next((name for (of, kind), name in _DIVIDED.items() if of == style and isinstance(module, kind)), None)
    if attribute is None:
        message = f"style {style} does not exist for layer {layer.label} ({layer.type})"
        return Problem(where, message, style, "Linear, Embedding", fix="give the _target_ of your own ParallelStyle")
    number = getattr(module, attribute)
    if number % size:
        message = f"{attribute} of layer {layer.label} ({layer.type}) is not divisible by tp={size}"
        fix = "change tp, or leave this layer out of the plan"
        return Problem(where, message, number, f"a multiple of {size}", fix=fix)
    return None


def _is_close(one: float, other: float, scale: float) -> bool:
    return abs(one - other) <= _TOLERANCE * scale + _ABSOLUTE
