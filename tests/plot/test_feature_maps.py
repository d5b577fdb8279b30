"""Maps as they were recorded, with their scale, numbers of channels, the image above; what was left out is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from drawn import make_run
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import instrument
from instrument import InstrumentError
from instrument.analysis.images import mosaic
from instrument.plot import feature_maps
from instrument.plot.mosaics import cut


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("feature_maps") / "run")


def charts(figure: Figure) -> dict[str, Axes]:
    """The charts with something in them, by their titles, without the scales."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def shown(axes: Axes) -> np.ndarray:
    (image,) = axes.images
    return np.ma.filled(image.get_array(), np.nan)


def tensors(values: np.ndarray, **columns: Any) -> pd.DataFrame:
    """One recorded tensor, as `run.tensors()` gives it."""
    moment = {"micro_step": 0, "call": 0, "backward": 0, "recompute": False, "phase": "train", "step": 0}
    seen = {"hook": "h", "kind": "forward", "role": "output", "layer": "a", "path": ""}
    row = {**moment, **seen, "values": values, "shape": values.shape, "source_shape": (1,) * 4, **columns}
    return pd.DataFrame([row])


def test_the_pixels_are_the_recorded_numbers(run: instrument.Run) -> None:
    figure = feature_maps(run, hook="maps", step=3, sample=1)
    image, maps = charts(figure).values()
    frame = run.tensors(step=3)
    np.testing.assert_array_equal(shown(maps), mosaic(frame[frame.hook == "maps"]["values"].iloc[0][1]))
    np.testing.assert_array_equal(shown(image), frame[frame.hook == "image"]["values"].iloc[0][1, 0])
    assert list(charts(figure)) == ["image, step 3", "0, step 3\n4 feature maps, 6 x 6"]
    assert figure.get_suptitle() == "maps: forward output, sample 1"


def test_a_frame_gives_the_same_picture(run: instrument.Run) -> None:
    one, two = charts(feature_maps(run, hook="maps")), charts(feature_maps(run.tensors(), hook="maps"))
    assert list(one) == list(two)
    assert [title.partition("\n")[0] for title in one][4:] == [f"0, step {step}" for step in range(4)]
    for title in one:
        np.testing.assert_array_equal(shown(one[title]), shown(two[title]))


def test_filters_have_no_image_and_a_scale_around_zero_with_numbers(run: instrument.Run) -> None:
    (axes,) = charts(feature_maps(run, "0.weight", step=0)).values()
    filters = run.tensors(hook="filters", step=0)["values"].iloc[0]
    np.testing.assert_array_equal(shown(axes), mosaic(filters))
    assert axes.get_title() == "0.weight, step 0\n4 x 1 filters, 3 x 3"
    largest = np.abs(filters).max()
    assert axes.images[0].get_clim() == (-largest, largest)
    assert axes.images[0].get_cmap().name == "RdBu_r"
    (scale,) = axes.child_axes
    assert len([label for label in scale.get_yticklabels() if label.get_text()]) >= 3


def test_a_channel_is_the_sum_of_the_numbers_at_its_row_and_column() -> None:
    values = np.ones((1, 10, 4, 4)) * np.arange(10.0)[None, :, None, None]
    (axes,) = charts(feature_maps(tensors(values))).values()
    for y, row in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
        for x, column in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            channel = int(row.get_text()) + int(column.get_text())
            found = shown(axes)[int(y), int(x)]
            assert found == channel or (channel >= 10 and np.isnan(found))


def test_an_output_is_the_sum_of_the_numbers_at_its_row_and_column() -> None:
    values = np.ones((9, 2, 3, 3)) * np.arange(9.0)[:, None, None, None]
    frame = tensors(values, kind="step_post", role="param", path="weight")
    (axes,) = charts(feature_maps(frame)).values()
    numbers = [int(row.get_text()) for row in axes.get_yticklabels()]
    for y, first in zip(axes.get_yticks(), numbers, strict=True):
        for x, more in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
            beside = shown(axes)[int(y), int(x) + 2]
            assert beside == first + int(more.get_text()) or np.isnan(beside)


def test_rows_are_layers_in_forward_order_and_columns_steps(run: instrument.Run) -> None:
    late = [tensors(np.ones((1, 2, 4, 4)), layer=layer, step=step) for step in (0, 7) for layer in ("b", "a")]
    figure = feature_maps(pd.concat([*late[:2], late[3]]))
    assert [title.partition("\n")[0] for title in charts(figure)] == ["b, step 0", "a, step 0", "a, step 7"]
    figure.draw_without_rendering()
    boxes = {title.partition("\n")[0]: axes.get_position() for title, axes in charts(figure).items()}
    assert boxes["b, step 0"].y0 > boxes["a, step 0"].y1
    assert boxes["a, step 0"].x1 < boxes["a, step 7"].x0


def test_what_was_left_out_is_said() -> None:
    many = feature_maps(tensors(np.ones((1, 300, 2, 2))))
    assert "the first 256 of 300 feature maps" in next(iter(charts(many)))
    large = feature_maps(tensors(np.ones((1, 1, 4096, 2))))
    assert "means of squares: 2048 x 1" in next(iter(charts(large)))
    bad = feature_maps(tensors(np.array([[[[1.0, np.nan], [np.inf, 2.0]]]])))
    assert next(iter(charts(bad))) == "a, step 0\n1 feature map, 2 x 2, 2 elements not finite"
    places = feature_maps(pd.concat([tensors(np.ones((1, 1, 2, 2)), layer=f"l{i}") for i in range(11)]))
    assert len(charts(places)) == 8
    assert "8 of 11 places" in places.get_suptitle()


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
def test_the_first_maps_are_kept(shape: tuple[int, ...], kept: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(cut(values), values[tuple(slice(size) for size in kept)])
    assert cut(values).shape == kept


def test_an_image_in_colours_goes_from_its_smallest_to_its_largest_value() -> None:
    image = np.linspace(-2.0, 6.0, 12).reshape(1, 3, 2, 2)
    pair = [tensors(image, role="input", kind="forward_pre", path="0"), tensors(np.ones((1, 4, 2, 2)))]
    axes, _ = charts(feature_maps(pd.concat(pair))).values()
    np.testing.assert_allclose(shown(axes), np.linspace(0.0, 1.0, 12).reshape(3, 2, 2).transpose(1, 2, 0))
    alone = charts(feature_maps(pd.concat(pair), role="input"))
    assert list(alone) == ["a[0], step 0"]


def test_what_fits_nothing_or_several_is_an_error_that_names_what_there_is(run: instrument.Run) -> None:
    with pytest.raises(InstrumentError, match=r"(?s)hook.*nothing of this was recorded.*'grads'.*maps.*filters"):
        feature_maps(run, hook="grads")
    with pytest.raises(InstrumentError, match=r"(?s)layer: no maps of it.*'encoder'.*0\.weight"):
        feature_maps(run, "encoder")
    with pytest.raises(InstrumentError, match=r"(?s)step: nothing was recorded then.*'9'.*0, 1, 2, 3"):
        feature_maps(run, hook="maps", step=9)
    with pytest.raises(InstrumentError, match="sample 5 of 0 was not recorded at step 0: there are 2, from 0"):
        feature_maps(run, hook="maps", sample=5)
    with pytest.raises(InstrumentError, match="no images, feature maps or filters were recorded"):
        feature_maps(tensors(np.ones((3, 4)), source_shape=(3, 4)))
    with pytest.raises(InstrumentError, match="the tensors table has no rows"):
        feature_maps(run.tensors().iloc[:0])
