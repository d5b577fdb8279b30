"""A tensor on a GPU is measured with one launch of the kernel, or with several operations where the kernel is not usable."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import KERNEL_DEVICE
from hook_runs import record, run_steps
from tiers import tiered
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import instrument
from instrument.actions.base import Context, StepContext
from instrument.actions.measurement import measure_in_context
from instrument.stats import device_choice, device_kernel
from instrument.stats.cast_operations import TensorCast, lost_by_operations
from instrument.stats.device_kernel import DTYPES, histogram_by_kernel, measure_batch_by_kernel, measure_by_kernel
from instrument.stats.device_sums import DeviceSums, device_memory
from instrument.stats.distribution import distribution, distribution_on_device
from instrument.stats.fingerprint import fingerprint, portable_bits
from instrument.stats.measure import Measured, measure_statistics
from instrument.stats.portable import portable_sums
from instrument.stats.sums import MEASURED_COLUMNS, needs_of
from instrument.tables.formats import FORMATS
from instrument.tables.statistics import ALL, STATISTICS

# On a GPU, which Triton's interpreter imitates, operations on NaN do not warn.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

NAMES = tuple(name for name in ALL if all(need.term is not None for need in STATISTICS[name].needs))
VALUES = torch.linspace(-2.0, 3.0, 5000, device=KERNEL_DEVICE)
FLOAT32 = f"{VALUES.device} float32"
CONTEXT = Context("h", "forward", "output", "", nn.Identity(), "", StepContext(0, 0, 0, "train"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `measure_on_device` treat CPU tensors as tensors on a GPU. The list receives the ways that measured."""
    made: list[str] = []

    def counted(name: str, measure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            made.append(name)
            return measure(*given, **options)

        return call

    monkeypatch.setattr(device_choice, "_reasons", {})
    monkeypatch.setattr(device_choice, "_is_plain", lambda flat: type(flat) is Tensor)
    monkeypatch.setattr(device_choice, "portable_sums", counted("operations", portable_sums))
    monkeypatch.setattr(
        device_choice,
        "_kernels",
        lambda: SimpleNamespace(
            DTYPES=DTYPES,
            enable_launches=lambda flat: made.append("enable"),
            measure_by_kernel=counted("kernel", measure_by_kernel),
            measure_batch_by_kernel=counted("batch", measure_batch_by_kernel),
            histogram_by_kernel=counted("kernel", histogram_by_kernel),
        ),
    )
    return made


def expected(flat: Tensor) -> list[Any]:
    values = measure_statistics(flat.cpu(), NAMES)
    return [pytest.approx(value, rel=1e-5, abs=1e-9) for value in values]


def measured(flat: Tensor, names: tuple[str, ...] = NAMES) -> Measured:
    return Measured(on_device=device_choice.measure_on_device(flat, needs_of(names), 0, None))


def read(flat: Tensor, names: tuple[str, ...] = NAMES) -> list[float | None]:
    return measured(flat, names).statistics(names)


def by_kernel(flat: Tensor, names: tuple[str, ...]) -> list[float | None]:
    sums = DeviceSums(device_memory(1, flat.device)[0], flat.numel())
    measure_by_kernel(flat, sums.row[MEASURED_COLUMNS])
    return Measured(on_device=sums).statistics(names)


def test_kernel_is_checked_with_known_values_before_the_first_tensor_of_a_dtype(calls: list[str]) -> None:
    assert [read(VALUES) for _ in range(2)] == [expected(VALUES)] * 2
    assert device_choice.measured_by() == {FLOAT32: "Triton kernel"}
    both = ["operations", "kernel"] * 2  # with finite elements only, and with others
    # Launched by Triton, the bits, a histogram, launched by slabs, and several tensors in a launch.
    check = [*both, "kernel", "kernel", "enable", *both, *["operations", "batch"] * 2]
    assert calls == [*check, "kernel", "kernel"]
    on_device = measured(VALUES)
    assert [float(on_device.statistic(name)) for name in NAMES] == expected(VALUES)
    measured(VALUES.double())
    assert calls[len(check) + 3 :] == ["operations"]  # float64 is never measured by the kernel


def test_wrong_kernel_is_not_used(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = device_choice._kernels()
    monkeypatch.setattr(
        kernels, "measure_by_kernel", lambda flat, *given, **options: measure_by_kernel(flat * 1.01, *given, **options)
    )
    monkeypatch.setattr(device_choice, "_kernels", lambda: kernels)
    assert read(VALUES) == expected(VALUES)
    (reason,) = device_choice.measured_by().values()
    assert reason.startswith("PyTorch operations: the kernel returned mean ")
    assert read(VALUES) == expected(VALUES)
    assert calls == ["operations"] * 3


@pytest.mark.slow
def test_wrong_kernel_for_several_tensors_is_not_used(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(device: torch.device, dtype: torch.dtype, tensors: np.ndarray[Any, Any]) -> None:
        measure_batch_by_kernel(device, dtype, tensors - [0, 1, 0])  # without the last element

    kernels = device_choice._kernels()
    monkeypatch.setattr(kernels, "measure_batch_by_kernel", wrong)
    monkeypatch.setattr(device_choice, "_kernels", lambda: kernels)
    read(VALUES)
    assert device_choice.measured_by()[FLOAT32].startswith("PyTorch operations: the kernel returned ")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", tiered(DTYPES, [torch.bfloat16]))
def test_kernel_for_several_tensors_equals_that_for_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (5, 1024, 4096, 4097, 3, 13_000, 2)  # with one program and with several, each of one block and of several
    tensors = [torch.randn(size, generator=generator).to(KERNEL_DEVICE, dtype) for size in sizes]
    tensors[2][7], tensors[5][100], tensors[6][:] = math.nan, math.inf, math.nan
    results = torch.full((len(sizes), 9), math.nan, dtype=torch.float64, device=KERNEL_DEVICE)
    table = [(one.data_ptr(), one.numel(), row.data_ptr()) for one, row in zip(tensors, results, strict=True)]
    expected = torch.stack(
        [measure_by_kernel(one, torch.empty_like(row)) for one, row in zip(tensors, results, strict=True)]
    )
    for _ in range(2):  # the counters are zero again
        results.fill_(math.nan)
        measure_batch_by_kernel(VALUES.device, dtype, np.array(table, np.int64))
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=0.0)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("to", "dtype", "shape"),
    [
        ("float8_e4m3fn", torch.bfloat16, (1, 4200, 1)),  # two programs
        ("mxfp6_e3m2", torch.float32, (1, 50, 33)),
        ("nvfp4", torch.float16, (5, 40, 1)),
        ("mxfp4_e2m1", torch.bfloat16, (3, 1440, 1)),  # blocks that are consecutive
    ],
)
def test_kernel_casts_in_the_read_of_the_sums(to: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x = torch.linspace(-4.0, 4.0, math.prod(shape), device=KERNEL_DEVICE).pow(5).to(dtype)
    x[5:9] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    sums, expected_sums = (torch.empty(11, dtype=torch.float64, device=KERNEL_DEVICE) for _ in range(2))
    cast, expected = (TensorCast(FORMATS[to], 0.7, *shape) for _ in range(2))
    measure_by_kernel(x, sums[:9], cast)
    assert cast.lost is not None
    torch.testing.assert_close(sums[:9], measure_by_kernel(x, expected_sums, with_bits=True)[:9], rtol=1e-12, atol=0.0)
    assert expected_sums[9:].tolist() == [float(half) for half in portable_bits(x)]
    with_bits = TensorCast(FORMATS[to], 0.7, *shape)
    measure_by_kernel(x, sums, with_bits, with_bits=True)
    assert sums[9:].tolist() == expected_sums[9:].tolist()
    assert with_bits.lost is not None
    assert torch.equal(with_bits.lost[0][:5], cast.lost[0][:5])
    assert torch.equal(with_bits.lost[1], cast.lost[1])
    numbers, errors = lost_by_operations(x, expected)
    assert numbers[1] > 0  # underflows
    assert cast.lost[0][:3].tolist() == numbers[:3].tolist()
    torch.testing.assert_close(cast.lost[0][3:5], numbers[3:5], rtol=1e-12, atol=0.0)
    if cast.blocks:
        torch.testing.assert_close(cast.lost[1].sort()[0], errors.sort()[0], rtol=1e-12, atol=0.0, equal_nan=True)


def test_kernel_for_casts_is_checked_before_the_first_one(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cast_of = partial(TensorCast.along, -1, FORMATS["mxfp4_e2m1"], 1.0)
    kernels = device_choice._kernels()
    monkeypatch.setattr(device_choice, "_kernels", lambda: kernels)
    monkeypatch.setattr(device_choice, "_problem", lambda *given: None)

    def lost() -> tuple[Tensor, Tensor] | None:
        cast = cast_of(VALUES)
        device_choice.measure_on_device(VALUES, (), 0, None, cast)
        return cast.lost

    def no_cast(flat: Tensor, results: Tensor, cast: TensorCast | None, *, with_bits: bool) -> Tensor:
        if cast is not None:
            cast.lost = torch.zeros(6, dtype=torch.float64), torch.zeros(cast.blocks, dtype=torch.float64)
        return results

    def no_bits(flat: Tensor, results: Tensor, cast: TensorCast | None, *, with_bits: bool) -> Tensor:
        return measure_by_kernel(flat, results.zero_(), cast)

    for wrong, returned in ((no_cast, "[0.0, "), (no_bits, "the bits [0.0, 0.0] with the cast to float8_e4m3fn ")):
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "measure_by_kernel", wrong)
            assert lost() is None
        reason = device_choice.measured_by()[f"{FLOAT32} casts"]
        assert reason.startswith(f"PyTorch operations: the kernel returned {returned}")
        device_choice._reasons.clear()
    found = lost()
    assert found is not None
    torch.testing.assert_close(found[0][:5], lost_by_operations(VALUES, cast_of(VALUES))[0][:5])
    assert device_choice.measured_by()[f"{FLOAT32} casts"] == "Triton kernel"


@pytest.mark.slow
def test_sums_fingerprint_and_cast_come_from_one_launch(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.stats.measure.is_on_host", lambda flat: False)
    needs, cast_of = needs_of((*NAMES, "fingerprint")), partial(TensorCast.along, -1, FORMATS["mxfp4_e2m1"], 1.0)
    both = VALUES[:1280], VALUES[:1280].view(2, -1).T  # the second one is copied
    expected_bits = [fingerprint(x).item() for x in both]
    monkeypatch.setattr("instrument.stats.fingerprint.sums_of_bits", lambda *given: pytest.fail("it is measured"))
    for x, bits in zip(both, expected_bits, strict=True):
        measure_in_context(x, CONTEXT, needs, None, cast_of=cast_of)  # checks the kernels
        calls.clear()
        measured = measure_in_context(x, CONTEXT, needs, None, cast_of=cast_of)
        assert calls == ["kernel"]
        assert measured.lost is not None
        assert measured.statistics(["fingerprint"]) == [bits]


@pytest.mark.slow
def test_histogram_is_counted_by_the_kernel_if_it_is_right(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    values = VALUES.clone()
    values[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    wanted = distribution(values.cpu(), (), 7)
    assert distribution_on_device(values, (), 7).tolist() == wanted
    assert calls[-1] == "kernel"
    made = len(calls)
    assert distribution_on_device(values, (), 7).tolist() == wanted
    assert calls[made:] == ["kernel"]
    empty = torch.full((5,), math.nan, device=KERNEL_DEVICE)
    assert distribution_on_device(empty, (), 7).tolist()[2:] == [0] * 7
    assert device_choice.measured_by() == {FLOAT32: "Triton kernel"}
    kernels = device_choice._kernels()
    monkeypatch.setattr(kernels, "histogram_by_kernel", lambda flat, bins: histogram_by_kernel(flat[:-9], bins))
    monkeypatch.setattr(device_choice, "_kernels", lambda: kernels)
    monkeypatch.setattr(device_choice, "_reasons", {})
    disconnected: list[str] = []
    monkeypatch.setattr(device_choice, "disconnect_driver", lambda: disconnected.append("slabs launch no kernel"))
    assert distribution_on_device(values, (), 7).tolist() == wanted
    (reason,) = device_choice.measured_by().values()
    assert reason.startswith("PyTorch operations: the kernel returned the counts [")
    assert disconnected


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize("bins", [1, 2, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_histogram_of_the_kernel_equals_that_of_the_cpu(dtype: torch.dtype, bins: int) -> None:
    cases = [
        torch.full((5,), math.nan),
        torch.full((5,), 2.0),
        torch.tensor([1e-45, 0.0, 3e38, -3e38]),
        torch.randn(2500),
    ]
    for values in cases:
        wanted = [math.nan if value is None else value for value in distribution(values.to(dtype), (), bins)]
        np.testing.assert_array_equal(histogram_by_kernel(values.to(KERNEL_DEVICE, dtype), bins).tolist(), wanted)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"triton": None}, "PyTorch operations: ModuleNotFoundError: import of triton halted; None in sys.modules"),
        ({}, "PyTorch operations: RuntimeError: TRITON_INTERPRET=1 runs kernels on the CPU"),
    ],
)
def test_missing_compiler_is_reported(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, problem: dict[str, None], reason: str
) -> None:
    monkeypatch.setattr(device_choice, "_kernels", importing_kernels)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, module in problem.items():
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, device_kernel.__name__)  # to be imported again
        monkeypatch.delattr(instrument.stats, "device_kernel")
    assert read(VALUES) == expected(VALUES)
    assert device_choice.measured_by() == {FLOAT32: reason}
    assert calls == ["operations"]


importing_kernels = device_choice._kernels.__wrapped__


@pytest.mark.slow
def test_run_says_how_its_device_measured(calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)

    def trained(name: str) -> instrument.Run:
        step = lambda: [model(torch.ones(4, 3)), read(VALUES)]  # noqa: E731
        run_steps(model, {"h": record("forward")}, step, out=tmp_path / name)
        return instrument.load(tmp_path / name)

    run = trained("fast")
    assert run.info["device_statistics"] == {FLOAT32: "Triton kernel"}
    assert run.events.empty
    monkeypatch.setattr(device_choice, "_reasons", {})
    monkeypatch.setattr(device_choice, "_kernels", importing_kernels)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = trained("slow")
    (event,) = run.events.to_dict("records")
    assert (event["rule"], event["severity"]) == ("device_statistics", "info")
    assert event["message"] == (
        f"{FLOAT32} is measured with PyTorch operations: RuntimeError: TRITON_INTERPRET=1 runs kernels on the CPU"
    )


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize("numel", [1, 2, 1023, 1024, 1025, 4095, 4096, 4097, 12_289])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_is_exact_at_the_borders_of_blocks_and_programs(numel: int, dtype: torch.dtype) -> None:
    flat = torch.arange(-1.0, numel - 1, device=KERNEL_DEVICE).remainder_(31).to(dtype)
    wide = flat.double()
    names = ("numel", "nan_count", "inf_count", "min", "max", "zero_fraction", "mean", "l1", "std")
    found = by_kernel(flat, names)
    zeros = int((flat == 0).sum())
    counts = [numel, 0, 0, wide.min().item(), wide.max().item(), zeros / numel]
    assert found == [
        *counts,
        pytest.approx(wide.mean().item(), rel=1e-12, abs=1e-15),
        wide.abs().sum().item(),
        pytest.approx(wide.std(correction=0).item(), rel=1e-12),
    ]
    assert by_kernel(flat, names) == found  # the memory of a stream is used again


@pytest.mark.spread(3)
@pytest.mark.combinations
@pytest.mark.parametrize("numel", [1, 2, 1023, 1024, 1025, 4096, 4097, 12_289])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_effect_by_the_kernel_equals_that_of_numpy(numel: int, dtype: torch.dtype) -> None:
    before = torch.randn(numel).to(dtype)
    after = before.clamp(-0.5, 0.7)
    special = [math.nan, math.inf, -math.inf, math.nan, 0.0]
    before[: len(special)] = torch.tensor(special[:numel])
    after[: len(special)] = torch.tensor([math.nan, math.inf, 1.0, 2.0, -0.0][:numel])
    elements = [
        (each.view(torch.int16) if dtype == torch.bfloat16 else each).to(KERNEL_DEVICE) for each in (before, after)
    ]
    results = torch.empty(3, dtype=torch.float64, device=KERNEL_DEVICE)
    memory = device_kernel._memory(
        results.device, 0 if KERNEL_DEVICE == "cpu" else torch.cuda.current_stream().cuda_stream
    )
    for _ in range(2):  # the memory of a stream is used again
        programs = (-(-numel // 4096),)
        device_kernel._compare[programs](*elements, *memory, results, numel, 1024, dtype == torch.bfloat16)
        old, new = before.double().numpy(), after.double().numpy()
        finite = [each[np.isfinite(each)] for each in (old, new)]
        norms = [np.sqrt((each**2).sum()) if len(each) else np.nan for each in finite]
        changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
        np.testing.assert_allclose(results.tolist(), [changed.sum(), *norms], rtol=1e-12)


def test_kernel_is_the_only_launch() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    results = torch.empty(9, dtype=torch.float64, device=VALUES.device)
    measure_by_kernel(VALUES, results)  # allocates the memory of the stream
    for flat in (VALUES, VALUES.bfloat16()):
        with Operations() as operations, pytest.MonkeyPatch.context() as patch:
            found = {(2,): lambda *given, **options: operations.names.append("kernel")}
            patch.setattr(device_kernel, "_measure", found)
            measure_by_kernel(flat, results)
        views = ("aten.empty.memory_format", "aten.view.dtype", "aten.detach.default")
        launches = [name for name in operations.names if name not in views]
        assert launches == ["kernel"]


def test_kernels_are_launched_on_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which may be another one. The second GPU is imitated by a CPU tensor."""
    current, launched = [0], []

    class Second(Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 1

    @contextmanager
    def device(given: int) -> Iterator[None]:
        current[0] = 1
        yield
        current[0] = 0

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *given, **options: launched.append(current[0])

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(device_kernel, "_measure", Kernel())
    monkeypatch.setattr(device_kernel, "_compare", Kernel())
    monkeypatch.setattr(device_kernel, "_add_launchers", lambda *given: launched.append(current[0]))
    monkeypatch.setattr(device_kernel, "_compiled", {})
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda of: 0))
    monkeypatch.setattr(device_kernel, "driver", driver)
    flat = torch.ones(5000).as_subclass(Second)
    device_kernel.enable_launches(flat)
    measure_by_kernel(flat, torch.empty(9, dtype=torch.float64))
    assert launched == [1] * 6


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from instrument.stats.device_kernel import _OPTIONS, _compare, _count, _measure, _measure_cast

for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    for elements, numel in (("*fp32", "i32"), ("*fp32", "i64"), ("*fp16", "i32"), ("*i16", "i32")):
        types = {"elements": elements, "partials": "*fp64", "arrived": "*i32", "results": "*fp64", "numel": "i64"}
        constants = {"block_size": 1024, "is_bfloat16": elements == "*i16"}
        code, bits = (
            triton.compile(ASTSource(_measure, types, {**constants, "with_bits": each}), target=target, options=_OPTIONS)
            for each in (False, True)
        )
        of_cast = {"scale": "*fp32", "lost": "*fp64", "errors": "*fp64", "blocks": "i64", "length": "i32", "inner": "i32"}
        mx = {"block": 32, "rounding": (1, 20, 121 << 23, 2.0**14, 448.0), "with_bits": True}
        source = ASTSource(_measure_cast, {**types, **of_cast}, {**constants, **mx})
        cast = triton.compile(source, target=target, options=_OPTIONS)
        types = {"before": elements, "after": elements, **{name: types[name] for name in types if name != "elements"}}
        effect = triton.compile(ASTSource(_compare, types, constants), target=target, options=_OPTIONS)
        types = {"elements": elements, "results": "*fp64", "counts": "*i64", "numel": numel, "blocks": "i32", "bins": "i32"}
        histogram = triton.compile(ASTSource(_count, types, {**constants, "upper": 64}), target=target)
        binary = "cubin" if target.backend == "cuda" else "hsaco"
        print(target.arch, elements, numel, all(len(each.asm[binary]) > 1000 for each in (code, bits, cast, effect, histogram)))
"""


@pytest.mark.slow
def test_kernel_compiles_for_gpus_of_two_vendors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = ("*fp32 i32", "*fp32 i64", "*fp16 i32", "*i16 i32")
    assert done.stdout.splitlines() == [f"{arch} {kind} True" for arch in ("80", "90", "gfx942") for kind in kinds]
