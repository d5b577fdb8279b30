"""Selection of layers. A selection without matches is an error that names similar layers."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError, Mistake, nearest
from ..spec.fields import Selection
from ..spec.globs import matches
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
            if not any(matches(pattern, name) for layer in layers for name in layer.names):
                raise ConfigError(_no_such_layer(pattern, layers, f"{where}.{key}"))
    named = [
        layer for layer in layers if any(matches(pattern, name) for pattern in selection.globs for name in layer.names)
    ]
    typed = [layer for layer in named if not selection.types or any(layer.is_a(name) for name in selection.types)]
    if not typed:
        there = sorted({layer.type for layer in named})
        close = [name for written in selection.types for name in nearest(written, there)]
        raise ConfigError(
            Mistake(
                f"{where}.types",
                f"none of the {len(named)} modules that the globs match is of this type",
                written=list(selection.types),
                allowed=there,
                nearest=close,
            )
        )
    kept = [
        layer
        for layer in typed
        if not any(matches(pattern, name) for pattern in selection.exclude for name in layer.names)
    ]
    if not kept:
        raise ConfigError(
            Mistake(
                f"{where}.exclude",
                f"takes all {len(typed)} modules away that 'layers' and 'types' match",
                written=list(selection.exclude),
            )
        )
    return kept


def _no_such_layer(pattern: str, layers: Layers, where: str) -> Mistake:
    names = [name for layer in layers for name in layer.names if name]
    plain = pattern.removeprefix("re:").replace("*", "").replace("..", ".").strip(".")
    close = nearest(plain, names, most=5) or nearest(plain.split(".")[0], names, most=5)
    return Mistake(where, "this pattern matches no module", written=pattern, allowed=some(names), nearest=close)


def some(names: Sequence[str], most: int = 12) -> str:
    """Shorten a list of names for display: the first ones, and the total number."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names)} in all)"
