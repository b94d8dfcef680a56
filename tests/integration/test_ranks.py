"""What the control plane asks of the store that all ranks share, which rank 0's host serves.

The ranks are threads. Each has a connection of its own to a real TCPStore and calls the functions of the trainer; its
requests and their bytes are counted. A rank that waits asks again and again; each question is counted once.

meeting         launch/rendezvous.py: all ranks exist once, have the same world size, and a GPU each
heartbeats      run/watchdog.py: each rank's thread says that it lives, every two seconds; rank 0 looks at all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from accel_train.launch import rendezvous
from accel_train.launch.environment import Launch
from accel_train.run.watchdog import ProgressStore, Watchdog


@pytest.mark.slow
def test_the_store_is_asked_no_more_than_in_proportion_to_the_ranks() -> None:
    """What the ranks together ask of rank 0's host; it was the square of the ranks at the meeting."""
    few, many = measure(8), measure(32)
    assert list(few) == list(many) == ["meeting", "heartbeats"]
    for name in few:
        requests, sizes = ([sum(rank[place] for rank in found[name]) for found in (few, many)] for place in (0, 1))
        assert 0 < requests[1] <= 5 * requests[0] and sizes[1] <= 5 * sizes[0], name
        # Nobody but rank 0 does more than before.
        assert sorted(rank[0] for rank in many[name])[-2] <= max(rank[0] for rank in few[name][1:]) + 2, name


class Counted:
    """A rank's connection to the store, which counts each question once, and the bytes of it and of its answer."""

    def __init__(self, port: int) -> None:
        self._store: Any = distributed.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        self._asked: dict[tuple[str, str], int] = {}

    def _count(self, kind: str, key: str, size: int) -> None:
        self._asked[kind, key] = len(key) + size

    def set(self, key: str, value: str) -> None:
        self._count("set", key, len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count("get", key, len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count("multi_get", " ".join(keys), sum(map(len, values)))
        return values

    def check(self, keys: list[str]) -> bool:
        self._count("check", " ".join(keys), 1)
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int) -> int:
        self._count("add", key, 8)
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value: bytes = self._store.compare_set(key, expected, desired)
        self._count("compare_set", key, len(expected) + len(desired) + len(value))
        return value

    def taken(self) -> tuple[int, int]:
        """The requests and the bytes since the last call."""
        found = len(self._asked), sum(self._asked.values())
        self._asked.clear()
        return found


def measure(ranks: int) -> dict[str, list[tuple[int, int]]]:
    """(requests, bytes) of each rank in each part of the control plane."""
    server: Any = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stores = [Counted(server.port) for _ in range(ranks)]
    watchdogs = [_watchdog(rank, stores) for rank in range(ranks)]
    found = {}

    def everyone(name: str, act: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(ranks) as pool:
            for done in [pool.submit(act, rank) for rank in range(ranks)]:
                done.result()
        found[name] = [store.taken() for store in stores]

    def meet(rank: int) -> None:
        launch = Launch("simulated", rank, ranks, rank % 8, 8)
        rendezvous._check_ranks(stores[rank], launch, f"GPU-{rank}", 600.0, "")

    def beat(rank: int) -> None:
        watchdogs[rank]._beat += 1
        watchdogs[rank]._check_others()

    everyone("meeting", meet)
    everyone("begin", lambda rank: watchdogs[rank]._publish())
    everyone("heartbeats", beat)
    del found["begin"]
    return found


def _watchdog(rank: int, stores: Sequence[Counted]) -> Watchdog:
    accelerator: Any = SimpleNamespace(process_index=rank, num_processes=1)  # as there is no process group
    run: Any = SimpleNamespace(fail=lambda text: None)
    watchdog = Watchdog(accelerator, run, SimpleNamespace(reason=""), 0)  # type: ignore[arg-type]
    watchdog.world_size = len(stores)
    watchdog._store = store = ProgressStore.__new__(ProgressStore)
    store.rank, store.world_size, store._store = rank, len(stores), stores[rank]
    store._last_heard = {}
    return watchdog
