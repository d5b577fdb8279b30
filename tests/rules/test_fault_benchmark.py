"""The trainings of `benchmarks/rules.py`: their number, and some of them."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType

import pytest
import torch

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rules

    return rules


def test_benchmark_has_enough_trainings_and_accepts_existing_rules(benchmark: ModuleType) -> None:
    faults, healthy = benchmark.FAULTS, benchmark.HEALTHY
    assert len(faults) >= 30
    assert len(healthy) >= 20
    assert len({(case.architecture, case.name) for case in [*faults, *healthy]}) == len(faults) + len(healthy)
    architectures = {"MLP", "CNN", "RNN", "transformer", "GAN"}
    assert {case.architecture for case in faults} == {case.architecture for case in healthy} == architectures
    assert {accepted.partition("@")[0] for case in faults for accepted in case.accepts} <= benchmark.RULES.keys()
    assert not {*benchmark.DEVELOPMENT_SEEDS} & {*benchmark.REPORTED_SEEDS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("dropout of 1", "dropout_keeps_units @ dropout1"),
        slow("all weights equal", "poor_initialization @ linear0"),
        slow("softmax twice", "double_softmax @ softmax"),
        ("frozen layer (learning rate of its group is 0)", "unchanged_parameter @ linear"),
    ],
)
def test_fault_is_found(benchmark: ModuleType, name: str, found: str) -> None:
    (case,) = (case for case in benchmark.FAULTS if (case.architecture, case.name) == ("MLP", name))
    with torch.random.fork_rng():
        result = benchmark.run(case, seed=0, steps=31)
    assert result.found
    assert result.leads
    assert str(result.findings[result.found[0]]).startswith(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("CNN", "fine-tuning with frozen layers"),
        slow("MLP", "softmax with a squared error"),
        slow("MLP", "batch normalization"),
    ],
)
def test_healthy_training_has_no_warning(benchmark: ModuleType, architecture: str, name: str) -> None:
    (case,) = (case for case in benchmark.HEALTHY if (case.architecture, case.name) == (architecture, name))
    with torch.random.fork_rng():
        assert benchmark.run(case, seed=0, steps=61).findings == []
