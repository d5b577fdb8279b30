"""Recorded feature maps, gradient maps and filters, channel by channel, with the image that they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..analysis.choice import choose, refuse_unless, spread
from ..analysis.load import Run
from ..analysis.maps import Maps, image_of, maps_in
from ..analysis.series import UNPLACED, forward_order
from ..errors import InstrumentError
from .canvas import new_figure, plain
from .mosaics import aspect_of, draw_image, draw_maps
from .source import check, refuse_several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_PLACES, MOST_STEPS = 8, 5
WIDTH, SHORTEST, TALLEST, IMAGE = 3.4, 0.8, 5.0, 1.3  # inches of a mosaic, and the height of an image


def feature_maps(
    run: Run | pd.DataFrame,
    layer: str | Sequence[str] | None = None,
    *,
    step: int | Sequence[int] | None = None,
    hook: str | None = None,
    role: str | None = None,
    sample: int = 0,
) -> Figure:
    """The channels of one sample side by side: a row for each layer in forward order, a column for each step.

    Above them stands the image that they are of, where one was recorded. A channel's number is the sum of those at its row
    and below its column. Each mosaic has its own colours, symmetric around zero where there are negative values.

    Args:
        run: A run, or rows of its `tensors()`.
        layer: A layer, a parameter, or several; without it the first 8.
        step: One or several; without it up to 5, evenly chosen.
        hook: Which spec recorded them, where several did; without it and a role feature maps go before gradients and filters.
        role: Which of the kind's tensors.
        sample: Which of those that were recorded, from 0.

    Raises:
        InstrumentError: Nothing fits, several series do, or matplotlib is not installed.
    """
    known = _known(run)
    found = _at_layers(known, [layer] if isinstance(layer, str) else layer)
    if hook is None and role is None:
        found = (
            [one for one in found if one.what == "feature maps"] or [one for one in found if not one.is_image] or found
        )
    series = choose(list(dict.fromkeys(one.series for one in found)), hook=hook, role=role)
    found = [one for one in found if one.series == series]
    steps = _steps(sorted({one.step for one in found}), step)
    ranks = {name: rank for rank, name in enumerate(forward_order(run))}
    places = list(dict.fromkeys(one.place for one in sorted(found, key=lambda one: ranks.get(one.layer, UNPLACED))))
    grid = {(one.place, one.step): one for one in reversed(found)}  # of several calls the first
    figure = _drawn(run, [[grid.get((place, at)) for at in steps] for place in places[:MOST_PLACES]], known, sample)
    of_sample = "" if series.is_of_parameters else f", sample {sample}"
    more = f", {MOST_PLACES} of {len(places)} places" if len(places) > MOST_PLACES else ""
    figure.suptitle(plain(f"{series.label}{of_sample}{more}", 90), fontsize=10)
    return figure


def _known(run: Run | pd.DataFrame) -> list[Maps]:
    """All maps of one run."""
    if isinstance(run, Run):
        refuse_several([folder.name for folder in run.folders])
    else:
        check(run, "tensors")
        refuse_several(list(dict.fromkeys(run["run"])) if "run" in run else [])
    found = maps_in(run)
    if not found:
        raise InstrumentError(
            "no images, feature maps or filters were recorded: a record hook keeps them with tensors: true, samples: 1"
        )
    return found


def _at_layers(known: list[Maps], layers: Sequence[str] | None) -> list[Maps]:
    """Those of some layers or places, or all."""
    if layers is None:
        return known
    names = {one: (one.place, one.layer or ".") for one in known}
    for layer in layers:
        refuse_unless(layer, [name for both in names.values() for name in both], "layer", "no maps of it were recorded")
    return [one for one in known if not set(layers).isdisjoint(names[one])]


def _steps(there: list[int], step: int | Sequence[int] | None) -> list[int]:
    """The steps to show, of those that there are."""
    if step is None:
        return [there[i] for i in spread(len(there), MOST_STEPS)]
    wanted = [int(at) for at in ([step] if isinstance(step, int | np.integer) else step)]
    for at in wanted:
        refuse_unless(str(at), [str(one) for one in there], "step", "nothing was recorded then")
    return wanted


def _drawn(run: Run | pd.DataFrame, rows: list[list[Maps | None]], known: list[Maps], sample: int) -> Figure:
    """Images above, and a mosaic for each place and step."""
    values = [[None if one is None else _values(one, run, sample) for one in row] for row in rows]
    heights = [WIDTH * max(aspect_of(array) for array in row if array is not None) for row in values]
    heights = [min(TALLEST, max(SHORTEST, height)) for height in heights]
    images = [_image(column, known, sample) for column in zip(*rows, strict=True)]
    above = [IMAGE] if any(images) else []
    room = sum(above) + sum(heights) + 0.6 * (len(above) + len(heights)) + 0.4
    figure = new_figure((WIDTH + 0.9) * len(images), room)
    panels = figure.subplots(len(above) + len(rows), len(images), height_ratios=[*above, *heights], squeeze=False)
    for axes, image in zip(panels[0], images if above else [], strict=False):
        if image is None:
            axes.axis("off")
        else:
            draw_image(axes, image.values(run, sample), f"image, step {image.step:,}")
    for line, row, arrays in zip(panels[len(above) :], rows, values, strict=True):
        for axes, one, array in zip(line, row, arrays, strict=True):
            if one is None or array is None:
                axes.axis("off")
            elif one.is_image:
                draw_image(axes, array, f"{plain(one.place)}, step {one.step:,}")
            else:
                draw_maps(axes, array, f"{plain(one.place)}, step {one.step:,}", one.what)
    return figure


def _values(one: Maps, run: Run | pd.DataFrame, sample: int) -> np.ndarray:
    """The maps of a sample, as they were recorded."""
    try:
        return one.values(run, sample)
    except IndexError:
        message = (
            f"sample {sample} of {one.place} was not recorded at step {one.step}: there are {one.shape[0]}, from 0"
        )
        raise InstrumentError(message) from None


def _image(column: Sequence[Maps | None], known: list[Maps], sample: int) -> Maps | None:
    """The image that the maps of a column are of, if it was recorded for the sample."""
    image = next((image_of(one, known) for one in column if one is not None), None)
    has_it = image is not None and (len(image.shape) == 3 or sample < image.shape[0])
    return image if has_it and image not in column else None
