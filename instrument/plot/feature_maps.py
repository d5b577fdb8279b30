"""Plot of recorded feature maps, gradient maps and filters by channel, with the input image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack, get_args

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import check_choice, evenly_spaced, forward_order, rank_in, select_series
from ..analysis.tensor_images import TensorMaps, image_of, limits, maps_in, mosaic, relative_to_channels, smaller
from ..errors import InstrumentError
from .axes_and_scales import new_charts, plain, width_or
from .look import SIGNED, CommonLook, current
from .plot_function import at_layers, check_source, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_PLACES, MAX_STEPS = 8, 5
WIDTH, SHORTEST, TALLEST, IMAGE = 3.4, 0.8, 5.0, 1.3  # inches: mosaic, its height limits, image
LEAST, WIDEST = 1.6, 8.0  # minimum width of a column, and width without the argument, in inches
MAX_CHANNELS = 256  # maximum number of channels that are shown
MAX_NUMBERS = 16  # maximum number of channel labels per axis
PIXELS = 2_048  # maximum width of a mosaic, in pixels
Scale = Literal["step", "shared", "channel"]


@plot(interval="draws a single run, so there are no means over seeds")
def feature_maps(
    run: Run | pd.DataFrame,
    layer: str | Sequence[str] | None = None,
    *,
    step: int | Sequence[int] | None = None,
    hook: str | None = None,
    role: str | None = None,
    sample: int = 0,
    scale: Scale = "step",
    **look: Unpack[CommonLook],
) -> Figure:
    """Plot the channels of one sample: one row per layer in forward order, one column per step.

    If the input image was recorded, it is shown above the maps. The number of a channel is the sum of the labels of its
    row and its column. Color scales are symmetric around zero if there are negative values.

    Args:
        run: A run, or rows of its `tensors()`.
        layer: A layer, a parameter, or a list of them. Default: the first 8.
        step: A step, or a list of steps. Default: up to 5 evenly spaced steps, fewer if `width` is small.
        hook: Name of the hook that recorded the maps; required if several hooks did. Without `hook` and `role`, feature
            maps are preferred to gradient maps and filters.
        role: Role of the tensor, such as `output`.
        sample: Index of the recorded sample, starting at 0.
        scale: The maps that share a color scale. `step`: those of a layer and a step. `shared`: those of a layer at all
            shown steps, so that colors can be compared between steps. `channel`: none; each map is divided by its largest
            magnitude, so that weak channels are visible too.
        look: Width, labels and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No data matches the arguments or more than one series matches them.
    """
    check_choice(scale, list(get_args(Scale)), "scale", "unknown color scale")
    check_source(run, "tensors")
    if not (all_maps := maps_in(run)):
        fix = "set 'tensors: true' and 'samples: 1' in a record hook"
        raise InstrumentError(f"no images, feature maps or filters were recorded: {fix}")
    selected = at_layers(all_maps, layer, "no maps of this layer were recorded")
    if hook is None and role is None:
        features = [one for one in selected if one.what == "feature maps"]
        selected = features or [one for one in selected if not one.is_image] or selected
    series = select_series(list(dict.fromkeys(one.series for one in selected)), hook=hook, role=role)
    selected = [one for one in selected if one.series == series]
    steps = _steps(sorted({one.batch.step for one in selected}), step)
    rank = rank_in(forward_order(run))
    locations = list(dict.fromkeys(one.location for one in sorted(selected, key=lambda one: rank(one.layer))))
    grid = {(one.location, one.batch.step): one for one in reversed(selected)}  # the first of several calls wins
    rows = [[grid.get((location, at)) for at in steps] for location in locations[:MAX_PLACES]]
    _draw_figure(run, rows, all_maps, sample, scale)
    of_sample = "" if series.is_of_parameters else f", sample {sample}"
    more = f", {MAX_PLACES} of {len(locations)} locations" if len(locations) > MAX_PLACES else ""
    return with_title(plain(f"{series.label}{of_sample}{more}", 90))


def _steps(there: list[int], step: int | Sequence[int] | None) -> list[int]:
    if step is None:
        return [there[i] for i in evenly_spaced(len(there), min(MAX_STEPS, max(1, int(width_or(WIDEST) / LEAST))))]
    wanted = [int(at) for at in ([step] if isinstance(step, int | np.integer) else step)]
    for at in wanted:
        check_choice(str(at), [str(one) for one in there], "step", "no maps were recorded at this step")
    return wanted


def _draw_figure(
    run: Run | pd.DataFrame, rows: list[list[TensorMaps | None]], all_maps: list[TensorMaps], sample: int, scale: Scale
) -> None:
    """Draw the images at the top, and a mosaic for each location and step below."""
    values = [[None if one is None else _values(one, run, sample) for one in row] for row in rows]
    shapes = [[mosaic(cut(array)).shape for array in row if array is not None] for row in values]
    aspects = [max(height / width for height, width in of_row) for of_row in shapes]
    column = width_or((WIDTH + 0.9) * len(rows[0])) / len(rows[0]) - 0.9
    heights = [min(TALLEST, max(SHORTEST, column * aspect)) for aspect in aspects]
    images = []
    for column_maps in zip(*rows, strict=True):
        image = next((image_of(one, all_maps, sample) for one in column_maps if one is not None), None)
        images.append(None if image is None or image[0] in column_maps else image)
    above = [IMAGE] if any(images) else []
    room = sum(above) + sum(heights) + 0.6 * (len(above) + len(heights)) + 0.4
    size = len(above) + len(rows), len(images)
    panels = new_charts((WIDTH + 0.9) * len(images), room, *size, as_grid=True, height_ratios=[*above, *heights])
    for axes, image in zip(panels[0], images if above else [], strict=False):
        if image is None:
            axes.axis("off")
        else:
            draw_image(axes, image[0].values(run, image[1]), f"image, step {image[0].batch.step:,}")
    for line, row, arrays in zip(panels[len(above) :], rows, values, strict=True):
        ends = [limits(array) for array in arrays if array is not None]
        high = max(high for _, high in ends)
        shared = (-high if min(low for low, _ in ends) < 0 else 0.0), high
        for axes, one, array in zip(line, row, arrays, strict=True):
            if one is None or array is None:
                axes.axis("off")
                continue
            title = f"{plain(one.location)}, step {one.batch.step:,}"
            if one.is_image:
                draw_image(axes, array, title)
            else:
                bounds = {"step": limits(array), "shared": shared, "channel": None}[scale]
                draw_maps(axes, array, title, one.what, bounds)


def with_title(text: str) -> Figure:
    """Set the title of all charts of the plot in progress, and return its figure."""
    place = current().place
    assert place is not None
    place.suptitle(text)
    return place.get_figure(root=True)


def _values(one: TensorMaps, run: Run | pd.DataFrame, sample: int) -> np.ndarray:
    try:
        return one.values(run, sample)
    except IndexError:
        message = f"sample: {one.location} has {one.shape[0]} samples at step {one.batch.step}, numbered from 0; given {sample}"
        raise InstrumentError(message) from None


def cut(values: np.ndarray) -> np.ndarray:
    """Return the first maps of [C, H, W], or of [out, in, H, W] about as many outputs as inputs, that are shown."""
    if values.ndim == 3:
        return values[:MAX_CHANNELS]
    outputs = min(len(values), max(int(MAX_CHANNELS**0.5), MAX_CHANNELS // values.shape[1]))
    return values[:outputs, : max(1, MAX_CHANNELS // outputs)]


def draw_maps(axes: Axes, values: np.ndarray, title: str, what: str, bounds: tuple[float, float] | None = None) -> None:
    """Draw a mosaic with its color bar and channel numbers; the title says which maps are shown and which were omitted.

    `values`: [C, H, W] or [out, in, H, W]. `what`: the name of the maps, such as `feature maps`. `bounds`: the limits of the color scale;
    None: each channel has its own scale, up to its largest magnitude.
    """
    tile = cut(values)
    columns = (mosaic(tile).shape[1] + 1) // (tile.shape[-1] + 1)
    small = smaller(tile, max(1, PIXELS // columns))
    shown = relative_to_channels(small) if bounds is None else small
    low, high = bounds or limits(shown)
    drawn = axes.imshow(mosaic(shown), cmap=SIGNED if low < 0 else None, vmin=low, vmax=high, interpolation="nearest")
    _number(axes, small, columns)
    add_scale(axes, drawn, "of the channel's largest magnitude" if bounds is None else "")
    count, of = (" x ".join(map(str, shape[:-2])) for shape in (tile.shape, values.shape))
    noun = what.removesuffix("s") if of == "1" else what
    shown_count = count if count == of else f"the first {count} of {of}"
    caption = f"{shown_count} {noun}, {' x '.join(map(str, values.shape[-2:]))}"
    bad = int(np.size(values) - np.isfinite(values).sum())
    caption += f", averaged to {' x '.join(map(str, small.shape[-2:]))}" if small.shape != tile.shape else ""
    caption += f", {bad:,} non-finite elements" if bad else ""
    axes.set_title(f"{title}\n{caption}")


def _number(axes: Axes, small: np.ndarray, columns: int) -> None:
    """Label rows with the number of their first channel, and columns with the number to add; of filters, the outputs."""
    height, width = small.shape[-2:]
    inputs = small.shape[1] if small.ndim == 4 else 1
    rows = -(-int(np.prod(small.shape[:-2])) // columns)
    lines = range(0, rows, -(-rows // MAX_NUMBERS))
    across = range(0, columns, inputs * -(-columns // (inputs * MAX_NUMBERS)))
    middles = [row * (height + 1) + (height - 1) / 2 for row in lines]
    axes.set_yticks(middles, [str(row * columns // inputs) for row in lines])
    axes.set_xticks([])
    if columns > inputs:
        middles = [at * (width + 1) + (inputs * (width + 1) - 2) / 2 for at in across]
        axes.set_xticks(middles, [f"+{at // inputs}" for at in across])
    axes.tick_params(length=0.0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def draw_image(axes: Axes, values: np.ndarray, title: str) -> None:
    """Draw an image [1, H, W] in gray with a color bar, or [3, H, W] in colors from its smallest to its largest value."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title)
    if len(values) == 3:
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        axes.imshow((values.transpose(1, 2, 0) - low) / ((high - low) or 1.0))
    else:
        add_scale(axes, axes.imshow(values[0], cmap="gray"))


def add_scale(axes: Axes, drawn: AxesImage, label: str = "") -> None:
    """Add a color bar at the right edge of an image."""
    bar = axes.figure.colorbar(drawn, cax=axes.inset_axes((1.03, 0.0, 0.05, 1.0)), format="%.3g").ax
    bar.set_ylabel(label)
