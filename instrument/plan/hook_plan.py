"""The plan: specs resolved against a model, as a list of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..errors import ConfigError, Problem, similar_names
from ..spec.field_types import Selection
from ..spec.globs import matches
from ..spec.hooks import HookSpec
from ..spec.modify import PenaltySpec
from .attention_heads import check_heads
from .layer_selection import select_layers, shorten
from .modules import Layer, Layers


@dataclass(frozen=True, eq=False)
class Site:
    """One spec at one module, parameter or buffer.

    Attributes:
        spec: The spec.
        layer: The module.
        own_name: The name of the parameter or buffer within the module; empty for kinds that see a module's tensors.
        parameter: The parameter, if the site is at one.
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
        layers: The modules of the model.
        specs: The specs, by name.
        sites: The sites.
        shapes_checked: Whether shape inference has checked the specs against the shapes of the modules' tensors. Otherwise each
            site checks its first tensor.
    """

    layers: Layers
    specs: Mapping[str, HookSpec]
    sites: tuple[Site, ...]
    shapes_checked: bool = False

    def of(self, hook: str) -> list[Site]:
        """Return the sites of one spec."""
        return [site for site in self.sites if site.spec.name == hook]

    def at(self, layer: Layer) -> list[Site]:
        """Return the sites at one module."""
        return [site for site in self.sites if site.layer is layer]


def make_plan(specs: Mapping[str, HookSpec], model: nn.Module) -> HookPlan:
    """Resolve every spec against a model. The model is not changed.

    Args:
        specs: The specs, by name.
        model: The model.

    Returns:
        The plan.

    Raises:
        ConfigError: With every spec that matches no module or no parameter, or selects heads where there are none.
    """
    layers = Layers.of(model)
    sites: list[Site] = []
    problems: list[Problem] = []
    for name, spec in specs.items():
        try:
            sites += _sites(spec, layers, f"hooks.{name}")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return HookPlan(layers, specs, tuple(sites))


def _sites(spec: HookSpec, layers: Layers, where: str) -> list[Site]:
    selected = select_layers(spec, layers, where)
    if spec.definition.family == "module":
        called = [layer for layer in selected if not layer.is_container]
        if not called:
            raise ConfigError(_containers_problem(spec, selected, layers, where))
        check_heads(spec, called, layers, where)
        # Coverage reports those that a graph inlines.
        return [Site(spec, layer) for layer in selected if not layer.is_container or layers.is_inlined(layer)]
    if spec.definition.family == "loss":
        return [_loss_site(spec, selected, layers, where)]
    if spec.tensor_role == "buffer":
        return _named_sites("buffer", Layer.own_buffers, spec, selected, layers, where)
    if spec.tensor_role == "entry":
        return _named_sites("entry in a state dict", Layer.own_entries, spec, selected, layers, where)
    return _parameter_sites(spec, selected, layers, where)


def _containers_problem(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> Problem:
    inlined = "the graph of torch.fx or torch.export runs their operations itself: use kind function at the module of the graph"
    return Problem(
        f"{where}.layers",
        "the matched modules are containers, which are never called",
        given=list(spec.globs),
        allowed=shorten([f"{layer.label} ({layer.type})" for layer in selected]),
        similar=[f"{layer.name}.*" for layer in selected[:3] if layer.module._modules],
        fix=inlined if any(map(layers.is_inlined, selected)) else "",
    )


def _loss_site(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> Site:
    """Return the one site for the loss. For a penalty, it has the parameters of the penalty."""
    root = next(iter(layers))
    if not isinstance(spec, PenaltySpec):
        return Site(spec, root)
    penalised = {id(site.parameter): site.parameter for site in _parameter_sites(spec, selected, layers, where)}
    return Site(spec, root, parameters=tuple(parameter for parameter in penalised.values() if parameter is not None))


def _parameter_sites(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> list[Site]:
    candidates = [
        (layer.owner, own, parameter, layers.parameter_names[id(parameter)])
        for layer in selected
        for own, parameter in layer.own_parameters()
    ]
    if not candidates:
        below = [layer for layer in selected if any(True for _ in layer.module.parameters())]
        raise ConfigError(_no_own_tensor_problem("parameter", spec, selected, below, where))
    _check_params("parameter", spec, [name for *_, names in candidates for name in names], where)
    sites: dict[int, Site] = {}
    for layer, own, parameter, names in candidates:
        if is_selected(spec, names):
            note = "" if parameter.requires_grad else "the parameter is frozen"
            sites.setdefault(id(parameter), Site(spec, layer, own, parameter, note))
    return list(sites.values())


def _named_sites(
    what: str,
    names_of: Callable[[Layer], Iterable[str]],
    spec: HookSpec,
    selected: list[Layer],
    layers: Layers,
    where: str,
) -> list[Site]:
    """Return one site per buffer, or per entry of a state dict, of the modules."""
    candidates = [(layer.owner, own, layer.names_of(own)) for layer in selected for own in names_of(layer)]
    if not candidates:
        having = {layer.module for layer in layers if any(names_of(layer))}
        below = [layer for layer in selected if not having.isdisjoint(layer.module.modules())]
        raise ConfigError(_no_own_tensor_problem(what, spec, selected, below, where))
    _check_params(what, spec, [name for *_, names in candidates for name in names], where)
    sites = {(id(layer), own): Site(spec, layer, own) for layer, own, names in candidates if is_selected(spec, names)}
    return list(sites.values())


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


def _no_own_tensor_problem(
    what: str, spec: Selection, selected: list[Layer], below: list[Layer], where: str
) -> Problem:
    return Problem(
        f"{where}.layers",
        f"none of the matched modules directly contains a {what}",
        given=list(spec.globs),
        allowed=shorten([layer.label for layer in selected]),
        similar=[f"{layer.name}.**" if layer.name else "**" for layer in below[:3]],
    )


def check_not_frozen(plan: HookPlan) -> None:
    """Refuse patterns that match only frozen parameters if the kind requires gradients.

    Only for a training in which these parameters stay frozen.

    Raises:
        ConfigError: With every such pattern.
    """
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
    if problems:
        raise ConfigError(*problems)
