"""Mosaics of feature maps, and images, drawn into one chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..analysis.tensor_images import COLOURED, limits, mosaic, relative_to_channels, smaller
from .axes_and_scales import SMALL
from .style import MAGNITUDE, SIGNED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

MAX_CHANNELS = 256  # maximum number of channels that are shown
MAX_NUMBERS = 16  # maximum number of channel labels per axis
PIXELS = 2_048  # maximum width of a mosaic, in pixels


def cut(values: np.ndarray) -> np.ndarray:
    """Return the first maps of [C, H, W], or of [out, in, H, W] about as many outputs as inputs, that are shown."""
    if values.ndim == 3:
        return values[:MAX_CHANNELS]
    outputs = min(len(values), max(int(MAX_CHANNELS**0.5), MAX_CHANNELS // values.shape[1]))
    return values[:outputs, : max(1, MAX_CHANNELS // outputs)]


def draw_maps(axes: Axes, values: np.ndarray, title: str, what: str, bounds: tuple[float, float] | None = None) -> None:
    """Draw a mosaic with its color bar and channel numbers; the title says which maps are shown and which were omitted.

    Args:
        axes: The axes to draw into.
        values: [C, H, W] or [out, in, H, W].
        title: The location and the step.
        what: The name of the maps, such as `feature maps`.
        bounds: The limits of the color scale. None: each channel has its own scale, up to its largest magnitude.
    """
    tile = cut(values)
    columns = (mosaic(tile).shape[1] + 1) // (tile.shape[-1] + 1)
    small = smaller(tile, max(1, PIXELS // columns))
    shown = relative_to_channels(small) if bounds is None else small
    low, high = bounds or limits(shown)
    cmap = SIGNED if low < 0 else MAGNITUDE
    drawn = axes.imshow(mosaic(shown), cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
    _number(axes, small, columns)
    add_scale(axes, drawn, "of the channel's largest magnitude" if bounds is None else "")
    count, of = (" x ".join(map(str, shape[:-2])) for shape in (tile.shape, values.shape))
    noun = what.removesuffix("s") if of == "1" else what
    caption = (
        f"{count if count == of else f'the first {count} of {of}'} {noun}, {' x '.join(map(str, values.shape[-2:]))}"
    )
    bad = int(np.size(values) - np.isfinite(values).sum())
    caption += f", averaged to {' x '.join(map(str, small.shape[-2:]))}" if small.shape != tile.shape else ""
    caption += f", {bad:,} non-finite elements" if bad else ""
    axes.set_title(f"{title}\n{caption}", fontsize=SMALL)


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
    axes.tick_params(labelsize=SMALL - 1.5, length=0.0)
    axes.spines[:].set_visible(False)


def draw_image(axes: Axes, values: np.ndarray, title: str) -> None:
    """Draw an image [1, H, W] in gray with a color bar, or [3, H, W] in colors from its smallest to its largest value."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(title, fontsize=SMALL)
    if len(values) == COLOURED:
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        axes.imshow((values.transpose(1, 2, 0) - low) / ((high - low) or 1.0))
    else:
        add_scale(axes, axes.imshow(values[0], cmap="gray"))


def add_scale(axes: Axes, drawn: AxesImage, label: str = "") -> None:
    """Add a color bar at the right edge of an image."""
    room = axes.inset_axes((1.03, 0.0, 0.05, 1.0))
    bar = axes.figure.colorbar(drawn, cax=room, format="%.3g").ax
    bar.tick_params(labelsize=SMALL)
    bar.set_ylabel(label, fontsize=SMALL)
