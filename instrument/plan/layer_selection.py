"""The modules that a spec selects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ..errors import ConfigError, Problem, similar_names
from ..fields.field_types import STRUCTURES, Selection, StructureName
from ..formatting import shorten
from .modules import Layer, Layers
from .structure import find_structure


def select_layers(selection: Selection, layers: Layers, where: str) -> list[Layer]:
    """Return the layers that a selection matches, in the order of the model; none if its structure is missing and optional.

    Raises:
        ConfigError: A glob matches no module, the model has no such structure, or `types` or `exclude` remove all modules.
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
    fix = "select the modules with 'layers' or 'types', or remove the hook; plan=true shows all modules"
    return Problem(f"{where}.structure", looked_for, names, fix=fix)


def no_such_layer(pattern: str, layers: Iterable[Layer], where: str) -> Problem:
    names = [name for layer in layers for name in layer.names if name]
    plain = pattern.removeprefix("re:").replace("*", "").replace("..", ".").strip(".")
    similar = similar_names(plain, names, limit=5) or similar_names(plain.split(".")[0], names, limit=5)
    types = [layer.type for layer in layers if layer.type.lower() in plain.lower().split(".")]
    is_class = types and where.endswith(".layers")
    fix = f"'layers' are names; to select by class, write 'types: {types[0]}' instead" if is_class else ""
    return Problem(where, "this pattern matches no module", pattern, shorten(names or ["."]), similar, fix)
