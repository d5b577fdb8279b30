"""Tensors on device meshes: placements, merged rows, and interventions, compared with the same model in one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from distributed_runs import matched, run_processes
from mesh_processes import CHANGES, HOOKS, create, full_block, train, train_block

import instrument
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
PER_TENSOR = ["softmax_entropy", "token_cosine"]  # null where a row of logits, or the tokens of a sample, are sharded


class Programs(dict[str, list[dict[str, Any]]]):
    """The results of `mesh_processes.py` in each process, run at the first access."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, mesh: str) -> list[dict[str, Any]]:
        program, processes = Path(__file__).with_name("mesh_processes.py"), 2 if mesh == "tp" else 4
        done = run_processes(self.folder / mesh, str(self.folder), mesh, processes=processes, module=program)
        assert done.returncode == 0, done.stderr
        self[mesh] = json.loads(done.stdout.splitlines()[-1])
        return self[mesh]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("meshes"))


@pytest.fixture(scope="module")
def one_process() -> Callable[[str], tuple[list[float], Any]]:
    """Trains the model without a mesh, once for each set of hooks."""
    found: dict[str, tuple[list[float], Any]] = {}

    def trained(name: str) -> tuple[list[float], Any]:
        if name not in found:
            found[name] = train(create(), HOOKS) if name == "hooks" else train(create(), CHANGES, seed=3)
        return found[name]

    return trained


def assert_equal(one: Any, merged: instrument.Run, *, is_nullable: bool) -> None:
    """Assert that the merged rows equal those of one process.

    Args:
        one: The probe of the single process.
        merged: The run of several processes.
        is_nullable: Whether statistics of complete samples may be null because these are sharded.
    """
    both = matched(one.stats, merged.stats, KEYS)
    assert set(both["scope_there"]) == {"global"}
    assert set(both["rank_there"]) == {0}
    for name in [name for name in STATISTICS if both[name].notna().any()]:
        here, there = both[name], both[f"{name}_there"]
        known = there.notna() if is_nullable and name in PER_TENSOR else here.notna()
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


@pytest.mark.parametrize("variant", ["tp", "sp"])
def test_merged_rows_of_two_processes_equal_one(programs: Programs, variant: str, one_process: Any) -> None:
    expected, probe = one_process("hooks")
    for result in programs["tp"]:
        np.testing.assert_allclose(result[variant], expected, rtol=1e-4, atol=1e-6)
    merged = instrument.load(programs.folder / variant)
    assert_equal(probe, merged, is_nullable=True)
    assert_tables_equal(probe, merged)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dp_tp", "fsdp_tp", "hybrid"])
def test_merged_rows_of_four_processes_equal_one(programs: Programs, variant: str, one_process: Any) -> None:
    expected, probe = one_process("hooks")
    parameters = programs["dp_tp"][0][variant][2:]
    np.testing.assert_allclose(parameters, expected[2:], rtol=1e-4, atol=1e-6)
    assert_equal(probe, instrument.load(programs.folder / variant), is_nullable=variant != "hybrid")
