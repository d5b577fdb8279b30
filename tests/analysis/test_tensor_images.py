"""Recorded tensors as images: mosaics, colour scales, downscaling, and the input image of a map."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attached_runs import train_steps
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

import instrument
from instrument.analysis.plot_data import Batch, RecordedSeries
from instrument.analysis.tensor_images import TensorMaps, image_of, limits, maps_in, mosaic, smaller

sizes = st.integers(1, 6)
finite = st.floats(-1e6, 1e6)


@given(st.integers(1, 40), sizes, sizes)
def test_mosaic_contains_every_map(count: int, height: int, width: int) -> None:
    values = np.arange(count * height * width, dtype=float).reshape(count, height, width)
    full = mosaic(values)
    columns = (full.shape[1] + 1) // (width + 1)
    for i, one in enumerate(values):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        np.testing.assert_array_equal(full[top : top + height, left : left + width], one)
    assert np.isfinite(full).sum() == values.size


@given(st.integers(1, 20), st.integers(1, 20), sizes)
def test_filters_of_one_output_are_in_one_row(outputs: int, inputs: int, size: int) -> None:
    values = np.broadcast_to(np.arange(outputs, dtype=float)[:, None, None, None], (outputs, inputs, size, size))
    full = mosaic(values)
    columns = (full.shape[1] + 1) // (size + 1)
    assert columns % inputs == 0
    for output in range(outputs):
        rows, _ = np.nonzero(full == output)
        assert rows.max() - rows.min() == size - 1


def test_mosaic_is_nearly_square_or_has_the_given_columns() -> None:
    assert mosaic(np.zeros((16, 3, 3))).shape == (15, 15)
    assert mosaic(np.zeros((64, 3, 7, 7))).shape == (103, 119)
    assert mosaic(np.zeros((6, 3, 3)), columns=6).shape == (3, 23)


@given(arrays.arrays(float, sizes, elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_colour_scale_contains_all_values_and_is_zero_based(values: np.ndarray) -> None:
    low, high = limits(values)
    known = values[np.isfinite(values)]
    assert ((low <= known) & (known <= high)).all()
    assert low < high
    assert low == (-high if (known < 0).any() else 0.0)


@given(arrays.arrays(float, st.tuples(sizes, sizes, sizes), elements=finite), st.integers(1, 6))
def test_downscaled_maps_are_means_of_squares(values: np.ndarray, most: int) -> None:
    found = smaller(values, most)
    factor = -(-max(values.shape[1:]) // most)
    assert max(found.shape[1:]) <= most
    for row in range(found.shape[1]):
        for column in range(found.shape[2]):
            square = values[:, row * factor : (row + 1) * factor, column * factor : (column + 1) * factor]
            np.testing.assert_allclose(found[:, row, column], square.mean((1, 2)), rtol=1e-9, atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    keep = {"layers": "**", "action": "record", "tensors": True, "stats": "none"}
    hooks = {
        "seen": {**keep, "kind": "forward_pre", "samples": 2},
        "given": {**keep, "kind": "forward", "samples": 2},
        "back": {**keep, "kind": "full_backward", "role": "grad_output", "samples": 1},
        "filters": {**keep, "kind": "step_post", "role": "param"},
        "slopes": {**keep, "kind": "parameter_grad"},
    }
    return train_steps(model, hooks, torch.randn(2, 3, 3, 8, 8), out=tmp_path_factory.mktemp("maps") / "run").run


def test_maps_are_tensors_with_two_spatial_dimensions(run: instrument.Run) -> None:
    found = [one for one in maps_in(run) if one.batch.step == 0]
    assert sorted((one.series.hook, one.location, one.what) for one in found) == [
        ("back", "0", "gradient maps"),
        ("back", "1", "gradient maps"),
        ("filters", "0.weight", "filters"),
        ("given", "0", "feature maps"),
        ("given", "1", "feature maps"),
        ("seen", ".[0]", "inputs"),
        ("seen", "0[0]", "inputs"),
        ("seen", "1[0]", "inputs"),
        ("seen", "2[0]", "inputs"),
        ("slopes", "0.weight", "filter gradients"),
    ]


@pytest.mark.slow
def test_tensor_frame_has_the_maps_of_its_run(run: instrument.Run) -> None:
    frame = run.tensors()
    assert maps_in(frame) == maps_in(run)
    for one in maps_in(run):
        np.testing.assert_array_equal(one.values(frame), one.values(run))
    (maps,) = (
        one for one in maps_in(run) if one.series.hook == "given" and one.location == "1" and one.batch.step == 1
    )
    full = run.tensors(hook="given", layer="1", step=1)["values"].iloc[0]
    np.testing.assert_array_equal(maps.values(frame, 1), full[1])
    with pytest.raises(IndexError):
        maps.values(run, 2)


def test_filters_have_no_samples(run: instrument.Run) -> None:
    filters = next(one for one in maps_in(run) if one.series.hook == "filters")
    assert filters.values(run, sample=7).shape == filters.shape == (4, 3, 3, 3)


def test_image_of_a_map_is_the_input_of_the_same_step(run: instrument.Run) -> None:
    known = maps_in(run)
    for one in known:
        found = image_of(one, known)
        if one.series.is_of_parameters:
            assert found is None
        else:
            assert found is not None
            image, sample = found
            assert (image.location, image.batch.step, sample) == (".[0]", one.batch.step, 0)
    assert image_of(known[0], [one for one in known if not one.is_image]) is None


def test_image_of_a_map_is_that_of_its_sample() -> None:
    keep = {"kind": "forward", "layers": "0", "action": "record", "tensors": True, "stats": "none"}
    hooks = {
        "image": {**keep, "kind": "forward_pre", "samples": [1, 2]},
        "chosen": {**keep, "samples": [0, 2]},
        "sliced": {**keep, "slice": "-2"},
        "every": {**keep, "slice": "::2"},
    }
    known = maps_in(train_steps(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()), hooks, torch.randn(1, 4, 3, 8, 8)).run)
    image, *others = known
    found = {one.series.hook: [image_of(one, known, sample) for sample in range(2)] for one in others}
    second = (image, 1)
    assert found == {"chosen": [None, second], "sliced": [second, second], "every": [None, second]}


@pytest.mark.parametrize(
    ("role", "shape", "is_image"),
    [
        ("input", (2, 3, 8, 8), True),
        ("input", (1, 8, 8), True),
        ("input", (2, 4, 8, 8), False),
        ("output", (1, 8, 8), False),
    ],
)
def test_image_is_an_input_of_one_or_three_channels(role: str, shape: tuple[int, ...], is_image: bool) -> None:
    series = RecordedSeries("h", "forward", role, "train")
    batch = Batch("train", 0, 0, 0)
    assert TensorMaps(series, "", "", 0, 0, batch, "float32", shape, shape, samples=(0,)).is_image is is_image
