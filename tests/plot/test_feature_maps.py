"""Feature maps: values, color scales, channel numbers, images, notes on omissions, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from figures import make_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import instrument
from instrument import InstrumentError
from instrument.analysis.tensor_images import mosaic, relative_to_channels
from instrument.plot import feature_maps
from instrument.plot.feature_maps import cut


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("feature_maps") / "run")


def charts_of(figure: Figure) -> dict[str, Axes]:
    """Return the charts by title, without color bars."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def pixels_of(axes: Axes) -> np.ndarray:
    (image,) = axes.images
    return np.ma.filled(image.get_array(), np.nan)


def tensor_table(values: np.ndarray, **columns: Any) -> pd.DataFrame:
    """Return a table with one tensor, in the format of `run.tensors()`."""
    zeros = dict.fromkeys(("step", "micro_step", "rank", "call", "backward"), 0)
    moment = {**zeros, "dtype": "float32", "recompute": False, "phase": "train"}
    seen = {"hook": "h", "kind": "forward", "role": "output", "layer": "a", "path": ""}
    row = {**moment, **seen, "values": values, "shape": values.shape, "source_shape": (1,) * 4, **columns}
    return pd.DataFrame([row])


def test_pixels_equal_the_recorded_tensors(run: instrument.Run) -> None:
    figure = feature_maps(run, hook="maps", step=3, sample=1)
    image, maps = charts_of(figure).values()
    frame = run.tensors(step=3)
    np.testing.assert_array_equal(pixels_of(maps), mosaic(frame[frame.hook == "maps"]["values"].iloc[0][1]))
    np.testing.assert_array_equal(pixels_of(image), frame[frame.hook == "image"]["values"].iloc[0][1, 0])
    assert list(charts_of(figure)) == ["image, step 3", "0, step 3\n4 feature maps, 6 x 6"]
    assert figure.get_suptitle() == "maps: forward output, sample 1"


@pytest.mark.slow
def test_frame_gives_the_same_figure(run: instrument.Run) -> None:
    one, two = charts_of(feature_maps(run, hook="maps")), charts_of(feature_maps(run.tensors(), hook="maps"))
    assert list(one) == list(two)
    assert [title.partition("\n")[0] for title in one][4:] == [f"0, step {step}" for step in range(4)]
    for title in one:
        np.testing.assert_array_equal(pixels_of(one[title]), pixels_of(two[title]))


@pytest.mark.slow
def test_filters_have_a_centered_color_scale_and_no_image(run: instrument.Run) -> None:
    (axes,) = charts_of(feature_maps(run, "0.weight", step=0)).values()
    filters = run.tensors(hook="filters", step=0)["values"].iloc[0]
    np.testing.assert_array_equal(pixels_of(axes), mosaic(filters))
    assert axes.get_title() == "0.weight, step 0\n4 x 1 filters, 3 x 3"
    largest = np.abs(filters).max()
    assert axes.images[0].get_clim() == (-largest, largest)
    assert axes.images[0].get_cmap().name == "RdBu_r"
    (scale,) = axes.child_axes
    assert len([label for label in scale.get_yticklabels() if label.get_text()]) >= 3


@pytest.mark.slow
def test_channel_number_is_the_sum_of_row_and_column_labels() -> None:
    values = np.ones((1, 10, 4, 4)) * np.arange(10.0)[None, :, None, None]
    (axes,) = charts_of(feature_maps(tensor_table(values))).values()
    for y, row in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        for x, column in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            channel = int(row.get_text()) + int(column.get_text())
            found = pixels_of(axes)[int(y), int(x)]
            assert found == channel or (channel >= 10 and np.isnan(found))


def test_filter_number_is_the_sum_of_row_and_column_labels() -> None:
    values = np.ones((9, 2, 3, 3)) * np.arange(9.0)[:, None, None, None]
    frame = tensor_table(values, kind="step_post", role="param", path="weight")
    (axes,) = charts_of(feature_maps(frame)).values()
    numbers = [int(row.get_text()) for row in axes.get_yticklabels()]
    for y, first in zip(axes.get_yticks(), numbers, strict=True):
        for x, more in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            value = pixels_of(axes)[int(y), int(x) + 2]
            assert value == first + int(more.get_text()) or np.isnan(value)


@pytest.mark.slow
def test_rows_are_layers_and_columns_are_steps(run: instrument.Run) -> None:
    late = [tensor_table(np.ones((1, 2, 4, 4)), layer=layer, step=step) for step in (0, 7) for layer in ("b", "a")]
    figure = feature_maps(pd.concat([*late[:2], late[3]]))
    assert [title.partition("\n")[0] for title in charts_of(figure)] == ["b, step 0", "a, step 0", "a, step 7"]
    figure.draw_without_rendering()
    boxes = {title.partition("\n")[0]: axes.get_position() for title, axes in charts_of(figure).items()}
    assert boxes["b, step 0"].y0 > boxes["a, step 0"].y1
    assert boxes["a, step 0"].x1 < boxes["a, step 7"].x0


@pytest.mark.slow
def test_omissions_are_noted() -> None:
    many = feature_maps(tensor_table(np.ones((1, 300, 2, 2))))
    assert "the first 256 of 300 feature maps" in next(iter(charts_of(many)))
    large = feature_maps(tensor_table(np.ones((1, 1, 4096, 2))))
    assert "averaged to 2048 x 1" in next(iter(charts_of(large)))
    bad = feature_maps(tensor_table(np.array([[[[1.0, np.nan], [np.inf, 2.0]]]])))
    assert next(iter(charts_of(bad))) == "a, step 0\n1 feature map, 2 x 2, 2 non-finite elements"
    locations = feature_maps(pd.concat([tensor_table(np.ones((1, 1, 2, 2)), layer=f"l{i}") for i in range(11)]))
    assert len(charts_of(locations)) == 8
    assert "8 of 11 locations" in locations.get_suptitle()


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ((300, 5, 5), (256, 5, 5)),
        ((64, 3, 7, 7), (64, 3, 7, 7)),
        ((32, 16, 3, 3), (16, 16, 3, 3)),
        ((512, 512, 3, 3), (16, 16, 3, 3)),
        ((8, 512, 3, 3), (8, 32, 3, 3)),
    ],
)
def test_number_of_maps_is_limited(shape: tuple[int, ...], kept: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(cut(values), values[tuple(slice(size) for size in kept)])
    assert cut(values).shape == kept


@pytest.mark.slow
def test_color_scale_of_a_step_of_all_steps_and_of_each_channel() -> None:
    weak, strong = np.array([[[[0.0, 1.0]], [[0.0, 0.5]]]]), np.array([[[[-4.0, 2.0]], [[1.0, 3.0]]]])
    frame = pd.concat([tensor_table(weak), tensor_table(strong, step=7)])

    def limits_of(**arguments: Any) -> list[tuple[float, float]]:
        return [axes.images[0].get_clim() for axes in charts_of(feature_maps(frame, **arguments)).values()]

    assert limits_of() == limits_of(scale="step") == [(0.0, 1.0), (-4.0, 4.0)]
    assert limits_of(scale="shared") == [(-4.0, 4.0), (-4.0, 4.0)]
    assert limits_of(scale="channel") == [(0.0, 1.0), (-1.0, 1.0)]
    first, last = charts_of(feature_maps(frame, scale="channel")).values()
    np.testing.assert_array_equal(pixels_of(first), mosaic(np.array([[[0.0, 1.0]], [[0.0, 1.0]]])))
    np.testing.assert_array_equal(pixels_of(last), mosaic(np.array([[[-1.0, 0.5]], [[1.0 / 3.0, 1.0]]])))
    assert first.child_axes[0].get_ylabel() == "of the channel's largest magnitude"
    message = r"(?s)scale: unknown color scale.*'chanel'.*step, shared, channel.*similar"
    with pytest.raises(InstrumentError, match=message):
        feature_maps(frame, scale="chanel")


def test_channels_without_finite_values_keep_their_values() -> None:
    values = np.array([[[0.0, 0.0]], [[np.nan, np.inf]], [[np.nan, -2.0]]])
    np.testing.assert_array_equal(
        relative_to_channels(values), np.array([[[0.0, 0.0]], [[np.nan, np.inf]], [[np.nan, -1.0]]])
    )


def test_color_image_is_scaled_to_its_value_range() -> None:
    image = np.linspace(-2.0, 6.0, 12).reshape(1, 3, 2, 2)
    pair = [tensor_table(image, role="input", kind="forward_pre", path="0"), tensor_table(np.ones((1, 4, 2, 2)))]
    axes, _ = charts_of(feature_maps(pd.concat(pair))).values()
    np.testing.assert_allclose(pixels_of(axes), np.linspace(0.0, 1.0, 12).reshape(3, 2, 2).transpose(1, 2, 0))
    alone = charts_of(feature_maps(pd.concat(pair), role="input"))
    assert list(alone) == ["a[0], step 0"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda run: feature_maps(run, hook="grads"),
            "hook.*no data with this value was recorded.*'grads'.*maps.*filters",
        ),
        (lambda run: feature_maps(run, "encoder"), r"layer: no maps of this layer.*'encoder'.*0\.weight"),
        (
            lambda run: feature_maps(run, hook="maps", step=9),
            "step: no maps were recorded at this step.*'9'.*0, 1, 2, 3",
        ),
        (
            lambda run: feature_maps(run, hook="maps", sample=5),
            "sample: 0 has 2 samples at step 0, numbered from 0; given 5",
        ),
        (
            lambda run: feature_maps(tensor_table(np.ones((3, 4)), source_shape=(3, 4))),
            "no images, feature maps or filters were recorded",
        ),
        (lambda run: feature_maps(run.tensors().iloc[:0]), "the tensors table has no rows"),
    ],
)
def test_missing_maps_are_an_error_with_options(run: instrument.Run, draw: Any, message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        draw(run)
