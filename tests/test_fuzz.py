"""Random configurations: each one runs or is refused with an error message, and none hangs."""

from __future__ import annotations

import io
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fuzz import CONFIG, mutated, mutated_arguments
from rich.console import Console
from tiers import portions

from instrument import ConfigError
from instrument.config.parse import parse_config
from instrument.plan.display import plan_view
from instrument.training.dry_run import dry_run
from instrument.training.environment import process_state
from instrument.training.experiment import Experiment

TIME_LIMIT = 30  # seconds per case; a case takes a few milliseconds


@pytest.fixture(autouse=True)
def one_pass(few_repeats: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the dry run of a plan to one pass over the batches of one step: no test here reads its durations."""
    for name in ("MIN_REPEATS", "MAX_REPEATS", "BATCHES"):
        monkeypatch.setattr(f"instrument.training.dry_run.{name}", 0)


@contextmanager
def time_limit(seconds: int, name: str) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{name} hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plan_exit_code(raw: dict[str, Any]) -> int:
    """Return the exit code of the plan of a configuration."""
    try:
        config = parse_config(raw)
        with process_state(seed=config.seed, deterministic=config.deterministic):
            made = Experiment(config)
            Console(file=io.StringIO(), width=100).print(
                plan_view(made.plan, made.inferred_by_phase, dry_run(made), made.steps)
            )
    except ConfigError as error:
        return error.exit_code if str(error).strip() else 1
    return 0


def exit_codes(numbers: range) -> Counter[int]:
    codes: Counter[int] = Counter()
    for number in numbers:
        with time_limit(TIME_LIMIT, f"configuration {number}"):
            try:
                codes[plan_exit_code(mutated(number))] += 1
            except Exception as error:
                raise AssertionError(f"configuration {number}: {type(error).__name__}: {error}") from error
    return codes


def test_base_configuration_is_valid() -> None:
    assert plan_exit_code(CONFIG) == 0


@pytest.mark.parametrize("numbers", portions(25, 10_000, 1_110))
def test_mutated_configurations_run_or_are_refused(numbers: range) -> None:
    codes = exit_codes(numbers)
    assert set(codes) == {0, 2}
    assert codes[0] > len(numbers) // 20, "some of the changes should be valid"


@pytest.mark.parametrize("numbers", portions(10, 1_000, 142))
def test_mutated_command_lines_run_or_are_refused(cli: Callable[..., Any], numbers: range) -> None:
    base = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=2", "plan=true"]
    codes: Counter[int] = Counter()
    for number in numbers:
        arguments = mutated_arguments(number)
        with time_limit(TIME_LIMIT, f"command line {number}"):
            answer = cli(*base, *arguments)
        assert answer.code in (0, 2), (number, arguments, answer.err)
        assert "Traceback" not in answer.err, (number, arguments, answer.err)
        assert answer.code == 0 or answer.err.strip(), (number, arguments)
        codes[answer.code] += 1
    assert set(codes) == {0, 2}
    assert list(Path.cwd().iterdir()) == []
