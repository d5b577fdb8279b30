"""Recorded tensors as images for a page: mosaics of channels with their input images."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, zip_longest
from typing import Any

import numpy as np

from ..analysis.load import Run
from ..analysis.plot_data import RecordedSeries, evenly_spaced, rank_in
from ..analysis.tensor_images import TensorMaps, image_of, limits, maps_in, mosaic, smaller
from .numbers import rounded

MAX_VALUES = 260_000  # maximum number of values in all mosaics together
PIXELS, CHANNELS, STEPS = 48, 64, 6  # maximum side of a map, channels per mosaic, steps per location
FEWEST_PIXELS = 8
ASPECT = 2.6  # ratio of columns to rows of a mosaic
IMAGE_PIXELS = 48

LocationMaps = list[TensorMaps]  # of one location, one per step


def maps(run: Run, order: Sequence[str], others: Collection[tuple[RecordedSeries, str]] = ()) -> dict[str, Any]:
    """Return feature maps, gradient maps and filters at some steps, as mosaics with their input images.

    The number of values on the page is limited. The last step of each location is added first, then its first step,
    then the steps between. If the limit is too low, maps are downsampled; maps that still do not fit are omitted.

    Args:
        run: The run.
        order: Layer names in forward order.
        others: The series and locations that the page shows in another way.

    Returns:
        A dictionary with `shown`, the mosaics in the order of the locations; `images`, to which the mosaics refer by
        index; `locations` and `pictures`, the total numbers of both.
    """
    all_maps = [one for one in maps_in(run) if (one.series, one.location) not in others]
    locations = _locations(all_maps, order)
    chosen = [evenly_spaced(len(location), STEPS) for location in locations]
    ordered = [list(dict.fromkeys([steps[-1], steps[0], *steps])) for steps in chosen]
    all_turns = zip_longest(*([each[at] for at in steps] for each, steps in zip(locations, ordered, strict=True)))
    # The maps in the order in which they are added: the last one of each location, the first, the others.
    turns = [[one for one in turn if one is not None] for turn in all_turns]
    first = turns[0] if turns else []  # every location has one map of these
    sizes = range(PIXELS, FEWEST_PIXELS, -4)
    fitting = (size for size in sizes if sum(_size(one, size) for one in first) <= MAX_VALUES // 2)
    pixels = next(fitting, FEWEST_PIXELS)
    images: dict[TensorMaps, int] = {}  # the index of each input image
    shown: dict[tuple[int, int], dict[str, Any]] = {}
    ranks = {id(one): (rank, one.batch.step) for rank, location in enumerate(locations) for one in location}
    room = MAX_VALUES
    for one in chain.from_iterable(turns):
        if _size(one, pixels) > room:
            continue
        image = image_of(one, all_maps)
        number = None if image is None else images.setdefault(image, len(images))
        picture = shown[ranks[id(one)]] = _picture(run, one, pixels, number)
        room -= sum(len(row) for row in picture["mosaic"]["z"])
    of = {"locations": len(locations), "pictures": sum(len(location) for location in locations)}
    drawn = [_image(image.values(run)) for image in images]
    return {"shown": [shown[rank] for rank in sorted(shown)], "images": drawn, **of}


def _locations(all_maps: list[TensorMaps], order: Sequence[str]) -> list[LocationMaps]:
    """Return the maps of each location in forward order, one for each step; of several calls the first."""
    rank = rank_in(order)
    locations: dict[tuple[str, str, str], LocationMaps] = {}
    for one in all_maps:
        if not one.is_image:
            at = locations.setdefault((one.what, one.series.label, one.location), [])
            if one.batch.step not in {other.batch.step for other in at}:
                at.append(one)
    return sorted(locations.values(), key=lambda location: (location[0].what, rank(location[0].layer)))


def _size(one: TensorMaps, pixels: int) -> int:
    """Return the approximate number of values in a mosaic of maps with at most `pixels` per side."""
    return min(CHANNELS, one.shape[-3]) * min(pixels, max(one.shape[-2:])) ** 2


def _picture(run: Run, one: TensorMaps, pixels: int, image: int | None) -> dict[str, Any]:
    return {
        "what": one.what,
        "label": one.series.label,
        "location": one.location,
        "step": one.batch.step,
        "shape": list(one.shape),
        "samples": one.shape[0] if len(one.shape) == 4 and not one.series.is_of_parameters else 1,
        "mosaic": _mosaic(one.values(run), pixels),
        "image": image,
    }


def _mosaic(values: np.ndarray, most: int) -> dict[str, Any]:
    """Return a mosaic with its color limits and the numbers of shown and recorded channels and pixels."""
    cut = values[:CHANNELS]
    if cut.ndim == 4:
        cut = cut[:, : max(1, CHANNELS // len(cut))] if cut.shape[1] > 3 else cut
    low, high = limits(values)
    pixels = smaller(cut, most)
    count = int(np.prod(cut.shape[:-2]))
    wide = None if count > len(cut) else max(1, min(count, round((ASPECT * count) ** 0.5)))
    return {
        "z": rounded(mosaic(pixels, columns=wide)),
        "low": rounded(low),
        "high": rounded(high),
        "channels": [count, int(np.prod(values.shape[:-2]))],
        "pixels": [*pixels.shape[-2:], *values.shape[-2:]],
    }


def _image(values: np.ndarray) -> dict[str, Any]:
    """Return an input image: one channel as values, three channels as colors from 0 to 255."""
    pixels = smaller(values, IMAGE_PIXELS)
    finite = pixels[np.isfinite(pixels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if len(pixels) == 1:
        return {"z": rounded(pixels[0]), "low": rounded(low), "high": rounded(high), "colours": False}
    shades = np.nan_to_num((pixels - low) / ((high - low) or 1.0) * 255.0).round().astype(int)
    return {"z": shades.transpose(1, 2, 0).tolist(), "low": 0, "high": 255, "colours": True}
