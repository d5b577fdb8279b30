"""Tensors on device meshes: placements, merged rows, and interventions, compared with the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runs import matched
from mesh_processes import CHANGES, COUNTED, HOOKS, OF_BATCHES, STEPS, create, full_block, train, train_block
from rank_results import results_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import instrument
from instrument.config.parse import parse_hooks
from instrument.hooks.mesh_layout import style_of
from instrument.plan.cost import Cost, Forecast, mesh_cost
from instrument.tables.statistics import STATISTICS

KEYS = ["step", "micro_step", "phase", "hook", "layer", "kind", "role", "path", "call", "backward"]
EXACT = [
    "numel",
    "min",
    "max",
    "abs_max",
    "nan_count",
    "inf_count",
    "zero_fraction",
    "dead_fraction",
    "negative_fraction",
]


class Programs(dict[str, list[dict[str, Any]]]):
    """The results of `mesh_processes.py` in each process, run at the first access."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, mesh: str) -> list[dict[str, Any]]:
        processes = 2 if mesh == "tp" else 4
        self[mesh] = results_of("mesh_processes.py", self.folder / mesh, str(self.folder), mesh, processes=processes)
        return self[mesh]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("meshes"))


@pytest.fixture(scope="module")
def one_process() -> Callable[[str], tuple[list[float], Any]]:
    """Trains the model without a mesh, once for each set of hooks."""
    found: dict[str, tuple[list[float], Any]] = {}
    all_hooks = {"hooks": HOOKS, "batches": OF_BATCHES, "changes": CHANGES}

    def trained(name: str) -> tuple[list[float], Any]:
        if name not in found:
            found[name] = train(create(), all_hooks[name], seed=3)
        return found[name]

    return trained


def assert_equal(one: Any, merged: instrument.Run) -> None:
    """Assert that the merged rows of a run equal those of the probe of one process."""
    both = matched(one.stats, merged.stats, KEYS)
    assert set(both["scope_there"]) == {"global"}
    assert set(both["rank_there"]) == {0}
    for name in [name for name in STATISTICS if both[name].notna().any()]:
        here, there = both[name], both[f"{name}_there"]
        known = here.notna()
        assert (there.notna() == known).all(), name
        # A mean, such as one of zero, is compared with the spread, as documented. Other numbers below the rounding of float32 are zero.
        scale = np.maximum(here.abs(), both["std"]) if name == "mean" else here.abs()
        is_near = (here - there).abs() <= 1e-5 * scale + (0 if name in ("numel", "nan_count", "inf_count") else 1e-7)
        assert is_near[known].all(), both[known & ~is_near][[*KEYS, name, f"{name}_there"]].to_string()
    if len(one.effects):
        both = matched(one.effects, merged.effects, KEYS)
        assert both["numel"].tolist() == both["numel_there"].tolist()
        assert both["changed"].tolist() == both["changed_there"].tolist()
        for name in ("norm_before", "norm_after"):
            np.testing.assert_allclose(both[name], both[f"{name}_there"], rtol=1e-5, atol=1e-7)


def assert_tables_equal(one: Any, merged: instrument.Run) -> None:
    """Assert that quantiles, histograms, spectra and casts of the merged rows equal those of one process."""
    both = matched(one.distributions, merged.distributions, KEYS)
    assert both["counts"].map(sum).tolist() == both["counts_there"].map(sum).tolist()
    np.testing.assert_allclose(both["low"], both["low_there"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both["high"], both["high_there"], rtol=1e-5, atol=1e-6)
    spread = both["high"] - both["low"]
    medians = (both["quantiles"].str[1] - both["quantiles_there"].str[1]).abs()
    assert (medians <= 0.1 * spread + 1e-6).all()
    both = matched(one.spectra, merged.spectra, KEYS)
    for here, there in zip(both["values"], both["values_there"], strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-4, atol=1e-5)
    both = matched(one.casts, merged.casts, [*KEYS, "format"])
    np.testing.assert_allclose(both["quantization_error"], both["quantization_error_there"], rtol=1e-3)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", ["tp", "sp"])
def test_merged_rows_of_two_processes_equal_one(programs: Programs, variant: str, one_process: Any) -> None:
    expected, probe = one_process("hooks")
    for result in programs["tp"]:
        np.testing.assert_allclose(result[variant], expected, rtol=1e-4, atol=1e-6)
    merged = instrument.load(programs.folder / variant)
    assert_equal(probe, merged)
    assert_tables_equal(probe, merged)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dp_tp", "fsdp_tp", "hybrid"])
def test_merged_rows_of_four_processes_equal_one(programs: Programs, variant: str, one_process: Any) -> None:
    expected, probe = one_process("batches")
    parameters = programs["dp_tp"][0][variant][2:]
    np.testing.assert_allclose(parameters, expected[2:], rtol=1e-4, atol=1e-6)
    merged = instrument.load(programs.folder / variant)
    assert_equal(probe, merged)
    assert_tables_equal(probe, merged)


def test_recording_on_a_mesh_changes_nothing(programs: Programs) -> None:
    for result in programs["tp"]:
        assert result["is_identical"] == [True, True]
        assert result["missed"] == []
        assert result["differences"] == []


PLACES = {  # of tensors of the first block: placement and scope
    "given embed 0": "tp replicate averaged",
    "seen blocks.0.before ": "tp replicate averaged",
    "given blocks.0.attention.q 0": "tp replicate averaged",
    "called blocks.0.attention.q linear.0": "tp shard(2) shard",
    "seen blocks.0.attention.q ": "tp shard(2) shard",
    "given blocks.0.attention.o 0": "tp shard(2) shard",
    "called blocks.0.attention.o linear.0": "tp partial shard",
    "seen blocks.0.attention.o ": "tp replicate averaged",
    "seen blocks.0.attention ": "tp replicate averaged",
    "seen blocks.0.act ": "tp shard(2) shard",
    "seen blocks.0 ": "tp replicate averaged",
    "added blocks.0 ": "tp replicate averaged",
    "total blocks.0.act ": "tp shard(2) shard",
    "back blocks.0.up 0": "tp partial shard",
    "back blocks.0.act 0": "tp shard(2) shard",
    "grads blocks.0.up weight": "tp shard(0) shard",
    "weights blocks.0.down weight": "tp shard(1) shard",
    "weights blocks.0.down bias": "tp replicate averaged",
    "updates blocks.0.norm weight": "tp replicate averaged",
}
OF_SEQUENCES = {
    "given embed 0": "tp replicate averaged",
    "seen embed ": "tp shard(1) shard",
    "seen blocks.0.before ": "tp shard(1) shard",
    "given blocks.0.attention 0": "tp replicate averaged",  # PrepareModuleInput gives a local tensor
    "seen blocks.0.attention ": "tp shard(1) shard",
    "seen blocks.0 ": "tp shard(1) shard",
    "added blocks.0 ": "tp shard(1) shard",
    "seen  ": "tp replicate averaged",
}


@pytest.mark.parametrize(("result", "expected"), [("places", PLACES), ("sp places", OF_SEQUENCES)])
def test_rows_have_mesh_and_placement(programs: Programs, result: str, expected: dict[str, str]) -> None:
    for found in programs["tp"]:
        assert {place: found[result].get(place) for place in expected} == expected


def test_placement_of_outputs_without_gradients(programs: Programs) -> None:
    found, other = (result["eval"] for result in programs["tp"])
    expected = {
        "attention.q": "shard(2) global",
        "up": "shard(2) global",
        "down": "replicate global",
        "act": "unknown local",
    }
    assert {name: found[f"seen blocks.0.{name} "] for name in expected} == {
        name: f"tp {place}" for name, place in expected.items()
    }
    assert other == {}
    (message,) = programs["tp"][0]["eval events"]
    assert "hook 'seen' (forward) on layer 'embed'" in message


def test_placement_is_unknown_if_the_graph_hides_shards(programs: Programs) -> None:
    for result in programs["tp"]:
        assert result["hidden"].pop("") == "tp shard(1) shard"
        assert result["hidden"] == dict.fromkeys(["frozen", "checkpoint", "function"], "tp unknown local")


@pytest.fixture
def six_processes() -> Iterator[DeviceMesh]:
    """The mesh of six processes, of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    yield init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_placement_of_a_style_does_not_depend_on_fully_shard(six_processes: DeviceMesh) -> None:
    for width, expected in (16, {"": Shard(-1)}), (15, {}):
        model = nn.Sequential(nn.Linear(8, width))
        parallelize_module(model, six_processes["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=six_processes["dp"])  # the parts of three processes are uneven
        style = style_of(model[0])
        assert style is not None
        assert style.outputs == expected


@pytest.mark.parametrize("sizes", [(3, 2), (1, 6)])
def test_dimensions_have_the_order_of_the_mesh(six_processes: DeviceMesh, sizes: tuple[int, int]) -> None:
    assert six_processes.size() == 6
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 12)), mesh["tp"], {"0": ColwiseParallel()})
    with instrument.attach(model, {"seen": {"layers": "0", "kind": "forward", "action": "record"}}, mesh=mesh) as probe:
        model(torch.randn(6, 8))
        probe.end_step()
    assert probe.stats[["mesh", "placement"]].values.tolist() == [["dp,tp", "shard(0),shard(1)"]]


def test_gradients_of_micro_batches_are_recorded_on_shards(six_processes: DeviceMesh) -> None:
    model = parallelize_module(nn.Sequential(nn.Linear(8, 12)), six_processes["tp"], {"0": ColwiseParallel()})
    hook = {"layers": "0", "kind": "parameter_grad_micro", "action": "record"}
    with instrument.attach(model, {"micro": hook}) as probe:
        model(torch.ones(5, 8)).sum().backward()
        probe.end_step()
    rows = probe.stats.set_index("path")
    assert rows["placement"].to_dict() == dict.fromkeys(["weight", "bias"], "partial,shard(0)")
    assert rows["l2"].to_dict() == pytest.approx({"weight": 5 * (6 * 8) ** 0.5, "bias": 5 * 6**0.5})


class Gathered(nn.Module):
    """A layer that gathers its parameter without a style, as those of Transformers do."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.eye(4), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.full_tensor()  # type: ignore[operator]


def test_placement_is_unknown_if_no_style_describes_shards(six_processes: DeviceMesh) -> None:
    model = nn.Sequential(Gathered(six_processes["tp"]), nn.Linear(4, 4))
    hook = {"layers": "1", "kind": "forward", "action": "record"}
    with pytest.warns(match="is not known"), instrument.attach(model, {"seen": hook}) as probe:
        model(torch.ones(2, 4))
        probe.end_step()
    assert probe.stats["placement"].tolist() == ["shard(0),unknown"]


def test_dtensor_for_a_plain_tensor_is_refused(six_processes: DeviceMesh) -> None:
    def distribute(tensor: Tensor, context: instrument.Context) -> Tensor:
        return DTensor.from_local(2 * tensor, six_processes, [Replicate(), Replicate()])

    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": distribute}
    model = nn.Identity()
    with (
        instrument.attach(model, {"mine": hook}),
        pytest.raises(instrument.errors.HookResultError, match="returned a DTensor"),
    ):
        model(torch.ones(3))


def test_declared_dimension_that_does_not_exist_is_reported(programs: Programs) -> None:
    for result in programs["tp"]:
        for number, text in zip((2, -3), result["dimensions"], strict=True):
            assert f"shard({number}) for output of layer 'act', but the tensor has 2 dimensions" in text


def test_number_of_collective_operations_of_a_step(programs: Programs) -> None:
    for result in programs["tp"]:
        counts = result["collectives"]["tp"]
        # In the first scheduled step, a check of the rows and a gathering; then a maximum with the check, and a sum or a gathering.
        assert counts["outputs"] == counts["units"] == counts["distributions"] == [2, 2]


def test_hook_waits_for_a_collective_result_that_it_reads(programs: Programs) -> None:
    for result in programs["tp"]:
        assert result["waits"] == [True, False]


def test_interventions_on_shards_equal_one_process(programs: Programs, one_process: Any) -> None:
    expected, probe = one_process("changes")
    for result in programs["tp"]:
        np.testing.assert_allclose(result["changed"], expected, rtol=1e-5, atol=1e-6)
    both = matched(probe.effects, instrument.load(programs.folder / "changed").effects, KEYS)
    assert set(both["hook"]) == {*CHANGES}
    for name in ("numel", "changed"):
        assert both[name].tolist() == both[f"{name}_there"].tolist()
    for name in ("norm_before", "norm_after", "factor"):
        np.testing.assert_allclose(both[name], both[f"{name}_there"], rtol=1e-5)


def test_declared_placements_of_modules_without_dtensors(programs: Programs) -> None:
    assert programs["tp"]
    merged = instrument.load(programs.folder / "megatron")
    assert_equal(train_block(full_block()), merged)
    places = merged.stats.query("step == 0").set_index(["hook", "layer", "path"])["placement"].to_dict()
    assert places["seen", "up", ""] == places["seen", "act", ""] == "shard(1)"
    assert (places["seen", "", ""], places["weights", "down", "weight"]) == ("replicate", "shard(1)")
    assert (places["weights", "up", "bias"], places["weights", "down", "bias"]) == ("shard(0)", "replicate")


def test_recorded_shards_are_joined_or_refused(programs: Programs, one_process: Any) -> None:
    assert programs["tp"]
    folder = programs.folder / "tp"
    with pytest.raises(instrument.ConfigError, match=r"a shard of the tensors, placed 'shard\(2\)'"):
        instrument.load(folder).features("blocks.0.up")
    fields = {
        "kind": "step_post",
        "role": "param",
        "action": "modify",
        "fn": "replace",
        "run": str(folder),
        "hook": "stored",
    }
    model = create()
    train(model, {"put": {"layers": "**.down", **fields}})
    last = one_process("hooks")[1].tensors(hook="stored", step=STEPS - 1, layer="blocks.1.down", path="weight")
    expected = np.asarray(last["values"].iloc[0])
    np.testing.assert_allclose(model.blocks[1].down.weight.detach(), expected, rtol=1e-5, atol=1e-6)  # type: ignore[index,union-attr,operator]


def test_errors_of_placements_are_reported_before_the_first_step(programs: Programs) -> None:
    for result in programs["tp"]:
        found = result["refused"]
        assert found["declared"] == ""
        assert "hooks.h.layers" in found["unknown"]
        assert "blocks.0, output" in found["unknown"]
        assert "placement={'blocks.*': {'output': {'tp': 'replicate'}}}" in found["unknown"]
        assert "budget: the processes join shards" in found["budget"]
        assert "the selection of hook 'h'" in found["budget"]
        assert "placement.**.output: must be a mapping" in found["type"]
        assert "the mesh has 1 of 2 processes" in found["size"]
        assert "the mesh has no such dimension" in found["dimension"]
        assert "allowed  tp" in found["dimension"]
        assert "placement.**.output.tp: must match" in found["text"]
        assert "input, output, weight, bias" in found["tensor"]
        assert "placement: this pattern matches no module" in found["layer"]
        assert "similar  head" in found["layer"]
        assert "mesh: must be a DeviceMesh" in found["name"]
        assert "the model has no device mesh" in found["mesh"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "tp"])
def test_plan_predicts_the_collectives_of_a_step(programs: Programs, parallel: str) -> None:
    sizes = {"tp" if parallel == "tp" else "dp": 2}
    predicted = {}
    for name, hooks in COUNTED.items():
        forecast = Forecast(dict.fromkeys(hooks, Cost(1, 1, 1, 0.0)), 1.0, 1.0)
        cost = mesh_cost(forecast, parse_hooks(hooks), sizes, shards=parallel == "fsdp2", reduces=True)
        predicted[name] = [cost.collectives] * (2 if parallel == "tp" else 1)
    assert [result["collectives"][parallel] for result in programs["tp"]] == [predicted] * 2
