"""Containers of nested values: their entries, a walk over their leaves, and replacement of leaves.

A container that occurs several times in a value, or that contains itself, is visited once. No function is recursive, so that the
depth of a value is not limited.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserList, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes})  # the classes of most values without entries
_OPAQUE = (Tensor, nn.Module, type)
_SEQUENCES = (list, tuple, deque, UserList)
_INDEXED = (Mapping, MutableSequence, tuple)
_MISSING = object()


def entries(value: Any) -> Sequence[tuple[Any, Any]]:
    """Return the keys and the values of a container's entries; empty for any other value.

    The keys are those of a mapping, the indices of a sequence, or the names of the fields of a named tuple, a dataclass, a class
    of attrs, a `SimpleNamespace` or a graph of torch_geometric. Iterators are not containers: they can be read only once.
    """
    if type(value) in _ATOMS or isinstance(value, _OPAQUE):
        return ()
    if type(value) is dict or isinstance(value, Mapping):  # the first condition is for speed
        return [*value.items()]  # not by the iteration over the value, which may yield samples
    if isinstance(value, _SEQUENCES):
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return [*zip(value._fields, value, strict=True)]
        return [*enumerate(value)]
    if isinstance(value, SimpleNamespace):
        return [*vars(value).items()]
    if _is_graph(value):
        return [*value.to_dict().items()]
    is_dataclass = dataclasses.is_dataclass(value)
    fields = dataclasses.fields(value) if is_dataclass else getattr(type(value), "__attrs_attrs__", ())
    children = ((field.name, getattr(value, field.name, _MISSING)) for field in fields)
    return [(name, child) for name, child in children if child is not _MISSING]


def _is_graph(value: Any) -> bool:
    geometric = sys.modules.get("torch_geometric.data")
    return geometric is not None and isinstance(value, geometric.Data)


def leaves(value: Any, is_leaf: Callable[[Any], bool], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each leaf, in order. A leaf that occurs several times has several paths.

    Other values without entries are skipped.
    """
    known: dict[int, Any] = {}  # contains the containers, so that no other object gets their `id`
    waiting = [(path, value)]
    while waiting:
        path, value = waiting.pop()
        if is_leaf(value):
            yield path, value
        elif id(value) not in known and (children := entries(value)):
            known[id(value)] = value
            prefix = f"{path}." if path else ""
            waiting += [(f"{prefix}{key}", child) for key, child in reversed(children)]


@dataclasses.dataclass(slots=True, eq=False)
class _Container:
    """A container that is visited, with its new leaves by the index of their entry, and the container that replaces it."""

    value: Any
    entries: Sequence[tuple[Any, Any]]
    parents: list[_Container] = dataclasses.field(default_factory=list)
    replaced: dict[int, Any] = dataclasses.field(default_factory=dict)
    new: Any = _MISSING

    @property
    def is_writable(self) -> bool:
        """Whether its entries can be replaced: it accepts an entry that it has already."""
        key, child = self.entries[0]
        try:
            if _is_indexed(self.value):
                self.value[key] = child
            else:
                setattr(self.value, key, child)
        except Exception:  # code of the class, which can raise anything
            return False
        return True


def map_leaves(
    value: Any, change: Callable[[str, Any], Any], is_leaf: Callable[[Any], bool], *, in_place: Any = ()
) -> Any:
    """Return a value with each leaf replaced by `change(path, leaf)`. Repeated and cyclic references are kept.

    Args:
        change: Takes the path and the leaf, in the order of `leaves`. It returns the same object to keep a leaf.
        is_leaf: See `leaves`.
        in_place: Values whose containers other code reads: those are changed in place, unless they are read-only.

    Returns:
        The same object if it is unchanged or was changed in place; otherwise a copy. A copy shares what is unchanged.
    """
    if is_leaf(value):
        return change("", value)
    known: dict[int, _Container] = {}
    changed: list[_Container] = []
    waiting: list[tuple[str, Any, _Container | None, int]] = [("", value, None, 0)]
    while waiting:
        path, child, user, index = waiting.pop()
        if is_leaf(child):
            assert user is not None, "a value that is a leaf has no entries"
            new = change(path, child)
            if new is not child:
                user.replaced[index] = new
                changed.append(user)
            continue
        container = known.get(id(child))
        if container is None:
            if not (children := entries(child)):
                continue
            container = known[id(child)] = _Container(child, children)
            prefix = f"{path}." if path else ""
            waiting += [(f"{prefix}{key}", each, container, i) for i, (key, each) in reversed([*enumerate(children)])]
        if user is not None:
            container.parents.append(user)
    if changed:
        _replace(known, changed, in_place)
        return value if (root := known[id(value)]).new is _MISSING else root.new
    return value


def _replace(known: Mapping[int, _Container], changed: Sequence[_Container], in_place: Any) -> None:
    """Set `new` of all containers that change, because a leaf or a container in them changes."""
    in_place_ids = _containers_in(in_place) if in_place else ()
    waiting, copies, fixed = [*changed], [], []
    seen: set[int] = set()
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        if id(container.value) in in_place_ids and container.is_writable:
            container.new = container.value
            copies.append(container)
            continue  # the containers around it still contain the same object
        waiting += container.parents
        if is_modifiable(container.value):
            container.new = _shallow_copy(container.value)
            copies.append(container)
        else:
            fixed.append(container)
    for container in fixed:
        _construct(container, known, seen)
    for container in copies:
        for (key, old), new in zip(container.entries, _new_children(container, known), strict=True):
            if new is not old:
                _write(container.new, key, new)


def _containers_in(value: Any) -> set[int]:
    """Return the `id` of each container in a value."""
    ids: set[int] = set()

    def note(child: Any) -> bool:
        ids.add(id(child))
        return False

    for _ in leaves(value, note):
        pass
    return ids


def _new_children(container: _Container, known: Mapping[int, _Container]) -> Iterator[Any]:
    for index, (_, child) in enumerate(container.entries):
        inner = known.get(id(child))
        kept = child if inner is None or inner.new is _MISSING else inner.new
        yield container.replaced.get(index, kept)


def is_modifiable(value: Any) -> bool:
    """Return whether a value is a container whose entries can be replaced, at least in a copy."""
    is_fixed = isinstance(value, tuple) or (isinstance(value, Mapping) and not isinstance(value, MutableMapping))
    return not is_fixed and bool(entries(value))


def _construct(container: _Container, known: Mapping[int, _Container], changed: set[int]) -> None:
    """Construct a tuple or a read-only mapping, after those that it contains."""
    waiting, started = [container], set()
    while waiting:
        top = waiting[-1]
        first_time = id(top) not in started
        started.add(id(top))
        inner = [known[id(child)] for _, child in top.entries if id(child) in known] if first_time else []
        missing = [each for each in inner if each.new is _MISSING and id(each) in changed and id(each) not in started]
        waiting += missing
        if not missing:
            waiting.pop()
            if top.new is _MISSING:
                top.new = _constructed(top.value, [*_new_children(top, known)], [key for key, _ in top.entries])


def _constructed(value: Any, children: Sequence[Any], keys: Sequence[Any]) -> Any:
    if isinstance(value, tuple):
        # A named tuple is constructed from separate fields; torch.return_types and plain tuples from one sequence.
        return type(value)(*children) if hasattr(value, "_fields") else type(value)(children)
    return type(value)(dict(zip(keys, children, strict=True)))


def _shallow_copy(value: Any) -> Any:
    """Copy a container. Its entries can be replaced without changing the original."""
    copied = copy.copy(value)
    is_generic = not hasattr(type(value), "__copy__")
    if isinstance(value, MutableMapping) and not isinstance(value, dict) and is_generic:
        attributes = vars(copied)  # a mapping keeps its entries in one of them
        attributes |= {name: copy.copy(child) for name, child in attributes.items() if isinstance(child, dict | list)}
    return copied


def _is_indexed(container: Any) -> bool:
    """Return whether entries are items, and not attributes."""
    return isinstance(container, _INDEXED) or _is_graph(container)


def _write(container: Any, key: Any, child: Any) -> None:
    if _is_indexed(container):
        container[key] = child
    else:
        object.__setattr__(container, key, child)  # also works for frozen dataclasses


class CopiedContainer(NamedTuple):
    """A container that a module gets instead of the original, and what the copy contains before the module runs."""

    original: Any
    copy: Any
    contents: dict[Hashable, Any]


def copied_containers(original: Mapping[str, Any], new: Mapping[str, Any]) -> list[CopiedContainer]:
    """Return the containers in arguments that `map_leaves` copied, without tuples and read-only mappings."""
    copies: dict[int, CopiedContainer] = {}
    visited: set[int] = set()
    waiting = [(old, new[name]) for name, old in original.items()]
    while waiting:
        old, copied = waiting.pop()
        if old is copied or id(copied) in visited or isinstance(old, Tensor):
            continue
        visited.add(id(copied))
        waiting += [(child, new) for (_, child), (_, new) in zip(entries(old), entries(copied), strict=True)]
        if is_modifiable(old):
            copies[id(copied)] = CopiedContainer(old, copied, _contents(copied))
    return [*copies.values()]


def _contents(container: Any) -> dict[Hashable, Any]:
    """Return the entries of a container, and the attributes of an object that are not fields."""
    if isinstance(container, Mapping | MutableSequence):
        return dict(entries(container))
    return {**getattr(container, "__dict__", {}), **dict(entries(container))}


def write_back(copies: Sequence[CopiedContainer]) -> None:
    """Write to the originals what a module wrote to their copies."""
    originals = {id(each.copy): each.original for each in copies}
    for original, copied, given in copies:
        now = _contents(copied)
        for key, child in now.items():
            if given.get(key, _MISSING) is child:
                continue
            kept = originals.get(id(child), child)
            if isinstance(original, MutableSequence) and key == len(original):
                original.append(kept)
            else:
                _write(original, key, kept)
        for key in reversed([key for key in given if key not in now]):
            if _is_indexed(original):
                del original[key]
            else:
                delattr(original, str(key))
