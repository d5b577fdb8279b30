"""Recorded tensors as a page shows them: mosaics of channels, each with the image that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analysis.choice import spread
from ..analysis.load import Run
from ..analysis.maps import Maps, image_of, limits, maps_in, mosaic, smaller
from .numbers import rounded

MAPS_ROOM, MAP_PIXELS, MAP_CHANNELS, MAP_STEPS = 200_000, 48, 64, 6
MAP_ASPECT = 2.6  # maps in a row over rows of them
IMAGE_PIXELS = 64


def maps(run: Run, order: Sequence[str]) -> list[dict[str, Any]]:
    """Feature maps, gradient maps and filters of some steps, each a mosaic of channels with the image that it is of."""
    ranks = {layer: rank for rank, layer in enumerate(order)}
    known = maps_in(run)
    places: dict[tuple[str, str, str], list[Maps]] = {}
    for one in known:
        if not one.is_image:
            at = places.setdefault((one.what, one.series.label, one.place), [])
            if one.step not in {other.step for other in at}:
                at.append(one)
    ordered = sorted(places.values(), key=lambda found: (found[0].what, ranks.get(found[0].layer, len(ranks))))
    chosen = [[found[i] for i in spread(len(found), MAP_STEPS)] for found in ordered]
    shown: list[dict[str, Any]] = []
    room = MAPS_ROOM
    for found in chosen:
        for one in found:
            picture = _picture(run, one, known)
            room -= sum(len(row) for row in picture["mosaic"]["z"])
            if room < 0:
                return shown
            shown.append(picture)
    return shown


def _picture(run: Run, one: Maps, known: list[Maps]) -> dict[str, Any]:
    image = image_of(one, known)
    return {
        "what": one.what,
        "label": one.series.label,
        "place": one.place,
        "step": one.step,
        "shape": list(one.shape),
        "mosaic": _mosaic(one.values(run)),
        "image": None if image is None else _image(image.values(run)),
    }


def _mosaic(values: np.ndarray) -> dict[str, Any]:
    """Maps side by side with their colour scale, and what was left out to make them fit."""
    cut = values[:MAP_CHANNELS]
    if cut.ndim == 4:
        cut = cut[:, : max(1, MAP_CHANNELS // len(cut))] if cut.shape[1] > 3 else cut
    low, high = limits(values)
    pixels = smaller(cut, MAP_PIXELS)
    count = int(np.prod(cut.shape[:-2]))
    wide = None if count > len(cut) else max(1, min(count, round((MAP_ASPECT * count) ** 0.5)))
    return {
        "z": rounded(mosaic(pixels, columns=wide)),
        "low": rounded(low),
        "high": rounded(high),
        "channels": [count, int(np.prod(values.shape[:-2]))],
        "pixels": [*pixels.shape[-2:], *values.shape[-2:]],
    }


def _image(values: np.ndarray) -> dict[str, Any]:
    """The image that maps are of: one channel as numbers, three as colours from 0 to 255."""
    pixels = smaller(values, IMAGE_PIXELS)
    finite = pixels[np.isfinite(pixels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if len(pixels) == 1:
        return {"z": rounded(pixels[0]), "low": rounded(low), "high": rounded(high), "colours": False}
    shades = np.nan_to_num((pixels - low) / ((high - low) or 1.0) * 255.0).round().astype(int)
    return {"z": shades.transpose(1, 2, 0).tolist(), "low": 0, "high": 255, "colours": True}
