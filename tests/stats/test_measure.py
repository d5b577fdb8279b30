"""Law 5: statistics are correct for every shape, layout, dtype, mean and non-finite value.

The reference is NumPy's, in two passes over an extended type (80 bits where available), independent of the
kernel. All implementations are compared with it: the compiled kernel, operations in float64, the operations for devices, and the
kernel for GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import KERNEL_DEVICE
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instrument.stats import cpu_kernel, device_kernel
from instrument.stats.device_choice import measure_on_device
from instrument.stats.device_sums import DeviceSums, device_memory
from instrument.stats.flatten import as_vector
from instrument.stats.measure import Measured, measure, measure_statistics
from instrument.stats.portable import further_sums
from instrument.stats.sums import INDEX, MEASURED_COLUMNS, needs_of
from instrument.tables.statistics import ALL, DEFAULT, MAGNITUDES, STATISTICS

# On a GPU, which Triton's interpreter imitates, operations on NaN do not warn.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

NAMES = tuple(name for name in ALL if all(need.term is not None for need in STATISTICS[name].needs))
BLOCK = 65_536
EXACT = ("numel", "min", "max", "abs_max", "zero_fraction", "nan_count", "inf_count", "negative_fraction", "l0")
SHAPE_OF_DISTRIBUTION = ("skewness", "kurtosis")
SMALLEST = 5e-324  # the smallest positive float64
RELATIVE = ("std", "rms", "l1", "l2")
Numbers = dict[str, float | None]
Implementation = Callable[[Tensor], Numbers]


def measure_with_kernel(tensor: Tensor) -> Numbers:
    return dict(zip(NAMES, measure_statistics(tensor, NAMES), strict=True))


def measure_portably(tensor: Tensor) -> Numbers:
    """Measure as on a machine without a C compiler."""
    with mock.patch.object(cpu_kernel, "native", None):
        return measure_with_kernel(tensor)


def numbers_on_device(sums: DeviceSums) -> Numbers:
    """Return the statistics on the host, after a comparison with those that are computed on the device."""
    measured = Measured(on_device=sums)
    values = measured.statistics(NAMES)
    for name, value in zip(NAMES, values, strict=True):
        on_device = measured.statistic(name)
        assert isinstance(on_device, Tensor)
        assert on_device.item() == pytest.approx(
            math.nan if value is None else value, rel=1e-9, abs=1e-300, nan_ok=True
        ), name
    return dict(zip(NAMES, values, strict=True))


def measure_with_device_operations(tensor: Tensor) -> Numbers:
    """Measure with the operations used on a GPU, here on the CPU."""
    return numbers_on_device(measure_on_device(as_vector(tensor), needs_of(NAMES), 0, None))


def measure_with_device_kernel(tensor: Tensor) -> Numbers:
    """Measure with the kernel used on a GPU. Without a GPU, it is interpreted on the CPU."""
    flat = as_vector(tensor).to(KERNEL_DEVICE)
    if flat.dtype not in device_kernel.DTYPES or not flat.numel():
        return measure_with_device_operations(tensor)
    sums = DeviceSums(device_memory(1, flat.device)[0], flat.numel())
    # The interpreter needs milliseconds for each block.
    with mock.patch.object(device_kernel, "_BLOCK", 1024 if flat.numel() < 20_000 else 2**17):
        device_kernel.measure_by_kernel(flat, sums.row[MEASURED_COLUMNS])
    others = [each for each in needs_of(NAMES) if each is not MAGNITUDES]
    for each, number in zip(others, further_sums(flat, sums.sums()[0], others), strict=True):
        sums.row[INDEX[each.name]] = number
    return numbers_on_device(sums)


def reference(elements: Any) -> Numbers:
    """Compute each statistic from its definition."""
    x = np.asarray(elements).reshape(-1)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.abs(x.astype(np.clongdouble)) if np.iscomplexobj(x) else x.astype(np.longdouble)
    finite = x[np.isfinite(x)]
    n = finite.size
    counts: Numbers = {"numel": x.size, "nan_count": int(np.isnan(x).sum()), "inf_count": int(np.isinf(x).sum())}
    if n == 0:
        return {name: counts.get(name) for name in NAMES}
    moved = finite - finite[0]  # so that the std of equal values is 0, however their mean is rounded
    moved -= moved.sum() / n
    scaled = moved / (np.abs(moved).max() or 1)  # the powers of some numbers overflow
    variance = (scaled**2).sum() / n
    return {
        **counts,
        "mean": float(finite.sum() / n),
        "std": float(np.sqrt((moved**2).sum() / n)),
        "skewness": float((scaled**3).sum() / n / variance**1.5) if variance else None,
        "kurtosis": float((scaled**4).sum() / n / variance**2 - 3) if variance else None,
        "negative_fraction": float((finite < 0).sum()) / n,
        "l0": int((finite != 0).sum()),
        "rms": float(np.sqrt((finite**2).sum() / n)),
        "min": float(finite.min()),
        "max": float(finite.max()),
        "abs_max": float(np.abs(finite).max()),
        "l1": float(np.abs(finite).sum()),
        "l2": float(np.sqrt((finite**2).sum())),
        "zero_fraction": float((finite == 0).sum()) / n,
    }


def assert_law_5(got: Numbers, wanted: Numbers) -> None:
    assert {name for name in NAMES if got[name] is None} == {name for name in NAMES if wanted[name] is None}
    for name in EXACT:
        assert got[name] == wanted[name], name
    if wanted["mean"] is None:
        return
    for name in RELATIVE:
        assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=SMALLEST), name
    for name in SHAPE_OF_DISTRIBUTION:
        if wanted[name] is not None:
            assert got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
    scale = max(abs(wanted["mean"]), wanted["std"] or 0.0)
    assert got["mean"] == pytest.approx(wanted["mean"], rel=0, abs=max(1e-5 * scale, SMALLEST)), "mean"


def numpy_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    wide = dense.to(torch.float32) if dense.dtype in (torch.bfloat16, *FLOAT8) else dense
    wide = wide.to(torch.complex64) if dense.dtype == torch.complex32 else wide
    return wide.detach().resolve_conj().resolve_neg().numpy()


FLOAT8 = (*(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz), torch.float8_e8m0fnu)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, *UNSIGNED)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
ALL_IMPLEMENTATIONS: tuple[Implementation, ...] = (
    measure_with_kernel,
    measure_portably,
    measure_with_device_operations,
    measure_with_device_kernel,
)
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "flat": lambda x: x.reshape(-1),
    "transposed": lambda x: x.transpose(1, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: x[::2, :, 1::3, ::2],
    "strided in one dimension": lambda x: x.reshape(-1)[::7],
    "a column": lambda x: x[:, 0, 0, 0],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "one element expanded": lambda x: x[0, 0, 0, 0].expand(3, 4),
    "flipped": lambda x: x.flip(0),
    "with an offset": lambda x: x[1:, :, 2:],
    "empty": lambda x: x[:0],
    "empty in the middle": lambda x: x[:, :0],
    "one element": lambda x: x[:1, :1, :1, :1],
    "zero-dimensional": lambda x: x[0, 0, 0, 0],
    "one sample": lambda x: x[:1],
}


@pytest.mark.spread(8)
@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", SHAPES)
def test_statistics_of_every_layout_and_float_type(
    implementation: Implementation, dtype: torch.dtype, layout: str
) -> None:
    tensor = SHAPES[layout](drawn(4, 3, 8, 10).to(dtype))
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    "special",
    [
        *([math.nan], [math.nan] * 5, [math.inf], [-math.inf, math.inf, math.nan], [math.nan, 1.0, 2.0]),
        *([1.0, -math.inf], [0.0, -0.0, math.inf, math.nan, 3.0, -7.0], [0.0], [-0.0, 0.0], [5.0], [-2.5] * 9),
    ],
    ids=str,
)
def test_non_finite_values_are_counted_and_excluded(
    implementation: Implementation, dtype: torch.dtype, special: list[float]
) -> None:
    tensor = torch.tensor(special, dtype=dtype)
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.spread(1)
@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_of_several_blocks(implementation: Implementation, dtype: torch.dtype, size: int) -> None:
    tensor = drawn(size, dtype=dtype) + torch.linspace(0, 50, size).to(dtype)  # blocks of different means
    tensor[::1001] = math.nan
    tensor[5::997] = -math.inf
    tensor[:: size // 3] = 0.0
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.spread(1)
@IMPLEMENTATIONS
def test_statistics_with_a_block_without_finite_values(implementation: Implementation) -> None:
    tensor = drawn(3 * BLOCK)
    tensor[BLOCK : 2 * BLOCK] = math.nan
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))
    tensor[:BLOCK] = math.inf
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.spread(3)
@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [100, 2 * BLOCK + 3])
def test_std_of_a_small_spread_around_a_large_mean(
    implementation: Implementation, dtype: torch.dtype, size: int
) -> None:
    tensor = (drawn(size, dtype=torch.float64) * 1e-2 + 1e4).to(dtype)
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.spread(1)
@IMPLEMENTATIONS
def test_std_of_a_spread_in_the_last_bits_of_float64(implementation: Implementation) -> None:
    steps = (torch.arange(2 * BLOCK + 5) % 7).double() * 2.0**-38  # of two units in the last place of float64
    assert_law_5(implementation(1e4 + steps), reference(numpy_of(1e4 + steps)))


@IMPLEMENTATIONS
@pytest.mark.parametrize("size", [1000, BLOCK + 1000])
def test_constant_tensor_has_zero_std(implementation: Implementation, size: int) -> None:
    tensor = torch.full((size,), 0.1)
    got = implementation(tensor)
    assert got["std"] == 0.0
    assert got["mean"] == tensor[0].item()


@pytest.mark.spread(8)
@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        *[(torch.float32, number) for number in (3e38, 1e-38, 1e-45)],
        *[(torch.float16, number) for number in (6.5e4, 6e-8)],
        *[(torch.bfloat16, number) for number in (3e38, 1e-40)],
        *[(torch.float64, number) for number in (1e150, 1e200, 1.7e308, 1e-150, 1e-200, 5e-324)],
    ],
)
def test_huge_and_tiny_values_do_not_overflow_or_vanish(
    implementation: Implementation, dtype: torch.dtype, magnitude: float
) -> None:
    pattern = torch.tensor([1.0, -1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    tensor = (pattern * magnitude).to(dtype)
    wanted = reference(numpy_of(tensor))
    for name in ("l1", "l2"):
        if wanted[name] == math.inf:  # the sum itself is beyond float64
            assert implementation(tensor)[name] == math.inf
    assert_law_5(implementation(tensor), wanted)


@pytest.mark.combinations
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_and_booleans_are_measured(implementation: Implementation, dtype: torch.dtype) -> None:
    info = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    some = torch.randint(max(info[0], -1000), min(info[1], 1000) + 1, (50,), generator=torch.Generator().manual_seed(0))
    tensor = torch.cat([some.to(dtype), torch.tensor(info[:1], dtype=dtype), torch.tensor(info[1:], dtype=dtype)])
    wanted = reference(numpy_of(tensor))
    wanted |= {name: float(np.float64(wanted[name])) for name in ("min", "max", "abs_max")}  # rounded like the column
    assert_law_5(implementation(tensor), wanted)


def numbers_of(dtype: torch.dtype) -> Tensor:
    """Return every number of an 8-bit or 16-bit floating type, with its infinities and NaN."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.spread(3)
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *FLOAT8], ids=str)
def test_every_narrow_float_is_measured(implementation: Implementation, dtype: torch.dtype) -> None:
    tensor = numbers_of(dtype)
    assert_law_5(implementation(tensor), reference(numpy_of(tensor)))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", COMPLEX, ids=str)
def test_complex_values_are_measured_by_magnitude(dtype: torch.dtype) -> None:
    tensor = torch.complex(drawn(40, seed=1, dtype=torch.float64), drawn(40, seed=2, dtype=torch.float64)).to(dtype)
    tensor[3] = complex(math.nan, 1.0)
    tensor[4] = complex(math.inf, 1.0)
    tensor[5] = 0
    for view in (tensor, tensor.conj(), tensor.reshape(5, 8).t(), tensor.imag, tensor.conj().imag):
        # The magnitude is computed in float64.
        wide = numpy_of(view).astype(np.complex128) if view.is_complex() else numpy_of(view)
        got, wanted = measure_with_kernel(view), reference(wide)
        for name in ("min", "max", "abs_max") if view.is_complex() else ():
            assert got[name] == pytest.approx(wanted[name], rel=1e-15)
            got[name] = wanted[name]
        assert_law_5(got, wanted)


def test_magnitude_beyond_the_dtype_of_the_parts_is_finite() -> None:
    got = measure_with_kernel(torch.tensor([complex(3e38, 3e38)], dtype=torch.complex64))
    assert got["inf_count"] == 0
    assert got["max"] == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)


TO_SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "coo with dense rows": lambda x: x.to_sparse(1),
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 1)),
    "bsc": lambda x: x.to_sparse_bsc((3, 7)),
}


def measure_as_on_device(tensor: Tensor) -> Numbers:
    """Measure with the numbers of the operations used on a GPU."""
    with mock.patch("instrument.stats.measure.is_on_host", return_value=False):
        sums = measure(tensor, needs_of(NAMES)).on_device
    return numbers_on_device(sums)


@pytest.mark.spread(6)
@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
@pytest.mark.parametrize("measuring", [measure_with_kernel, measure_portably, measure_as_on_device])
@pytest.mark.parametrize("layout", TO_SPARSE)
def test_sparse_tensors_are_measured_with_their_zeros(layout: str, measuring: Implementation) -> None:
    dense = drawn(6, 7).relu()
    dense[2:4] = 0.0
    for changed in (dense, -dense, dense * 1e38, torch.zeros(6, 7), torch.ones(6, 7)):
        assert_law_5(measuring(TO_SPARSE[layout](changed)), reference(changed.numpy()))
    dense[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert_law_5(measuring(TO_SPARSE[layout](dense)), reference(dense.numpy()))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_sparse_tensors_of_every_type_are_measured(dtype: torch.dtype) -> None:
    dense = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0]]).to(dtype)
    assert_law_5(measure_with_kernel(dense.to_sparse()), reference(numpy_of(dense)))


def test_huge_sparse_tensor_is_measured_without_becoming_dense() -> None:
    size, values = 3_000_000, torch.tensor([1.0, 2.0, -4.0, 2.0])
    places = torch.arange(4).expand(2, 4)
    n = size * size
    mean, squares = 1.0 / n, 25.0
    wanted = {
        **{"numel": n, "min": -4.0, "max": 2.0, "abs_max": 4.0, "zero_fraction": (n - 4) / n},
        **{"mean": mean, "std": math.sqrt(squares / n - mean * mean), "rms": 5.0 / size, "l1": 9.0, "l2": 5.0},
        **{"nan_count": 0, "inf_count": 0, "l0": 4, "negative_fraction": 1 / n},
        "skewness": sum((x - mean) ** 3 for x in (1, 2, -4, 2)) / n / (squares / n) ** 1.5,
        "kurtosis": sum((x - mean) ** 4 for x in (1, 2, -4, 2)) / n / (squares / n) ** 2 - 3,
    }
    tensor = torch.sparse_coo_tensor(places, values, (size, size), check_invariants=True)
    assert_law_5(measure_with_kernel(tensor), wanted)
    nothing = torch.sparse_coo_tensor(size=(size, size), check_invariants=True)
    assert_law_5(measure_with_kernel(nothing), reference([0.0]) | {"numel": n})


def test_uncoalesced_sparse_tensor_is_measured_by_its_sums() -> None:
    indices, values = torch.tensor([[1, 1, 2]]), torch.tensor([1.0, 2.0, -3.0])
    tensor = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    assert_law_5(measure_with_kernel(tensor), reference([0.0, 3.0, -3.0, 0.0]))


def test_parameters_and_graph_results_are_measured() -> None:
    weight = nn.Parameter(drawn(3, 4))
    for tensor in (weight, (weight * 2).relu()):
        assert_law_5(measure_with_kernel(tensor), reference(numpy_of(tensor)))


@IMPLEMENTATIONS
def test_measuring_does_not_change_the_tensor(implementation: Implementation) -> None:
    tensor = drawn(2, BLOCK)
    tensor[0, 0] = math.nan
    before, version = tensor.clone(), tensor._version
    implementation(tensor)
    assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0))
    assert tensor._version == version


NAME_LISTS = (DEFAULT, ("l2",), ("l1", "mean"), ("max", "min", "max"), (), ("mean",), ("zero_fraction",), ("l1", "std"))


@pytest.mark.parametrize("names", NAME_LISTS, ids=str)
def test_values_are_in_order_and_independent_of_other_names(names: Sequence[str]) -> None:
    for tensor in (drawn(50), drawn(3 * BLOCK).relu()):
        everything = measure_with_kernel(tensor)
        assert measure_statistics(tensor, names) == [everything[name] for name in names]


def test_counts_are_integers_and_other_statistics_floats() -> None:
    got = measure_with_kernel(torch.tensor([1.0, 2.0, math.nan]))
    for name in NAMES:
        assert type(got[name]) is {"int64": int, "float64": float}[STATISTICS[name].dtype], name


magnitudes = st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30])
floats32 = st.floats(width=32, allow_nan=True, allow_infinity=True)


@pytest.mark.slow
@given(
    npst.arrays(np.float32, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6), elements=floats32),
    st.randoms(use_true_random=False),
)
def test_law_5_for_any_float32_and_dimension_order(array: np.ndarray[Any, Any], random: Any) -> None:
    tensor = torch.from_numpy(array)
    tensor = tensor.permute(random.sample(range(tensor.dim()), tensor.dim()))
    wanted = reference(array)
    for implementation in ALL_IMPLEMENTATIONS:
        assert_law_5(implementation(tensor), wanted)


@pytest.mark.slow
@given(npst.arrays(np.float64, st.integers(0, 30), elements=st.floats(allow_nan=True, allow_infinity=True)))
def test_law_5_for_any_float64_with_representable_sums(array: np.ndarray[Any, Any]) -> None:
    wanted = reference(array)
    # A number that differs from the right one by less than the tolerance of law 5 may be infinite, too.
    if any((wanted[name] or 0.0) * (1 + 1e-5) == math.inf for name in ("l1", "l2")):
        return
    for implementation in ALL_IMPLEMENTATIONS:
        assert_law_5(implementation(torch.from_numpy(array)), wanted)


@pytest.mark.slow
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.floats(-1e4, 1e4),
    magnitudes,
    st.integers(1, 2 * BLOCK),
    st.integers(0, 2**31),
)
def test_law_5_for_any_mean_and_spread(dtype: torch.dtype, mean: float, spread: float, size: int, seed: int) -> None:
    tensor = (drawn(size, seed=seed, dtype=torch.float64) * spread + mean).to(dtype)
    wanted = reference(numpy_of(tensor))
    for implementation in ALL_IMPLEMENTATIONS:
        assert_law_5(implementation(tensor), wanted)


ADVERSARIES: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "a mean of just under two deviations": lambda rng, n: rng.normal(1.99, 1.0, n),
    "a mean of just over two deviations": lambda rng, n: rng.normal(2.01, 1.0, n),
    "one magnitude, whose square has no end in binary": lambda rng, n: rng.choice([-0.1, 0.1], n),
    "one magnitude with a mean": lambda rng, n: rng.choice([-0.1, 0.1, 0.1], n),
    "half zeros": lambda rng, n: np.maximum(rng.normal(0.0, 1.0, n), 0.0),
    "no second moment": lambda rng, n: rng.standard_cauchy(n),
    "a few large ones among many small ones": lambda rng, n: np.where(np.arange(n) % 1000 == 0, 1.0, 1e-4),
    "in order": lambda rng, n: np.sort(rng.normal(0.5, 1.0, n)),
    "quantised": lambda rng, n: rng.integers(-3, 4, n) * 0.1,
    "each block of its own mean": lambda rng, n: rng.normal(0.0, 1.0, n) + np.arange(n) // BLOCK * 100.0,
    "one block far from zero, the others around it": lambda rng, n: (
        rng.normal(0.0, 1.0, n) + (np.arange(n) < BLOCK) * 1e4
    ),
}


@pytest.mark.spread(4)
@pytest.mark.combinations
@pytest.mark.parametrize("size", [5, 700, 20_091, 2 * BLOCK + 3])
@pytest.mark.parametrize("scale", [1e-13, 1e-11, 1e-3, 1.0, 1e12, 3e15, 1e17])
@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_law_5_for_ill_conditioned_float32_sums(adversary: str, scale: float, size: int) -> None:
    values = ADVERSARIES[adversary](np.random.default_rng(size), size) * scale
    tensor = torch.from_numpy(values.astype(np.float32))
    wanted = reference(tensor.numpy())
    for implementation in (measure_with_kernel, measure_portably):
        assert_law_5(implementation(tensor), wanted)


@pytest.mark.slow
def test_measuring_is_thread_safe() -> None:
    tensors = [torch.randn(2 * BLOCK) * 10.0**i for i in range(8)]
    wanted = [measure_statistics(tensor, NAMES) for tensor in tensors]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert list(pool.map(lambda tensor: measure_statistics(tensor, NAMES), tensors)) == wanted


def test_inference_tensor_is_measured() -> None:
    with torch.inference_mode():
        inside = measure_with_kernel(torch.arange(5.0))
    assert measure_with_kernel(torch.arange(5.0)) == inside


def test_compiled_kernel_is_available() -> None:
    """Without a C compiler, results are equally correct but several times slower; the tests have to cover both."""
    assert cpu_kernel.native is not None


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 4095, 4096, 4097, 4111, 4112, 8191, 8192, 8209])
def test_special_values_at_lane_and_chunk_edges(dtype: torch.dtype, size: int) -> None:
    tensor = (drawn(size, dtype=torch.float64).abs() + 0.5).to(dtype)
    for special in (math.nan, math.inf, -math.inf, 0.0, -0.0, -700.0, 700.0):
        for index in {0, 15, 16, 4095, 4096, size // 2, size - 1}:
            if index < size:
                changed = tensor.clone()
                changed[index] = special
                assert_law_5(measure_with_kernel(changed), reference(numpy_of(changed)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flush", [False, True])
def test_kernel_converts_every_16_bit_float_as_torch(dtype: torch.dtype, flush: bool) -> None:
    """Also while the processor flushes subnormal numbers to zero."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randperm(1 << 16, generator=generator).to(torch.uint16).view(dtype)
    finite = every[every.isfinite() & ((dtype == torch.float16) | (every.abs() >= 2.0**-126))]
    wide = finite.float()
    assert torch.set_flush_denormal(flush) or not flush
    try:
        for low, high in ((one, one + 2) for one in range(0, len(finite) - 2, 37)):
            assert cpu_kernel.kernel_sums(finite[low:high])[4] == wide[low:high].min()
        for given in (finite, finite.abs(), every):
            by_kernel = cpu_kernel.kernel_sums(given, 1)
            assert by_kernel.tobytes() == cpu_kernel.kernel_sums(given.float(), 1).tobytes()
    finally:
        torch.set_flush_denormal(False)


def test_every_element_is_counted_once() -> None:
    for size in range(1, 200):
        assert measure_with_kernel(torch.ones(size))["l2"] == math.sqrt(size)
        assert measure_with_kernel(torch.zeros(size).index_fill_(0, torch.tensor([size - 1]), 1.0))["l1"] == 1.0


@pytest.mark.spread(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_effect_counts_changes_and_has_the_measured_norms(dtype: torch.dtype) -> None:
    for size in (2, 15, 16, 17, 4095, 4096, 4097, 8209):
        before = (drawn(size, dtype=torch.float64) + 3.0).to(dtype)
        for special in (1.0, math.nan, math.inf, -math.inf, 1e30):
            after = before.clone()
            for changes, index in enumerate(sorted({0, 1, 15 % size, size // 2, size - 1}), 1):
                after[index] = special
                counted = cpu_kernel.effect_of_plain(before, after)
                norms = [measure_statistics(each, ("l2",))[0] for each in (before, after)]
                wanted = [changes, *(math.nan if norm is None else norm for norm in norms)]
                assert counted == pytest.approx(wanted, rel=1e-13, nan_ok=True)
                assert cpu_kernel.effect_of_plain(after, after)[0] == 0
    nothing = torch.full((20,), math.nan, dtype=dtype)
    assert repr(cpu_kernel.effect_of_plain(nothing, nothing)) == "[0.0, nan, nan]"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_effect_of_clip_is_that_of_the_clamped_tensor(dtype: torch.dtype) -> None:
    for size in (2, 15, 16, 17, 4097, 8209):
        for special in (1.0, 2.0, math.nan, math.inf, -math.inf, -0.0):
            tensor = drawn(size, dtype=torch.float64).clamp(-3.0, 3.0).to(dtype)
            tensor[tensor.abs() == 1.0] = 0.5
            tensor[size // 2] = special
            for low, high in ((-1.0, 1.0), (None, 1.0), (-1.0, None), (0.0, 0.0), (2.0, 2.5)):
                found = cpu_kernel.effect_of_clip(tensor, low, high)
                expected = cpu_kernel.effect_of_plain(tensor, tensor.clamp(low, high))
                if expected is None:  # the norm of zeros in float64
                    assert found is None
                    continue
                is_inside, effect = found
                assert effect == pytest.approx(expected, rel=1e-13, nan_ok=True)
                at_bound = torch.zeros_like(tensor, dtype=torch.bool)
                for bound in (low, high):
                    at_bound |= tensor == (math.inf if bound is None else bound)
                assert is_inside == bool((tensor.isfinite() & ~at_bound).all())
    assert cpu_kernel.effect_of_clip(tensor, 1.0, -1.0) is None


@pytest.mark.parametrize("magnitude", [0.0, 1e-170, 1e-150, 1e145, 1e200])
def test_effect_is_left_to_other_code_where_squares_are_not_exact(magnitude: float) -> None:
    tensor = torch.full((40,), magnitude, dtype=torch.float64)
    assert cpu_kernel.effect_of_plain(tensor, torch.ones_like(tensor)) is None
    assert cpu_kernel.effect_of_plain(torch.ones_like(tensor), tensor) is None


class InterruptedMode(TorchFunctionMode):
    """Ctrl-C in the code of a mode, which the kernel calls to read a property of the tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "call",
    [
        lambda tensor: cpu_kernel.make_slab(32).add(tensor, 0, (), 0),
        lambda tensor: cpu_kernel.make_slab(32).add_effect(tensor, tensor, 0, (), None, None),
        lambda tensor: cpu_kernel.effect_of_clip(tensor, None, 1.0),
        lambda tensor: cpu_kernel.effect_of_plain(tensor, tensor),
    ],
)
def test_interrupt_in_a_mode_reaches_the_caller_of_the_kernel(call: Callable[[Tensor], object]) -> None:
    tensor = torch.ones(20)
    with InterruptedMode(), pytest.raises(KeyboardInterrupt):
        call(tensor)


def test_kernel_refuses_unknown_types() -> None:
    assert cpu_kernel.native is not None
    with pytest.raises(ValueError, match="kind has to be 0 to 3"):
        cpu_kernel.native.sums(0, 0, 4, 0)
    with pytest.raises(ValueError, match="count 0 or more"):
        cpu_kernel.native.sums(0, -1, 0, 0)
    for kind, length, block in ((4, 1, 0), (0, 0, 0), (0, 1, 24)):
        cast = length, 1, 1.0, 0, 0, 3, -6, 448.0, block, int(block > 0)
        with pytest.raises(ValueError, match="kind has to be 0 to 3, length and inner 1 or more"):
            cpu_kernel.native.sums(0, 0, kind, 0, cast)
    assert np.frombuffer(cpu_kernel.native.sums(0, 0, 0, 0))[:4].tolist() == [0, 0, 0, 0]
