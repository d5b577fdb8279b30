"""Rooms for copies: bounded, used again, and nobody waits for ever."""

from __future__ import annotations

import threading

import pytest
from waiting import HANGS

from instrument.sinks.buffer_pool import GRAIN, Pool


def never() -> None:
    raise AssertionError("nobody was to wait")


def test_rooms_are_large_enough_and_used_again() -> None:
    pool = Pool(10 * GRAIN)
    room = pool.take(GRAIN + 1, pinned=False, wait=never)
    assert room is not None
    assert room.numel() == 2 * GRAIN
    assert pool.used == 2 * GRAIN
    pool.give_back(room)
    assert pool.used == 0
    again = pool.take(2 * GRAIN - 5, pinned=False, wait=never)
    assert again is not None
    assert again.data_ptr() == room.data_ptr()


def test_no_more_is_kept_than_the_limit_whatever_sizes_are_asked_for() -> None:
    pool = Pool(8 * GRAIN)
    for count in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        rooms = [pool.take(count * GRAIN, pinned=False, wait=never) for _ in range(8 // count)]
        assert pool.used + pool._idle_bytes <= pool.limit
        for room in rooms:
            assert room is not None
            pool.give_back(room)
        assert pool.used + pool._idle_bytes <= pool.limit
        assert pool._idle_bytes == sum(size * len(rooms) for (size, _), rooms in pool._idle.items())


def test_who_does_not_wait_gets_nothing_when_it_is_full() -> None:
    pool = Pool(2 * GRAIN)
    room = pool.take(2 * GRAIN, pinned=False, wait=None)
    assert room is not None
    assert pool.take(1, pinned=False, wait=None) is None
    pool.give_back(room)
    assert pool.take(1, pinned=False, wait=None) is not None


def test_what_is_larger_than_the_pool_has_it_for_itself() -> None:
    pool = Pool(2 * GRAIN)
    room = pool.take(50 * GRAIN, pinned=False, wait=never)
    assert room is not None
    assert pool.take(1, pinned=False, wait=None) is None
    pool.give_back(room)
    assert pool.used == 0
    assert pool._idle_bytes == 0


def test_who_waits_goes_on_when_there_is_room() -> None:
    pool = Pool(GRAIN)
    first = pool.take(1, pinned=False, wait=never)
    assert first is not None
    waiting = threading.Event()
    threading.Thread(target=lambda: (waiting.wait(HANGS), pool.give_back(first)), daemon=True).start()
    assert pool.take(1, pinned=False, wait=waiting.set) is not None
    assert waiting.is_set()


def test_who_waits_for_somebody_who_has_failed_is_told() -> None:
    pool = Pool(GRAIN)
    pool.take(1, pinned=False, wait=never)

    def fail() -> None:
        raise OSError("the writer is gone")

    with pytest.raises(OSError, match="gone"):
        pool.take(1, pinned=False, wait=fail)
