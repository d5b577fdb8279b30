"""Signals while rows are written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.config.spec_file import read_specs
from instrument.plan.hook_plan import make_plan
from instrument.runtime import deferred_interrupts
from instrument.runtime.deferred_interrupts import deferred_signals, uninterrupted

RECORD = {"layers": ".", "kind": "forward", "action": "record"}


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Restore the default handler: tests started in the background may inherit an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)  # to the current thread, delivered before it returns


@pytest.mark.parametrize(("count", "completes"), [(1, True), (2, False)])
def test_ctrl_c_is_raised_after_the_block_and_the_second_at_once(
    count: int, completes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_interrupts, "DUPLICATE_SECONDS", 0.0)  # no later signal is a duplicate
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_signals():  # noqa: PT012
        for _ in range(count):
            interrupt()
        done.append(True)
    assert done == [True] * completes
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_duplicate_of_a_signal_is_raised_once_after_the_block() -> None:
    """The program `timeout` sends a signal to a process, and then to its group."""
    done = []

    def write_rows() -> None:
        with deferred_signals():
            interrupt()
            interrupt()
            done.append(True)

    with pytest.raises(KeyboardInterrupt) as caught:
        write_rows()
    assert done == [True]
    assert caught.value.__context__ is None


def test_error_in_the_block_restores_signal_handlers() -> None:
    with pytest.raises(ValueError, match="inside"), deferred_signals():
        raise ValueError("inside")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_raised_after_an_error_in_the_block() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, deferred_signals():  # noqa: PT012
        interrupt()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


def test_uninterrupted_block_defers_repeated_signals_and_raises_once() -> None:
    done = []

    with pytest.raises(KeyboardInterrupt) as caught, deferred_signals():  # noqa: PT012
        with uninterrupted():
            interrupt()
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert caught.value.__context__ is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_all_deferred_signals_are_handled() -> None:
    received: list[int] = []

    previous = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():  # noqa: PT012
            interrupt()
            signal.raise_signal(signal.SIGUSR1)
            assert not received
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == [signal.SIGUSR1]


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals():
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_do_not_defer_signals() -> None:
    done = []

    def inside() -> None:
        with deferred_signals():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert done == [signal.default_int_handler]


def test_step_written_during_ctrl_c_is_complete_and_unique() -> None:
    class Interrupting(instrument.MemorySink):
        def write(self, table: str, rows: Any) -> None:
            super().write(table, rows)
            if table == "metrics":
                interrupt()

    sink, model = Interrupting(), nn.Linear(2, 2)
    probe = instrument.Probe(make_plan(read_specs({"h": RECORD}), model), sink)
    with pytest.raises(KeyboardInterrupt), probe:  # noqa: PT012
        model(torch.ones(1, 2))
        probe.end_step(loss=0.5)
    assert len(sink.rows["metrics"]) == len(sink.rows["stats"]) == sink.records("coverage")[0]["fired"] == 1
