"""The apply section: changes made to modules once, before step 0, in the order of `nn.Module.apply`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

from ..errors import ConfigError, InstrumentError, Mistake, nearest, own_frame
from ..plan.modules import Layer, Layers
from ..plan.select import select_layers
from ..spec.apply import (
    AddParameterSpec,
    ApplySpec,
    CallSpec,
    FillSpec,
    FreezeSpec,
    InitSpec,
    ReplaceSpec,
    ReprSpec,
    SetSpec,
    WrapSpec,
)
from ..spec.fields import Target
from ..spec.globs import matches
from ..targets import build, locate


def apply_specs(specs: Mapping[str, ApplySpec], model: nn.Module) -> None:
    """Change a model as the specs say, one spec after the other, each on what the ones before left.

    Raises:
        ConfigError: A spec matches nothing, or cannot be done to a module that it matches.
    """
    for name, spec in specs.items():
        where = f"apply.{name}"
        layers = Layers.of(model)
        order = _in_order(model, select_layers(spec, layers, where))
        touched = 0
        for layer in order:
            try:
                touched += _DO[type(spec)](spec, layer, layers, where)
            except InstrumentError:
                raise
            except Exception as error:
                problem = (
                    f"{spec.action} failed at layer {layer.label!r} ({layer.type}): {type(error).__name__}: {error}"
                )
                raise ConfigError(Mistake(where, problem + own_frame(error))) from error
        if not touched:
            raise ConfigError(_nothing_to_do(spec, order, where))


def _in_order(model: nn.Module, chosen: list[Layer]) -> list[Layer]:
    """The chosen layers as `nn.Module.apply` comes to them; it comes to a shared module once for each of its places."""
    wanted = {id(layer.module): layer for layer in chosen}
    order: dict[int, Layer] = {}

    def visit(module: nn.Module) -> None:
        if id(module) in wanted:
            order[id(module)] = wanted[id(module)]

    model.apply(visit)
    return list(order.values())


def _nothing_to_do(spec: ApplySpec, layers: list[Layer], where: str) -> Mistake:
    owns = list(dict.fromkeys(name for layer in layers for name, _ in layer.own_parameters()))
    if spec.params and owns:
        close = [name for written in spec.params for name in nearest(written, owns)]
        return Mistake(
            f"{where}.params",
            "this pattern matches no parameter",
            written=list(spec.params),
            allowed=owns,
            nearest=close,
        )
    names = [
        f"{layer.name}.**" if layer.name else "**" for layer in layers if any(True for _ in layer.module.parameters())
    ]
    return Mistake(
        f"{where}.layers",
        "none of the modules matched has such a parameter of its own",
        written=list(spec.globs),
        nearest=names[:3],
    )


def _parameters(spec: ApplySpec, layer: Layer, default: tuple[str, ...] = ()) -> Iterator[Parameter]:
    globs = spec.params or default
    for name, parameter in layer.own_parameters():
        if not globs or any(matches(glob, name) for glob in globs):
            yield parameter


def _init(spec: InitSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    function = getattr(nn.init, spec.fn)
    parameters = list(_parameters(spec, layer, default=("weight",)))
    for parameter in parameters:
        function(parameter, **spec.arguments)
    return len(parameters)


@torch.no_grad()
def _fill(spec: FillSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    parameters = list(_parameters(spec, layer))
    for parameter in parameters:
        parameter.fill_(spec.value)
    return len(parameters)


def _freeze(spec: FreezeSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    parameters = list(_parameters(spec, layer))
    for parameter in parameters:
        parameter.requires_grad_(False)
    return len(parameters)


def _replace(spec: ReplaceSpec, layer: Layer, layers: Layers, where: str) -> int:
    _put(build_module(spec.module, f"{where}.module"), layer, layers, where)
    return 1


def _wrap(spec: WrapSpec, layer: Layer, layers: Layers, where: str) -> int:
    _put(build_module(spec.module, f"{where}.module", layer.module), layer, layers, where)
    return 1


def _put(new: nn.Module, layer: Layer, layers: Layers, where: str) -> None:
    """Put a module in the place of another, under all of its names."""
    if not layer.name:
        raise ConfigError(Mistake(where, "the root module cannot be replaced: name another one under 'model'"))
    for parent in layers:
        for key, child in parent.module._modules.items():
            if child is layer.module and parent.module is not new:
                parent.module._modules[key] = new


class Label:
    """A module's own `extra_repr` with a label in front; it can be copied and pickled along with the module."""

    def __init__(self, label: str, module: nn.Module) -> None:
        self.label = label
        self.own = module.extra_repr

    def __call__(self) -> str:
        own = self.own()
        return f"{self.label}, {own}" if own else self.label


def _repr(spec: ReprSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    layer.module.extra_repr = Label(spec.label, layer.module)  # type: ignore[method-assign]
    return 1


def _set(spec: SetSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    if not hasattr(layer.module, spec.attribute):
        close = nearest(spec.attribute, [name for name in vars(layer.module) if not name.startswith("_")])
        raise ConfigError(
            Mistake(
                f"{where}.attribute",
                f"layer {layer.label!r} ({layer.type}) has no such attribute",
                written=spec.attribute,
                nearest=close,
            )
        )
    setattr(layer.module, spec.attribute, spec.value)
    return 1


def _add_parameter(spec: AddParameterSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    if hasattr(layer.module, spec.parameter):
        raise ConfigError(
            Mistake(
                f"{where}.parameter",
                f"layer {layer.label!r} ({layer.type}) has this attribute already",
                written=spec.parameter,
            )
        )
    beside = next(layer.module.parameters(), None)
    device = beside.device if beside is not None else None
    layer.module.register_parameter(spec.parameter, Parameter(torch.full(spec.shape, spec.value, device=device)))
    return 1


def _call(spec: CallSpec, layer: Layer, layers: Layers, where: str) -> int:  # noqa: ARG001
    locate(spec.fn.target, f"{where}.fn")(layer.module, layer.name, **(spec.fn.model_extra or {}))
    return 1


_DO: dict[type[Any], Callable[[Any, Layer, Layers, str], int]] = {
    InitSpec: _init,
    FillSpec: _fill,
    FreezeSpec: _freeze,
    ReplaceSpec: _replace,
    WrapSpec: _wrap,
    ReprSpec: _repr,
    SetSpec: _set,
    AddParameterSpec: _add_parameter,
    CallSpec: _call,
}


def build_module(target: Target, where: str, *positional: Any) -> nn.Module:
    """A module from its target.

    Raises:
        ConfigError: The target is not there, fails, or gives something else than a `torch.nn.Module`.
    """
    found = build(target, where, *positional)
    if not isinstance(found, nn.Module):
        raise ConfigError(
            Mistake(
                where,
                f"{target.target} gave a {type(found).__name__}",
                written=target.target,
                allowed="a torch.nn.Module",
            )
        )
    return found
