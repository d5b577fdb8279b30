"""The buffer pool: its size is bounded, and no caller waits forever."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from waiting import TIMEOUT

from instrument.storage.tensors import Pool

SIZE = 4096


def fail_on_wait() -> None:
    raise AssertionError("the pool waited")


def test_pool_never_exceeds_its_limit() -> None:
    pool = Pool(8 * SIZE)
    for count in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        buffers = [pool.take(count * SIZE, pinned=False, wait=fail_on_wait) for _ in range(8 // count)]
        assert [buffer.numel() for buffer in buffers if buffer is not None] == [count * SIZE] * (8 // count)
        assert pool.used == count * SIZE * (8 // count)
        assert pool.take((8 % count + 1) * SIZE, pinned=False, wait=None) is None
        for buffer in buffers:
            assert buffer is not None
            pool.release(buffer)
        assert pool.used == 0


def test_buffer_larger_than_the_pool_is_exclusive() -> None:
    pool = Pool(2 * SIZE)
    buffer = pool.take(50 * SIZE, pinned=False, wait=fail_on_wait)
    assert buffer is not None
    assert pool.take(SIZE, pinned=False, wait=None) is None
    pool.release(buffer)
    assert pool.used == 0


def test_waiting_caller_resumes_when_a_buffer_is_returned() -> None:
    pool = Pool(SIZE)
    first = pool.take(SIZE, pinned=False, wait=fail_on_wait)
    assert first is not None
    waiting = threading.Event()
    threading.Thread(target=lambda: (waiting.wait(TIMEOUT), pool.release(first)), daemon=True).start()
    assert pool.take(SIZE, pinned=False, wait=waiting.set) is not None
    assert waiting.is_set()


def test_interrupt_at_the_lock_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition acquires its lock in Python code, in which a signal can arrive before the block begins."""
    original = threading.Condition.__enter__

    def acquire_and_interrupt(condition: threading.Condition) -> bool:
        original(condition)
        raise KeyboardInterrupt

    pool = Pool(SIZE)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Condition, "__enter__", acquire_and_interrupt)
        pool.take(SIZE, pinned=False, wait=fail_on_wait)
    taken = threading.Thread(target=lambda: pool.take(SIZE, pinned=False, wait=None), daemon=True)
    taken.start()
    taken.join(TIMEOUT)
    assert not taken.is_alive()
