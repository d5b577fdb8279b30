"""Import names of version 0.2 that have moved. They work in this version, with a `DeprecationWarning`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

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


class MovedModules(MetaPathFinder, Loader):
    """Finds the modules of `MODULES`. They contain the names of those that have replaced them."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        return ModuleSpec(name, self, is_package=name in _PACKAGES) if name in MODULES or name in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        if (new := MODULES.get(module.__name__)) is not None:
            _warn(module.__name__, new)
            names = vars(import_module(new))
            vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


def moved_attribute(module: str, name: str) -> Any:
    """Return an attribute that another module has now.

    Raises:
        AttributeError: There is none.
    """
    if (new := ATTRIBUTES.get(f"{module}.{name}")) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{new}.{name}")
    return getattr(import_module(new), name)


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will be removed", DeprecationWarning, stacklevel=3)
