"""Differences between two tensors, and between their statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from instrument.comparison.differences import (
    PRECISIONS,
    ULP_BINS,
    decisive,
    relative_differences,
    run_precision,
    tensor_errors,
)

DTYPES = ("float64", "float32", "float16", "bfloat16")


def array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 1024, 1025])
def test_distance_in_units_in_the_last_place(dtype: str, steps: int) -> None:
    one = torch.tensor([1.5, -1.5, 0.3, -300.0, 1e-3], dtype=getattr(torch, dtype))
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[one.itemsize]
    other = (one.view(integer) - steps).view(one.dtype)
    counts = tensor_errors(array(one), array(other), (dtype, dtype)).ulp
    expected = {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 4, 1024: 11, 1025: 12}[steps]
    assert counts.tolist() == [5 if index == expected else 0 for index in range(len(ULP_BINS))]


def test_distance_across_zero_counts_both_sides() -> None:
    tiny = np.array([np.float32(1e-45), 0.0, -0.0], np.float32)
    counts = tensor_errors(tiny, np.array([-1e-45, -0.0, 0.0], np.float32), ("float32", "float32")).ulp
    assert counts[:3].tolist() == [2, 0, 1]


def test_distance_uses_the_coarser_dtype() -> None:
    one = torch.linspace(0.1, 7.0, 999)
    errors = tensor_errors(array(one), array(one.bfloat16()), ("float32", "bfloat16"))
    assert errors.ulp[0] == 999
    assert 0 < errors.max_rel <= 2**-8


def test_bins_are_named() -> None:
    assert ULP_BINS[:6] == ("0", "1", "2", "3-4", "5-8", "9-16")
    assert ULP_BINS[11:] == ("513-1024", "> 1024")


def test_errors_of_tensors_agree_with_their_definitions() -> None:
    a, b = torch.randn(2, 3, 50, dtype=torch.float64)
    errors = tensor_errors(a.numpy(), b.numpy(), ("float64", "float64"))
    assert errors.cosine == pytest.approx(torch.nn.functional.cosine_similarity(a.ravel(), b.ravel(), dim=0).item())
    assert errors.max_abs == (a - b).abs().max().item()
    assert errors.max_rel == pytest.approx(((a - b).abs() / torch.maximum(a.abs(), b.abs())).max().item())
    assert errors.l2 == pytest.approx(((a - b).norm() / max(a.norm(), b.norm())).item())


def test_errors_of_special_tensors() -> None:
    def errors(one: list[Any], other: list[Any]) -> Any:
        return tensor_errors(np.array(one), np.array(other), ("float32", "float32"))

    zeros = errors([0.0, 0.0], [0.0, 0.0])
    assert (zeros.l2, zeros.cosine, zeros.max_rel) == (0.0, 1.0, 0.0)
    assert errors([0.0, 0.0], [1.0, 0.0]).cosine == 0.0
    assert errors([], []).l2 == 0.0
    same = errors([np.nan, np.inf, 1.0], [np.nan, np.inf, 1.0])
    assert (same.l2, same.max_abs, same.ulp.sum()) == (0.0, 0.0, 1)
    assert errors([np.nan, 1.0], [2.0, 1.0]).l2 == np.inf
    assert tensor_errors(np.array([1j]), np.array([2j]), ("complex64", "complex64")).l2 == 0.5
    assert not tensor_errors(np.array([1, 2]), np.array([1, 3]), ("int64", "int64")).ulp.any()


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [(np.int64, 2**53, 2**53 + 1), (np.int64, -(2**63), 2**63 - 1), (np.uint64, 2**63, 2**63 + 1), (np.int64, -1, 1)],
)
def test_integers_are_compared_exactly(dtype: type, one: int, other: int) -> None:
    errors = tensor_errors(np.array([one], dtype), np.array([other], dtype), (dtype.__name__, dtype.__name__))
    gap, size = float(abs(one - other)), max(abs(one), abs(other))
    assert (errors.max_abs, errors.l2, errors.max_rel) == (gap, pytest.approx(gap / size), pytest.approx(gap / size))


@pytest.mark.parametrize(("one", "other", "l2"), [(1e200, 2e200, 0.5), (1e-200, 2e-200, 0.5), (-1e308, 1e308, 1.8)])
def test_squares_outside_of_the_range_of_float64_are_compared(one: float, other: float, l2: float) -> None:
    errors = tensor_errors(np.array([one]), np.array([other]), ("float64", "float64"))
    assert errors.l2 == pytest.approx(l2, abs=0.01)
    assert errors.cosine == np.sign(one * np.sign(other))


def test_complex_and_real_numbers_are_compared() -> None:
    assert tensor_errors(np.array([3 + 4j]), np.array([3.0]), ("complex128", "float64")).l2 == 0.8


def test_infinite_statistics_differ_from_others() -> None:
    rows = pd.DataFrame({"mine_a": [np.inf, np.inf, np.inf, np.nan], "mine_b": [np.inf, -np.inf, 1.0, 1.0]})
    found = relative_differences(rows, ["mine"], None, 0.0)["mine"].to_numpy()
    np.testing.assert_array_equal(found, [0.0, np.inf, np.inf, np.nan])


def test_differences_of_statistics_are_lower_bounds() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        a = generator.normal(generator.normal(0, 3), 10 ** generator.uniform(-3, 1), 20)
        b = a + generator.normal(0, 10 ** generator.uniform(-5, 1), 20)
        numbers = {
            f"{name}_{side}": [function(x)]
            for side, x in (("a", a), ("b", b))
            for name, function in (("mean", np.mean), ("std", np.std), ("rms", rms), ("l2", np.linalg.norm))
        }
        found, _ = decisive(relative_differences(pd.DataFrame(numbers), ["mean", "std", "rms", "l2"], None, 0.0))
        assert found[0] <= rms(a - b) / max(rms(a), rms(b)) * (1 + 1e-9)


def rms(x: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean(x**2)))


@pytest.mark.parametrize("names", [["mean", "std"], ["mean", "rms"], ["mean", "abs_max"]])
def test_mean_near_zero_is_compared_with_the_size_of_the_tensor(names: list[str]) -> None:
    numbers = {"mean_a": [1e-9], "mean_b": [-1e-9], **{f"{names[1]}_{side}": [1.0] for side in "ab"}}
    assert relative_differences(pd.DataFrame(numbers), names, None, 0.0)["mean"][0] == pytest.approx(2e-9)


def extremes(values: torch.Tensor) -> pd.DataFrame:
    numbers = values.double().numpy().reshape(-1, 3)
    return pd.DataFrame(numbers, columns=["min", "max", "abs_max"]).assign(location=np.arange(len(numbers)) % 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_precision_is_that_of_the_extremes(dtype: str) -> None:
    values = torch.randn(60, dtype=torch.float64).to(getattr(torch, dtype))
    assert run_precision({}, extremes(values), []).dtype == dtype


def test_precision_of_integers_and_few_levels_is_unknown() -> None:
    levels = torch.arange(60) / 16
    for values in (torch.arange(60.0), levels, torch.zeros(60)):
        assert run_precision({}, extremes(values), []).dtype == "float32"
        assert run_precision({}, extremes(values), ["float16"]).dtype == "float16"


def test_precision_of_the_configuration_counts() -> None:
    values = extremes(torch.randn(60))
    assert run_precision({"config": {"train": {"precision": "bf16"}}}, values, []).dtype == "bfloat16"
    assert run_precision({"config": {"train": {"precision": "fp32"}}}, values, []).dtype == "float32"
    assert run_precision({"config": None}, values, ["bfloat16"]).dtype == "float32"


def test_tolerances_are_multiples_of_the_unit_roundoff() -> None:
    for dtype in DTYPES:
        precision = PRECISIONS[dtype]
        assert precision.unit == torch.finfo(getattr(torch, dtype)).eps / 2
        assert precision.tolerance >= 10 * precision.unit
