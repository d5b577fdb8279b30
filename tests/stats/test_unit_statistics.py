"""Statistics that need more than a tensor's values: dead units, saturation, update ratio."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from device_statistics import use_device_statistics
from hook_runs import record, run_step, run_steps
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import nn

import instrument
from instrument.config.parse import parse_hooks
from instrument.errors import ConfigError
from instrument.stats.unit_statistics import count_saturated, dead_units, saturation_limits, unit_dim
from instrument.tables.statistics import ALL, DEFAULT

RECORD = record("forward", "**")


def recorded(module: nn.Module, value: torch.Tensor, **fields: Any) -> dict[str, Any]:
    _, probe = run_step(module, {"h": record("forward", **fields)}, value)
    (row,) = probe.sink.records("stats")
    return row


RELU = nn.ReLU()


@pytest.mark.parametrize(
    ("module", "shape", "of_parameter", "dim"),
    [
        *((nn.Conv1d(3, 5, 1), (8, 5, 7), False, 1), (nn.BatchNorm1d(5), (8, 5, 7), False, 1)),
        *((nn.Linear(3, 5), (8, 4, 4, 5), False, 3), (RELU, (8, 7, 5), False, 2)),
        *((RELU, (8, 5), False, 1), (RELU, (8, 5, 4, 4), False, 1), (RELU, (8, 5, 2, 4, 4), False, 1)),
        *((RELU, (8,), False, None), (RELU, (), False, None)),
        *((RELU, (5, 3), True, 0), (RELU, (5,), True, 0), (RELU, (), True, None)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_unit_dim_follows_the_module_type_and_the_shape(
    module: nn.Module, shape: tuple[int, ...], of_parameter: bool, dim: int | None
) -> None:
    assert unit_dim(len(shape), module, of_parameter=of_parameter) == dim


@pytest.mark.slow
@given(
    npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=5),
        elements=st.sampled_from([0.0, -0.0, 0.0, 0.0, 1e-30, -2.0, math.nan, math.inf]),
    ),
    st.data(),
)
def test_unit_is_dead_if_all_its_values_are_zero(array: np.ndarray[Any, Any], data: Any) -> None:
    dim = data.draw(st.integers(0, array.ndim - 1))
    rows = np.moveaxis(array, dim, 0).reshape(array.shape[dim], -1)
    wanted = [all(x == 0 for x in row) for row in rows]
    tensor = torch.from_numpy(array)
    assert dead_units(tensor, dim).tolist() == dead_units(tensor, dim - array.ndim).tolist() == wanted
    assert dead_units(tensor.to("meta"), dim).is_meta


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *FLOAT8)
INTEGERS = (torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


@pytest.mark.spread(3)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_dead_fraction_of_every_dtype(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 0], [0, 0, 1]]).to(dtype)
    assert dead_units(tensor, 1).tolist() == [True, False, False]
    assert recorded(nn.Identity(), tensor, stats="dead_fraction")["dead_fraction"] == pytest.approx(1 / 3)


@pytest.mark.filterwarnings("ignore:Sparse .* is in beta")
def test_units_of_a_sparse_tensor_are_those_of_the_dense_one() -> None:
    dense = torch.zeros(4, 6)
    dense[0, 0], dense[1, 4], dense[1, 5], dense[3, 4] = 0.99, -2.0, math.nan, -0.99
    for sparse in (dense.to_sparse(), dense.to_sparse(1), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 3))):
        assert [int(dead_units(sparse, dim).sum()) for dim in (0, 1, -1)] == [1, 3, 3]
        for ends, near in (((-1.0, 1.0), 3), ((None, 1.0), 1), ((0.0, 1.0), 23)):
            assert count_saturated(sparse, ends) == count_saturated(dense, ends) == near


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_smallest_number_of_a_dtype_is_not_zero(dtype: torch.dtype) -> None:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.tensor([[0, 1], [0, 0]], dtype=bits).view(dtype)
    assert dead_units(tensor, 1).tolist() == [True, False]


def numbers_near(dtype: torch.dtype, ends: tuple[float | None, float]) -> torch.Tensor:
    """Return every number of a narrow type, or the numbers nearest to the saturation thresholds of a wider one."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    low, high = ends
    margin = 0.015 * (high - (low or 0.0))
    middle = torch.tensor([high - margin, (low or 0.0) + margin, 0.0], dtype=dtype)
    numbers = [middle, *(torch.nextafter(middle, torch.full_like(middle, end)) for end in (-9.0, 9.0))]
    return torch.cat([*numbers, torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=dtype)])


@pytest.mark.spread(16)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("ends", [(-1.0, 1.0), (0.0, 1.0), (None, 6.0), (-0.3, 7.7)], ids=str)
def test_saturated_elements_are_those_of_float64(dtype: torch.dtype, ends: tuple[float | None, float]) -> None:
    tensor = numbers_near(dtype, ends)
    x = tensor.to(torch.float32 if dtype.itemsize == 1 else dtype).double().numpy()
    x = x[np.isfinite(x)]
    low, high = ends
    margin = 0.015 * (high - (low or 0.0))
    near = (x >= high - margin) | (low is not None and x <= (low or 0.0) + margin)
    column = torch.stack([tensor, torch.zeros_like(tensor)], dim=1)[:, 0]  # not contiguous
    assert count_saturated(tensor, ends) == count_saturated(column, ends) == near.sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("instrument.stats.unit_statistics.is_on_host", lambda tensor: False)
        assert count_saturated(tensor, ends) == near.sum()


@pytest.mark.spread(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_update_is_measured_in_float64(dtype: torch.dtype) -> None:
    """The difference of two half-precision numbers is in general not representable in half precision."""
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 101, dtype=torch.float64).to(dtype))
    model = nn.ParameterList([weight])
    before = weight.detach().clone().double()
    optimizer = torch.optim.SGD([weight], lr=0.7)
    hook = record("step_post", role="update", stats=["l2", "update_ratio"])
    weight.grad = torch.full_like(weight, 0.321)
    probe = run_steps(model, {"u": hook}, optimizer.step, optimizer=optimizer)
    (row,) = probe.sink.records("stats")
    after = weight.detach().double()
    assert row["l2"] == pytest.approx((after - before).norm().item(), rel=1e-5)
    assert row["update_ratio"] == pytest.approx(((after - before).norm() / after.norm()).item(), rel=1e-5)


def test_dead_fraction_of_an_empty_tensor_is_none() -> None:
    assert recorded(nn.Identity(), torch.zeros(0, 5), stats="dead_fraction")["dead_fraction"] is None


def test_recorded_dead_fraction_is_that_of_the_activation() -> None:
    layer = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    with torch.no_grad():
        layer[0].weight.fill_(0.1)
        layer[0].bias[:] = torch.tensor([-100.0, 1.0, -100.0, -100.0])
    row = recorded(layer, torch.rand(6, 1, 8, 8), stats=["dead_fraction", "zero_fraction"])
    assert (row["dead_fraction"], row["zero_fraction"]) == (0.75, 0.75)


def test_unit_dim_field_selects_the_dimension() -> None:
    value = torch.zeros(2, 3, 4)
    value[:, 0, 0] = 1.0
    assert recorded(nn.Identity(), value, stats="dead_fraction")["dead_fraction"] == 0.75
    assert recorded(nn.Identity(), value, stats="dead_fraction", unit_dim=1)["dead_fraction"] == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match=r"hooks.h.unit_dim: dim 3 is out of range for .*\[2, 3, 4\]"):
        recorded(nn.Identity(), value, stats="dead_fraction", unit_dim=3)
    with pytest.raises(ConfigError, match="'unit_dim' requires 'units', dead_fraction"):
        parse_hooks({"h": {**RECORD, "unit_dim": 1}})


def test_units_of_a_gradient_are_rows_of_the_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias[:] = torch.tensor([-100.0, -100.0, 0.0, 0.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"g": record("parameter_grad", "**", stats="all")}
    _, probe = run_step(model, hooks, torch.rand(5, 3), loss=torch.sum, optimizer=optimizer)
    assert probe.sink.frame("stats").set_index("path").dead_fraction.to_dict() == {"weight": 0.5, "bias": 0.5}


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("module", "values", "saturated"),
    [
        (nn.Tanh(), [-9.0, -1.0, 0.0, 9.0], 0.5),
        (nn.Sigmoid(), [-9.0, -1.0, 0.0, 9.0], 0.5),
        (nn.Hardtanh(-2.0, 2.0), [-9.0, -1.0, 0.0, 1.9], 0.25),
        (nn.ReLU6(), [-9.0, 0.0, 5.0, 9.0], 0.25),
        (nn.Hardsigmoid(), [-9.0, 0.0, 0.0, 9.0], 0.5),
        (nn.Softsign(), [-1e9, 0.0, 1.0, 1e9], 0.5),
        (nn.Tanh(), [9.0, math.nan, 0.0, math.nan], 0.5),
        (nn.Tanh(), [math.nan, math.nan], None),
        (nn.ReLU(), [-9.0, 0.0, 5.0, 9.0], None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_saturated_values_are_at_the_ends_of_the_range(
    module: nn.Module, values: list[float], saturated: float | None
) -> None:
    assert recorded(module, torch.tensor(values), stats="saturated_fraction")["saturated_fraction"] == saturated
    ends = saturation_limits(module)
    if ends is not None:
        assert count_saturated(module(torch.tensor(values)).to("meta"), ends).is_meta


def test_update_ratio_is_relative_to_the_updated_parameter() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hooks = {"u": record("step_post", "**", role="update", stats=["update_ratio", "l2"])}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    squares = lambda output: output.square().sum()  # noqa: E731
    _, probe = run_step(model, hooks, torch.rand(4, 3), loss=squares, optimizer=optimizer)
    for row in probe.sink.records("stats"):
        after = dict(model.named_parameters())[row["path"]].detach()
        wanted = (after - before[row["path"]]).norm() / after.norm()
        assert row["update_ratio"] == pytest.approx(wanted.item(), rel=1e-5)


def test_update_ratio_of_zeros_is_none() -> None:
    model = nn.Linear(3, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    hooks = {"u": record("step_post", "**", role="update", stats="update_ratio")}
    _, probe = run_step(model, hooks, torch.rand(4, 3), loss=torch.sum, optimizer=optimizer)
    assert [row["update_ratio"] for row in probe.sink.records("stats")] == [None]


def test_statistic_of_another_role_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="statistic update_ratio requires kind step_post, role update; this hook has kind forward"
    ):
        parse_hooks({"h": {**RECORD, "stats": ["update_ratio"]}})
    with pytest.raises(ConfigError, match="statistic saturated_fraction requires kind forward, role output"):
        parse_hooks({"h": {**RECORD, "kind": "forward_pre", "stats": "saturated_fraction"}})


def test_default_is_allowed_in_a_list() -> None:
    spec = parse_hooks({"h": {**RECORD, "stats": ["default", "dead_fraction", "l2"]}})["h"]
    assert spec.statistics == tuple(name for name in ALL if name in (*DEFAULT, "dead_fraction"))


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_an_embedding_without_a_gradient_are_dead(sparse: bool) -> None:
    model = nn.Embedding(10, 4, sparse=sparse)
    hooks = {"h": record("parameter_grad", stats=["dead_fraction"])}
    _, probe = run_step(
        model, hooks, torch.tensor([[1, 3], [3, 8]]), loss=torch.sum, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    )
    assert [row["dead_fraction"] for row in probe.sink.records("stats")] == [0.7]


@pytest.mark.spread(2)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dim", [None, 1])
def test_variation_of_the_norms_of_units(dim: int | None, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    torch.manual_seed(0)
    model = nn.Linear(5, 7, bias=dim is None)
    hooks = {"h": record("step_post", role="param", stats=["unit_norm_cv"], unit_dim=dim)}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, probe = run_step(model, hooks, torch.randn(2, 5), loss=torch.sum, optimizer=optimizer)
    norms = np.linalg.norm(model.weight.detach().double().numpy(), axis=1 if dim is None else 0)
    found = {row["path"]: row["unit_norm_cv"] for row in probe.sink.records("stats")}
    assert found.pop("bias", None) is None
    assert found == {"weight": pytest.approx(norms.std() / norms.mean(), rel=1e-6)}


@pytest.mark.parametrize("weight", [torch.zeros(3, 2), torch.tensor([[1.0, math.inf], [1.0, 2.0]])])
def test_units_without_norms_have_no_variation(weight: torch.Tensor) -> None:
    model = nn.ParameterDict({"weight": weight})
    hooks = {"h": record("step_post", role="param", stats=["unit_norm_cv"])}
    with instrument.attach(model, hooks, optimizer=(optimizer := torch.optim.SGD(model.parameters(), 0.0))) as probe:
        model.weight.sum().backward()
        optimizer.step()
        probe.end_step()
    assert [row["unit_norm_cv"] for row in probe.sink.records("stats")] == [None]
