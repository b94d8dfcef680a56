"""When the watchdog ends a run; tests/integration/test_watchdog.py stops and kills real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from accel_train.run.watchdog import Progress, ProgressStore, Watchdog


@pytest.fixture
def stores() -> Iterator[list[ProgressStore]]:
    """Those of six processes."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield [ProgressStore(rank, 6) for rank in range(6)]
    distributed.destroy_process_group()


def watchdog(processes: int, hang_seconds: float = 0) -> Any:
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=processes)
    return Watchdog(accelerator, None, SimpleNamespace(reason=""), hang_seconds)  # type: ignore[arg-type]


def progress(beat: int, *, has_left: bool = False) -> Progress:
    return Progress(beat, 7, 3, "saves a checkpoint", "node5", has_left)


def test_the_first_reason_counts_and_one_process_searches(stores: list[ProgressStore]) -> None:
    assert stores[0].end() is None
    ends = [store.announce_end(f"rank {store.rank} failed", with_stacks=False) for store in stores]
    assert {(end.rank, end.text) for end in ends} == {(0, "rank 0 failed")} and stores[5].end() == ends[0]
    assert [store.searches_first() for store in stores] == [True] + [False] * 5


def test_processes_are_described_and_those_without_a_beat_are_found(stores: list[ProgressStore]) -> None:
    stores[1].publish(progress(1))
    said = stores[0].describe([1, 2, 3, 4, 5])
    assert said.startswith("rank 1 on node5, which saves a checkpoint, after update 3; rank 2, which has not begun")
    assert said.endswith("; and 1 more")
    for rank in (2, 3):
        stores[rank].publish(progress(1, has_left=rank == 3))
    beats = iter(range(2, 99))
    timer = threading.Timer(0.1, lambda: stores[2].publish(progress(next(beats))))
    timer.start()
    assert stores[0].without_beat(1) == [1]  # the second has one, the third has left
    timer.join()
    stores[1].publish(progress(1, has_left=True))
    timer = threading.Timer(0.1, lambda: stores[2].publish(progress(next(beats))))
    timer.start()
    assert stores[0].without_beat(60) == []
    timer.join()


def test_a_process_is_silent_after_so_many_ticks_without_a_new_beat(stores: list[ProgressStore]) -> None:
    ticks, now = 23, 0

    def silent_after(number: int) -> list[int]:
        nonlocal now
        now += number
        return stores[0].silent(now, ticks)

    assert not silent_after(10 * ticks)  # nobody has begun
    for beat in range(3):
        stores[1].publish(progress(beat))
        assert not silent_after(ticks) and not silent_after(ticks - 1)
    assert silent_after(1) == [1]
    stores[1].publish(progress(2, has_left=True))
    assert not silent_after(10 * ticks)


@pytest.mark.parametrize("has_updated", [False, True])
def test_until_the_first_update_another_limit_counts(has_updated: bool) -> None:
    dog, ends = watchdog(1, 0.2), []
    assert dog.start_seconds == 3600
    dog.start_seconds, dog.hang_seconds = (2, 0.2) if has_updated else (0.2, 2)

    def end_run(text: str) -> None:
        ends.append(text)
        dog._leaving.set()

    dog._end_run = end_run
    dog.heartbeat("begins")
    if has_updated:
        dog.advance(1)
    began = time.monotonic()
    dog._watch()
    assert ends == ["No progress for 0 s (--hang-timeout-seconds)."]
    assert time.monotonic() - began >= 0.2
