"""The interventions as pure functions, and as specs on a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import run_step, run_steps
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import instrument
from instrument import HookError
from instrument.actions.builtin.functions import QUANTIZED_MAX
from instrument.actions.clip import clip_quantile, clip_ratio
from instrument.actions.scale import scheduled
from instrument.actions.tensor_selection import TensorSelection, patch


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
    return output.detach(), inputs.grad


def modified(inputs: Tensor, **spec: Any) -> Tensor:
    """Return the output of an identity with a function of `modify`."""
    return apply_to_identity(inputs, action="modify", **spec)[0]


ROW = torch.tensor([[1.0, -2.0, 3.0], [4.0, -5.0, 6.0]])
WEIGHTS = torch.arange(1.0, 7.0).view(2, 3)


@pytest.mark.parametrize("name", ["resample", "shuffle"])
def test_resample_and_shuffle_draw_from_the_batch(name: str) -> None:
    batch = torch.arange(32.0).view(16, 2)
    new = modified(batch, fn=name)
    rows = {tuple(row) for row in batch.tolist()}
    assert {tuple(row) for row in new.tolist()} <= rows
    assert not torch.equal(new, batch)
    if name == "shuffle":
        assert sorted(new.tolist()) == batch.tolist()
    assert torch.equal(new, modified(batch, fn=name))


def test_dropout_zeroes_a_fraction_and_scales_the_rest() -> None:
    new = modified(torch.ones(10_000), fn="dropout", p=0.25)
    assert new.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert new.eq(0).float().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("to", "steps"), [("int8", 255), ("int4", 15)])
def test_quantize_to_integers_uses_one_scale(to: str, steps: int) -> None:
    tensor = torch.linspace(-1, 1, 10_001)
    new = modified(tensor, fn="quantize", to=to)
    assert len(new.unique()) == steps
    assert (new - tensor).abs().max() <= 1 / (steps - 1) + 1e-6
    assert new.abs().max() == 1.0


@pytest.mark.spread(1)
@pytest.mark.parametrize("to", ["float8_e4m3fn", "float8_e5m2"])
def test_quantize_to_float8_rounds_to_nearest(to: str) -> None:
    tensor = torch.randn(1000, generator=generator())
    step = tensor.abs().max() / QUANTIZED_MAX[to]
    assert torch.equal(modified(tensor, fn="quantize", to=to), (tensor / step).to(getattr(torch, to)).float() * step)
    assert torch.equal(modified(torch.zeros(3), fn="quantize", to=to), torch.zeros(3))


def test_put_writes_the_requested_number_of_values() -> None:
    new = modified(torch.zeros(4, 5), fn="nan", count=3)
    assert int(new.isnan().sum()) == 3
    assert int(modified(torch.zeros(2), fn="nan", value="inf", count=9).isinf().sum()) == 2


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


@pytest.mark.spread(3)
@pytest.mark.parametrize("fn", [{"fn": "resample"}, {"fn": "shuffle"}, {"fn": "dropout", "p": 0.5}, {"fn": "nan"}])
def test_random_functions_are_reproducible_and_keep_global_state(fn: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    first = apply_to_identity(ROW, action="modify", **fn)[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.nan_to_num(9.0), apply_to_identity(ROW, action="modify", **fn)[0].nan_to_num(9.0))


def test_patch_replaces_a_slice_and_checks_its_shape() -> None:
    recorded = torch.full((2, 3), 9.0)
    part = TensorSelection((2, 3), (slice(None), slice(0, 1)))
    new = patch(part.of(ROW), recorded, part)
    assert part.into(ROW, new).tolist() == [[9.0, -2.0, 3.0], [9.0, -5.0, 6.0]]
    assert torch.equal(patch(part.of(ROW), torch.full((2, 1), 9.0), part), new)
    with pytest.raises(ValueError, match=r"shape \[5\], the tensor to replace \[2, 3\]"):
        patch(ROW, torch.zeros(5), None)


def same(tensor: Tensor) -> Tensor:
    return tensor


# The value of each action on a tensor without elements, of dimension 0, and with one sample.
NOTHING_TO_DRAW: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "zero": ({"action": "modify", "fn": "zero"}, torch.zeros_like),
    "mean": ({"action": "modify", "fn": "mean"}, lambda tensor: torch.full_like(tensor, tensor.double().mean())),
    "shuffle": ({"action": "modify", "fn": "shuffle"}, same),
    "resample": ({"action": "modify", "fn": "resample"}, same),
    "swap": ({"action": "modify", "fn": "swap"}, same),
    "sign": ({"action": "modify", "fn": "sign"}, torch.sign),
    "add": ({"action": "modify", "fn": "add", "value": 1.5}, lambda tensor: tensor + 1.5),
    "nan": ({"action": "modify", "fn": "nan", "count": 9}, lambda tensor: torch.full_like(tensor, torch.nan)),
    "dropout": ({"action": "modify", "fn": "dropout", "p": 0.0}, same),
    "noise": ({"action": "modify", "fn": "noise", "std": 0.0, "mean": 1.0}, lambda tensor: tensor + 1),
    "quantize": ({"action": "modify", "fn": "quantize", "to": "int8"}, same),
    "straight_through": ({"action": "modify", "fn": "sign", "straight_through": True}, torch.sign),
    "clip_value": ({"action": "clip", "value": 0.5}, lambda tensor: tensor.clamp(-0.5, 0.5)),
    "clip_quantile": ({"action": "clip", "quantile": 1.0}, same),
    "clip_norm": ({"action": "clip", "norm": 100.0}, same),
    "clip_inf": ({"action": "clip", "norm": 100.0, "ord": "inf"}, same),
    "clip_samples": ({"action": "clip", "norm": 100.0, "scope": "sample", "ord": "inf"}, same),
    "scale": ({"action": "scale", "factor": 2.0}, lambda tensor: tensor * 2),
}


@pytest.mark.spread(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NOTHING_TO_DRAW)
def test_actions_accept_tensors_of_every_size(name: str, dtype: torch.dtype) -> None:
    spec, expected = NOTHING_TO_DRAW[name]
    for shape in [(0,), (0, 3), (2, 0), (), (1,), (1, 1)]:
        if name == "swap" and (shape == () or shape[0] == 1):  # an odd number of samples is an error
            continue
        tensor = torch.full(shape, 2.0, dtype=dtype, requires_grad=True)
        output, probe = run_step(
            nn.Identity(), {"x": {"layers": ".", "kind": "forward", **spec}}, tensor, loss=torch.sum
        )
        torch.testing.assert_close(output.detach(), expected(tensor.detach()), equal_nan=True)
        assert probe.coverage()[0]["fired"] == 1


@pytest.mark.spread(4)
@pytest.mark.parametrize("fn", ["l1", "l2"])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1, 1), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_penalty_has_the_gradient_of_its_formula(fn: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = [torch.nn.Parameter(torch.full(shape, 3 + 4j if dtype.is_complex else 3.0, dtype=dtype)) for _ in "ab"]
    model = nn.Module()
    model.weight = values[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    spec = {"layers": ".", "kind": "parameter_grad", "action": "modify", "fn": fn, "coefficient": 0.5}

    def step() -> None:
        values[0].abs().sum().backward()
        optimizer.step()

    run_steps(model, {"x": spec}, step, optimizer=optimizer)
    penalty = 0.5 * values[1].abs().sum() if fn == "l1" else 0.25 * values[1].abs().square().sum()
    (values[1].abs().sum() + penalty).backward()
    torch.testing.assert_close(values[0].grad, values[1].grad)


def test_norm_over_all_gradients_ignores_empty_ones() -> None:
    model = nn.ParameterList([torch.zeros(0, 2), torch.tensor([3.0, -4.0]), torch.zeros(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    spec = {"layers": ".", "kind": "parameter_grad", "action": "clip", "norm": 1.0, "ord": "inf"}
    with instrument.attach(model, {"x": spec}, optimizer=optimizer, rules=None) as probe:
        sum((parameter * torch.tensor([3.0, -4.0])[: parameter.shape[-1]]).sum() for parameter in model).backward()  # type: ignore[union-attr]
        optimizer.step()
        probe.end_step()
    torch.testing.assert_close(model[1].grad, torch.tensor([0.75, -1.0]), rtol=1e-5, atol=0)
    assert model[0].grad.shape == (0, 2)  # type: ignore[union-attr]


def test_sign_of_a_complex_gradient_has_magnitude_one() -> None:
    values = torch.tensor([3 + 4j, 0, -2j, complex(torch.nan, 1)], requires_grad=True)
    model = nn.Identity()
    spec = {"layers": ".", "kind": "tensor", "action": "modify", "fn": "sign"}
    run_steps(model, {"x": spec}, lambda: model(values).backward(values.detach()))
    torch.testing.assert_close(values.grad[:3], torch.tensor([0.6 + 0.8j, 0, -1j]))  # type: ignore[index]
    assert values.grad[3].isnan()  # type: ignore[index]


@pytest.mark.parametrize(
    "spec",
    [
        {"action": "clip", "value": 0.5},
        {"action": "clip", "quantile": 0.5},
        {"action": "modify", "fn": "quantize", "to": "int8"},
    ],
    ids=str,
)
def test_failed_action_names_dtype_and_shape_of_its_tensor(spec: dict[str, Any]) -> None:
    values = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    message = r"hook 'x' \(tensor\) .* complex types; the tensor is complex64 \[3\]"
    with pytest.raises(HookError, match=message):
        run_step(nn.Identity(), {"x": {"layers": ".", "kind": "tensor", **spec}}, values, loss=lambda y: y.abs().sum())
