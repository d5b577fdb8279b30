"""Selection of layers. A selection without matches is an error that names similar layers."""

from __future__ import annotations

import re

from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..spec.field_types import Selection
from .modules import Layer, Layers


def select_layers(selection: Selection, layers: Layers, where: str) -> list[Layer]:
    """Return the layers that a selection matches, in the order of the model.

    Args:
        selection: The selecting fields.
        layers: The modules of the model.
        where: The config key of the spec, for messages.

    Raises:
        ConfigError: A glob matches no module, or `types` or `exclude` remove all modules.
    """
    for key, patterns in (("layers", selection.globs), ("exclude", selection.exclude)):
        for pattern in patterns:
            if not any(layer.is_named([pattern]) for layer in layers):
                raise ConfigError(_no_such_layer(pattern, layers, f"{where}.{key}"))
    named = [layer for layer in layers if layer.is_named(selection.globs)]
    typed = [layer for layer in named if not selection.types or any(layer.is_a(name) for name in selection.types)]
    if not typed:
        types = sorted({layer.type for layer in named})
        plain = [re.sub(r"[*?\[\]!]", "", name) for name in selection.types]
        similar = [name for each in plain for name in similar_names(each, types)]
        message = f"none of the {len(named)} modules that the globs match is of this type"
        raise ConfigError(Problem(f"{where}.types", message, list(selection.types), types, similar))
    kept = [layer for layer in typed if not layer.is_named(selection.exclude)]
    if not kept:
        message = f"excludes all {len(typed)} modules that 'layers' and 'types' match"
        raise ConfigError(Problem(f"{where}.exclude", message, given=list(selection.exclude)))
    return kept


def _no_such_layer(pattern: str, layers: Layers, where: str) -> Problem:
    names = [name for layer in layers for name in layer.names if name]
    plain = pattern.removeprefix("re:").replace("*", "").replace("..", ".").strip(".")
    similar = similar_names(plain, names, limit=5) or similar_names(plain.split(".")[0], names, limit=5)
    return Problem(where, "this pattern matches no module", given=pattern, allowed=shorten(names), similar=similar)
