"""`instrument.diff` of runs with operators: the first one that differs, its reason, and operators that only one run has."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Call
from run_folders import write_run
from torch import Tensor, nn

import instrument
from instrument.commands.diff import main
from instrument.comparison.alignment import common_subsequence
from instrument.comparison.operators import OperatorDifferences, non_finite_operators

pytestmark = pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")


@torch.library.custom_op("instrument_tests::drift", mutates_args=())
def drift(x: Tensor) -> Tensor:
    return x + 0.1 + random.SystemRandom().random()


drift.register_autograd(lambda _, gradient: gradient)


class Drift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.instrument_tests.drift(x * 2)
        return result


class Scaled(nn.Module):
    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = (x * factor).tanh()
        return x


def recorded(*modules: nn.Module, seed: int = 0, steps: int = 1) -> Any:
    """Train with recorded operators, and return the run."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), *modules, nn.Linear(8, 2))
    for module in model:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.rand(16, 8)
    with instrument.attach(model, {}, optimizer=optimizer) as probe:
        for _ in range(steps):
            with probe.record_operators():
                model(batch).square().mean().backward()
                optimizer.step()
            probe.end_step()
    return probe.run


def compared(one: Any, other: Any, **options: Any) -> tuple[OperatorDifferences, str]:
    difference = instrument.diff(one, other, **options)
    assert difference.operators is not None
    return difference.operators, str(difference)


@pytest.mark.slow
def test_a_repeated_step_is_equal() -> None:
    operators, text = compared(recorded(nn.ReLU()), recorded(nn.ReLU()))
    assert operators.first is None
    assert f"EQUAL BITS: {operators.compared} outputs of operators are equal" in text


@pytest.mark.slow
def test_an_operator_that_is_not_deterministic_is_named() -> None:
    operators, text = compared(recorded(Drift()), recorded(Drift()))
    assert operators.first is not None
    assert operators.first.a["operator"] == "instrument_tests.drift.default"
    assert operators.first.before == (2, 2)  # addmm and mul
    assert "DIFFERENT: the first operator that differs is instrument_tests.drift.default in 1 (tests/" in text
    assert "Its inputs are equal: this operator is the reason." in text


@pytest.mark.slow
def test_random_numbers_of_other_seeds_are_the_reason() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(40))
            return x + torch.rand(x.shape, generator=generator)

    _, text = compared(recorded(Noise()), recorded(Noise()))
    assert "aten.rand.generator in 1" in text
    assert "Its inputs are equal: it draws random numbers, so the random states differ." in text


@pytest.mark.slow
def test_other_weights_are_not_blamed_on_an_operator() -> None:
    _, text = compared(recorded(seed=0), recorded(seed=1))
    assert "the first operator that differs is aten.addmm.default in 0" in text
    assert "Its inputs differ already: the weights, the state of the optimizer or the batch" in text


def test_operators_of_only_one_run_are_left_out() -> None:
    operators, text = compared(recorded(Scaled(2.0)), recorded(Scaled(2.0, 1.0)))
    assert operators.first is not None
    # The second tanh changes the input of the last layer. Nothing before it differs.
    assert operators.first.a["operator"] == "aten.addmm.default"
    assert operators.first.between == ((), ("aten.mul", "aten.tanh"))
    assert "only B has aten.mul, aten.tanh: not compared" in text
    assert "outputs of operators only in B: " in text


@pytest.mark.slow
def test_small_differences_are_within_the_tolerance() -> None:
    one, other = recorded(Scaled(1.0)), recorded(Scaled(1.0 + 2**-23))
    operators, text = compared(one, other)
    assert operators.first is not None
    assert operators.first.a["operator"] == "aten.mul.Tensor"
    assert operators.above is None
    assert "WITHIN THE TOLERANCE: the first operator that differs is aten.mul.Tensor in 1" in text
    strict, _ = compared(one, other, tolerance=0)
    assert strict.above == strict.first


def rows(ranks: int, *, value: float = 1.0) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {
        "source": None,
        "dtype": "float32",
        "random": False,
        "inputs": 0,
        "nan_inputs": 0,
        "nan_count": 0,
        "inf_count": 0,
        "projection": 0.0,
    }
    shared |= dict.fromkeys(("min", "max", "mean"), value) | {"std": 0.0, "layer": "0"}
    # All elements of a tensor are `value`.
    forward = {"part": "forward", "operator": "aten.mm.default", "shape": [8 // ranks, 4], "fingerprint": 100 * ranks}
    gradient = {"part": "backward", "operator": "aten.mm.default", "shape": [4, 4], "fingerprint": 100 * ranks + 1}
    step = {"part": "optimizer", "operator": "aten.add_.Tensor", "shape": [4, 4], "fingerprint": round(value)}
    return [
        {**shared, **each, "rank": rank, "number": number, "output": 0, "step": 0, "micro_step": 0, "epoch": 0}
        | {"phase": "train", "l2": value * math.sqrt(math.prod(each["shape"]))}
        for rank in range(ranks)
        for number, each in enumerate((forward, gradient, step))
    ]


@pytest.mark.slow
def test_relations_of_another_number_of_processes(tmp_path: Path, call: Call) -> None:
    for name, ranks, value in (("one", 1, 1.0), ("two", 2, 1.0), ("other", 2, 2.0)):
        write_run(tmp_path / name, rows={"operators": rows(ranks, value=value)}, used={"ranks": ranks})
    out = call(main, tmp_path / "one", tmp_path / "two").expect(0).out
    assert "WITHIN THE TOLERANCE: 3 outputs of operators follow a relation of the processes" in out
    assert "1: parts of the batch or of a sharded tensor" in out
    out = call(main, tmp_path / "one", tmp_path / "other").expect(1).out
    assert "the first operator that differs between the processes is aten.mm.default in 0, forward, step 0" in out
    assert "The closest relation is: parts of the batch or of a sharded tensor. Its relative difference is 0.5." in out
    assert "3: no relation" in out
    out = call(main, tmp_path / "two", tmp_path / "other").expect(1).out
    assert "All 2 outputs before it in this step are equal." in out


def change(name: str, ranks: int, at: int, **cells: Any) -> list[dict[str, Any]]:
    """Return the rows of two processes, with other cells of the operator `name` in the given ranks."""
    return [row | (cells if row["part"] == name and row["rank"] >= ranks - at else {}) for row in rows(ranks)]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("part", "cells", "text"),
    [
        ("optimizer", {"fingerprint": 5}, "Its bits in rank 1 of B differ from those in rank 0."),
        (
            "forward",
            {"nan_count": 1},
            "No relation is possible: its numbers of elements, of NaN or of infinite values differ.",
        ),
        ("forward", {"l2": 3.0}, "The closest relation is: parts of the batch or of a sharded tensor."),
        (
            "backward",
            {"projection": 1.0},
            "The closest relation is: mean over the processes. Its relative difference is 0.12.",
        ),
        (
            "backward",
            {"mean": 1.1},
            "The closest relation is: mean over the processes. Its relative difference is 0.05.",
        ),
        ("forward", {"operator": "aten.bmm.default"}, "Of the processes of B, only rank 0 has it."),
    ],
)
def test_violated_relation_is_described(tmp_path: Path, part: str, cells: dict[str, Any], text: str) -> None:
    write_run(tmp_path / "a", rows={"operators": rows(1)})
    write_run(tmp_path / "b", rows={"operators": change(part, 2, 1, **cells)}, used={"ranks": 2})
    operators, out = compared(tmp_path / "a", tmp_path / "b")
    assert operators.first is not None
    assert operators.first.a["part"] == part
    assert text in out


def test_integers_need_no_relation(tmp_path: Path) -> None:
    """Positions of tokens in the part of the batch of a process follow no relation."""
    for name, ranks in (("a", 1), ("b", 2)):
        table = [row | ({"dtype": "int64"} if row["part"] == "forward" else {}) for row in rows(ranks)]
        table[0]["l2"] = 20.0 * ranks
        write_run(tmp_path / name, rows={"operators": table}, used={"ranks": ranks})
    operators, out = compared(tmp_path / "a", tmp_path / "b")
    assert operators.first is None
    assert "1: integers without a relation, such as positions in a part of the batch" in out


def test_fingerprints_are_compared_exactly(tmp_path: Path) -> None:
    """Float64 would round both to the same number."""
    for name, bits in (("a", 2**62), ("b", 2**62 + 1)):
        row = {**rows(1)[2], "fingerprint": bits}
        view = {**row, "number": 3, "fingerprint": None, "operator": "aten.t.default"}
        write_run(tmp_path / name, rows={"operators": [row, view]})
    operators, _ = compared(tmp_path / "a", tmp_path / "b")
    assert operators.different == 1


def test_runs_without_a_common_step_are_refused(tmp_path: Path, call: Call) -> None:
    write_run(tmp_path / "a", rows={"operators": rows(1)})
    moved = [{**row, "step": step} for step in (5, 6) for row in rows(1)]
    for name, source in (("b", {}), ("c", {"replay": {"source": "runs/first"}})):
        write_run(tmp_path / name, rows={"operators": moved}, used=source)
    err = call(main, tmp_path / "a", tmp_path / "b").expect(2).err
    assert "steps: nothing to compare: the two runs recorded the operators of different steps" in err
    assert "A: 0; B: 5, 6" in err
    assert "with probe.record_operators():" in err
    err = call(main, tmp_path / "a", tmp_path / "c").expect(2).err
    assert "python -m instrument.replay runs/first --steps 0 --ops" in err


def test_operators_of_a_process_are_missing(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rows={"operators": rows(1)})
    write_run(tmp_path / "b", rows={"operators": rows(2)[:3]}, used={"ranks": 2})
    with pytest.raises(instrument.ConfigError, match=r"B: no operators of rank 1 in step 0"):
        instrument.diff(tmp_path / "a", tmp_path / "b")


def test_matched_operators_are_a_longest_common_subsequence() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        one, other = (generator.integers(0, 4, generator.integers(0, 40)) for _ in range(2))
        table = np.zeros((len(one) + 1, len(other) + 1), int)  # the textbook recursion
        for i, j in np.ndindex(len(one), len(other)):
            equal = one[i] == other[j]
            table[i + 1, j + 1] = table[i, j] + 1 if equal else max(table[i, j + 1], table[i + 1, j])
        pairs = common_subsequence(one, other)
        assert len(pairs) == table[-1, -1]
        assert all(one[i] == other[j] for i, j in pairs)
        assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def test_first_of_several_processes_is_named(tmp_path: Path) -> None:
    for name, change in (("a", {}), ("b", {"fingerprint": 7, "nan_count": 1, "nan_inputs": 1})):
        table = rows(2)
        table[2] |= {**change, "nan_inputs": 0}  # rank 0, the last operator
        table[4] |= change  # rank 1, an earlier one
        write_run(tmp_path / name, rows={"operators": table}, used={"ranks": 2})
    operators, text = compared(tmp_path / "a", tmp_path / "b")
    assert operators.first is not None
    assert (operators.first.a["rank"], operators.first.a["number"]) == (1, 1)
    assert "aten.mm.default in 0, backward, step 0 of rank 1" in text
    lines = [*non_finite_operators(instrument.load(tmp_path / "b"))]
    assert lines[1:] == [
        "first NaN of an operator at step 0 of rank 1: aten.mm.default in 0, backward: 1 of 16",
        "  Its inputs have NaN already: the weights, the state of the optimizer or the batch. Replay an earlier step.",
    ]
