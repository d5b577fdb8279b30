"""Names of version 0.2.0 that have moved. They still work, with a `DeprecationWarning`."""

from __future__ import annotations

import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REMOVED_IN = "0.4.0"
MODULES = {
    "instrument.cli.validation_callback": "instrument.commands.validation_callback",
    "instrument.spec.kinds": "instrument.tables.kinds",
    "instrument.spec.tables": "instrument.tables.schemas",
}
ATTRIBUTES = {
    f"instrument.analysis.{name}": "instrument.interpret"
    for name in ("ClassActivation", "class_activation_map", "layer_similarity", "logit_lens")
}
_PACKAGES = {name.rpartition(".")[0] for name in MODULES}


def find_spec(name: str) -> ModuleSpec | None:
    return ModuleSpec(name, _Loader(), is_package=name in _PACKAGES) if name in MODULES or name in _PACKAGES else None


class _Loader(Loader):
    """Fills a module with the names of the one that has replaced it."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        if (new := MODULES.get(module.__name__)) is not None:
            _warn(module.__name__, new, stacklevel=3)
            names = vars(import_module(new))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


def moved_attribute(module: str, name: str) -> Any:
    """Return an attribute that another module has now. Raise an AttributeError if none with this name has moved."""
    if (new := ATTRIBUTES.get(f"{module}.{name}")) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{new}.{name}", stacklevel=4)
    return getattr(import_module(new), name)


def _warn(old: str, new: str, *, stacklevel: int) -> None:
    warnings.warn(
        f"{old} is now {new}; version {REMOVED_IN} removes the old name", DeprecationWarning, stacklevel=stacklevel
    )
