"""Registries of extensions: actions, kinds, trackers, plots and others, built in or from installed packages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules, resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from ..errors import ConfigError, Problem, similar_names, user_code_location

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Entries by name: those that code registers, and the entry points of installed packages.

    Nothing is imported before it is needed. A built-in name does not search the installed packages.

    Args:
        group: The group of entry points is `instrument.<group>`.
        what: One entry in words, for messages: `action`.
        folder: A package whose modules register entries. They are imported at first use, and the entries are in alphabetical order.
            Default: none, the entries are in the order of their registration.
        builtin: Further built-in entries, as `package.module:object`. Each is imported at its first use.
        check: Returns what is wrong with an entry, or None. Default: no check.
    """

    def __init__(
        self,
        group: str,
        what: str,
        *,
        folder: str | None = None,
        builtin: Mapping[str, str] = MappingProxyType({}),
        check: Callable[[T], str | None] | None = None,
    ) -> None:
        self.group, self.what = f"instrument.{group}", what
        self.builtin = builtin
        self.places: dict[str, str] = {**builtin}
        self._entries: dict[str, T] = {}
        self._folder, self._check = folder, check
        self._lock = threading.RLock()
        self._is_sorted = folder is not None  # other code may have imported some of its modules first

    def register(self, *names: str, place: str = "") -> Callable[[T], T]:
        """Return a decorator that adds a class or a function under one name or several.

        Args:
            place: The file and line of the entry, for messages. Default: those of the caller.

        Raises:
            ConfigError: From the decorator: a name is registered already, or the entry is invalid.
        """
        caller = sys._getframe(1)
        place = place or f"{caller.f_code.co_filename}:{caller.f_lineno}"

        def add(entry: T) -> T:
            for name in names:
                self._add(name, entry, place)
            return entry

        return add

    def find(self, name: str, where: str) -> T:
        """Return the entry of a name that a user gave. Raise a ConfigError if it is unknown, or its entry point cannot be loaded."""
        if name in self:
            return self[name]
        similar = similar_names(name, self)
        raise ConfigError(Problem(where, f"unknown {self.what}", given=name, allowed=list(self), similar=similar))

    def __getitem__(self, name: str) -> T:
        self._import_folder()
        if name not in self._entries and name in self.builtin:
            self._entries[name] = resolve_name(self.builtin[name])
        elif name not in self._entries:
            self._load(self._installed[name])
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        self._import_folder()
        if not isinstance(name, str):
            return False
        return name in self._entries or name in self.builtin or name in self._installed

    def __iter__(self) -> Iterator[str]:
        self._import_folder()
        names = dict.fromkeys([*self.builtin, *self._entries, *self._installed])
        return iter(sorted(names) if self._is_sorted else names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _import_folder(self) -> None:
        with self._lock:  # another thread would see a part of the entries
            folder, self._folder = self._folder, None
            if folder is not None:
                for module in iter_modules(import_module(folder).__path__):
                    import_module(f"{folder}.{module.name}")

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        from importlib.metadata import entry_points

        points: dict[str, EntryPoint] = {}
        for point in entry_points(group=self.group):
            other = self.places.get(point.name) or (point.name in points and _place(points[point.name]))
            if other:
                raise self._registered_twice(point.name, other, _place(point))
            points[point.name] = point
        return points

    def _load(self, point: EntryPoint) -> None:
        try:
            entry = point.load()
        except (Exception, SystemExit) as error:
            message = f"cannot be loaded: {type(error).__name__}: {error}{user_code_location(error)}"
            raise ConfigError(Problem(_place(point), message)) from error
        if self._entries.get(point.name) is not entry:  # otherwise, the module used the decorator
            self._add(point.name, entry, _place(point))

    def _add(self, name: str, entry: T, place: str) -> None:
        if (first := self.places.get(name, place)) != place:  # a notebook runs the same cell again
            raise self._registered_twice(name, first, place)
        if self._check is not None and (wrong := self._check(entry)):
            raise ConfigError(Problem(place, f"{self.what} {name!r} {wrong}", given=entry))
        self._entries[name], self.places[name] = entry, place

    def _registered_twice(self, name: str, first: str, second: str) -> ConfigError:
        message = f"{self.what} {name!r} is registered already"
        return ConfigError(Problem(second, message, fix=f"choose another name; {first} has this one"))


def _place(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"
    return f"entry point {point.name} = {point.value} (group {point.group}, package {package})"
