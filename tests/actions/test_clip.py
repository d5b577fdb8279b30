"""Clipping: values and norms within a bound, in every dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hook_runs import run_step
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from instrument.actions.clip import clip_norm, clip_quantile, clip_ratio, clip_values, total_norm_factor
from instrument.stats.directed_rounding import round_down, round_up

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6}
numbers = st.floats(-1e4, 1e4, width=16)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    values = draw(st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=draw(st.sampled_from(DTYPES))).reshape(shape)


@pytest.mark.slow
@given(tensors(), numbers, numbers)
def test_clip_values_keeps_bounds_and_inner_values(tensor: Tensor, a: float, b: float) -> None:
    low, high = sorted((a, b))
    clipped = clip_values(tensor, low, high)
    assert (clipped.shape, clipped.dtype) == (tensor.shape, tensor.dtype)
    was, is_now = tensor.double(), clipped.double()
    between = round_up(low, tensor.dtype) <= round_down(high, tensor.dtype)
    assert ((is_now >= low) | (not between)).all()
    assert (is_now <= high).all()
    inside = (was >= low) & (was <= high)
    assert torch.equal(clipped[inside], tensor[inside])


@given(tensors(), st.floats(1e-3, 1e5), st.sampled_from([1.0, 2.0, 3.0, math.inf]), st.booleans())
def test_clip_norm_keeps_the_bound_and_smaller_norms(
    tensor: Tensor, bound: float, order: float, per_sample: bool
) -> None:
    clipped, factor = clip_norm(tensor, bound, ord=order, per_sample=per_sample)
    assert (clipped.shape, clipped.dtype) == (tensor.shape, tensor.dtype)
    parts = zip(tensor, clipped, strict=True) if per_sample and tensor.dim() else [(tensor, clipped)]
    for before, after in parts:
        was, is_now = (torch.linalg.vector_norm(part.double(), order).item() for part in (before, after))
        smallest = torch.finfo(tensor.dtype).smallest_normal * torch.finfo(tensor.dtype).eps
        assert is_now <= bound * (1 + PRECISION[tensor.dtype]) + before.numel() * smallest
        if was < bound * (1 - 1e-5) - 1e-5:
            assert torch.equal(before, after)
    assert ((factor <= 1) & (factor >= 0)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_clip_norm_is_correct_beyond_the_half_precision_range(dtype: torch.dtype) -> None:
    tensor = torch.full((10_000,), 2e3, dtype=dtype)  # its norm is 2e5; the largest float16 is 65504
    clipped, factor = clip_norm(tensor, 1.0)
    assert factor.item() == pytest.approx(1 / 2e5, rel=1e-2)
    assert clipped.double().norm().item() == pytest.approx(1.0, rel=2e-2)


def test_clip_norm_of_zeros_and_to_zero_is_zeros() -> None:
    clipped, factor = clip_norm(torch.zeros(3), 1.0)
    assert clipped.tolist() == clip_norm(torch.ones(3), 0.0)[0].tolist() == [0.0, 0.0, 0.0]
    assert factor.item() == 1.0


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, math.inf])
def test_total_norm_factor_equals_clip_grad_norm(order: float) -> None:
    gradients = [torch.randn(5, 3), torch.randn(7), torch.randn(2, 2, 2)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 0.7, norm_type=order)
    factor = total_norm_factor(gradients, 0.7, ord=order)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert torch.equal(parameter.grad, gradient * factor)


def clipped(tensor: Tensor, **fields: Any) -> Tensor:
    return run_step(torch.nn.Identity(), {"h": {"layers": ".", "kind": "forward", "action": "clip", **fields}}, tensor)[
        0
    ]


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"min": 0.0}, [[3.0, 0.0], [0.0, 10.0]]),
        ({"max": 2.0}, [[2.0, -4.0], [0.0, 2.0]]),
        ({"min": -1.0, "max": 1.0}, [[1.0, -1.0], [0.0, 1.0]]),
        ({"value": 3.5}, [[3.0, -3.5], [0.0, 3.5]]),
        ({"value": 0.0}, [[0.0, 0.0], [0.0, 0.0]]),
        ({"norm": 5.0, "scope": "sample"}, [[3.0, -4.0], [0.0, 5.0]]),
        ({"norm": 12.5**0.5, "scope": "tensor"}, [[0.9486833, -1.2649111], [0.0, 3.1622777]]),
        ({"norm": 3.4, "ord": 1.0}, [[0.6, -0.8], [0.0, 2.0]]),
        ({"norm": 5.0, "ord": math.inf}, [[1.5, -2.0], [0.0, 5.0]]),
    ],
    ids=str,
)
def test_each_clip_field_is_applied(fields: dict[str, float], wanted: list[list[float]]) -> None:
    tensor = torch.tensor([[3.0, -4.0], [0.0, 10.0]])
    torch.testing.assert_close(clipped(tensor, **fields), torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    assert tensor.tolist() == [[3.0, -4.0], [0.0, 10.0]], "the input tensor is not changed in place"


@pytest.mark.spread(6)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", [{"value": 1.0}, {"norm": 1.0}, {"norm": 1.0, "scope": "sample"}], ids=str)
def test_clip_keeps_shape_dtype_device_and_graph(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    tensor = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    result = clipped(tensor, **fields)
    assert (result.shape, result.dtype, result.device) == (tensor.shape, dtype, tensor.device)
    result.sum().backward()
    assert tensor.grad.any()


@pytest.mark.spread(16)
@pytest.mark.combinations(2)
@pytest.mark.parametrize("special", [[], [0.5], [-0.25], [-0.0], [math.nan], [math.inf], [-math.inf]], ids=str)
@pytest.mark.parametrize("bounds", [(-0.25, 0.5), (0.0, 0.5), (None, 0.5), (-0.25, None), (0.5, -0.25)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_clip_values_and_its_gradients_equal_clamp(
    dtype: torch.dtype, bounds: tuple[float | None, float | None], special: list[float]
) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(3)).to(dtype)
    values = values[(values != 0.5) & (values != -0.25)]
    values[1234 : 1234 + len(special)] = torch.tensor(special, dtype=dtype)
    results = []
    for clip in (clip_values, torch.clamp):
        tensor = values.clone().requires_grad_()
        clipped = clip(tensor, *bounds)
        (first,) = torch.autograd.grad(clipped.square().sum(), tensor, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), tensor)
        results.append((clipped.detach(), first.detach(), second))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    # Zeros of second derivatives differ in sign.
    for ours, expected in zip(*(result[:2] for result in results), strict=True):
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


def test_gradient_of_clip_values_is_one_operation() -> None:
    tensor = torch.randn(100, requires_grad=True)
    assert type(clip_values(tensor, -1.0, None).grad_fn).__name__ == "HardtanhBackward0"
    at_the_bound = torch.tensor([1.0, 2.0], requires_grad=True)
    assert type(clip_values(at_the_bound, -1.0, 1.0).grad_fn).__name__ == "ClampBackward1"


def test_clip_norm_is_differentiable() -> None:
    tensor = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: clip_norm(t, 0.5)[0], (tensor,))


def test_per_sample_norm_of_a_vector_is_per_element() -> None:
    result = clipped(torch.tensor([3.0, -0.5, -8.0]), norm=1.0, scope="sample")
    torch.testing.assert_close(result, torch.tensor([1.0, -0.5, -1.0]))


@pytest.mark.spread(4)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), ()])
@pytest.mark.parametrize("scope", ["tensor", "sample"])
def test_clip_accepts_empty_tensors_and_scalars(shape: tuple[int, ...], scope: str) -> None:
    result = clipped(torch.full(shape, 4.0), norm=1.0, scope=scope)
    assert result.shape == shape
    assert torch.allclose(result, torch.ones(shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_highest_quantile_changes_nothing(dtype: torch.dtype) -> None:
    tensor = torch.randn(999, dtype=torch.float64).to(dtype)
    assert torch.equal(clip_quantile(tensor, 1.0), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantile", [0.07, 0.29, 0.5, 0.57, 0.99])
def test_quantile_bound_is_the_element_of_its_rank(dtype: torch.dtype, quantile: float) -> None:
    tensor = torch.arange(1, 101).to(dtype)
    assert clip_quantile(tensor, quantile).max().item() == round(100 * quantile)


@given(st.floats(1e-8, 1e38), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_bounds_are_rounded_inwards(bound: float, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor([bound], dtype=torch.float64).to(dtype)
    near = torch.cat([numbers, *(torch.nextafter(numbers, torch.full_like(numbers, end)) for end in (-1, math.inf))])
    near = near[near.isfinite()].double()
    assert round_down(bound, dtype) == max([x for x in near.tolist() if x <= bound] or [info.max])
    assert round_up(bound, dtype) == min([x for x in near.tolist() if x >= bound] or [math.inf])
    assert round_up(-bound, dtype) == -round_down(bound, dtype)


@given(st.integers(0, 2**32), st.floats(1e-3, 1.0), st.sampled_from(DTYPES))
def test_clip_ratio_bounds_every_unit(seed: int, ratio: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = (torch.randn(3, 50, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    clipped = clip_ratio(gradient, weight, ratio)
    assert clipped.dtype == dtype
    bounds = ratio * weight.double().norm(dim=1)
    assert (clipped.double().norm(dim=1) <= bounds * (1 + PRECISION[dtype])).all()
