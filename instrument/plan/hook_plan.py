"""The plan: specs resolved against a model, as a list of sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..config.hook_specs import HookSpec
from ..config.record import RecordSpec
from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.field_types import Selection
from ..fields.globs import matches
from ..formatting import shorten
from ..stats.experts import PER_TOKEN, attribute_of
from .attention_heads import check_heads
from .layer_selection import select_layers
from .modules import Layer, Layers


@dataclass(frozen=True, eq=False)
class Site:
    """One spec at one module, parameter or buffer.

    Attributes:
        own_name: The name of the parameter or buffer within the module; empty for kinds that see a module's tensors.
        note: Why the hook cannot fire there, if that is known in advance; otherwise empty.
        parameters: For a penalty on the loss: its parameters.
    """

    spec: HookSpec
    layer: Layer
    own_name: str = ""
    parameter: Parameter | None = None
    note: str = ""
    parameters: tuple[Parameter, ...] = ()

    @property
    def label(self) -> str:
        """Its name for display: that of the layer, or the full name of the parameter."""
        return ".".join(part for part in (self.layer.name, self.own_name) if part) or "."

    @property
    def current_tensor(self) -> Tensor | None:
        """The parameter or buffer that is registered at the site now; None if it was removed."""
        module, name = self.registration
        # Not `get`, which the parameters of a TorchScript module do not have.
        return next((tensors[name] for tensors in (module._parameters, module._buffers) if name in tensors), None)

    @cached_property
    def registration(self) -> tuple[nn.Module, str]:
        """The module that registers the parameter or buffer (the layer or a parametrization), and its name there."""
        path, _, name = self.own_name.rpartition(".")
        module = self.layer.module
        return module.get_submodule(path) if path else module, name  # TorchScript has no `get_submodule`


@dataclass(frozen=True, eq=False)
class HookPlan:
    """All sites of all specs on one model: specs in the order of the configuration, layers in the order of the model.

    Attributes:
        shapes_checked: Whether shape inference has checked the specs against the shapes of the modules' tensors. Otherwise each
            site checks its first tensor.
    """

    layers: Layers
    specs: Mapping[str, HookSpec]
    sites: tuple[Site, ...]
    shapes_checked: bool = False

    def of(self, hook: str) -> list[Site]:
        return [site for site in self.sites if site.spec.name == hook]

    def at(self, layer: Layer) -> list[Site]:
        return [site for site in self.sites if site.layer is layer]


def make_plan(specs: Mapping[str, HookSpec], model: nn.Module) -> HookPlan:
    """Resolve every spec against a model, which is not changed. The ConfigError has every spec that matches nothing."""
    layers = Layers.of(model)
    sites: list[Site] = []
    problems: list[Problem] = []
    for name, spec in specs.items():
        try:
            sites += _sites(spec, layers, f"hooks.{name}")
        except ConfigError as error:
            problems += error.problems
    raise_problems(problems)
    return HookPlan(layers, specs, tuple(sites))


def _sites(spec: HookSpec, layers: Layers, where: str) -> list[Site]:
    if spec.definition.family == "collective":
        return [Site(spec, next(iter(layers)))]
    selected = select_layers(spec, layers, where)
    if not selected:
        return []
    if spec.definition.family == "module":
        called = [layer for layer in selected if not layer.is_container]
        if not called:
            raise ConfigError(_containers_problem(spec, selected, layers, where))
        check_heads(spec, called, layers, where)
        _check_routers(spec, called, where)
        # Coverage reports those that a graph inlines.
        return [Site(spec, layer) for layer in selected if not layer.is_container or layers.is_inlined(layer)]
    if spec.definition.family == "loss":  # the site of a penalty has its parameters
        penalised = _tensor_sites(spec, selected, layers, where) if spec.uses_parameters else []
        parameters = tuple(site.parameter for site in penalised if site.parameter is not None)
        return [Site(spec, next(iter(layers)), parameters=parameters)]
    return _tensor_sites(spec, selected, layers, where)


def _check_routers(spec: HookSpec, called: Sequence[Layer], where: str) -> None:
    fields = spec.tables.get("experts", {}) if isinstance(spec, RecordSpec) else {}
    if fields and fields.get("experts", "module") == "module":
        unknown = [f"{layer.label} ({layer.type})" for layer in called if attribute_of(layer.module, PER_TOKEN) is None]
        if unknown:
            message = f"the number of experts per token is unknown at {shorten(unknown, 4)}: no attribute {' or '.join(PER_TOKEN)}"
            fix = "set it: experts: 2, or match the routers only"
            raise ConfigError(Problem(f"{where}.experts", message, fields.get("experts"), "a number", fix=fix))


def _containers_problem(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> Problem:
    inlined = "the graph of torch.fx or torch.export runs their operations itself: use kind function at the module of the graph"
    containers = shorten([f"{layer.label} ({layer.type})" for layer in selected])
    message = f"the matched modules are containers, which are never called: {containers}"
    similar = [f"{layer.name}.*" for layer in selected[:3] if layer.module._modules]
    fix = inlined if any(map(layers.is_inlined, selected)) else ""
    return Problem(f"{where}.layers", message, list(spec.globs), similar=similar, fix=fix)


def _tensor_sites(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> list[Site]:
    """Return one site per parameter, buffer or entry of a state dict of the modules. Tied parameters have one site."""
    what = {"buffer": "buffer", "entry": "entry in a state dict"}.get(spec.tensor_role, "parameter")
    candidates = [(layer, *tensor) for layer in selected for tensor in _own_tensors(spec, layer)]
    if not candidates and spec.optional:
        return []
    if not candidates:
        labels = {layer.module: layer.label for layer in layers if any(_own_tensors(spec, layer))}
        below = [layer for layer in selected if not labels.keys().isdisjoint(layer.module.modules())]
        message = (
            f"none of the matched modules directly contains a {what}: {shorten([layer.label for layer in selected])}"
        )
        allowed = shorten([*labels.values()])
        similar = [f"{layer.name}.**".removeprefix(".") for layer in below[:3]]
        raise ConfigError(Problem(f"{where}.layers", message, list(spec.globs), allowed, similar))
    names = [
        layer.names_of(own) if parameter is None else layers.parameter_names[id(parameter)]
        for layer, own, parameter in candidates
    ]
    _check_params(what, spec, [name for of_tensor in names for name in of_tensor], where)
    sites: dict[object, Site] = {}
    for (layer, own, parameter), of_tensor in zip(candidates, names, strict=True):
        if is_selected(spec, of_tensor):
            key = (id(layer.owner), own) if parameter is None else id(parameter)
            note = "" if parameter is None or parameter.requires_grad else "the parameter is frozen"
            sites.setdefault(key, Site(spec, layer.owner, own, parameter, note))
    return list(sites.values())


def _own_tensors(spec: HookSpec, layer: Layer) -> Iterator[tuple[str, Parameter | None]]:
    """Yield the names of the tensors of a module that a spec may select; parameters also themselves, not for state dicts."""
    if spec.tensor_role in ("buffer", "entry"):
        names = layer.own_buffers() if spec.tensor_role == "buffer" else layer.own_entries()
        yield from ((name, None) for name in names)
    else:
        yield from layer.own_parameters()


def is_selected(spec: Selection, names: Iterable[str]) -> bool:
    """Return whether `params` selects a parameter or buffer, given all of its names within modules."""
    return not spec.params or any(matches(pattern, name) for pattern in spec.params for name in names)


def _check_params(what: str, spec: Selection, names: Iterable[str], where: str) -> None:
    own_names = list(dict.fromkeys(names))
    for pattern in spec.params:
        if not any(matches(pattern, own) for own in own_names):
            message = f"this pattern matches no {what}"
            similar = similar_names(pattern, own_names)
            raise ConfigError(Problem(f"{where}.params", message, given=pattern, allowed=own_names, similar=similar))


def check_not_frozen(plan: HookPlan) -> None:
    """Refuse patterns that match only frozen parameters if the kind requires gradients, for a training in which they stay frozen."""
    problems = []
    for name, spec in plan.specs.items():
        if not spec.definition.gradient or spec.tensor_role in ("param", "buffer"):
            continue
        for pattern in spec.globs:
            matched = [site for site in plan.of(name) if site.layer.is_named([pattern])]
            if matched and all(site.note for site in matched):
                message = (
                    f"kind {spec.kind} requires gradients, but every parameter that this pattern matches is frozen "
                    "(requires_grad is False)"
                )
                allowed = "trainable parameters; frozen: " + shorten([site.label for site in matched])
                problems.append(Problem(f"hooks.{name}.layers", message, given=pattern, allowed=allowed))
    raise_problems(problems)
