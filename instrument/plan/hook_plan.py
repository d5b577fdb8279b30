"""The plan: specs resolved against a model, as a list of sites, with the modules that a spec selects, and remarks that are not errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor, nn
from torch.nn.parameter import Parameter

from ..config.hook_specs import HookSpec, RecordSpec
from ..errors import ConfigError, Problem, raise_problems, similar_names
from ..fields.field_types import STRUCTURES, Selection, StructureName
from ..fields.globs import matches
from ..formatting import shorten
from ..stats.experts import PER_TOKEN, attribute_of
from ..tables.statistics import MAGNITUDES, statistic_of
from .modules import Layer, Layers
from .structure import ATTENTION, find_structure

# Names of output projections in attention modules of transformers, timm, torchvision and common custom code.
_OUTPUT_PROJECTION = re.compile(
    r"((att|attn|c|o|out|output|post)_)?proj|(out_|output_)?projection|proj_out|projection_layer|"
    r"((attention|attn|fc|linear|to)_)?out|out_lin|out_linear|output|dense|merge|(linear_|w_?)?o",
    re.IGNORECASE,
)
_PROJECTION_TYPES = ("*Linear*", "Conv1D", "Conv[12]d")


@dataclass(frozen=True, eq=False)
class Site:
    """One spec at one module, parameter or buffer."""

    spec: HookSpec
    layer: Layer
    own_name: str = ""  # of the parameter or buffer within the module; empty for kinds that see a module's tensors
    parameter: Parameter | None = None
    note: str = ""  # why the hook cannot fire there, if that is known in advance
    parameters: tuple[Parameter, ...] = ()  # of a penalty on the loss

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
    """All sites of all specs on one model: specs in the order of the configuration, layers in the order of the model."""

    layers: Layers
    specs: Mapping[str, HookSpec]
    sites: tuple[Site, ...]
    shapes_checked: bool = False  # by shape inference; otherwise each site checks its first tensor

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


def unhooked_locations(plan: HookPlan) -> list[tuple[str, str, list[str]]]:
    """Return what was added after the plan was made: the name of a spec that selects it, `modules` or `parameters`, and their names."""
    known = {name for layer in plan.layers for name in layer.names}
    layers = Layers.of(plan.layers.model)
    added = [
        layer for layer in layers if id(layer.module) not in plan.layers.by_module and known.isdisjoint(layer.names)
    ]
    unhooked: list[tuple[str, str, list[str]]] = []
    has_new_parameters = not layers.parameter_names.keys() <= plan.layers.parameter_names.keys()
    for name, spec in plan.specs.items() if added or has_new_parameters else ():
        with suppress(ConfigError):  # it matched modules that were removed
            sites = _sites(spec, layers, f"hooks.{name}")
            selected = {id(site.layer) for site in sites}
            modules = [layer.label for layer in added if id(layer) in selected]
            hooked = {(site.layer.module, site.own_name) for site in plan.of(name)}
            parameters = [
                site.label
                for site in sites
                if site.parameter is not None
                and id(site.layer.module) in plan.layers.by_module
                and (site.layer.module, site.own_name) not in hooked
            ]
            unhooked += [(name, *each) for each in (("modules", modules), ("parameters", parameters)) if each[1]]
    return unhooked


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
        article = "an" if what.startswith("entry") else "a"
        labelled = shorten([layer.label for layer in selected])
        message = f"none of the matched modules directly contains {article} {what}: {labelled}"
        allowed = shorten([*labels.values()])
        similar = [f"{layer.name}.**".removeprefix(".") for layer in below[:3]]
        raise ConfigError(Problem(f"{where}.layers", message, list(spec.globs), allowed, similar))
    names = [
        layer.names_of(own) if parameter is None else layers.parameter_names[id(parameter)]
        for layer, own, parameter in candidates
    ]
    check_params(what, spec, [name for of_tensor in names for name in of_tensor], where)
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


def check_params(what: str, spec: Selection, names: Iterable[str], where: str) -> None:
    """Raise a ConfigError for the first pattern of `params` that matches none of the names of parameters or buffers."""
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


def select_layers(selection: Selection, layers: Layers, where: str) -> list[Layer]:
    """Return the layers that a selection matches, in the order of the model; none if its structure is missing and optional.

    Raises:
        ConfigError: A glob matches no module, the model has no such structure, a name in `types` is unknown, or `types` or
            `exclude` remove all modules.
    """
    for key, patterns in (("layers", selection.globs), ("exclude", selection.exclude)):
        for pattern in patterns:
            if not any(layer.is_named([pattern]) for layer in layers):
                raise ConfigError(no_such_layer(pattern, layers, f"{where}.{key}"))
    named = [layer for layer in layers if layer.is_named(selection.globs)]
    if selection.structure:
        found = find_structure(layers, selection.structure)
        parts = {id(layer) for of_name in found.values() for layer in of_name}
        named = [layer for layer in named if id(layer) in parts]
        if not named and selection.optional:
            return []
        if not named:
            raise ConfigError(_no_such_structure(selection, found, where))
    of_torch = {base.__name__ for cls in vars(nn).values() if isinstance(cls, type) for base in cls.__mro__}
    for name in selection.types:
        short = name.rpartition(".")[2]
        if not (short in of_torch or set(name) & set("*?[") or any(layer.is_a(name) for layer in layers)):
            types = sorted({layer.type for layer in layers})
            message = "neither the model nor torch.nn has this class"
            similar = similar_names(short, [*types, *sorted(of_torch)])
            fix = "a name with a wildcard, such as *MLP, may match no class"
            raise ConfigError(Problem(f"{where}.types", message, name, types, similar, fix))
    typed = [layer for layer in named if not selection.types or any(layer.is_a(name) for name in selection.types)]
    if not typed:
        types = sorted({layer.type for layer in named})
        plain = [re.sub(r"[*?\[\]!]", "", name) for name in selection.types]
        similar = [name for each in plain for name in similar_names(each, types)]
        message = f"none of the {len(named)} modules that the other fields match is of this type"
        raise ConfigError(Problem(f"{where}.types", message, list(selection.types), types, similar))
    kept = [layer for layer in typed if not layer.is_named(selection.exclude)]
    if not kept:
        message = f"excludes all {len(typed)} modules that the other fields match"
        raise ConfigError(Problem(f"{where}.exclude", message, given=list(selection.exclude)))
    return kept


def _no_such_structure(selection: Selection, found: Mapping[StructureName, Sequence[Layer]], where: str) -> Problem:
    names = ", ".join(selection.structure)
    if elsewhere := [layer.label for of_name in found.values() for layer in of_name]:
        message = f"these patterns match none of the modules with structure: {names}"
        return Problem(f"{where}.layers", message, list(selection.globs), shorten(elsewhere))
    looked_for = "; ".join(f"no {name} found ({STRUCTURES[name]})" for name in selection.structure)
    fix = "select the modules with 'layers' or 'types', or remove the hook; print(model) or plan=true shows all modules"
    return Problem(f"{where}.structure", looked_for, names, fix=fix)


def no_such_layer(pattern: str, layers: Iterable[Layer], where: str) -> Problem:
    names = [name for layer in layers for name in layer.names if name]
    plain = pattern.removeprefix("re:").replace("*", "").replace("..", ".").strip(".")
    similar = similar_names(plain, names, limit=5) or similar_names(plain.split(".")[0], names, limit=5)
    types = [layer.type for layer in layers if layer.type.lower() in plain.lower().split(".")]
    is_class = types and where.endswith(".layers")
    fix = f"'layers' are names; to select by class, write 'types: {types[0]}' instead" if is_class else ""
    return Problem(where, "this pattern matches no module", pattern, shorten(names or ["."]), similar, fix)


def check_heads(spec: HookSpec, hooked: Sequence[Layer], layers: Layers, where: str) -> None:
    """Refuse `heads` at tensors in which features belong to no head. The ConfigError names the modules at which the heads are."""
    if spec.heads is None:
        return
    projections = [*_output_projections(layers)]
    conflicts = [
        (layer, projection, attention)
        for layer in hooked
        for projection, attention in projections
        if _contains(layer, projection) and not _has_heads(spec, layer, projection, attention)
    ]
    if not conflicts:
        return
    layer, _, attention = conflicts[0]
    if isinstance(attention.module, nn.MultiheadAttention):
        function = nn.functional.multi_head_attention_forward.__name__
        places = shorten([*dict.fromkeys(attention.label for _, _, attention in conflicts)], 4)
        fix = f"layers: {places}, kind: function, functions: {function}, role: input, path: {function}.0.11"
        fix += (
            "; in evaluations without gradients, turn off the fast path: torch.backends.mha.set_fastpath_enabled(False)"
        )
        reason = "nn.MultiheadAttention does not call its output projection, but passes the weight to a function"
    else:
        places = shorten([*dict.fromkeys(projection.label for _, projection, _ in conflicts)], 4)
        fix = f"layers: {places}, kind: {'full_backward' if spec.definition.gradient else 'forward_pre'}"
        reason = "heads are side by side in the input of the output projection"
    message = f"features in the {spec.tensor_role} of {layer.label!r} belong to no head; {reason}"
    allowed = "'units: [...]' for attention weights [N, heads, T, T]"
    raise ConfigError(Problem(f"{where}.heads", message, given=spec.heads.model_dump(), allowed=allowed, fix=fix))


def _has_heads(spec: HookSpec, layer: Layer, projection: Layer, attention: Layer) -> bool:
    is_called = not isinstance(attention.module, nn.MultiheadAttention)
    if spec.definition.of_functions:
        return spec.tensor_role == "input" or layer is not (projection if is_called else attention)
    return spec.tensor_role in ("input", "grad_input") and is_called and not _contains(layer, attention)


def _contains(layer: Layer, other: Layer) -> bool:
    return any(module is other.module for module in layer.module.modules())


def _output_projections(layers: Layers) -> Iterator[tuple[Layer, Layer]]:
    by_name = {name: layer for layer in layers for name in layer.names}
    for layer in layers:
        segments = re.sub(r"(\.\d+)+$", "", layer.name).split(".")  # `to_out.0` is a part of `to_out`
        if not _OUTPUT_PROJECTION.fullmatch(segments[-1]) or not any(map(layer.is_a, _PROJECTION_TYPES)):
            continue
        for end in (-1, -2):  # BertAttention contains `output.dense`
            parent = by_name[".".join(segments[:end])]
            if ATTENTION.search(f"{parent.name.rpartition('.')[2]} {parent.type}"):
                yield layer, parent
                break


@dataclass(frozen=True)
class Remark:
    """One remark. It is printed with the plan and written to `events`."""

    rule: str  # the topic: hidden_module, structure, fast_path, statistics
    layer: str | None  # None for several
    message: str
    severity: Literal["info", "warning"]


def remarks(plan: HookPlan) -> Iterator[Remark]:
    """Yield remarks about modules that PyTorch cannot find, optional specs that are left out, fast paths that hooks disable, and
    statistics that no kernel computes.
    """
    for location, message in plan.layers.hidden_messages():
        yield Remark("hidden_module", location, message, "warning")
    for name, spec in plan.specs.items():
        if spec.optional and not plan.of(name):
            kind = "" if spec.definition.family == "module" else " with parameters"
            message = f"hook {name!r} is left out: the model has no {' or '.join(spec.structure)}{kind}"
            yield Remark("structure", None, message, "info")
    affected = fast_paths(plan)
    if affected:
        message = (
            f"hooks inside {shorten(affected, 4)} disable PyTorch's fast path for evaluations without gradients; the values "
            "are the same up to rounding"
        )
        yield Remark("fast_path", affected[0] if len(affected) == 1 else None, message, "info")
    statistics = dict.fromkeys(name for spec in plan.specs.values() for name in getattr(spec, "statistics", ()))
    needs = {name: statistic_of(name).needs for name in statistics}  # some are sums that no kernel forms
    if again := [
        name for name in needs if any(need.term is not None and need is not MAGNITUDES for need in needs[name])
    ]:
        message = (
            f"PyTorch operations compute {', '.join(again)} in addition to the kernel; they read each tensor again"
        )
        yield Remark("statistics", None, message, "info")


def fast_paths(plan: HookPlan) -> list[str]:
    """Return the transformer encoder layers whose fast path PyTorch does not use, because modules inside them have hooks.

    Hooks on the functions of a module need hooks on all attention modules inside it; see `register_pauses`.
    """
    sites = [site for site in plan.sites if site.spec.definition.family == "module"]
    hooked = {id(site.layer.module) for site in sites}
    of_functions = [site.layer.module for site in sites if site.spec.definition.of_functions]
    hooked |= {id(part) for module in of_functions for part in module.modules()}
    return [
        layer.label
        for layer in plan.layers
        if isinstance(layer.module, nn.TransformerEncoderLayer)
        and any(id(module) in hooked for module in layer.module.modules())
    ]
