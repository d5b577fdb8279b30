"""The modules of a model and all the names that they answer to."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.parameter import Parameter

from ..sharded import module_type

# A wrapper's attribute that holds the wrapped module, and the class names that own it. The attribute's name does
# not count in a layer's name; a module of one's own that is called `module` keeps it.
_WRAPPED = {
    "module": ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"),
    "_orig_mod": ("OptimizedModule",),
    "_checkpoint_wrapped_module": ("CheckpointWrapper", "OffloadWrapper"),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """One module of a model.

    Attributes:
        name: Its first name in `named_modules` order, without wrappers' segments; empty for the root.
        aliases: The other names that the same module answers to.
        module: The module itself, the innermost one where wrappers share its name.
        depth: Segments in its name.
    """

    name: str
    aliases: tuple[str, ...]
    module: nn.Module
    depth: int

    @property
    def names(self) -> tuple[str, ...]:
        """All of its names, the first one first."""
        return (self.name, *self.aliases)

    @property
    def type(self) -> str:
        """The short name of its class."""
        return module_type(self.module)

    @property
    def label(self) -> str:
        """Its name, fit for print: the root is `.`."""
        return self.name or "."

    @property
    def is_holder(self) -> bool:
        """Whether it only holds others (ModuleList, ModuleDict, ParameterList): without a forward it is never called."""
        return type(self.module).forward is nn.Module.forward and "forward" not in vars(self.module)

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """The parameters registered on this very module, by their own names."""
        yield from ((name, parameter) for name, parameter in self.module._parameters.items() if parameter is not None)

    def is_a(self, type_name: str) -> bool:
        """Whether its class, or a class above it, has this name: short, or with a package that it can be had from."""
        package, _, short = type_name.rpartition(".")
        public = getattr(sys.modules.get(package), short, None)  # torch.nn.Conv2d is torch.nn.modules.conv's
        return any(
            cls is public or type_name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
            for cls in type(self.module).__mro__
        )


@dataclass(frozen=True, eq=False)
class Layers:
    """All modules of a model, each once, the root first, in the order of `named_modules`."""

    model: nn.Module
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layers:
        """Walk a model. Wrappers (DDP, `torch.compile`, checkpoint) stand for the module that they wrap."""
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
        """The layer of a module, by the module's `id`."""
        return {id(layer.module): layer for layer in self.layers}

    @cached_property
    def parameter_names(self) -> dict[int, tuple[str, ...]]:
        """All full names of each parameter, by its `id`: tied parameters answer to several."""
        found: dict[int, list[str]] = {}
        for layer in self.layers:
            for own, parameter in layer.own_parameters():
                for name in layer.names:
                    found.setdefault(id(parameter), []).append(f"{name}.{own}" if name else own)
        return {key: tuple(names) for key, names in found.items()}

    def hidden(self) -> list[tuple[str, nn.Module]]:
        """Modules that a module keeps in a plain list, tuple, set or dict, which `named_modules` cannot see."""
        known = {id(module) for module in self.model.modules()}
        found: dict[int, tuple[str, nn.Module]] = {}
        for layer in self.layers:
            for attribute, value in vars(layer.module).items():
                if attribute.startswith("_") and attribute in vars(nn.Module()):
                    continue
                owner = f"{layer.name}.{attribute}" if layer.name else attribute
                for place, item in _plain_items(value, owner):
                    if isinstance(item, nn.Module) and id(item) not in known:
                        found.setdefault(id(item), (place, item))
        return list(found.values())

    def hidden_messages(self) -> list[tuple[str, str]]:
        """Where each hidden module is, and a warning of it in words."""
        return [
            (
                place,
                f"{place} ({type(module).__name__}) is kept in a plain Python list or dict, which PyTorch cannot see: its "
                "parameters are not trained, moved or saved, and no glob matches it; use nn.ModuleList or nn.ModuleDict",
            )
            for place, module in self.hidden()
        ]


def _plain_items(value: object, place: str, above: frozenset[int] = frozenset()) -> Iterator[tuple[str, object]]:
    """Everything in a plain container, and in those that it holds, with the place where it is."""
    if id(value) in above:
        return
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(value)
    for key, item in items:
        yield f"{place}[{key!r}]", item
        yield from _plain_items(item, f"{place}[{key!r}]", above | {id(value)})


def _walk(module: nn.Module, name: str, above: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every one of its names, parents first; a wrapper gives way to what it wraps."""
    inner = _unwrapped(module)
    if inner is not None:
        yield from _walk(inner, name, above)
        return
    yield name, module
    if id(module) in above:  # a module that holds itself
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _walk(child, f"{name}.{key}" if name else key, above | {id(module)})


def _unwrapped(module: nn.Module) -> nn.Module | None:
    classes = {cls.__name__ for cls in type(module).__mro__}
    for attribute, owners in _WRAPPED.items():
        if classes & set(owners) and attribute in module._modules:
            return module._modules[attribute]
    return None
