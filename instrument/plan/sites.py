"""The plan: each spec held against a model, as the sites where it will act."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import Parameter

from ..errors import ConfigError, Mistake, nearest
from ..spec.globs import matches
from ..spec.hooks import HookBase, HookSpec
from .modules import Layer, Layers
from .select import select_layers, some


@dataclass(frozen=True, eq=False)
class Site:
    """One spec at one module, or at one parameter or buffer of it.

    Attributes:
        spec: What is to be done there.
        layer: The module.
        own_name: The parameter's or buffer's own name; empty for kinds that see a module's tensors.
        parameter: The parameter, where the site is at one.
        note: Why nothing can be seen there, where that is known beforehand; empty otherwise.
    """

    spec: HookSpec
    layer: Layer
    own_name: str = ""
    parameter: Parameter | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """Its name for print: the layer's, or the parameter's full one."""
        return ".".join(part for part in (self.layer.name, self.own_name) if part) or "."


@dataclass(frozen=True, eq=False)
class HookPlan:
    """All sites of all specs on one model: specs in the order written, layers in the order of the model."""

    layers: Layers
    specs: Mapping[str, HookSpec]
    sites: tuple[Site, ...]

    def of(self, hook: str) -> list[Site]:
        """The sites of one spec."""
        return [site for site in self.sites if site.spec.name == hook]

    def at(self, layer: Layer) -> list[Site]:
        """The sites at one module."""
        return [site for site in self.sites if site.layer is layer]


def make_plan(specs: Mapping[str, HookSpec], model: nn.Module) -> HookPlan:
    """Resolve every spec against a model. Touches nothing.

    Raises:
        ConfigError: With every spec that matches no module or no parameter, or only frozen ones.
    """
    layers = Layers.of(model)
    sites: list[Site] = []
    mistakes: list[Mistake] = []
    for name, spec in specs.items():
        try:
            sites += _sites(spec, layers, f"hooks.{name}")
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    return HookPlan(layers, specs, tuple(sites))


def _sites(spec: HookSpec, layers: Layers, where: str) -> list[Site]:
    selected = select_layers(spec, layers, where)
    if spec.definition.family == "module":
        return [Site(spec, layer) for layer in selected]
    if spec.tensor_role == "buffer":
        return _buffer_sites(spec, selected, where)
    return _parameter_sites(spec, selected, layers, where)


def _parameter_sites(spec: HookSpec, selected: list[Layer], layers: Layers, where: str) -> list[Site]:
    sites: dict[int, Site] = {}
    for layer in selected:
        for own, parameter in layer.own_parameters():
            if _wanted(spec, own, layers.parameter_names[id(parameter)]):
                note = "" if parameter.requires_grad else "the parameter is frozen"
                sites.setdefault(id(parameter), Site(spec, layer, own, parameter, note))
    if not sites:
        raise ConfigError(_no_parameter(spec, selected, where))
    _refuse_frozen(spec, list(sites.values()), where)
    return list(sites.values())


def _wanted(spec: HookBase, own: str, names: Iterable[str]) -> bool:
    """Whether `params` means a parameter: by the own name of any of the names it is tied under."""
    owns = {own, *(name.rpartition(".")[2] for name in names)}
    return not spec.params or any(matches(pattern, name) for pattern in spec.params for name in owns)


def _no_parameter(spec: HookBase, selected: list[Layer], where: str) -> Mistake:
    below = [layer for layer in selected if any(True for _ in layer.module.parameters())]
    owns = list(dict.fromkeys(name for layer in selected for name, _ in layer.own_parameters()))
    if spec.params and owns:
        close = [name for written in spec.params for name in nearest(written, owns)]
        return Mistake(
            f"{where}.params",
            "this pattern matches no parameter",
            written=list(spec.params),
            allowed=owns,
            nearest=close,
        )
    return Mistake(
        f"{where}.layers",
        "none of the modules matched has a parameter of its own",
        written=list(spec.globs),
        allowed=some([layer.label for layer in selected]),
        nearest=[f"{layer.name}.**" if layer.name else "**" for layer in below[:3]],
    )


def _refuse_frozen(spec: HookBase, sites: list[Site], where: str) -> None:
    if not spec.definition.gradient or spec.tensor_role in ("param", "buffer"):
        return
    for pattern in spec.globs:
        matched = [site for site in sites if any(matches(pattern, name) for name in site.layer.names)]
        if matched and all(site.note for site in matched):
            raise ConfigError(
                Mistake(
                    f"{where}.layers",
                    f"kind {spec.kind} needs gradients, and every parameter that this pattern matches is frozen (requires_grad is False)",
                    written=pattern,
                    allowed="parameters that train; frozen are " + some([site.label for site in matched]),
                )
            )


def _buffer_sites(spec: HookSpec, selected: list[Layer], where: str) -> list[Site]:
    sites = [
        Site(spec, layer, own)
        for layer in selected
        for own, buffer in layer.module._buffers.items()
        if buffer is not None and _wanted(spec, own, ())
    ]
    if not sites:
        owns = list(dict.fromkeys(name for layer in selected for name in layer.module._buffers))
        raise ConfigError(
            Mistake(
                f"{where}.params" if spec.params else f"{where}.layers",
                "none of the modules matched has such a buffer",
                written=list(spec.params or spec.globs),
                allowed=owns,
            )
        )
    return sites
