"""The modules of a model with all of their names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import Parameter
from torch.nn.utils.parametrize import is_parametrized

from ..fields.globs import matches
from ..values.dtensor import module_type

# The attribute of each wrapper class that contains the wrapped module. It is not part of layer names. A custom module
# with an attribute `module` keeps its name.
_WRAPPED = {
    "module": ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
    "_orig_mod": ("OptimizedModule",),
    "_checkpoint_wrapped_module": ("CheckpointWrapper", "OffloadWrapper"),
}

PARAMETRIZATIONS = "parametrizations"  # the submodule with the parametrizations of torch.nn.utils.parametrize
# The suffixes of parameters from which weight_norm, spectral_norm and prune of torch.nn.utils compute a tensor before a call.
COMPUTED_FROM = ("_g", "_v", "_orig")


@dataclass(frozen=True, eq=False)
class Layer:
    """One module of a model."""

    name: str  # the first one in the order of `named_modules`, without segments of wrappers; empty for the root module
    aliases: tuple[str, ...]  # the other names of the same module
    module: nn.Module  # the innermost one if wrappers share its name
    depth: int  # the number of segments in its name
    parametrized: Layer | None = None  # of a part of a parametrization: the layer whose tensor it computes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def type(self) -> str:
        return module_type(self.module)

    @property
    def label(self) -> str:
        """Its name for display; `.` for the root module."""
        return self.name or "."

    @property
    def is_container(self) -> bool:
        """Whether it is only a container (ModuleList, ModuleDict, ParameterList), which has no forward and is never called."""
        return (
            not self.is_script and type(self.module).forward is nn.Module.forward and "forward" not in vars(self.module)
        )

    @property
    def is_script(self) -> bool:
        """Whether it is a TorchScript module, which calls no hooks."""
        return isinstance(self.module, torch.jit.ScriptModule)

    @property
    def owner(self) -> Layer:
        """The layer to which its parameters and buffers belong: itself, or the layer whose tensor it computes."""
        return self.parametrized or self

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield its parameters, with their names within `owner`: those of parametrizations, but not of submodules."""
        for prefix, module in self._registering_modules():
            yield from ((prefix + name, value) for name, value in module._parameters.items() if value is not None)

    def counted_parameters(self) -> list[Parameter]:
        """Return its parameters, each counted at one layer: none for a part of a parametrization."""
        return [] if self.parametrized is not None else [parameter for _, parameter in self.own_parameters()]

    def own_buffers(self) -> Iterator[str]:
        """Yield the names of its buffers within `owner`: those of parametrizations, but not of submodules."""
        for prefix, module in self._registering_modules():
            yield from (prefix + name for name, buffer in module._buffers.items() if buffer is not None)

    def own_entries(self) -> Iterator[str]:
        """Yield the names of its entries in a state dict: parameters, and persistent buffers."""
        temporary = {at + name for at, each in self._registering_modules() for name in each._non_persistent_buffers_set}
        yield from (name for name, _ in self.own_parameters())
        yield from (name for name in self.own_buffers() if name not in temporary)

    def tensor_of(self, own_name: str) -> str:
        """Return the tensor that one of its parameters or buffers determines, given the name within `owner`.

        That is `weight` for `parametrizations.weight.original0`, and for `weight_g` of `torch.nn.utils.weight_norm`. For any
        other one, it is itself.
        """
        if own_name.startswith(f"{PARAMETRIZATIONS}."):
            return own_name.split(".")[1]
        computed = [own_name.removesuffix(suffix) for suffix in COMPUTED_FROM if own_name.endswith(suffix)]
        return next((name for name in computed if isinstance(vars(self.module).get(name), Tensor)), own_name)

    def names_of(self, own_name: str) -> tuple[str, ...]:
        """Return the names by which `params` selects one of its parameters or buffers, given the name within `owner`.

        `parametrizations.weight.original0` is selected by this name, and also by `weight`, `weight.original0` and `original0`.
        """
        within = own_name.removeprefix(f"{PARAMETRIZATIONS}.")
        return tuple(dict.fromkeys((self.tensor_of(own_name), within, within.rpartition(".")[2], own_name)))

    def _registering_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that register its parameters and buffers, with the prefix of their names within `owner`."""
        modules = [("", self.owner.module)]
        if (parametrizations := _parametrizations(self.owner.module)) is not None:
            modules += [
                (f"{name}.", module) for name, module in parametrizations.named_modules(prefix=PARAMETRIZATIONS)
            ]
        yield from (pair for pair in modules if self.parametrized is None or pair[1] is self.module)

    def is_named(self, patterns: Iterable[str]) -> bool:
        return any(matches(pattern, name) for pattern in patterns for name in self.names)

    def is_a(self, type_name: str) -> bool:
        """Return whether its class or a base class has this name.

        Args:
            type_name: A short name, or a name with a package from which the class can be imported. `*`, `?` and `[ab]` are
                wildcards. A name with a wildcard is not compared with `nn.Module`, which is a base of all modules.
        """
        package = type_name.rpartition(".")[0]
        classes = type(self.module).__mro__
        if set(type_name) & set("*?["):
            classes = classes[: classes.index(nn.Module)]
        return any(fnmatchcase(name, type_name) for cls in classes for name in _class_names(cls, package))


def _parametrizations(module: nn.Module) -> nn.Module | None:
    return module._modules[PARAMETRIZATIONS] if is_parametrized(module) else None


def _class_names(cls: type, package: str) -> Iterator[str]:
    """Yield the short name and the full name of a class, and its name in a package from which it can be imported."""
    yield cls.__name__
    yield f"{cls.__module__}.{cls.__qualname__}"
    if (
        getattr(sys.modules.get(package), cls.__name__, None) is cls
    ):  # torch.nn.Conv2d is defined in torch.nn.modules.conv.
        yield f"{package}.{cls.__name__}"


@dataclass(frozen=True, eq=False)
class Layers:
    """All modules of a model, each once, in the order of `named_modules` with the root module first."""

    model: nn.Module
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """List the modules of a model. A wrapper (DDP, `torch.compile`, checkpoint) is replaced by the wrapped module."""
        found: dict[int, tuple[nn.Module, dict[str, None]]] = {}  # the modules with their names
        layers: list[Layer] = []
        parametrized: dict[int, Layer] = {}
        for name, module in _walk(model, "", set()):
            found.setdefault(id(module), (module, {}))[1][name] = None
        for key, (module, (name, *aliases)) in found.items():
            depth = len(name.split(".")) if name else 0
            layer = Layer(name, tuple(aliases), module, depth, parametrized.get(key))
            layers.append(layer)
            if (parametrizations := _parametrizations(layer.module)) is not None:
                for part in parametrizations.modules():
                    parametrized.setdefault(id(part), layer.owner)
        return cls(model, tuple(layers))

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def parents(self, layer: Layer) -> list[nn.Module]:
        names = [name.split(".") for name in layer.names if name]
        paths = {".".join(parts[:depth]) for parts in names for depth in range(len(parts))}
        inside = [other for other in self if not paths.isdisjoint(other.names)]
        return [other.module for other in sorted(inside, key=lambda other: -other.depth)]

    def is_inlined(self, layer: Layer) -> bool:
        """Return whether a graph of `torch.fx` or `torch.export` runs the operations of the module, and keeps only its parts."""
        return type(layer.module) is nn.Module and any(
            isinstance(parent, GraphModule) for parent in self.parents(layer)
        )

    @cached_property
    def by_module(self) -> dict[int, Layer]:
        return {id(layer.module): layer for layer in self.layers}

    @cached_property
    def parameter_names(self) -> dict[int, tuple[str, ...]]:
        """The names of each parameter for `params`, by the `id` of the parameter. Tied parameters have several names."""
        names_by_id: dict[int, dict[str, None]] = {}
        for layer in self.layers:
            for own, parameter in layer.own_parameters():
                names_by_id.setdefault(id(parameter), {}).update(dict.fromkeys(layer.names_of(own)))
        return {key: tuple(names) for key, names in names_by_id.items()}

    def hidden_messages(self) -> list[tuple[str, str]]:
        """Return a location of each module in plain lists, tuples, sets or dicts, which PyTorch does not find, and a warning about it."""
        known = {id(module) for module in self.model.modules()}
        messages: list[tuple[str, str]] = []
        for layer in self.layers:
            for attribute, value in vars(layer.module).items():
                if attribute.startswith("_") and attribute in vars(nn.Module()):
                    continue
                owner = f"{layer.name}.{attribute}" if layer.name else attribute
                for location, item in _plain_items(value, owner):
                    if isinstance(item, nn.Module) and id(item) not in known:
                        known.add(id(item))
                        # Keras registers the parameters of its layers in another module.
                        is_held = hasattr(item, "_parameters") and self.parameter_names.keys() >= {
                            *map(id, item.parameters())
                        }
                        lost = "" if is_held else "its parameters are not trained, moved or saved, and "
                        message = (
                            f"{location} ({type(item).__name__}) is in a plain Python list or dict, where PyTorch does not find "
                            f"it: {lost}no glob matches it; use nn.ModuleList or nn.ModuleDict"
                        )
                        messages.append((location, message))
        return messages


def _plain_items(value: object, location: str, ancestors: frozenset[int] = frozenset()) -> Iterator[tuple[str, object]]:
    if id(value) in ancestors:
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(value)
    for key, item in items:
        yield f"{location}[{key!r}]", item
        yield from _plain_items(item, f"{location}[{key!r}]", ancestors | {id(value)})


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their layer names, without wrappers (DDP, `torch.compile`, checkpoint)."""
    named: dict[int, tuple[str, nn.Module]] = {}  # by identity: a proxy of a module has no hash
    for name, module in _walk(model, "", set()):
        named.setdefault(id(module), (name, module))
    return dict(named.values())


def _walk(module: nn.Module, name: str, ancestors: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under each of its names, parents first. Wrappers are replaced by the wrapped module."""
    children = dict(module._modules.items())  # those of a TorchScript module are not in a dict
    for attribute, owners in _WRAPPED.items():
        inner = children.get(attribute)
        if inner is not None and not {cls.__name__ for cls in type(module).__mro__}.isdisjoint(owners):
            yield from _walk(inner, name, ancestors)
            return
    yield name, module
    if id(module) in ancestors:  # a module that contains itself
        return
    ancestors = ancestors | {id(module)}
    for key, child in children.items():
        if child is not None:
            yield from _walk(child, f"{name}.{key}" if name else key, ancestors)
