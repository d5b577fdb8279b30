"""Signals while rows are handed over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.capture.signals import held_back
from instrument.integrations.attach import read_specs
from instrument.plan.sites import make_plan

RECORD = {"layers": ".", "kind": "forward", "action": "record"}


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Who starts the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def train_one_step(model: nn.Module, probe: instrument.Probe) -> None:
    with probe:
        model(torch.ones(1, 2))
        probe.end_step(loss=0.5)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # to this very thread, and before it returns


def test_ctrl_c_is_raised_when_the_block_is_done() -> None:
    done = []

    def hand_over() -> None:
        with held_back():
            interrupt()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        hand_over()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_does_not_wait() -> None:
    done = []

    def hand_over() -> None:
        with held_back():
            interrupt()
            interrupt()
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        hand_over()
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_inside_is_raised_and_signals_are_as_before() -> None:
    with pytest.raises(ValueError, match="inside"), held_back():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_have_nothing_to_hold_back() -> None:
    done = []

    def inside() -> None:
        with held_back():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_a_step_that_is_being_handed_over_when_ctrl_c_comes_is_there_whole_and_once() -> None:
    class Interrupting(instrument.MemorySink):
        def write(self, table: str, rows: Any) -> None:
            super().write(table, rows)
            if table == "metrics":
                interrupt()

    sink = Interrupting()

    model = nn.Linear(2, 2)
    probe = instrument.Probe(make_plan(read_specs({"h": RECORD}), model), sink)
    with pytest.raises(KeyboardInterrupt):
        train_one_step(model, probe)
    assert len(sink.rows["metrics"]) == len(sink.rows["stats"]) == sink.records("coverage")[0]["fired"] == 1
