"""`instrument.diff` of the operators of one process and of two: relations of a healthy pair, and the operator of a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from distributed_runs import run_processes
from tiers import tiered

import instrument
from instrument.comparison.operators import OperatorDifferences

PARTS = "parts of the batch or of a sharded tensor"
DIVIDED = "replicas or shards after a division, which can amplify rounding"


def train(folder: Path, *names: str, processes: int) -> None:
    program = Path(__file__).with_name("operator_processes.py")
    done = run_processes(folder, str(folder), *names, processes=processes, module=program)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Healthy runs with one process and with two, and a run with a fault that has no effect."""
    folder = tmp_path_factory.mktemp("operators")
    train(folder, "SGD", "AdamW", "bf16", processes=1)
    train(folder, "SGD", "AdamW", "bf16", "fsdp_SGD", "fsdp_AdamW", "bias_gradient", processes=2)
    return folder


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Path:
    """The folder, with the runs with other faults."""
    train(folder, "epsilon", "fsdp_epsilon", "stale", "dropout", "gradient", "rate", "decay", processes=2)
    return folder


def compared(folder: Path, one: str, other: str) -> tuple[OperatorDifferences, str]:
    difference = instrument.diff(folder / "1" / one, folder / "2" / other)
    assert difference.operators is not None
    assert not difference.is_identical
    return difference.operators, str(difference)


@pytest.mark.parametrize("name", tiered(["SGD", "AdamW", "bf16", "fsdp_SGD", "fsdp_AdamW"], ["fsdp_AdamW"]))
def test_healthy_pair_has_a_relation_at_every_operator(folder: Path, name: str) -> None:
    operators, text = compared(folder, name.removeprefix("fsdp_"), name)
    relations = operators.relations
    assert relations is not None
    assert f"WITHIN THE TOLERANCE: {len(relations)} outputs of operators follow a relation of the processes" in text
    assert operators.first is operators.above is None
    assert operators.unmatched[0] == 0
    of_step = relations[relations["step"] == 0].groupby(["part", "layer"])["relation"].agg(set)
    assert of_step["forward", "2.up"] >= {PARTS}
    # The gradient of the input, and those of the parameters.
    assert of_step["backward", "2.norm"] == {f"{PARTS[:18]}, times the number of processes", "mean over the processes"}
    assert of_step["optimizer", "2.norm"] <= {PARTS if "fsdp" in name else "equal in all processes", DIVIDED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "expected", "reason"),
    [
        ("epsilon", ("native_layer_norm.default", "2.norm", "forward", 0), "The closest relation is: parts of the"),
        (
            "fsdp_epsilon",
            ("native_layer_norm.default", "2.norm", "forward", 0),
            "The closest relation is: parts of the",
        ),
        ("stale", ("addmm.default", "2.up", "forward", 0), "The closest relation is: parts of the batch"),
        ("dropout", ("bernoulli_.float", "2.dropout", "forward", 1), "only rank 1 has it.\nIt draws random numbers"),
        ("gradient", ("mul.Tensor", "2.down", "backward", 1), "Of the processes of B, only rank 1 has it."),
        ("rate", ("add_.Tensor", "0", "optimizer", 1), "Its bits in rank 1 of B differ from those in rank 0."),
        ("decay", ("add.Tensor", None, "optimizer", 1), "Of the processes of B, only rank 1 has it."),
    ],
)
def test_fault_of_one_process_is_named(faulty: Path, fault: str, expected: tuple[Any, ...], reason: str) -> None:
    first = compared(faulty, "SGD", fault)[0].above
    assert first is not None
    operator, layer, *others = expected
    assert first.a["operator"] == f"aten.{operator}"
    assert first.a["layer"] == layer if layer is not None else pd.isna(first.a["layer"])
    assert [first.a[name] for name in ("part", "rank", "step")] == [*others, 0]
    assert "operator_processes.py:" in first.a["source"]
    assert reason in first.reason


def test_operator_of_one_process_without_an_effect_is_named(folder: Path) -> None:
    """The gradient of one bias changes by 1%, and the bias by less than the tolerance."""
    operators, text = compared(folder, "SGD", "bias_gradient")
    assert operators.above is None
    assert (
        "WITHIN THE TOLERANCE: the first operator that differs between the processes is aten.mul.Tensor in 2.up" in text
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [("SGD", (0, 1)), ("AdamW", (0,))])
def test_steps_after_amplified_rounding_are_not_compared(folder: Path, name: str, steps: tuple[int, ...]) -> None:
    """Adam divides the gradient of the bias of a key, which is rounding, by its size."""
    operators, text = compared(folder, name, name)
    assert operators.steps == steps
    assert operators.left_out == 2 - len(steps)
    assert ("not compared: 1 later steps, since the optimizer divides" in text) is (name == "AdamW")
