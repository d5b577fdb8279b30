"""Plot of recorded attention probabilities by head, with the tokens of the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import Batch, check_choice, forward_order, rank_in, select_series, short_names
from ..analysis.tensor_images import limits
from ..errors import InstrumentError, Problem
from ..formatting import shorten
from ..plot.axes_and_scales import BLANK, LETTER, colours, new_charts, plain, token_label, width_or
from ..plot.feature_maps import with_title
from ..plot.look import Look, current
from ..plot.plot_function import at_layers, check_source, plot
from .recorded_layers import AttentionMaps, AttentionTensor, attention_tensors, sample_ids, token_ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LAYERS, MAX_HEADS = 8, 64  # maximum numbers of rows of layers, and of heads in each of them
TOKEN, LABEL = 0.17, 0.13  # size of a token, and the smallest distance of two labels, in inches
AROUND, BETWEEN = 1.5, 0.2  # room for labels and the color bar, and between two maps, in inches
SMALLEST = 0.6  # minimum size of one of several maps, in inches
ONE, MANY, WIDEST = (3.0, 9.0), (1.2, 2.6), 20.0  # limits of the size of a map alone and of several; of a figure

Tokens = Sequence[str] | Sequence[int] | Callable[[int], str] | None


class MapRow(NamedTuple):
    """The maps of a sample at one location, and whether their values are probabilities over the keys."""

    tensor: AttentionTensor
    maps: AttentionMaps
    are_probabilities: bool


@plot(interval="draws a single run, so there are no means over seeds")
def attention(
    run: Run | pd.DataFrame,
    layer: str | Sequence[str] | None = None,
    *,
    head: int | Sequence[int] | None = None,
    sample: int | str | None = None,
    tokens: Tokens = None,
    step: int | None = None,
    hook: str | None = None,
    phase: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot the attention probabilities of one sample: a map for each head, with queries as rows and keys as columns.

    The maps are recorded tensors of shape [N, heads, queries, keys], or [N, queries, keys] for the mean of all heads: the
    output of a module, or the result of a function:

        probabilities: {layers: "blocks.*.attention", kind: function, functions: softmax, action: record, tensors: true}

    All maps of a figure have the same color scale.

    Args:
        run: A run, or rows of its `tensors()`. For a probe, pass `probe.run`. A DataFrame does not contain the selections of the
            hooks: pass the run if heads or positions were selected.
        layer: A layer, a location such as `blocks.0.attention[softmax.0]`, or a list of them. Default: all layers with
            attention probabilities, in forward order; the figure shows the first 8, and of a module that is called several times
            in a step, the first call. A location with a path is also drawn if its values are not probabilities, such as scores;
            a layer is not.
        head: A head, or a list of heads, numbered from 0 as in the model. Default: all; the figure shows the first 64.
        sample: The id of a sample, as in the table `samples`: its index in the dataset. Without ids, the index of the sample
            in the batch; for a DataFrame, that among the recorded samples of the batch. Default: the first recorded sample.
        tokens: The tokens of the sample as labels: strings or ids. Or a function that converts a recorded id to a string,
            such as `chr` or `tokenizer.convert_ids_to_tokens`. Default: the recorded ids, if the integer inputs of the model
            or of its embedding were recorded, and positions otherwise.
        step: The step. Default: the last one at which the sample was recorded.
        hook: Name of the hook that recorded the maps; required if several hooks did.
        phase: Phase of the hook, such as `eval`. Default: `train` if it was recorded.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No recorded tensor matches the arguments, or more than one series does; the head or the sample
            was not recorded; the number of tokens is not that of the keys.
    """
    tensors = _tensors(run, [layer] if isinstance(layer, str) else layer, hook, phase, step)
    batch, position, name = _find_sample(run, tensors, sample)
    tensors = [one for one in tensors if one.batch == batch and position in one.indices[0]]
    rank = rank_in(forward_order(run))
    first: dict[str, AttentionTensor] = {}
    for one in tensors:
        first.setdefault(one.location, one)  # the first of several calls wins
    shown = sorted(first.values(), key=lambda one: rank(one.layer))
    rows = [_row(run, one, position, head) for one in shown[:MAX_LAYERS]]
    _draw_figure(rows, [_labels(run, row, batch, position, tokens) for row in rows])
    more = f", {MAX_LAYERS} of {len(shown)} layers" if len(shown) > MAX_LAYERS else ""
    more += ", first call of each module" if len(first) < len(tensors) else ""
    where = f"{shown[0].location}: " if len(rows) == 1 else ""
    return with_title(plain(f"{where}{shown[0].series.label}, step {batch.step:,}, sample {name}{more}", 110))


def _tensors(
    run: Run | pd.DataFrame, layers: Sequence[str] | None, hook: str | None, phase: str | None, step: int | None
) -> list[AttentionTensor]:
    """Return the tensors of one series that hold attention maps."""
    check_source(run, "tensors")
    known = attention_tensors(run)
    if not known:
        fix = _HOW_TO_RECORD + ("" if isinstance(run, Run) else "; pass the run if the hook selects heads or positions")
        raise InstrumentError(Problem("layer", "no attention probabilities were recorded", fix=fix))
    selected = at_layers(known, layers, "no tensor with attention maps was recorded at this layer", _HOW_TO_RECORD)
    if step is not None:
        steps = [str(one.batch.step) for one in selected]
        check_choice(str(step), steps, "step", "no attention was recorded at this step")
        selected = [one for one in selected if one.batch.step == step]
    chosen = [one for one in selected if hook in (None, one.series.hook) and phase in (None, one.series.phase)]
    last = {(one.series, one.location): one for one in sorted(chosen, key=lambda one: one.batch.step)}
    are = {key for key, one in last.items() if not one.series.is_gradient and one.are_probabilities(one.read(run))}
    probable = [one for one in chosen if (one.series, one.location) in are]
    named = [one for one in chosen if hook is not None or (layers and one.location in layers and one.path)]
    if chosen and not probable and not named:
        shapes = {one.location: f"{one.location} {list(one.source_shape)}" for one in chosen}
        message = "these tensors are not attention probabilities: they are negative, or do not sum to 1 over the last dimension"
        fix = f"{_HOW_TO_RECORD}; or pass the name of a location with a path, or hook=, to draw any values"
        raise InstrumentError(Problem("layer", message, shorten([*shapes.values()]), fix=fix))
    tensors = (probable or named) if chosen else selected
    series = select_series(list(dict.fromkeys(one.series for one in tensors)), hook=hook, phase=phase)
    return [one for one in tensors if one.series == series]


_HOW_TO_RECORD = "record them at attention modules: {kind: function, functions: softmax, action: record, tensors: true}"


def _find_sample(
    run: Run | pd.DataFrame, tensors: Sequence[AttentionTensor], sample: int | str | None
) -> tuple[Batch, int, int | str]:
    """Return the batch of a sample, its position in the batch, and its name."""
    recorded: dict[Batch, set[int]] = {}
    for one in tensors:
        recorded.setdefault(one.batch, set()).update(one.indices[0])
    ids = sample_ids(run, recorded) if isinstance(run, Run) else {}
    known: dict[int | str, list[tuple[Batch, int]]] = {}
    for name, places in ids.items():
        if there := [(batch, position) for batch, position in places if position in recorded[batch]]:
            known[name] = there
    if not known:  # without ids, a sample is known by its position in the last step
        last = max(batch.step for batch in recorded)
        first = min(batch for batch in recorded if batch.step == last)
        known = {position: [(first, position)] for position in sorted(recorded[first])}
    if sample is None:
        last = max(places[-1][0].step for places in known.values())  # ids may be unknown in later steps
        return next((*places[-1], name) for name, places in known.items() if places[-1][0].step == last)
    if sample not in known:
        message = "the attention of this sample was not recorded"
        raise InstrumentError(Problem("sample", message, repr(sample), shorten([*map(str, known)])))
    return (*known[sample][-1], sample)


def _row(run: Run | pd.DataFrame, tensor: AttentionTensor, position: int, head: int | Sequence[int] | None) -> MapRow:
    values = tensor.read(run)
    maps = tensor.maps(values, position)
    if head is not None:
        wanted = [int(one) for one in ([head] if isinstance(head, int | np.integer) else head)]
        for one in wanted:
            if one not in maps.heads:
                message = f"{tensor.location} has no such recorded head: its shape is {list(tensor.source_shape)}"
                raise InstrumentError(Problem("head", message, one, ", ".join(map(str, maps.heads)) or "no heads"))
        maps = maps._replace(values=maps.values[[maps.heads.index(one) for one in wanted]], heads=wanted)
    return MapRow(tensor, maps, tensor.are_probabilities(values))


def _labels(
    run: Run | pd.DataFrame, row: MapRow, batch: Batch, position: int, tokens: Tokens
) -> tuple[list[str], list[str]]:
    """Return the labels of the queries and of the keys. Queries have those of the keys if their numbers are equal."""
    queries, keys = row.tensor.source_shape[-2:]
    ids: Sequence[Any] | None
    if tokens is None or callable(tokens):
        ids = token_ids(run, batch, position, keys)
        if callable(tokens) and ids is None:
            message = "a function requires the recorded token ids, and no integer input was recorded in this batch"
            fix = "pass the tokens of the sample, or record {layers: '.', kind: forward_pre, action: record, tensors: true}"
            raise InstrumentError(Problem("tokens", message, fix=fix))
        names = None if ids is None else [str(tokens(one) if callable(tokens) else one) for one in ids]
    else:
        names = [str(one) for one in np.asarray(tokens).tolist()]
        if len(names) != keys:
            message = f"the number of tokens is not that of the keys of {row.tensor.location}"
            raise InstrumentError(Problem("tokens", message, len(names), str(keys)))
    of_keys = [token_label(name) for name in names] if names else [str(at) for at in range(keys)]
    of_queries = of_keys if names and queries == keys else [str(at) for at in range(queries)]
    return [of_queries[at] for at in row.maps.queries], [of_keys[at] for at in row.maps.keys]


def _draw_figure(rows: Sequence[MapRow], labels: Sequence[tuple[list[str], list[str]]]) -> None:
    """Draw one row of maps for each location, or the maps of one location in a grid."""
    counts = [min(MAX_HEADS, len(row.maps.values)) for row in rows]
    most = max(1, int((width_or(WIDEST) - AROUND) / (SMALLEST + BETWEEN)))
    columns = min(most, _columns(counts[0]) if len(rows) == 1 else max(counts))
    cells = [
        [(i, number) for number in range(start, min(start + columns, count))]
        for i, count in enumerate(counts)
        for start in range(0, count, columns)
    ]
    longest = max(max(row.maps.values.shape[-2:]) for row in rows)
    low, high = ONE if len(cells) == columns == 1 else MANY
    side = min(float(np.clip(TOKEN * longest, low, high)), max(0.6, (WIDEST - 2.0) / columns))
    natural = columns * (side + BETWEEN) + AROUND
    side = min(side, (width_or(natural) - AROUND) / columns - BETWEEN)
    ratios = [min(1.0, max(0.25, np.divide(*rows[line[0][0]].maps.values.shape[-2:]))) for line in cells]
    height = sum(ratios) * side + 0.3 * len(cells) + 1.3
    panels = new_charts(natural, height, len(cells), columns, as_grid=True, height_ratios=ratios)
    values = np.concatenate([row.maps.values.ravel() for row in rows]).astype(np.float64)
    lowest, largest = limits(values)  # a linear scale: zeros, as in a causal mask, have no color on a logarithmic one
    of_scale = colours(values, limits=(min(0.0, lowest), largest))
    short = short_names([row.tensor.location for row in rows], int(1.5 * side / LETTER))
    for y, line in enumerate(panels):
        for x, axes in enumerate(line):
            if x >= len(cells[y]):
                axes.axis("off")
                continue
            i, number = cells[y][x]
            _draw_map(axes, rows[i], number, of_scale)
            is_last = y + 1 == len(cells) or x >= len(cells[y + 1])
            _label_tokens(axes, labels[i], side, is_left=x == 0, is_bottom=is_last)
        if len(rows) > 1 and cells[y][0][1] == 0:
            location = rows[cells[y][0][0]].tensor.location
            line[0].set_ylabel(plain(short[location], name=location))
    place = current().place
    assert place is not None
    place.supxlabel("key")
    place.supylabel("query")
    shrink = min(1.0, 2.5 / (sum(ratios) * side))
    bar = place.colorbar(panels[0, 0].images[0], ax=panels, shrink=shrink, aspect=25, pad=0.02)
    bar.set_label("attention probability" if all(row.are_probabilities for row in rows) else "value")


def _columns(count: int) -> int:
    """Return the number of columns of a grid of maps: about square, with few empty cells."""
    square = ceil(count**0.5)
    return min(range(square, min(count, 2 * square) + 1), key=lambda columns: (-count % columns, columns))


def _draw_map(axes: Axes, row: MapRow, number: int, of_scale: dict[str, Any]) -> None:
    """Draw the map of one head; values that are not finite are gray."""
    axes.set_facecolor(BLANK)
    axes.grid(False)
    heads = row.maps.heads
    if heads:
        more = f" (of {len(heads)})" if number + 1 == MAX_HEADS < len(heads) else ""
        axes.set_title(f"head {heads[number]}{more}")
    axes.imshow(np.ma.masked_invalid(row.maps.values[number]), **of_scale)


def _label_tokens(
    axes: Axes, labels: tuple[list[str], list[str]], side: float, *, is_left: bool, is_bottom: bool
) -> None:
    """Label queries at the left and keys at the bottom; if there is no room for all labels, every n-th is shown."""
    queries, keys = labels
    every = max(1, ceil(LABEL * max(len(queries), len(keys)) / side))
    ys = range(0, len(queries), every) if is_left else ()
    xs = range(0, len(keys), every) if is_bottom else ()
    axes.set_yticks(list(ys), [queries[i] for i in ys])
    is_wide = any(len(key) > 1 for key in keys)
    axes.set_xticks(list(xs), [keys[i] for i in xs], rotation=90 if is_wide else 0)
    axes.tick_params(length=2.0, pad=1.5)
