"""Plots of class activation maps over the images of the samples, of the similarity of layers, and of the logit lens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd

from ..analysis.features import Array
from ..analysis.load import Run
from ..analysis.plot_data import check_choice, short_names
from ..analysis.tensor_images import COLOURED, limits, maps_in
from ..errors import InstrumentError, Problem
from ..formatting import shorten
from ..plot import axes_and_scales as draw
from ..plot.feature_maps import add_scale, draw_image, with_title
from ..plot.look import SIGNED, Look
from ..plot.plot_function import check_columns, plot
from .class_activation import ClassActivation
from .class_activation import class_activation_map as compute
from .recorded_layers import Recorded, positions_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn

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
    classifier: Tensor | Array | nn.Linear | str | None = None,
    classes: int | Sequence[int] | None = None,
    samples: int | str | Sequence[int | str] | None = None,
    hook: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    path: str | None = None,
    call: int | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot class activation maps over the images: one row per sample, with the image and a map per class.

    The maps are interpolated to the size of the image. The maps of a row share a color scale. `instrument.interpret`
    has the function of the same name, which returns the maps as arrays.

    Args:
        run: A run with recorded feature maps [N, C, H, W]. If the input of the model was recorded too, it is shown.
        layer, classifier, classes, hook, phase, step, path, call: See `instrument.interpret.class_activation_map`.
        samples: The id of a sample, or a list of ids. Default: the first 4.
        look: Width, labels and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: As for `instrument.interpret.class_activation_map`; a sample was not recorded.
    """
    where: dict[str, Any] = {"hook": hook, "phase": phase, "step": step, "path": path, "call": call}
    maps = compute(run, layer, classifier=classifier, classes=classes, **where)
    rows = _rows(maps, samples)
    images = _images(run, maps, Recorded(role="input", phase=phase, step=step))
    columns = maps.maps.shape[1] + (images is not None)
    width = (SIDE + BAR) * columns
    height = (min(SIDE, draw.width_or(width) / columns - BAR) + 0.5) * len(rows) + 0.4
    panels = draw.new_charts(width, height, len(rows), columns, as_grid=True)
    for row, line in zip(rows, panels, strict=True):
        label = f"sample {maps.ids[row]}" + ("" if maps.y is None else f", target {maps.y[row]}")
        image = None if images is None else images[row]
        if image is not None:
            draw_image(line[0], image, draw.plain(label))
        bounds = limits(maps.maps[row])
        for number, axes in enumerate(line[columns - maps.maps.shape[1] :]):
            title = "Grad-CAM" if maps.classes is None else f"class {maps.classes[row, number]}"
            _draw(axes, maps.maps[row, number], image, bounds, title if images is not None else f"{label}: {title}")
    score = (((run.info.get("config") or {}).get("forward") or {}).get("of") or "") if maps.classes is None else ""
    method = f"Grad-CAM of the score {score}".removesuffix(" of the score ") if maps.classes is None else "CAM"
    more = f", {len(rows)} of {len(maps.ids)} samples" if samples is None and len(rows) < len(maps.ids) else ""
    return with_title(draw.plain(f"{method}, {maps.layer}{more}", 90))


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
    smooth: dict[str, Any] = {"interpolation": "bilinear", "alpha": OPACITY}
    over = {"interpolation": "nearest"} if image is None else smooth
    drawn = axes.imshow(values, cmap=SIGNED if low < 0 else None, vmin=low, vmax=high, extent=extent, **over)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(draw.plain(title))
    add_scale(axes, drawn)


SQUARE, LARGEST = 0.38, 9.0  # width of a cell, and maximum width of the chart without labels, in inches


@plot(interval="draws a single run, so there are no means over seeds")
def layer_similarity(table: pd.DataFrame, **look: Unpack[Look]) -> Figure:
    """Plot the similarity of layers as a heat map, from 0 to 1.

    Args:
        table: The result of `instrument.interpret.layer_similarity`.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: `table` is not such a table.
    """
    check_columns(table, "layer similarity", ())
    rows, columns = ([str(name) for name in names] for names in (table.index, table.columns))
    values = table.to_numpy(np.float64)
    width = min(LARGEST, max(2.0, SQUARE * len(columns)))
    height = max(draw.height_of(len(rows)), min(LARGEST, SQUARE * len(rows)))
    charts = draw.new_charts(width + draw.width_of(rows) + 1.3, height + draw.width_of(columns) + 0.8)
    names, missing = short_names(columns, draw.LONGEST), "constant or not finite"
    labels, scale = [draw.plain(names[name], name=name) for name in columns], draw.colours(values, limits=(0.0, 1.0))
    draw.draw_cells(charts[0, 0], values, rows, labels, height=height, label="linear CKA", missing=missing, **scale)
    samples = table.attrs.get("samples")
    return draw.finished(charts, "similarity of layers" + (f", {samples:,} samples" if samples else ""))


CELL, ROW = 0.55, 0.26  # size of a cell, in inches
MAX_POSITIONS = 40
NARROWEST, WIDEST = 0.4, 24.0  # minimum width of a cell; width without the argument, in inches


@plot(interval="draws a single run, so there are no means over seeds")
def logit_lens(
    table: pd.DataFrame,
    *,
    sample: int | str | None = None,
    tokens: Sequence[str] | Callable[[int], str] | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot the most probable token of each layer and position for one sample, with its probability as color.

    The labels of the columns are the positions and the targets. Cells whose most probable token is the target have a frame.
    The figure shows the first 40 positions, fewer if `width` is small; pass some rows of the table for others.

    Args:
        table: The result of `instrument.interpret.logit_lens`, or some of its rows.
        sample: The id of the sample. Default: the first one.
        tokens: The text of each token: a list by token id, or a function such as `chr` or `tokenizer.convert_ids_to_tokens`.
            Default: the ids.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The table has no rows of the sample or lacks a column.
    """
    from matplotlib.patches import Rectangle

    check_columns(table, "logit lens", ("layer", "sample", "position", "top_tokens", "top_log_probs", "target"))
    name = table["sample"].iloc[0] if sample is None else sample
    check_choice(str(name), [str(each) for each in table["sample"].unique()], "sample", "the table has no such sample")
    rows = table[table["sample"].astype(str) == str(name)]
    if rows.duplicated(["layer", "position"]).any():
        raise InstrumentError("the table has several rows of a layer and position")
    layers = list(dict.fromkeys(rows["layer"]))
    positions = sorted(rows["position"].unique())
    room = draw.width_or(WIDEST) - min(draw.width_of(layers), 0.38 * draw.width_or(WIDEST)) - 0.9
    shown = positions[: min(MAX_POSITIONS, max(1, int(room / NARROWEST)))]

    def text(token: int) -> str:
        if tokens is None:
            return str(token)
        if not callable(tokens) and token >= len(tokens):
            message = f"must have the text of each token id of the vocabulary, such as {token}"
            raise InstrumentError(
                Problem("tokens", message, f"{len(tokens)} texts", fix="or pass a function of the id")
            )
        return draw.token_label(tokens(token) if callable(tokens) else str(tokens[token]))

    probabilities = np.full((len(layers), len(shown)), np.nan)
    charts = draw.new_charts(CELL * len(shown) + draw.width_of(layers) + 1.5, max(1.2, ROW * len(layers)) + 1.5)
    axes = charts[0, 0]
    axes.grid(False)
    labels = {position: str(position) for position in shown}
    texts = []
    for row in rows[rows["position"].isin(shown)].to_dict("records"):
        y, x = layers.index(row["layer"]), shown.index(row["position"])
        probabilities[y, x] = np.exp(row["top_log_probs"][0])
        is_target = not pd.isna(row["target"]) and row["target"] == row["top_tokens"][0]
        texts.append((y, x, text(row["top_tokens"][0]), is_target))
        if not pd.isna(row["target"]):
            labels[row["position"]] = f"{row['position']}: {text(int(row['target']))}"
    cells = axes.pcolormesh(np.ma.masked_invalid(probabilities), **draw.colours(probabilities, limits=(0.0, 1.0)))
    for y, x, token, is_target in texts:
        draw.write_cell(axes, x, y, token, draw.shade_on(cells, probabilities[y, x]), "token")
        if is_target:
            frame: dict[str, Any] = {"fill": False, "edgecolor": draw.colour_of(5), "linewidth": 1.5}
            axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, **frame))
    draw.label_locations(axes, layers, middle=0.5)
    draw.label_columns(axes, list(labels.values()))
    axes.set_xlabel("position: target" if rows["target"].notna().any() else "position")
    draw.colour_bar(axes, cells, "probability", ROW * len(layers))
    more = f", {len(shown)} of {len(positions)} positions" if len(shown) < len(positions) else ""
    note = "\nframed: the target" if any(is_target for *_, is_target in texts) else ""
    axes.set_title(draw.plain(f"logit lens, sample {name}{more}", 80) + note)
    return draw.finished(charts)
