"""The buffer pool: its size is bounded, buffers are reused, and no caller waits forever."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from waiting import TIMEOUT

from instrument.storage.tensors import SIZE_STEP, Pool


def fail_on_wait() -> None:
    raise AssertionError("the pool waited")


def test_buffers_are_large_enough_and_reused() -> None:
    pool = Pool(10 * SIZE_STEP)
    buffer = pool.take(SIZE_STEP + 1, pinned=False, wait=fail_on_wait)
    assert buffer is not None
    assert buffer.numel() == 2 * SIZE_STEP
    assert pool.used == 2 * SIZE_STEP
    pool.release(buffer)
    assert pool.used == 0
    again = pool.take(2 * SIZE_STEP - 5, pinned=False, wait=fail_on_wait)
    assert again is not None
    assert again.data_ptr() == buffer.data_ptr()


def test_pool_never_exceeds_its_limit() -> None:
    pool = Pool(8 * SIZE_STEP)
    for count in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        buffers = [pool.take(count * SIZE_STEP, pinned=False, wait=fail_on_wait) for _ in range(8 // count)]
        assert pool.used + pool._idle_bytes <= pool.limit
        for buffer in buffers:
            assert buffer is not None
            pool.release(buffer)
        assert pool.used + pool._idle_bytes <= pool.limit
        assert pool._idle_bytes == sum(size * len(buffers) for (size, _), buffers in pool._idle.items())


def test_buffer_larger_than_the_pool_is_exclusive() -> None:
    pool = Pool(2 * SIZE_STEP)
    buffer = pool.take(50 * SIZE_STEP, pinned=False, wait=fail_on_wait)
    assert buffer is not None
    assert pool.take(1, pinned=False, wait=None) is None
    pool.release(buffer)
    assert pool.used == 0
    assert pool._idle_bytes == 0


def test_waiting_caller_resumes_when_a_buffer_is_returned() -> None:
    pool = Pool(SIZE_STEP)
    first = pool.take(1, pinned=False, wait=fail_on_wait)
    assert first is not None
    waiting = threading.Event()
    threading.Thread(target=lambda: (waiting.wait(TIMEOUT), pool.release(first)), daemon=True).start()
    assert pool.take(1, pinned=False, wait=waiting.set) is not None
    assert waiting.is_set()


def test_interrupt_at_the_lock_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition acquires its lock in Python code, in which a signal can arrive before the block begins."""
    original = threading.Condition.__enter__

    def acquire_and_interrupt(condition: threading.Condition) -> bool:
        original(condition)
        raise KeyboardInterrupt

    pool = Pool(SIZE_STEP)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Condition, "__enter__", acquire_and_interrupt)
        pool.take(1, pinned=False, wait=fail_on_wait)
    taken = threading.Thread(target=lambda: pool.take(1, pinned=False, wait=None), daemon=True)
    taken.start()
    taken.join(TIMEOUT)
    assert not taken.is_alive()
