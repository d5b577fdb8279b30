"""Quantiles and histograms: equal to NumPy's, with every element counted, for any kind of tensor."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from instrument.stats import cpu_kernel
from instrument.stats.distribution import SAMPLE, _sample_indices, distribution, distribution_on_device
from instrument.stats.flatten import stored_elements
from instrument.stats.table_rows import Distributions

LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
IMPLEMENTATIONS = ("compiled", "portable", "on a device")


def compute(
    tensor: Tensor, levels: tuple[float, ...] = LEVELS, bins: int = 8, implementation: str = "compiled"
) -> dict[str, Any]:
    if implementation == "on a device":
        values = distribution_on_device(tensor.reshape(-1), levels, bins).tolist()
    elif implementation == "portable":
        with mock.patch.object(cpu_kernel, "native", None):
            values = list(distribution(tensor, levels, bins))
    else:
        values = list(distribution(tensor, levels, bins))
    names = ("sampled", "levels", "quantiles", "low", "high", "counts")
    return dict(zip(names, Distributions(levels, bins).cells(values), strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64], ids=str
)
def test_quantiles_of_small_tensors_equal_numpy(implementation: str, dtype: torch.dtype) -> None:
    tensor = (torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    x = tensor.double().numpy().reshape(-1)
    answer = compute(tensor, implementation=implementation)
    assert answer["sampled"] == 3000
    assert answer["quantiles"] == pytest.approx(np.quantile(x, LEVELS), rel=1e-12)
    assert (answer["low"], answer["high"]) == (x.min(), x.max())
    edges = np.linspace(x.min(), x.max(), 9)
    # An element within a rounding error of an edge may be counted on either side of it.
    near = (np.abs(x[:, None] - edges[None, 1:-1]) < 1e-9).sum()
    assert near < 30
    assert np.abs(np.array(answer["counts"]) - np.histogram(x, 8)[0]).sum() <= 2 * near
    assert sum(answer["counts"]) == 3000


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_element_on_an_edge_belongs_to_the_bin_above(implementation: str) -> None:
    answer = compute(torch.arange(9.0), bins=4, implementation=implementation)
    assert answer["counts"] == [2, 2, 2, 3]


@pytest.mark.spread(3)
@pytest.mark.combinations
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("numel", [2 * SAMPLE + 1, 300_000, 1 << 21])
def test_sampled_quantiles_are_accurate_and_all_elements_counted(implementation: str, numel: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).exp()
    answer = compute(tensor, LEVELS[1:-1], implementation=implementation)
    assert answer["sampled"] == SAMPLE
    x = np.sort(tensor.numpy())
    ranks = np.searchsorted(x, answer["quantiles"]) / numel
    assert np.abs(ranks - LEVELS[1:-1]).max() < 0.013
    assert sum(answer["counts"]) == numel
    assert (answer["low"], answer["high"]) == (x[0], x[-1])


def test_sample_has_no_duplicates() -> None:
    for numel in (2 * SAMPLE + 1, 40_000, 123_457, 10_000_019):
        indices = _sample_indices(numel, torch.device("cpu"))
        assert len(indices.unique()) == SAMPLE
        assert indices.min() >= 0
        assert indices.max() < numel


@pytest.mark.parametrize("channels", [2, 3, 16, 64, 128, 1000])
def test_sample_covers_every_channel(channels: int) -> None:
    """Each channel holds its own number and has to be sampled equally often, whatever its stride."""
    tensor = torch.arange(float(channels)).repeat(2_000_000 // channels, 1)
    for layout in (tensor, tensor.t().contiguous()):
        answer = compute(layout, LEVELS[1:-1], bins=2)
        wanted = np.array(LEVELS[1:-1]) * (channels - 1)
        assert np.abs(np.array(answer["quantiles"]) - wanted).max() <= 0.015 * channels + 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_only_finite_elements_are_counted(implementation: str) -> None:
    tensor = torch.tensor([math.nan, 1.0, math.inf, 2.0, -math.inf, 3.0, math.nan])
    answer = compute(tensor, (0.0, 0.5, 1.0), bins=2, implementation=implementation)
    assert answer["sampled"] == 3
    assert answer["quantiles"] == [1.0, 2.0, 3.0]
    assert (answer["low"], answer["high"], answer["counts"]) == (1.0, 3.0, [1, 2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tensor", [torch.empty(0), torch.empty(0, 3), torch.full((5,), math.nan)])
def test_distribution_without_finite_values_is_none(implementation: str, tensor: Tensor) -> None:
    answer = compute(tensor, bins=3, implementation=implementation)
    assert answer["sampled"] == 0
    assert answer["quantiles"] is answer["low"] is answer["high"] is None
    assert answer["counts"] == [0, 0, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [0.1, 0.0, 1e200, -1.7e308, 5e-324])
def test_equal_elements_are_all_in_the_first_bin(implementation: str, value: float) -> None:
    answer = compute(torch.full((100,), value, dtype=torch.float64), bins=3, implementation=implementation)
    assert answer["counts"] == [100, 0, 0]
    assert set(answer["quantiles"]) == {value}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("extreme", [[-1.7e308, 0.0, 1.7e308], [0.0, 5e-324, 1e-323], [1e300, 1e300 * (1 + 1e-15)]])
def test_extreme_values_do_not_overflow(implementation: str, extreme: list[float]) -> None:
    answer = compute(torch.tensor(extreme, dtype=torch.float64), (0.0, 0.5, 1.0), bins=4, implementation=implementation)
    assert sum(answer["counts"]) == len(extreme)
    assert answer["counts"][0] >= 1
    assert answer["counts"][-1] >= 1
    assert all(min(extreme) <= quantile <= max(extreme) for quantile in answer["quantiles"])


@pytest.mark.slow
@given(
    elements=st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=200),
    bins=st.integers(2, 70),
    levels=st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda found: tuple(sorted(set(found)))),
)
def test_all_implementations_agree(elements: list[float], bins: int, levels: tuple[float, ...]) -> None:
    tensor = torch.tensor(elements, dtype=torch.float32)
    first, *others = (compute(tensor, levels, bins, implementation) for implementation in IMPLEMENTATIONS)
    for other in others:
        assert other["counts"] == first["counts"]
        assert (other["low"], other["high"], other["sampled"]) == (first["low"], first["high"], first["sampled"])
        if first["quantiles"] is not None:
            assert other["quantiles"] == pytest.approx(first["quantiles"], rel=1e-12, abs=1e-300)


def test_distribution_is_independent_of_layout_and_type() -> None:
    plain = torch.arange(24.0).reshape(2, 3, 4)
    wanted = compute(plain)
    strided = torch.zeros(2, 3, 8)[..., ::2].copy_(plain)
    nested = torch.nested.nested_tensor([plain[0], plain[1]])
    negative = torch.complex(torch.zeros_like(plain), -plain).conj().imag
    assert negative.is_neg()
    others = (plain.transpose(0, 2), strided, plain.to_sparse(), plain.to(torch.complex64), plain.to(torch.int64))
    for same in (*others, nested, negative, nn.Parameter(plain)):
        assert compute(same) == wanted


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
def test_distribution_of_a_sparse_tensor_is_that_of_the_dense_one() -> None:
    dense = torch.arange(-11.0, 13.0).reshape(4, 6)
    dense[dense.abs() < 5] = 0.0
    dense[0, 1], dense[3, 2] = math.nan, math.inf
    wanted = compute(dense)
    for sparse in (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_csr(), dense.to_sparse_bsc((2, 3))):
        assert compute(sparse) == wanted
        vector, zeros = stored_elements(sparse)
        on_device = distribution_on_device(vector, LEVELS, 5, zeros).tolist()
        assert on_device == distribution_on_device(dense.reshape(-1), LEVELS, 5).tolist()
        assert on_device == pytest.approx(distribution(sparse, LEVELS, 5))


def test_distribution_of_a_huge_sparse_tensor_counts_its_zeros() -> None:
    size, stored = 1_000_000, 4 * SAMPLE
    places = torch.arange(stored).expand(2, stored)
    values = torch.cat([torch.full((stored // 2,), -1.0), torch.full((stored // 2,), 3.0)])
    tensor = torch.sparse_coo_tensor(places, values, (size, size), check_invariants=True)
    vector, zeros = stored_elements(tensor)
    for found in (
        distribution(tensor, (0.0, 0.5, 1.0), 4),
        distribution_on_device(vector, (0.0, 0.5, 1.0), 4, zeros).tolist(),
    ):
        assert found[1:] == [-1.0, 0.0, 3.0, -1.0, 3.0, stored // 2, size * size - stored, 0, stored // 2]


def test_cells_contain_only_what_was_requested() -> None:
    tensor = torch.arange(4.0)
    assert Distributions((), 2).cells(list(distribution(tensor, (), 2))) == (None, None, None, 0.0, 3.0, [2, 2])
    assert Distributions((0.5,), 0).cells(list(distribution(tensor, (0.5,), 0))) == (4, [0.5], [1.5], None, None, None)


def test_kernel_refuses_invalid_arguments() -> None:
    assert cpu_kernel.native is not None
    counts = np.zeros(4, np.int64)
    for kind, count, bins in ((3, 0, 4), (0, -1, 4), (0, 0, 0), (0, 0, 10**6)):
        with pytest.raises(ValueError, match="has to be"):
            cpu_kernel.native.histogram(0, count, kind, 0.0, 1.0, bins, counts.ctypes.data)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16], ids=str)
def test_every_narrow_float_is_counted(implementation: str, dtype: torch.dtype) -> None:
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    tensor = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to(bits).view(dtype)
    x = tensor.to(torch.float32).double().numpy()
    x = x[np.isfinite(x)]
    answer = compute(tensor[tensor.to(torch.float32).isfinite()][:1000], bins=2, implementation=implementation)
    assert answer["quantiles"] == pytest.approx(np.quantile(x[:1000], LEVELS), rel=1e-12)
    answer = compute(tensor, (), 2, implementation)
    assert (answer["low"], answer["high"], sum(answer["counts"])) == (x.min(), x.max(), len(x))
