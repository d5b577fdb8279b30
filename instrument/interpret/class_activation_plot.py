"""Plot of class activation maps over the images of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from ..analysis.features import Array
from ..analysis.load import Run
from ..analysis.tensor_images import COLOURED, limits, maps_in
from ..errors import InstrumentError, Problem
from ..formatting import shorten
from ..plot.axes_and_scales import new_charts, plain, width_or
from ..plot.feature_maps import add_scale, draw_image, with_title
from ..plot.look import SIGNED, Look
from ..plot.plot_function import plot
from .class_activation import ClassActivation
from .class_activation import class_activation_map as compute
from .recorded_layers import Recorded, positions_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

MAX_SAMPLES = 4
SIDE, BAR = 1.9, 0.6  # size of a picture and width of its color bar, in inches
OPACITY = 0.6


@plot(
    interval="draws a single run, so there are no means over seeds",
    scale="draws maps with negative values on a linear scale around zero",
)
def class_activation_map(
    run: Run,
    layer: str | None = None,
    *,
    classifier: Tensor | Array | str | None = None,
    classes: int | Sequence[int] | None = None,
    samples: int | str | Sequence[int | str] | None = None,
    hook: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    path: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot class activation maps over the images: one row per sample, with the image and a map per class.

    The maps are interpolated to the size of the image. The maps of a row share a color scale. `instrument.analysis`
    has the function of the same name, which returns the maps as arrays.

    Args:
        run: A run with recorded feature maps [N, C, H, W]. If the input of the model was recorded too, it is shown.
        layer, classifier, classes, hook, phase, step, path: See `instrument.interpret.class_activation_map`.
        samples: The id of a sample, or a list of ids. Default: the first 4.
        look: Width, labels and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: As for `instrument.interpret.class_activation_map`; a sample was not recorded.
    """
    maps = compute(run, layer, classifier=classifier, classes=classes, hook=hook, phase=phase, step=step, path=path)
    rows = _rows(maps, samples)
    images = _images(run, maps, Recorded(None, "input", phase, step))
    columns = maps.maps.shape[1] + (images is not None)
    width = (SIDE + BAR) * columns
    height = (min(SIDE, width_or(width) / columns - BAR) + 0.5) * len(rows) + 0.4
    panels = new_charts(width, height, len(rows), columns, as_grid=True)
    for row, line in zip(rows, panels, strict=True):
        label = f"sample {maps.ids[row]}" + ("" if maps.y is None else f", target {maps.y[row]}")
        image = None if images is None else images[row]
        if image is not None:
            draw_image(line[0], image, plain(label))
        bounds = limits(maps.maps[row])
        for number, axes in enumerate(line[columns - maps.maps.shape[1] :]):
            title = "Grad-CAM" if maps.classes is None else f"class {maps.classes[row, number]}"
            _draw(axes, maps.maps[row, number], image, bounds, title if images is not None else f"{label}: {title}")
    score = (((run.info.get("config") or {}).get("forward") or {}).get("of") or "") if maps.classes is None else ""
    method = f"Grad-CAM of the score {score}".removesuffix(" of the score ") if maps.classes is None else "CAM"
    more = f", {len(rows)} of {len(maps.ids)} samples" if samples is None and len(rows) < len(maps.ids) else ""
    return with_title(plain(f"{method}, {maps.layer}{more}", 90))


def _rows(maps: ClassActivation, samples: int | str | Sequence[int | str] | None) -> list[int]:
    if samples is None:
        return list(range(min(MAX_SAMPLES, len(maps.ids))))
    wanted = [samples] if isinstance(samples, int | np.integer | str) else list(samples)
    at = positions_of(maps.ids, np.array(wanted, maps.ids.dtype))
    if (at < 0).any():
        given = wanted[int(np.argmax(at < 0))]
        raise InstrumentError(Problem("samples", "the sample was not recorded", given, shorten([*map(str, maps.ids)])))
    return [int(each) for each in at]


def _images(run: Run, maps: ClassActivation, recorded: Recorded) -> Array | None:
    """Return the images of the samples [N, 1 or 3, H, W]; None if they were not recorded."""
    layer = next((one.layer for one in maps_in(run) if one.is_image), None)
    if layer is None:
        return None
    try:
        inputs = recorded.read(run, layer or ".")
    except InstrumentError:  # for example several steps
        return None
    at = positions_of(inputs.ids, maps.ids)
    return inputs.X[at] if (at >= 0).all() else None


def _draw(axes: Axes, values: Array, image: Array | None, bounds: tuple[float, float], title: str) -> None:
    """Draw a map [H, W] over an image [1 or 3, H, W]."""
    height, width = values.shape if image is None else image.shape[1:]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    if image is not None:
        gray = image.mean(0) if len(image) == COLOURED else image[0]
        dark, bright = float(np.nanmin(gray)), float(np.nanmax(gray))
        axes.imshow(gray, cmap="gray", vmin=2 * dark - bright, vmax=bright)  # middle gray to white, to keep the colors
    low, high = bounds
    over: dict[str, Any] = (
        {"interpolation": "nearest"} if image is None else {"interpolation": "bilinear", "alpha": OPACITY}
    )
    drawn = axes.imshow(values, cmap=SIGNED if low < 0 else None, vmin=low, vmax=high, extent=extent, **over)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(plain(title))
    add_scale(axes, drawn)
