"""The interventions as pure functions, and as specs on a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instrument
from instrument.actions import builtin_functions
from instrument.actions.clip import clip_quantile, clip_ratio
from instrument.actions.scale import scheduled
from instrument.actions.tensor_selection import TensorSelection


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def apply_to_identity(inputs: Tensor, **spec: Any) -> tuple[Tensor, Tensor]:
    """Return the output of a hooked identity, and the gradient of a weighted sum of it."""
    inputs = inputs.clone().requires_grad_()
    model = nn.Identity()
    with instrument.attach(model, {"x": {"layers": ".", "kind": "forward", **spec}}) as probe:
        output = model(inputs)
        (output * torch.arange(1.0, 1 + output.numel()).view_as(output)).sum().backward()
        probe.end_step()
    assert inputs.grad is not None
    return output.detach(), inputs.grad


ROW = torch.tensor([[1.0, -2.0, 3.0], [4.0, -5.0, 6.0]])
WEIGHTS = torch.arange(1.0, 7.0).view(2, 3)


@pytest.mark.parametrize("name", ["resample", "shuffle"])
def test_resample_and_shuffle_draw_from_the_batch(name: str) -> None:
    batch = torch.arange(32.0).view(16, 2)
    new = getattr(builtin_functions, name)(batch, generator())
    rows = {tuple(row) for row in batch.tolist()}
    assert {tuple(row) for row in new.tolist()} <= rows
    assert not torch.equal(new, batch)
    if name == "shuffle":
        assert sorted(new.tolist()) == batch.tolist()
    assert torch.equal(new, getattr(builtin_functions, name)(batch, generator()))


def test_dropout_zeroes_a_fraction_and_scales_the_rest() -> None:
    new = builtin_functions.dropout(torch.ones(10_000), 0.25, generator())
    assert new.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert new.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("to", "steps"), [("int8", 255), ("int4", 15)])
def test_quantize_to_integers_uses_one_scale(to: str, steps: int) -> None:
    tensor = torch.linspace(-1, 1, 10_001)
    new = builtin_functions.quantize(tensor, to)
    assert len(new.unique()) == steps
    assert (new - tensor).abs().max() <= 1 / (steps - 1) + 1e-6
    assert new.abs().max() == 1.0


@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_quantize_to_float8_rounds_to_nearest(to: str) -> None:
    tensor = torch.randn(1000, generator=generator())
    step = tensor.abs().max() / builtin_functions.QUANTIZED_MAX[to]
    assert torch.equal(builtin_functions.quantize(tensor, to), (tensor / step).to(getattr(torch, to)).float() * step)
    assert torch.equal(builtin_functions.quantize(torch.zeros(3), to), torch.zeros(3))


def test_put_writes_the_requested_number_of_values() -> None:
    new = builtin_functions.insert_value(torch.zeros(4, 5), float("nan"), 3, generator())
    assert int(new.isnan().sum()) == 3
    assert int(builtin_functions.insert_value(torch.zeros(2), float("inf"), 9, generator()).isinf().sum()) == 2


@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_clip_quantile_keeps_the_quantile_and_smaller_values(values: list[float], quantile: float) -> None:
    tensor = torch.tensor(values)
    clipped = clip_quantile(tensor, quantile)
    bound = clipped.abs().max()
    assert bound in tensor.abs()
    assert (tensor.abs() <= bound).sum() >= quantile * len(values) - 1e-3 * len(values)
    assert torch.equal(clipped, tensor.clamp(-bound, bound))


def test_clip_quantile_ignores_nan() -> None:
    clipped = clip_quantile(torch.tensor([1.0, float("nan"), -8.0, 2.0]), 0.5)
    assert clipped[[0, 2, 3]].tolist() == [1.0, -2.0, 2.0]
    assert clipped[1].isnan()


def test_clip_ratio_is_per_unit() -> None:
    weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    gradient = torch.tensor([[6.0, 8.0], [0.0, 1.0]])
    clipped = clip_ratio(gradient, weight, 0.1)
    torch.testing.assert_close(clipped, torch.tensor([[0.3, 0.4], [0.0, 1e-4]]))
    assert torch.equal(clip_ratio(gradient, weight, 100.0)[0], gradient[0])


@given(st.dictionaries(st.integers(0, 50), st.floats(-5, 5), min_size=1, max_size=6), st.integers(0, 60))
def test_scheduled_factor_interpolates_between_its_points(points: dict[int, float], step: int) -> None:
    value = scheduled(points, step)
    assert min(points.values()) - 1e-9 <= value <= max(points.values()) + 1e-9
    if step in points:
        assert value == points[step]


def test_scale_by_channel_schedule_and_gradient_reversal() -> None:
    output, gradient = apply_to_identity(ROW, action="scale", factor=[1.0, 0.0, 2.0])
    assert torch.equal(output, ROW * torch.tensor([1.0, 0.0, 2.0]))
    assert torch.equal(gradient, WEIGHTS * torch.tensor([1.0, 0.0, 2.0]))
    assert scheduled({0: 1.0, 10: 0.0}, 5) == 0.5
    assert torch.equal(apply_to_identity(ROW, action="scale", factor={"0": 0.5, "10": 1.0})[0], ROW * 0.5)
    output, gradient = apply_to_identity(ROW, action="scale", factor=0.5, reverse=True)
    assert torch.equal(output, ROW)
    assert torch.equal(gradient, -0.5 * WEIGHTS)


def test_straight_through_keeps_the_old_gradient() -> None:
    output, gradient = apply_to_identity(ROW, action="modify", fn="sign", straight_through=True)
    assert torch.equal(output, ROW.sign())
    assert torch.equal(gradient, WEIGHTS)
    assert not apply_to_identity(ROW, action="modify", fn="sign")[1].any()
    assert torch.equal(apply_to_identity(ROW, action="modify", fn="quantize")[1], WEIGHTS)


@pytest.mark.parametrize("fn", [{"fn": "resample"}, {"fn": "shuffle"}, {"fn": "dropout", "p": 0.5}, {"fn": "nan"}])
def test_random_functions_are_reproducible_and_keep_global_state(fn: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    first = apply_to_identity(ROW, action="modify", **fn)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.nan_to_num(9.0), apply_to_identity(ROW, action="modify", **fn)[0].nan_to_num(9.0))


def test_patch_replaces_a_slice_and_checks_its_shape() -> None:
    recorded = torch.full((2, 3), 9.0)
    part = TensorSelection((2, 3), (slice(None), slice(0, 1)))
    new = builtin_functions.patch(part.of(ROW), recorded, part)
    assert part.into(ROW, new).tolist() == [[9.0, -2.0, 3.0], [9.0, -5.0, 6.0]]
    assert torch.equal(builtin_functions.patch(part.of(ROW), torch.full((2, 1), 9.0), part), new)
    with pytest.raises(ValueError, match=r"shape \[5\], the tensor to replace \[2, 3\]"):
        builtin_functions.patch(ROW, torch.zeros(5), None)
