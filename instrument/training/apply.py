"""The `apply` section: one-time changes to modules before step 0, in the order of `nn.Module.apply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import is_parametrized

from ..config.apply import (
    AddParameterSpec,
    ApplyCallSpec,
    ApplySpec,
    FillSpec,
    FreezeSpec,
    InitSpec,
    ReplaceSpec,
    SetSpec,
    WrapSpec,
)
from ..errors import ConfigError, InstrumentError, Problem, similar_names, user_code_location
from ..fields.field_types import Target
from ..fields.targets import build, locate
from ..plan.hook_plan import check_params, is_selected, select_layers
from ..plan.modules import Layer, Layers
from ..plan.shape_inference import without_side_effects


def apply_specs(specs: Mapping[str, ApplySpec], model: nn.Module) -> None:
    """Change a model in place. Each spec acts on the result of the previous ones. Raise a ConfigError if one matches nothing or fails."""
    for name, spec in specs.items():
        where = f"apply.{name}"
        layers = Layers.of(model)
        selected = select_layers(spec, layers, where)
        if not selected:  # its structure is optional
            continue
        chosen, visited = {id(layer.module): layer for layer in selected}, list[nn.Module]()
        model.apply(visited.append)
        order = [chosen[key] for key in dict.fromkeys(map(id, visited)) if key in chosen]
        # A layer includes the parameters of its parametrizations.
        if isinstance(spec, InitSpec | FillSpec | FreezeSpec):
            order = [layer for layer in order if layer.parametrized not in order]
        changed = 0
        for layer in order:
            try:
                changed += _act(spec, layer, layers, where)
            except InstrumentError:
                raise
            except Exception as error:
                failed = f"{spec.action} failed at layer {layer.label!r} ({layer.type})"
                message = f"{failed}: {type(error).__name__}: {error}"
                raise ConfigError(Problem(where, message + user_code_location(error))) from error
        if not changed:
            names = [name for layer in order for own, _ in layer.own_parameters() for name in layer.names_of(own)]
            if names:
                check_params("parameter", spec, names, where)
            below = [layer for layer in order if any(True for _ in layer.module.parameters())]
            similar = [f"{layer.name}.**".removeprefix(".") for layer in below[:3]]
            message = "no matched module has such a parameter of its own"
            raise ConfigError(Problem(f"{where}.layers", message, given=list(spec.globs), similar=similar))


@torch.no_grad()
def _assign(spec: ApplySpec, layer: Layer, where: str, fill: Callable[[Tensor], object]) -> int:
    """Fill the parameters that `params` selects. A selected parametrized tensor is filled as a whole. Return their number."""
    filled: set[str] = set()
    for name, parameter in layer.own_parameters():
        tensor = layer.tensor_of(name)
        if tensor != name and layer.parametrized is None and is_selected(spec, [tensor]):
            if tensor not in filled:
                _assign_parametrized(layer, tensor, where, fill)
            filled.add(tensor)
        elif is_selected(spec, layer.names_of(name)):
            fill(parameter)
            filled.add(name)
    return len(filled)


def _assign_parametrized(layer: Layer, name: str, where: str, fill: Callable[[Tensor], object]) -> None:
    """Fill a parametrized tensor: PyTorch computes its parameters from its values (`right_inverse`)."""
    module = layer.module
    if is_parametrized(module, name):
        with without_side_effects(module):
            value = torch.empty_like(getattr(module, name))
        fill(value)
        setattr(module, name, value)
    elif (original := module._parameters.get(f"{name}_orig")) is not None:  # spectral_norm, prune
        fill(original)
    else:
        message = f"{name!r} of layer {layer.label!r} ({layer.type}) is computed by torch.nn.utils.weight_norm, which has no inverse"
        fix = f"use torch.nn.utils.parametrizations.weight_norm, or select {name}_g or {name}_v with 'params'"
        raise ConfigError(Problem(where, message, fix=fix))


def _act(spec: ApplySpec, layer: Layer, layers: Layers, where: str) -> int:
    match spec:
        case InitSpec():
            function = getattr(nn.init, spec.fn)
            selection = spec if spec.params else spec.model_copy(update={"params": ("weight",)})
            return _assign(selection, layer, where, lambda tensor: function(tensor, **spec.arguments))
        case FillSpec():
            return _assign(spec, layer, where, lambda tensor: tensor.fill_(spec.value))
        case FreezeSpec():
            parameters = [value for name, value in layer.own_parameters() if is_selected(spec, layer.names_of(name))]
            for parameter in parameters:
                parameter.requires_grad_(False)
            return len(parameters)
        case ReplaceSpec():
            _replace_module(build_module(spec.module, f"{where}.module"), layer, layers, where)
        case WrapSpec():
            _replace_module(build_module(spec.module, f"{where}.module", layer.module), layer, layers, where)
        case SetSpec():
            if not hasattr(layer.module, spec.attribute):
                close = similar_names(spec.attribute, [name for name in vars(layer.module) if not name.startswith("_")])
                message = f"layer {layer.label!r} ({layer.type}) has no such attribute"
                raise ConfigError(Problem(f"{where}.attribute", message, given=spec.attribute, similar=close))
            setattr(layer.module, spec.attribute, spec.value)
        case AddParameterSpec():
            owned, name = layer.module._parameters, spec.parameter
            if getattr(layer.module, name, None) is not None or (hasattr(layer.module, name) and name not in owned):
                message = f"layer {layer.label!r} ({layer.type}) already has this attribute"
                raise ConfigError(Problem(f"{where}.parameter", message, given=name))
            device = next((each.device for each in layer.module.parameters()), None)
            layer.module.register_parameter(name, Parameter(torch.full(spec.shape, spec.value, device=device)))
        case ApplyCallSpec():
            locate(spec.fn.target, f"{where}.fn")(layer.module, layer.name, **(spec.fn.model_extra or {}))
    return 1


def _replace_module(new: nn.Module, layer: Layer, layers: Layers, where: str) -> None:
    if not layer.name:
        raise ConfigError(Problem(where, "the root module cannot be replaced", fix="set 'model' instead"))
    for parent in layers:
        for key, child in parent.module._modules.items():
            if child is layer.module and parent.module is not new:
                parent.module._modules[key] = new


def build_module(target: Target, where: str, *positional: Any) -> nn.Module:
    """Build a module from its target. Raise a ConfigError if that fails, or gives something else than a `torch.nn.Module`."""
    module = build(target, where, *positional)
    if not isinstance(module, nn.Module):
        message = f"must be a torch.nn.Module, but {target.target} returned {type(module).__name__}"
        raise ConfigError(Problem(where, message))
    return module
