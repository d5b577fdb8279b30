"""Record: statistics, tensors, and the slice of a tensor that is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, run_step, run_steps
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import instrument
from instrument.actions.base import Context, StepContext
from instrument.actions.record import select_part
from instrument.actions.stages import Selector
from instrument.config.parse import parse_hooks
from instrument.hooks.mesh_layout import MeshLayout
from instrument.plan.hook_plan import make_plan
from instrument.stats.spectrum import Spectrum
from instrument.tables.statistics import ALL, COUNTS, DEFAULT, STATISTICS
from instrument.values.dtensor import NOT_SHARDED, Shards


def spec(**fields: Any) -> dict[str, Any]:
    return {"layers": ".", "kind": "forward", "action": "record", **fields}


def recorded(value: Any, **fields: Any) -> instrument.MemorySink:
    output, probe = run_step(nn.Identity(), {"h": spec(**fields)}, value)
    assert output is value
    return probe.sink


@pytest.mark.parametrize(
    ("requested", "names"),
    [
        ("default", DEFAULT),
        (
            "all",
            [
                *(name for name in ALL if all(need.term is not None for need in STATISTICS[name].needs)),
                *("fingerprint", "softmax_entropy", "z_loss"),
            ],
        ),
        (["mean", "l2"], ("mean", "l2")),
        (["l2", "nan_count", "mean"], ("mean", "l2", "nan_count")),
        ("l1", ("l1",)),
    ],
    ids=str,
)
def test_requested_statistics_are_recorded_with_the_counts(requested: Any, names: tuple[str, ...]) -> None:
    (row,) = recorded(torch.tensor([1.0, -2.0, 0.0]), stats=requested).records("stats")
    assert [name for name in ALL if row[name] is not None] == [name for name in ALL if name in (*COUNTS, *names)]
    wanted = {"mean": -1 / 3, "l1": 3.0, "l2": math.sqrt(5), "min": -2.0, "zero_fraction": 1 / 3, "numel": 3}
    for name in set(wanted) & set(names):
        assert row[name] == pytest.approx(wanted[name])


def test_counts_are_integers_and_undefined_values_are_none() -> None:
    (row,) = recorded(torch.tensor([math.nan, math.inf, math.nan]), stats="all").records("stats")
    assert (row["numel"], row["nan_count"], row["inf_count"]) == (3, 2, 1)
    assert all(type(row[name]) is int for name in ("numel", "nan_count", "inf_count"))
    assert all(row[name] is None for name in ALL if name not in (*COUNTS, "fingerprint"))


def test_quantiles_and_histogram_are_one_distribution_row() -> None:
    sink = recorded(torch.tensor([4.0, 1.0, 2.0, 3.0, 5.0]), stats="none", quantiles=[0.5, 0.0], histogram=2)
    assert not sink.rows["stats"]
    (row,) = sink.records("distributions")
    assert (row["sampled"], row["levels"], row["quantiles"]) == (5, [0.0, 0.5], [1.0, 3.0])
    assert (row["low"], row["high"], row["counts"]) == (1.0, 5.0, [2, 3])
    assert (row["layer"], row["kind"], row["role"], row["step"]) == ("", "forward", "output", 0)


@pytest.mark.parametrize(
    ("requested", "absent"),
    [({"quantiles": True}, ("low", "high", "counts")), ({"histogram": True}, ("sampled", "levels", "quantiles"))],
    ids=str,
)
def test_distribution_has_only_the_requested_columns(requested: dict[str, Any], absent: tuple[str, ...]) -> None:
    sink = recorded(torch.arange(10.0), **requested)
    (row,) = sink.records("distributions")
    assert all(row[name] is None for name in absent)
    assert all(
        row[name] is not None for name in {"low", "high", "counts", "sampled", "levels", "quantiles"} - {*absent}
    )
    assert len(sink.rows["stats"]) == 1


def test_tensors_only_statistics_only_or_both() -> None:
    for fields, rows in (({"tensors": True}, (1, 1)), ({"tensors": True, "stats": "none"}, (0, 1)), ({}, (1, 0))):
        sink = recorded(torch.ones(2), **fields)
        assert (len(sink.rows["stats"]), len(sink.rows["tensors"])) == rows


def test_tensor_is_copied_when_recorded() -> None:
    x = torch.ones(4, 4)
    model = nn.Identity()
    with instrument.attach(model, {"whole": spec(tensors=True), "part": spec(tensors=True, slice="1, :2")}) as probe:
        model(x)
        x.fill_(7.0)
        probe.end_step()
    for row in probe.sink.records("tensors"):
        assert row["values"].eq(1).all()
        assert row["values"].is_contiguous()
        # Only the kept elements are held in memory.
        assert row["values"].untyped_storage().nbytes() == row["values"].numel() * 4


X = torch.arange(4 * 3 * 5, dtype=torch.float32).reshape(4, 3, 5)


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, X),
        ({"samples": 2}, X[:2]),
        ({"samples": 99}, X),
        ({"slice": "1:3, :, ::2"}, X[1:3, :, ::2]),
        ({"slice": "-1"}, X[-1]),
        ({"slice": "0, 0, 0"}, X[0, 0, 0]),
        ({"slice": ":, 1:"}, X[:, 1:]),
        ({"samples": 2, "slice": "-1"}, X[1]),
        ({"max_elements": 7}, X.flatten()[:7]),
        ({"max_elements": 60}, X),
        ({"samples": 1, "slice": ":, 0", "max_elements": 2}, X[0, 0, :2]),
    ],
    ids=str,
)
def test_requested_slice_is_kept_with_the_source_shape(fields: dict[str, Any], wanted: Tensor) -> None:
    (row,) = recorded(X, tensors=True, **fields).records("tensors")
    assert torch.equal(row["values"], wanted)
    assert (row["shape"], row["source_shape"]) == (list(wanted.shape), [4, 3, 5])
    assert row["dtype"] == "float32"


def test_slicing_a_tensor_does_not_affect_its_statistics() -> None:
    (row,) = recorded(X, tensors=True, samples=1, max_elements=1).records("stats")
    assert (row["numel"], row["max"]) == (60, 59.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_values_are_converted_to_the_requested_dtype(dtype: str) -> None:
    x = torch.tensor([1 / 3, 1e-9, 3e4])
    (row,) = recorded(x, tensors=True, dtype=dtype).records("tensors")
    assert row["dtype"] == dtype
    assert torch.equal(row["values"], x.to(getattr(torch, dtype)))


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([True, False]),
        torch.tensor([3, -1]),
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.ones(4, 3).t(),
        torch.ones(1, 3).expand(4, 3),
        torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.ones(3).to_sparse(),
        torch.tensor([1 + 1j]),
    ],
    ids=["bool", "int", "scalar", "empty", "transposed", "expanded", "channels_last", "sparse", "complex"],
)
def test_any_layout_and_dtype_is_recorded_unchanged(x: Tensor) -> None:
    sink = recorded(x, tensors=True)
    (row,) = sink.records("tensors")
    assert torch.equal(row["values"], x.to_dense())
    assert row["values"].dtype == x.dtype
    assert sink.records("stats")[0]["numel"] == x.numel()


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.none() | st.integers(1, 5),
    st.sampled_from([None, ":", "::2", "1:, -2:", ":, :1"]),
    st.none() | st.integers(1, 9),
)
def test_cut_is_within_the_requested_limits(
    shape: list[int], samples: int | None, part: str | None, most: int | None
) -> None:
    fields = {"samples": samples, "slice": part, "max_elements": most}
    given_fields = {key: value for key, value in fields.items() if value is not None}
    assume(part is None or part.count(",") < len(shape))
    hook = parse_hooks({"h": spec(tensors=True, **given_fields)})["h"]
    full = torch.arange(math.prod(shape)).reshape(shape)
    selector = Selector.of(hook, nn.Identity())
    kept = select_part(full if selector is None else selector.parts([full])[0], hook)
    assert set(kept.flatten().tolist()) <= set(full.flatten().tolist())
    assert most is None or kept.numel() <= most
    if samples is not None and shape and kept.dim():
        assert kept.numel() <= samples * math.prod(shape[1:])
    if not given_fields:
        assert kept is full


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_kept_padded(layout: torch.layout) -> None:
    nesting = Calls(lambda x: torch.nested.nested_tensor([x[0, :2], x[1]], layout=layout))
    batch = torch.arange(12.0).view(2, 3, 2)
    _, probe = run_step(nesting, {"h": spec(tensors=True)}, batch)
    (row,) = probe.sink.records("tensors")
    wanted = batch.clone()
    wanted[0, 2] = torch.nan
    assert torch.equal(row["values"].nan_to_num(-1.0), wanted.nan_to_num(-1.0))
    assert row["shape"] == row["source_shape"] == [2, 3, 2]
    assert probe.sink.records("stats")[0]["numel"] == 10


@pytest.mark.parametrize("part", [{"units": [0]}, {"split_dim": 2}], ids=str)
def test_statistics_of_a_part_of_a_nested_tensor_are_refused(part: dict[str, Any]) -> None:
    """A part is that of the padded tensor, whose padding is NaN."""
    nesting = Calls(lambda x: torch.nested.nested_tensor([x[0, :2], x[1]], layout=torch.jagged))
    batch = torch.arange(12.0).view(2, 3, 2)
    with pytest.raises(
        instrument.HookError, match="padding would count as elements; record the complete tensor, or keep the part"
    ):
        run_step(nesting, {"h": spec(**part)}, batch)
    _, probe = run_step(nesting, {"h": spec(stats="none", tensors=True, **part)}, batch)
    kept = probe.sink.records("tensors")[0]["values"].reshape(2, 3)
    assert torch.equal(kept.nan_to_num(-1.0), torch.tensor([[0.0, 2.0, -1.0], [6.0, 8.0, 10.0]]))


@pytest.mark.spread(1)
@pytest.mark.parametrize("on_device", [False, True])
def test_extremes_of_64_bit_integers_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    given = [
        torch.tensor([2**53 + 1, 3]),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([2**64 - 1, 7], dtype=torch.uint64),
        torch.tensor([2**63 - 1, 2**63 + 2049], dtype=torch.uint64),
        torch.tensor([2**60, 2**53]),  # float64 represents both
        torch.tensor([-(2**54) - 1, 2**54]),  # their magnitudes are equal in float64
        torch.tensor([5, 9, -(2**62) - 1, 7])[::2],
        torch.tensor([0.5, 2.0**70]),
    ]
    model = nn.Identity()
    run_steps(model, {"ids": spec()}, lambda: [*map(model, given)], out=tmp_path / "run", rules=None)
    run = instrument.load(tmp_path / "run")
    stats = run.stats
    exact = "(max::hugeint + coalesce(max_remainder, 0)::int)"
    assert run.sql(f"select {exact}::varchar as max from stats order by position")["max"].tolist() == [
        str(round(max(tensor.tolist()))) for tensor in given
    ]
    assert run.sql(f"select max({exact}::bigint) as max from stats where max <= 2^63")["max"].tolist() == [2**63 - 1]
    assert "max_remainder" not in run.sql("select * from stats")
    largest_of_each = [round(max(tensor.tolist())) for tensor in given]
    with pytest.raises(TypeError, match=r"such as \['max'\]"):
        run.read("stats", "max")
    assert len(run.read("stats", ["custom"])) == len(given)
    assert run.read("stats", ["layer", "max"])["max"].astype(object).tolist() == largest_of_each
    batches = [batch.to_pylist() for batch in run.scan("stats", ["max", "max_remainder"])]
    cells = [(row["max"], row["max_remainder"]) for batch in batches for row in batch]
    assert [int(rounded) + int(rest or 0) for rounded, rest in cells] == largest_of_each
    for tensor, (_, row) in zip(given, stats.iterrows(), strict=True):
        numbers = tensor.tolist()
        assert (int(row["min"]), int(row["max"])) == (int(min(numbers)), int(max(numbers)))
        assert int(row["abs_max"]) == int(max(map(abs, numbers)))
        assert row["l2"] == pytest.approx(math.hypot(*map(float, numbers)))


@pytest.mark.parametrize("on_device", [False, True])
def test_extremes_of_small_integers_are_a_float_column(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    model, given = nn.Identity(), (torch.tensor([2**53, -(2**53)]), torch.zeros(0, dtype=torch.int64))
    probe = run_steps(model, {"ids": spec()}, lambda: [*map(model, given)])
    assert probe.stats["max"].dtype == "float64"
    assert probe.stats["max"].tolist() == [2**53, pytest.approx(math.nan, nan_ok=True)]
    assert [row["custom"] for row in probe.sink.records("stats")] == [None, None]


@pytest.mark.parametrize("on_device", [False, True])
def test_exact_integers_support_layouts_and_conditions(monkeypatch: pytest.MonkeyPatch, on_device: bool) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    large = 2**60 + 1
    parts = [torch.tensor([large, -3]), torch.tensor([9])]
    given = [
        torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.tensor([large, large + 4]), (6,), check_invariants=True),
        torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([large, large]), (2,), check_invariants=True),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        torch.nested.nested_tensor(parts),
        torch.tensor([True, False]),
        torch.tensor([255, 3], dtype=torch.uint8),
    ]
    model = nn.Identity()
    hooks = {
        "all": spec(stats=["max"]),
        "some": spec(stats=["min"], when={"stat": "max", "above": 2.0**60 + 2**20}),
        "others": spec(stats=["mean"]),
    }
    probe = run_steps(model, hooks, lambda: [*map(model, given)])
    rows = probe.stats.groupby("hook")
    assert rows.get_group("all")["max"].tolist() == [large + 4, 2 * large, large, large, 1, 255]
    assert rows.get_group("some")["min"].tolist() == [0]
    assert all(row["custom"] is None for row in probe.sink.records("stats") if row["hook"] != "all")


def trained(model: nn.Module, between: Callable[[], None] = lambda: None, **fields: Any) -> instrument.MemorySink:
    """Record at the parameters in one step of SGD. `between` runs between the optimizer's step and the end of the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = {"layers": "**", "kind": "step_post", "role": "param", "action": "record", "stats": "none", **fields}
    with instrument.attach(model, {"h": hook}, optimizer=optimizer) as probe:
        sum(parameter.real.square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
        between()
        probe.end_step()
    return probe.sink


def holder(weight: Tensor) -> nn.Module:
    """Return a module with one parameter."""
    return nn.ParameterDict({"weight": weight})


@pytest.mark.spread(2)
@pytest.mark.parametrize("role", ["param", "param_grad", "update"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_spectrum_is_of_the_matrix_of_the_first_dimension_and_all_others(role: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = holder(torch.randn(6, 5, 2, 2, dtype=dtype))
    before = model.weight.detach().clone()
    (row,) = trained(model, spectrum=4, role=role).records("spectra")
    after = model.weight.detach()
    tensor = {"param": after, "param_grad": model.weight.grad, "update": after - before}[role]
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).reshape(6, 20).numpy()
    values = np.linalg.svd(wide, compute_uv=False)
    assert row["values"] == pytest.approx(values[:4].tolist(), rel=1e-12)
    assert row["spectral_norm"] == pytest.approx(np.linalg.norm(wide, 2), rel=1e-12)
    assert row["stable_rank"] == pytest.approx(np.linalg.norm(wide) ** 2 / np.linalg.norm(wide, 2) ** 2, rel=1e-12)
    shares = values / values.sum()
    assert row["effective_rank"] == pytest.approx(math.exp(scipy.stats.entropy(shares)), rel=1e-12)
    assert (row["shape"], row["role"], row["path"]) == ([6, 5, 2, 2], role, "weight")


def test_spectrum_is_of_the_firing_even_if_the_parameter_changes_later() -> None:
    model = holder(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
    (row,) = trained(model, model.weight.data.zero_, spectrum=9).records("spectra")
    assert row["values"] == pytest.approx([2.4, 1.6, 0.8], rel=1e-6)  # the gradient is twice the weight


def test_singular_values_are_computed_after_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    svdvals = torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, "svdvals", lambda matrix: calls.append("svd") or svdvals(matrix))
    trained(holder(torch.eye(2)), lambda: calls.append("step"), spectrum=1)
    assert calls == ["step", "svd"]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (torch.tensor([[1.0, math.nan], [0.0, 1.0]]), (None, None, None, None)),
        (torch.tensor([[1.0, math.inf], [0.0, 1.0]]), (None, None, None, None)),
        (torch.zeros(2, 2), ([0.0, 0.0], 0.0, None, None)),
        (torch.zeros(0, 2), ([], None, None, None)),
    ],
)
def test_spectrum_without_a_value_is_null(weight: Tensor, expected: tuple[Any, ...]) -> None:
    (row,) = trained(holder(weight), spectrum=2).records("spectra")
    assert (row["values"], row["spectral_norm"], row["stable_rank"], row["effective_rank"]) == expected


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("module", "shape", "fields", "units"),
    [
        (nn.Identity(), (3, 5, 4), {}, 2),
        (nn.Identity(), (2, 4, 3, 3), {}, 1),
        (nn.Identity(), (2, 3, 3, 4), {"unit_dim": -1}, 3),
        (nn.Linear(3, 4), (2, 3, 3), {}, 2),
        (nn.Identity(), (6, 4), {"samples": [0, 2, 3]}, 1),
    ],
)
def test_spectrum_of_an_activation_is_of_features_and_positions(
    module: nn.Module, shape: tuple[int, ...], fields: dict[str, Any], units: int
) -> None:
    torch.manual_seed(0)
    output, probe = run_step(module, {"h": spec(spectrum=9, **fields)}, torch.randn(shape))
    (row,) = probe.sink.records("spectra")
    used = output.detach()[fields.get("samples", slice(None))]
    matrix = np.moveaxis(used.double().numpy(), units, -1).reshape(-1, 4)  # [tokens, features]
    values = np.linalg.svd(matrix, compute_uv=False)
    assert row["values"] == pytest.approx(values.tolist(), rel=1e-12)
    assert row["effective_rank"] == pytest.approx(math.exp(scipy.stats.entropy(values / values.sum())), rel=1e-12)


@pytest.mark.parametrize("sizes", [(2, 1, 3), (6,), (1, 0, 5)])
def test_spectrum_of_batch_shards_is_that_of_the_batch(sizes: tuple[int, ...]) -> None:
    full = torch.randn(sum(sizes), 2, 5)
    context = Context("h", "forward", "output", "", nn.Identity(), "", StepContext(0, 0, 0, "train"))
    measures = {Spectrum(9).of_call(part, context) for part in full.split(sizes)}
    (measure,) = measures  # all processes must have the same
    parts = np.stack([measure.part(part, NOT_SHARDED)().numpy() for part in full.split(sizes)])
    values, norm, _, effective, _ = measure.merged(parts)
    whole = np.linalg.svd(full.reshape(-1, 5).double().numpy(), compute_uv=False)
    assert values == pytest.approx(whole.tolist(), rel=1e-12)
    assert effective == pytest.approx(math.exp(scipy.stats.entropy(whole / whole.sum())), rel=1e-12)
    assert norm == values[0]


def test_tensors_of_one_dimension_have_no_spectrum() -> None:
    sink = trained(nn.Linear(3, 2), spectrum=1)
    assert [row["path"] for row in sink.records("spectra")] == ["weight"]
    assert [row["fired"] for row in sink.records("coverage")] == [1, 1]


def test_spectrum_of_shards_is_that_of_the_full_tensor() -> None:
    full = torch.randn(7, 5, 3)
    measure = Spectrum(20)
    rows = (full.split(4), full.split(1), [full, full[:0]])
    columns = (full.split(3, 1), full.split(1, 2), full.split(1, 1))
    for dim, shards in [(0, each) for each in rows] + list(zip((1, 2, 1), columns, strict=True)):
        sizes = zip(*(shard.shape for shard in shards), strict=True)
        largest = Shards((dim,), tuple(map(max, sizes)), tuple(full.shape))
        parts = np.stack([measure.part(shard, largest)().numpy() for shard in shards])
        assert parts.shape[1] <= max(shard.numel() for shard in shards) + 3  # no process sends more than its shard
        values, norm, rank, effective, shape = measure.merged(parts)
        whole = np.linalg.svd(full.reshape(7, 15).double().numpy(), compute_uv=False)
        assert values == pytest.approx(whole.tolist(), rel=1e-12)
        assert (norm, shape) == (values[0], None)
        assert rank == pytest.approx((whole**2).sum() / whole[0] ** 2, rel=1e-12)
        assert effective == pytest.approx(math.exp(scipy.stats.entropy(whole / whole.sum())), rel=1e-12)
    parts[1] = math.nan  # a process that recorded nothing
    assert measure.merged(parts) == (None, None, None, None, None)
    with pytest.raises(ValueError, match="is complex has no spectrum"):
        measure.part(full.to(torch.complex64), Shards((0,), (7, 5, 3)))


def test_shards_are_those_of_several_processes() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        hooks = parse_hooks({"h": spec(kind="step_pre", params="weight")})
        (site,) = make_plan(hooks, nn.Linear(4, 5)).sites
        for placements, dims, largest in (
            ([Shard(0), Shard(1), Replicate()], (0, 1), (3, 2)),
            ([Replicate(), Shard(1), Shard(0)], (1,), (5, 2)),
            ([Shard(0), Shard(0), Replicate()], (0,), (2, 4)),
            ([Replicate()] * 3, (), (5, 4)),
        ):
            shards = MeshLayout((), mesh).of(distribute_tensor(torch.ones(5, 4), mesh, placements), site, "weight")
            assert (shards.dims, shards.largest) == (dims, largest)
    finally:
        dist.destroy_process_group()
