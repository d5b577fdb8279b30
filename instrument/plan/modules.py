"""The modules of a model and all of their names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import nn
from torch.nn.parameter import Parameter

from ..dtensor import module_type

# The attribute of each wrapper class that contains the wrapped module. It is not part of layer names. A custom module
# with an attribute `module` keeps its name.
_WRAPPED = {
    "module": ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
    "_orig_mod": ("OptimizedModule",),
    "_checkpoint_wrapped_module": ("CheckpointWrapper", "OffloadWrapper"),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """One module of a model.

    Attributes:
        name: Its first name in the order of `named_modules`, without segments of wrappers; empty for the root module.
        aliases: The other names of the same module.
        module: The module; the innermost one if wrappers share its name.
        depth: The number of segments in its name.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    depth: int

    @property
    def names(self) -> tuple[str, ...]:
        """All of its names, starting with `name`."""
        return (self.name, *self.aliases)

    @property
    def type(self) -> str:
        """The short name of its class."""
        return module_type(self.module)

    @property
    def label(self) -> str:
        """Its name for display; `.` for the root module."""
        return self.name or "."

    @property
    def is_container(self) -> bool:
        """Whether it is only a container (ModuleList, ModuleDict, ParameterList).

        It has no forward and is never called.
        """
        return type(self.module).forward is nn.Module.forward and "forward" not in vars(self.module)

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters that are registered on this module itself, with their names within it."""
        yield from ((name, parameter) for name, parameter in self.module._parameters.items() if parameter is not None)

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
        """List the modules of a model.

        A wrapper (DDP, `torch.compile`, checkpoint) is replaced by the wrapped module.
        """
        names: dict[int, list[str]] = {}
        modules: dict[int, nn.Module] = {}
        for name, module in _walk(model, "", set()):
            modules[id(module)] = module
            if name not in names.setdefault(id(module), []):
                names[id(module)].append(name)
        return cls(
            model,
            tuple(
                Layer(found[0], tuple(found[1:]), modules[key], len(found[0].split(".")) if found[0] else 0)
                for key, found in names.items()
            ),
        )

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @cached_property
    def by_module(self) -> dict[int, Layer]:
        """The layer of each module, by the `id` of the module."""
        return {id(layer.module): layer for layer in self.layers}

    @cached_property
    def parameter_names(self) -> dict[int, tuple[str, ...]]:
        """All full names of each parameter, by the `id` of the parameter. Tied parameters have several names."""
        found: dict[int, list[str]] = {}
        for layer in self.layers:
            for own, parameter in layer.own_parameters():
                for name in layer.names:
                    found.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
        return {key: tuple(names) for key, names in found.items()}

    def hidden(self) -> list[tuple[str, nn.Module]]:
        """Return the modules in plain lists, tuples, sets or dicts, which `named_modules` does not find."""
        module_ids = {id(module) for module in self.model.modules()}
        found: dict[int, tuple[str, nn.Module]] = {}
        for layer in self.layers:
            for attribute, value in vars(layer.module).items():
                if attribute.startswith("_") and attribute in vars(nn.Module()):
                    continue
                owner = f"{layer.name}.{attribute}" if layer.name else attribute
                for location, item in _plain_items(value, owner):
                    if isinstance(item, nn.Module) and id(item) not in module_ids:
                        found.setdefault(id(item), (location, item))
        return list(found.values())

    def hidden_messages(self) -> list[tuple[str, str]]:
        """Return the location of each hidden module and a warning about it."""
        return [
            (
                location,
                f"{location} ({type(module).__name__}) is in a plain Python list or dict, where PyTorch does not find it: its "
                "parameters are not trained, moved or saved, and no glob matches it; use nn.ModuleList or nn.ModuleDict",
            )
            for location, module in self.hidden()
        ]


def _plain_items(value: object, location: str, ancestors: frozenset[int] = frozenset()) -> Iterator[tuple[str, object]]:
    """Yield all items of a plain container and of its nested containers, with their locations."""
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


def _walk(module: nn.Module, name: str, ancestors: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under each of its names, parents first. Wrappers are replaced by the wrapped module."""
    inner = _unwrapped(module)
    if inner is not None:
        yield from _walk(inner, name, ancestors)
        return
    yield name, module
    if id(module) in ancestors:  # a module that contains itself
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}.{key}" if name else key, ancestors | {id(module)})


def _unwrapped(module: nn.Module) -> nn.Module | None:
    classes = {cls.__name__ for cls in type(module).__mro__}
    for attribute, owners in _WRAPPED.items():
        if classes & set(owners) and attribute in module._modules:
            return module._modules[attribute]
    return None
