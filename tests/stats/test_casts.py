"""What a cast to a narrow format would lose: the table `casts`."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, record, refused, run_step, run_steps
from torch import Tensor, nn

from instrument.stats import cpu_kernel
from instrument.stats.casts import Casts, next_scale
from instrument.tables.formats import FORMATS, Cast, Format
from instrument.values.dtensor import NOT_SHARDED

TORCH_FORMATS = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
BLOCK_FORMATS = tuple(name for name, form in FORMATS.items() if form.block)
COLUMNS = ("underflow_fraction", "overflow_fraction", "quantization_error")


def use_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_kernel, "native", None)


@pytest.fixture(params=["kernel", "operations"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Measure by the compiled kernel, and by PyTorch operations."""
    if request.param == "operations":
        use_operations(monkeypatch)
    return str(request.param)


def overflows(x: Tensor, cast: Tensor, to: str) -> Tensor:
    """Return which finite numbers are rounded to more than the largest one: an infinity in formats that have it.

    Versions of PyTorch differ in whether the cast to float8_e4m3fn, which has no infinity, returns NaN or 448. The next number would be
    480, so that those above 464 are rounded up; 464 itself is rounded to the even mantissa of 448.
    """
    return x.abs() > 464 if to == "float8_e4m3fn" else ~cast.isfinite()


def fitting(tensor: Tensor, to: str) -> float:
    """Return the scale that makes the largest magnitude the largest number of a format."""
    magnitudes = tensor[tensor.isfinite()].abs().double()
    top = FORMATS[to].largest * (448.0 if FORMATS[to].scales == 2 else 1.0)
    return torch.tensor(top).div(magnitudes.max().float()).item() if magnitudes.any() else 1.0


def lost(tensor: Tensor, to: str, scale: Any = None, **fields: Any) -> dict[str, Any]:
    """Return the cells of a row, and the counts. The default scale of nvfp4 is that of the same tensor."""
    if scale == "fitting" or (scale is None and to == "nvfp4"):
        scale = fitting(tensor, to)
    measure = Casts(Cast(to=to, scale=scale), **fields)
    numbers = measure.values(tensor).tolist()
    _, used, *fractions, blocks, _ = measure.cells(numbers, tuple(tensor.shape))
    counts = dict(zip(("finite", "underflows", "overflows"), map(int, numbers[:3]), strict=True))
    return {**dict(zip(COLUMNS, fractions, strict=True)), "scale": used, "block_errors": blocks, **counts}


@pytest.mark.spread(1)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("to", TORCH_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_numbers_are_cast_as_by_torch(to: str, dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for part in numbers.split(512):  # of similar exponents, so that each part shows its own errors
        x = part.double()
        finite = x.isfinite()
        cast = part.to(getattr(torch, to)).double()
        over = finite & overflows(x, cast, to)
        expected = torch.where(over, x.sign() * FORMATS[to].largest, cast)[finite] - x[finite]
        row = lost(part, to)
        counts = finite.sum(), (finite & (cast == 0) & (x != 0)).sum(), over.sum()
        assert (row["finite"], row["underflows"], row["overflows"]) == tuple(count.item() for count in counts)
        squares = x[finite].square().sum().item()
        if squares:
            error = expected.square().sum().item() / squares
            assert row["quantization_error"] == pytest.approx(error, rel=1e-12, abs=1e-300)


@pytest.mark.spread(2)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("to", TORCH_FORMATS)
def test_float32_near_the_ties_is_cast_as_by_torch(to: str) -> None:
    """Each number halfway between two neighbours, and the numbers of float32 next to it."""
    form = FORMATS[to]
    known = magnitudes_of(form._replace(least=max(form.least, -14)), beyond=4)
    exact = np.array([float((low + high) / 2) for low, high in pairwise(known)])
    halves = exact[exact < np.finfo(np.float32).max].astype(np.float32)
    near = np.concatenate([halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(np.inf))])
    for x in torch.from_numpy(np.concatenate([near, -near])).split(2999):
        cast = x.to(getattr(torch, to)).double()
        row = lost(x, to)
        over = overflows(x, cast, to)
        assert row["overflows"] == over.sum()
        assert row["underflows"] == ((cast == 0) & (x != 0)).sum()
        kept = torch.where(over, x.double().sign() * form.largest, cast)
        error = (kept - x.double()).square().sum() / x.double().square().sum()
        assert row["quantization_error"] == pytest.approx(error.item(), rel=1e-9)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("to", FORMATS)
def test_numbers_outside_float32_count(to: str) -> None:
    x = torch.tensor([[1e-50], [-1e-50], [1e39], [1.0], [0.0], [math.inf]], dtype=torch.float64)
    row = lost(x, to, None if FORMATS[to].scales == 1 else 1.0)
    assert row["finite"] == 5
    if to in TORCH_FORMATS:
        cast = x.to(getattr(torch, to)).double()
        assert row["underflows"] == ((cast == 0) & (x != 0)).sum()
        assert row["overflows"] == (x.isfinite() & overflows(x, cast, to)).sum()


@cache
def magnitudes_of(form: Format, beyond: int = 1) -> list[Fraction]:
    """Return all magnitudes of a format, ascending, and some that would follow the largest one. The index is the code."""
    known: list[Fraction] = []
    exponent, ones = form.least, 2**form.mantissa
    known += [Fraction(code, ones) * Fraction(2) ** form.least for code in range(ones)]
    while known[-1] <= Fraction(form.largest):
        known += [(1 + Fraction(code, ones)) * Fraction(2) ** exponent for code in range(ones)]
        exponent += 1
    return known[: known.index(Fraction(form.largest)) + 1 + beyond]


def nearest(x: Fraction, form: Format) -> tuple[Fraction, bool]:
    """Return a magnitude in a format, half to even, the largest one for larger numbers, and whether it is larger."""
    known = magnitudes_of(form)
    below = bisect_right(known, x) - 1
    if below == len(known) - 1:
        return Fraction(form.largest), True
    distance = x - known[below], known[below + 1] - x
    code = below if distance[0] < distance[1] or (distance[0] == distance[1] and below % 2 == 0) else below + 1
    return (Fraction(form.largest), True) if code == len(known) - 1 else (known[code], False)


@dataclass
class Expected:
    """What a block loses: counts, squared error and squares."""

    underflows: int = 0
    overflows: int = 0
    error: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)


def expected_of(block: list[float], form: Format, scale: float) -> Expected:
    """Return what a block loses, by exact arithmetic. The scales are rounded to float32 as by a device."""
    x = [Fraction(abs(value)) for value in block]
    amax = max(x)
    result, factor = Expected(), Fraction(1)
    if form.scales == 1 and amax:
        exponent = math.frexp(float(amax))[1] - math.frexp(form.largest)[1]
        factor = 1 / Fraction(2) ** exponent
    elif form.scales == 2:
        wide = np.float32(np.float32(float(amax)) / np.float32(form.largest)) * np.float32(scale)
        stored, _ = nearest(Fraction(float(wide)), FORMATS["float8_e4m3fn"])
        factor = Fraction(float(np.float32(scale) / np.float32(float(stored)))) if stored else Fraction(0)
    for value in x:
        scaled = Fraction(float(np.float32(float(value)) * np.float32(float(factor))))
        cast, is_above = nearest(scaled, form)
        decoded = (
            (cast / factor if form.scales == 1 else cast * stored / Fraction(float(np.float32(scale))))
            if cast
            else cast
        )
        result.underflows += value != 0 and cast == 0
        result.overflows += is_above
        result.error += (decoded - value) ** 2
        result.squares += value**2
    return result


def assert_close(row: dict[str, Any], expected: dict[str, Any], rel: float = 1e-12) -> None:
    """Assert that two rows of `lost` are equal, sums up to rounding."""
    for name, value in expected.items():
        assert row[name] == (None if value is None else pytest.approx(value, rel=rel)), name


def blocks_of(x: Tensor, size: int) -> Iterator[list[float]]:
    for row in x.tolist():
        yield from (row[at : at + size] for at in range(0, len(row), size))


@pytest.mark.spread(4)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("length", [64, 41])
@pytest.mark.parametrize("to", BLOCK_FORMATS)
def test_blocks_follow_their_specification(to: str, length: int) -> None:
    """MX: OCP Microscaling Formats 1.0, section 6.3. NVFP4: arXiv 2509.25149, appendix C."""
    torch.manual_seed(0)
    x = torch.randn(6, length) * torch.tensor([1e-3, 1e-2, 1.0, 30.0, 1e4, 0.0])[:, None]
    x[2, 3], x[3, 7], x[1, :16] = 2.0**-20, 96.0, 0.0
    form = FORMATS[to]
    scale = fitting(x, to) if form.scales == 2 else 1.0
    expected = [expected_of(block, form, scale) for block in blocks_of(x, form.block)]
    row = lost(x, to)
    assert row["underflows"] == sum(each.underflows for each in expected)
    assert row["overflows"] == sum(each.overflows for each in expected)
    error = sum(each.error for each in expected) / sum(each.squares for each in expected)
    assert row["quantization_error"] == pytest.approx(float(error), rel=1e-6)
    errors = [float(each.error / each.squares) for each in expected if each.squares]
    quantiles = np.quantile(errors, [0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])
    assert row["block_errors"] == pytest.approx(quantiles, rel=1e-6)


@pytest.mark.spread(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("to", "scale"), [("float8_e4m3fn", "fitting"), ("float8_e5m2", 0.37), *[(n, None) for n in BLOCK_FORMATS]]
)
def test_operations_equal_the_kernel(to: str, scale: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x = (torch.randn(7, 5, 83) * torch.randn(83).exp() ** 4).to(dtype)
    x[0, 0, :5] = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    by_kernel = lost(x, to, scale)
    use_operations(monkeypatch)
    monkeypatch.setattr("instrument.stats.portable.PART", 500)
    by_operations = lost(x, to, scale)
    assert by_kernel["finite"] == x.isfinite().sum()
    assert_close(by_operations, by_kernel)


@pytest.mark.usefixtures("way")
def test_scale_of_a_tensor() -> None:
    x = torch.tensor([3.0, -1e-4, 0.11, 0.0])
    row = lost(x, "float8_e4m3fn", "fitting")
    assert row["scale"] == torch.tensor(448.0).div(3.0).item()
    scaled = (x * row["scale"]).to(torch.float8_e4m3fn).double() / row["scale"]
    error = (scaled - x.double()).square().sum() / x.double().square().sum()
    assert row["quantization_error"] == pytest.approx(error.item(), rel=1e-12)
    assert (row["underflows"], row["overflows"]) == (0, 0)
    assert lost(x, "float8_e4m3fn", 1024)["overflows"] == 1
    assert lost(x, "float8_e4m3fn", 1)["underflows"] == 1
    assert lost(x, "nvfp4", "fitting")["scale"] == torch.tensor(448.0 * 6.0).div(3.0).item()
    assert lost(x, "float8_e5m2")["scale"] == 1.0
    most = torch.finfo(torch.float32).max
    assert next_scale(2.0**-140, FORMATS["float8_e5m2"], 1.0) == most
    assert next_scale(torch.tensor(2.0**-140), FORMATS["float8_e5m2"], 1.0) == most
    for amax in (
        1e300,
        torch.tensor(1e300, dtype=torch.float64),
    ):  # the cast limits it to the largest number of float32
        assert next_scale(amax, FORMATS["float8_e4m3fn"], 1.0) == torch.tensor(224.0).div(most)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("to", FORMATS)
def test_zeros_empty_and_scalar_tensors(to: str) -> None:
    for x, finite in (
        (torch.zeros(3, 5), 15),
        (torch.zeros(0, 5), 0),
        (torch.zeros(5, 0), 0),
        (torch.full((4,), math.nan), 0),
        (torch.tensor(0.0), 1),
    ):
        row = lost(x, to)
        assert (row["finite"], row["underflows"], row["overflows"]) == (finite, 0, 0)
        assert row["quantization_error"] is None
        assert row["block_errors"] is None
        assert row["overflow_fraction"] == (0.0 if finite else None)
    assert lost(torch.tensor(3.0), to)["quantization_error"] == 0.0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "slice": lambda x: torch.stack([x, -x], -2)[..., 0, :],
    "every_second": lambda x: torch.stack([x, -x], -1)[..., 0],
    "expanded": lambda x: x[:, :, :1, :1].expand(x.shape),
    "negative": torch._neg_view,
    "without_batch": lambda x: x[0],
    "one_channel": lambda x: x[:, :1],
    "scalar": lambda x: x[0, 0, 0, 0],
}


@pytest.mark.spread(4)
@pytest.mark.usefixtures("way")
@pytest.mark.combinations(2)
@pytest.mark.parametrize("along", [-1, -3, -4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, along: int) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(3, 40, 7, 70) ** 5)
    rows = x.movedim(along, -1).contiguous() if x.dim() >= -along else x.reshape(1, -1)
    for to in ("float8_e5m2", "mxfp4_e2m1", "nvfp4"):
        assert_close(lost(x, to, along=along), lost(rows, to))


@pytest.mark.usefixtures("way")
def test_sparse_and_nested_tensors() -> None:
    x = torch.randn(6, 5) ** 5
    sparse = torch.where(x.abs() > 1, x, 0.0)
    assert_close(lost(sparse.to_sparse(), "float8_e5m2"), lost(sparse, "float8_e5m2"))
    parts = [torch.randn(3, 40), torch.randn(5, 40)]
    row = lost(torch.nested.nested_tensor(parts, layout=torch.jagged), "float8_e5m2")
    assert_close(row, lost(torch.cat(parts), "float8_e5m2"))


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("x", "recorded"),
    [
        (torch.ones(2, 40), {"float8_e5m2", "mxfp8_e4m3"}),
        (torch.ones(2, 40).to_sparse(), {"float8_e5m2"}),
        (torch.nested.nested_tensor([torch.ones(2, 40), torch.ones(1, 40)], layout=torch.jagged), {"float8_e5m2"}),
        (torch.ones(2, 40, dtype=torch.int64), set()),
        (torch.ones(2, 40, dtype=torch.bool), set()),
        (torch.ones(2, 40, dtype=torch.complex64), set()),
        (torch.ones(2, 40).to(torch.float8_e4m3fn), set()),
    ],
)
def test_tensors_without_a_cast_get_no_row(x: Tensor, recorded: set[str]) -> None:
    hooks = {to: record("forward", stats="numel", cast=to) for to in ("float8_e5m2", "mxfp8_e4m3")}
    _, probe = run_step(nn.Identity(), hooks, x)
    assert {row["hook"] for row in probe.sink.records("stats")} == set(hooks)
    assert {row["hook"] for row in probe.sink.records("casts")} == recorded


def conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(4, 32)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("make", "shape", "of_input", "of_weight"),
    [
        (lambda: nn.Linear(32, 4), (2, 3, 32), 2, 1),
        (lambda: nn.Conv2d(32, 4, 1), (1, 32, 2, 3), 1, 1),
        (lambda: nn.Conv2d(32, 4, 1), (32, 2, 3), 0, 1),  # without a batch
        (lambda: nn.ConvTranspose1d(32, 4, 3), (2, 32, 5), 1, 0),
        (conv1d, (2, 3, 32), 2, 0),
    ],
    ids=["linear", "conv", "conv-without-batch", "transposed", "conv1d-of-transformers"],
)
def test_blocks_are_along_the_inputs_of_a_product(
    make: Callable[[], nn.Module], shape: tuple[int, ...], of_input: int, of_weight: int
) -> None:
    torch.manual_seed(0)
    module = make()
    x, weight = torch.randn(shape), module.get_parameter("weight")
    with torch.no_grad():
        for tensor, along in ((x, of_input), (weight, of_weight)):
            tensor.movedim(along, -1).mul_(torch.randn(32).exp())
    fields = {"stats": "none", "cast": "mxfp4_e2m1"}
    hooks = {"x": record("forward_pre", **fields), "w": record("step_pre", role="param", params="weight", **fields)}
    _, probe = run_step(module, hooks, x, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    rows = {row["hook"]: row for row in probe.sink.records("casts")}
    for name, tensor, along in (("x", x, of_input), ("w", weight, of_weight)):
        lines = tensor.detach().movedim(along, -1).flatten(0, -2)
        errors = [expected_of(block, FORMATS["mxfp4_e2m1"], 1.0) for block in blocks_of(lines, 32)]
        error = sum(each.error for each in errors) / sum(each.squares for each in errors)
        assert rows[name]["quantization_error"] == pytest.approx(float(error), rel=1e-6)
        assert (rows[name]["format"], rows[name]["shape"]) == ("mxfp4_e2m1", list(tensor.shape))


KNOWN = [
    {"to": "bfloat16"},
    {"to": "float8_e4m3fn", "scale": 0.37},
    {"to": "float8_e5m2", "scale": "previous"},
    {"to": "mxfp6_e2m3"},
    {"to": "nvfp4", "scale": 40.0},
]
"""Casts whose scale is known before the tensor is read."""


@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(70, 331), (3, 8192), (20000,)])
@pytest.mark.parametrize("cast", KNOWN, ids=lambda cast: cast["to"])
def test_a_cast_in_the_read_of_the_sums(
    cast: Any, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums have the same bits as without a cast, and the cast loses what operations find."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.randn(shape[-1]).exp() ** 3).to(dtype)
    x.view(-1)[5000:5003] = torch.tensor([math.nan, math.inf, -math.inf])
    stats = ["mean", "std", "l1", "fingerprint"]
    hooks = {"cast": record("forward", stats=stats, cast=cast), "sums": record("forward", stats=stats)}
    model = nn.Identity()
    probe = run_steps(model, hooks, lambda: model(x), 2)
    rows = probe.sink.records("stats")
    by_hook = [{row["step"]: [row[name] for name in stats] for row in rows if row["hook"] == hook} for hook in hooks]
    assert by_hook[0] == by_hook[1]
    use_operations(monkeypatch)
    row = probe.sink.records("casts")[1]
    expected = lost(x, cast["to"], fitting(x, cast["to"]) / 2 if cast.get("scale") == "previous" else cast.get("scale"))
    assert_close(row, {name: expected[name] for name in (*COLUMNS, "block_errors")})


@pytest.mark.spread(3)
@pytest.mark.combinations(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stats", ["numel", "none", "fingerprint"])
@pytest.mark.parametrize("cast", KNOWN, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_is_read_once(
    layout: str, cast: Any, stats: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of the kernel, on the memory of the tensor, or on the only copy of a tensor that is no block of memory."""
    kernel = mock.Mock(wraps=cpu_kernel.native)
    monkeypatch.setattr(cpu_kernel, "native", kernel)
    x = LAYOUTS[layout](torch.randn(2, 16, 8, 8, dtype=dtype))
    hooks = {"h": record("forward_pre", stats=stats, cast=cast)}
    layer = nn.Conv2d(16, 16, 1)
    model = Calls(lambda layer, x: x, layer=layer)
    with mock.patch.object(layer, "forward", lambda x: x):
        run_steps(model, {"h": {**hooks["h"], "layers": "layer"}}, lambda: layer(x), 3)
    assert [len(call.args) for call in kernel.sums.call_args_list] == [
        5 if cast.get("scale") != "previous" else 4,
        5,
        5,
    ]
    assert not kernel.bits.called
    is_copied = layout in {"slice", "every_second", "expanded", "negative", "one_channel"} or (
        stats == "fingerprint" and layout in {"channels_last", "transposed"}
    )
    assert {call.args[0] == x.data_ptr() for call in kernel.sums.call_args_list} == {not is_copied}


@pytest.mark.parametrize("on_device", [False, True])
def test_scale_of_the_previous_tensor(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    inputs = iter([torch.tensor([1.0, 2.0]), torch.tensor([0.5, 8.0]), torch.zeros(2), torch.tensor([1.0, 3.0])])
    hooks = {"h": record("forward", stats="numel", cast={"to": "float8_e4m3fn", "scale": "previous"}, every=1)}
    model = nn.Identity()
    probe = run_steps(model, hooks, lambda: model(next(inputs)), 4)
    rows = probe.sink.records("casts")
    assert [row["scale"] for row in rows] == [None, 112.0, 28.0, 28.0]  # for 2, 8, and nothing but zeros
    assert [row["overflow_fraction"] for row in rows] == [None, 0.5, 0.0, 0.0]  # 8 * 112 is more than 448


def test_calls_of_a_shared_module_have_scales_of_their_own() -> None:
    layer = nn.Identity()
    model = Calls(lambda layer, x: layer(layer(x) * 4.0), layer=layer)
    hooks = {"h": record("forward", "layer", stats="none", cast={"to": "float8_e5m2", "scale": "previous"})}
    probe = run_steps(model, hooks, lambda: model(torch.ones(3)), 2)
    scales = [row["scale"] for row in probe.sink.records("casts")]
    assert scales == [None, None, 28672.0, 7168.0]


@pytest.mark.parametrize("to", FORMATS)
def test_parts_of_processes_are_merged(to: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 512) ** 3
    measure = Casts(Cast(to=to, scale=0.5 if FORMATS[to].scales != 1 else None))
    parts = torch.stack([measure.part(part, NOT_SHARDED) for part in x.split(64)])
    missing = torch.full_like(parts[:1], math.nan)
    cells = measure.merged(torch.cat([parts, missing]).numpy())
    expected = measure.cells(measure.values(x).tolist(), None)
    assert cells[:2] == expected[:2]
    assert cells[2:5] == pytest.approx(expected[2:5], rel=1e-12)
    if expected[5] is not None:
        assert cells[5] == pytest.approx(expected[5], rel=0.03)
    assert measure.merged(missing.numpy())[1:6] == (None,) * 5


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (
            "fp8",
            r"hooks\.h\.cast\.to: not an allowed value[\s\S]*given    fp8[\s\S]*allowed  float8_e4m3fn, float8_e5m2",
        ),
        ({"to": "mxfp8_e4m3", "scale": "previous"}, "remove 'scale', or set 'to' to one of float8_e4m3fn"),
        ({"to": "nvfp4", "scale": 0}, r"hooks\.h\.cast\.scale: must be a number from 1e-30 to 1e30"),
        (8, r"hooks\.h\.cast: must be the name of a format[\s\S]*given    8"),
        ({"to": "nvfp4", "scale": "amax"}, r"hooks\.h\.cast\.scale: not an allowed value[\s\S]*allowed  previous"),
        ({"scale": 2}, r"hooks\.h\.cast\.to: is missing"),
    ],
)
def test_invalid_casts(cast: Any, message: str) -> None:
    assert re.search(message, refused(nn.Identity(), {"h": record("forward", cast=cast)}))
