"""Images of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from instrument.trackers.tensor_tiles import LONGEST, TILES, draw_tiles, tiles_of

RED, BLUE, GREY, BLACK, WHITE = (220, 40, 40), (40, 60, 110), (128, 128, 128), (0, 0, 0), (255, 255, 255)


def tiles(tensor: Tensor, kind: str = "forward", dtype: torch.dtype | None = None) -> np.ndarray[Any, Any] | None:
    found = tiles_of(kind, tensor, dtype)
    return None if found is None else found.wait().numpy()


def colours(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(draw_tiles(np.asarray(values, np.float32)).convert("RGB"))


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((8, 3, 5, 6), "forward", (3, 5, 6)),
        ((4, 5, 6), "forward", (4, 5, 6)),
        ((2, 1000, 2, 2), "forward", (TILES, 2, 2)),
        ((8, 3, 5, 6), "step_post", (24, 5, 6)),
        ((8, 3, 5, 6), "parameter_grad", (24, 5, 6)),
        ((512, 512, 3, 3), "step_post", (TILES, 3, 3)),
        ((1, 1, 300, 128), "forward", (1, 100, 64 + 64)),
        ((5,), "forward", None),
        ((5, 6), "forward", None),
        ((2, 3, 4, 5, 6), "forward", None),
        ((8, 64, 1, 1), "forward", None),
        ((0, 3, 5, 6), "forward", None),
        ((8, 0, 5, 6), "step_post", None),
    ],
)
def test_image_tiles_of_each_shape_and_kind(
    shape: tuple[int, ...], kind: str, expected: tuple[int, ...] | None
) -> None:
    found = tiles(torch.zeros(shape), kind)
    assert (None if found is None else found.shape) == expected
    assert found is None or max(found.shape[1:]) <= LONGEST


def test_tiles_are_first_sample_maps_or_all_filters() -> None:
    x = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
    assert np.array_equal(tiles(x), x[0].numpy())
    assert np.array_equal(tiles(x, "step_post"), x.reshape(6, 2, 2).numpy())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_is_drawn(dtype: torch.dtype) -> None:
    x = torch.tensor([[[0, 1], [1, 0]]]).to(dtype)
    assert np.array_equal(tiles(x), [[[0, 1], [1, 0]]])


def test_image_is_a_copy_of_the_tensor_with_the_recorded_dtype() -> None:
    x = torch.zeros(1, 2, 2, requires_grad=True)
    found = tiles(x)
    with torch.no_grad():
        x.add_(1.001)
    assert np.array_equal(found, np.zeros((1, 2, 2)))
    assert np.array_equal(tiles(x, dtype=torch.bfloat16), np.ones((1, 2, 2)))


def test_zero_is_black_or_mid_grey() -> None:
    image = colours([[[0.0, 4.0], [2.0, 4.0]]])
    assert [tuple(image[at]) for at in ((0, 0), (0, -1))] == [BLACK, WHITE]
    assert abs(int(image[-1, 0, 0]) - 127) <= 1
    image = colours([[[0.0, 4.0], [-4.0, -2.0]]])
    assert abs(int(image[0, 0, 0]) - GREY[0]) <= 1
    assert [tuple(image[at]) for at in ((0, -1), (-1, 0))] == [WHITE, BLACK]
    assert abs(int(image[-1, -1, 0]) - 64) <= 1
    assert tuple(colours(np.zeros((1, 2, 2)))[0, 0]) == BLACK


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_red_and_ignored_in_scaling(value: float) -> None:
    image = colours([[[0.0, 1.0], [value, 1.0]]])
    assert [tuple(image[at]) for at in ((0, 0), (0, -1), (-1, 0))] == [BLACK, WHITE, RED]
    assert tuple(colours(np.full((1, 2, 2), value))[0, 0]) == RED


def test_tiles_have_separators_and_small_ones_are_enlarged() -> None:
    image = colours(np.stack([np.full((40, 50), float(value)) for value in range(5)]))
    assert image.shape == (40 * 2 + 1, 50 * 3 + 2, 3)
    assert [tuple(image[0, at]) for at in (0, 50, 101)] == [BLACK, BLUE, BLUE]
    assert tuple(image[41, 51]) == WHITE
    assert tuple(image[-1, -1]) == BLUE, "there is no sixth tile"
    assert colours(np.zeros((1, 3, 2))).shape == (30, 20, 3)


@pytest.mark.gpu
def test_gpu_tensor_is_drawn_without_synchronisation() -> None:
    x = torch.rand(4, 3, 8, 8, device="cuda")
    expected = x[0].cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = tiles_of("forward", x)
        x.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found is not None
    assert np.array_equal(found.wait().numpy(), expected.numpy())
