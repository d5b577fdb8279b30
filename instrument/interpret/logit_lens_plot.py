"""Plot of the logit lens: the most probable token at each layer and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.plot_data import check_choice
from ..errors import InstrumentError
from ..plot.axes_and_scales import (
    colour_bar,
    colour_of,
    colours,
    figure_of,
    label_columns,
    label_locations,
    new_charts,
    plain,
    shade_on,
    token_label,
    width_of,
    width_or,
    write_cell,
)
from ..plot.look import Look
from ..plot.plot_function import plot
from ..plot.source import check_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

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
    check_columns(table, "logit lens", ("layer", "sample", "position", "top_tokens", "top_log_probs", "target"))
    name = table["sample"].iloc[0] if sample is None else sample
    check_choice(str(name), [str(each) for each in table["sample"].unique()], "sample", "the table has no such sample")
    rows = table[table["sample"].astype(str) == str(name)]
    if rows.duplicated(["layer", "position"]).any():
        raise InstrumentError("the table has several rows of a layer and position")
    layers = list(dict.fromkeys(rows["layer"]))
    positions = sorted(rows["position"].unique())
    room = width_or(WIDEST) - min(width_of(layers), 0.38 * width_or(WIDEST)) - 0.9
    shown = positions[: min(MAX_POSITIONS, max(1, int(room / NARROWEST)))]

    def text(token: int) -> str:
        return str(token) if tokens is None else token_label(tokens(token) if callable(tokens) else str(tokens[token]))

    probabilities = np.full((len(layers), len(shown)), np.nan)
    charts = new_charts(CELL * len(shown) + width_of(layers) + 1.5, max(1.2, ROW * len(layers)) + 1.5)
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
    cells = axes.pcolormesh(np.ma.masked_invalid(probabilities), **colours(probabilities, limits=(0.0, 1.0)))
    for y, x, token, is_target in texts:
        write_cell(axes, x, y, token, shade_on(cells, probabilities[y, x]), "token")
        if is_target:
            axes.add_patch(_frame(x, y))
    label_locations(axes, layers, middle=0.5)
    label_columns(axes, list(labels.values()))
    axes.set_xlabel("position: target" if rows["target"].notna().any() else "position")
    colour_bar(axes, cells, "probability", ROW * len(layers))
    more = f", {len(shown)} of {len(positions)} positions" if len(shown) < len(positions) else ""
    note = "\nframed: the target" if any(is_target for *_, is_target in texts) else ""
    axes.set_title(plain(f"logit lens, sample {name}{more}", 80) + note)
    return figure_of(charts)


def _frame(x: int, y: int) -> Rectangle:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, fill=False, edgecolor=colour_of(5), linewidth=1.5)
