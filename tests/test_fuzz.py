"""Hostile configurations: whatever is written, it runs or it is told what is wrong, in words, and nothing hangs."""

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
from instrument.dry_run.dry_run import rehearse
from instrument.plan.display import plan_view
from instrument.spec.parse import parse_config
from instrument.training.device import process_state
from instrument.training.experiment import prepare

PATIENCE = 30  # seconds; each takes a few milliseconds


@contextmanager
def no_longer_than(seconds: int, what: str) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(raw: dict[str, Any]) -> int:
    """The exit code that the plan of a configuration would end with."""
    try:
        config = parse_config(raw)
        with process_state(seed=config.seed, deterministic=config.deterministic):
            made = prepare(config)
            Console(file=io.StringIO(), width=100).print(plan_view(made.plan, made.trials, rehearse(made), made.steps))
    except ConfigError as error:
        return error.exit_code if str(error).strip() else 1
    return 0


def go_through(numbers: range) -> Counter[int]:
    codes: Counter[int] = Counter()
    for number in numbers:
        with no_longer_than(PATIENCE, f"configuration {number}"):
            try:
                codes[outcome(mutated(number))] += 1
            except Exception as error:
                raise AssertionError(f"configuration {number}: {type(error).__name__}: {error}") from error
    return codes


def test_the_configuration_that_is_mutated_is_a_good_one() -> None:
    assert outcome(CONFIG) == 0


@pytest.mark.parametrize("numbers", portions(100, 10_000, 1_100))
def test_mutated_configurations_run_or_are_refused_in_words(numbers: range) -> None:
    codes = go_through(numbers)
    assert set(codes) == {0, 2}
    assert codes[0] > len(numbers) // 20, "some of the changes are harmless"


def command_lines(cli: Callable[..., Any], numbers: range) -> Counter[int]:
    base = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "hooks=activations", "train.steps=2", "plan=true"]
    codes: Counter[int] = Counter()
    for number in numbers:
        arguments = mutated_arguments(number)
        with no_longer_than(PATIENCE, f"command line {number}"):
            answer = cli(*base, *arguments)
        assert answer.code in (0, 2), (number, arguments, answer.err)
        assert "Traceback" not in answer.err, (number, arguments, answer.err)
        assert answer.code == 0 or answer.err.strip(), (number, arguments)
        codes[answer.code] += 1
    return codes


@pytest.mark.parametrize("numbers", portions(20, 1_000, 140))
def test_mutated_command_lines_run_or_are_refused_in_words(cli: Callable[..., Any], numbers: range) -> None:
    assert set(command_lines(cli, numbers)) == {0, 2}
    assert list(Path.cwd().iterdir()) == []
