"""What is fetched before it is needed, and what is removed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import PER_SHARD, TRAIN, size_of, write_shards
from storage_server import StorageServer

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, IndexSampler, TrainingSampler
from accel_train.data.sources.load import load_splits
from accel_train.data.sources.remote import ahead, shard_cache
from accel_train.data.sources.remote.ahead import NEVER, Pass, follow
from accel_train.data.sources.splits import Splits
from accel_train.data.tools.index import make_index
from accel_train.errors import UserError

BATCH = 8
SHARD_OF = np.arange(TRAIN * PER_SHARD) // PER_SHARD


class InOrder(TrainingSampler):
    """Has the samples as they are stored: a shard after the other."""

    def _ids(self, positions: torch.Tensor) -> torch.Tensor:
        return positions


def in_order() -> InOrder:
    return InOrder(Plan(TRAIN * PER_SHARD, BATCH, 1, 1), 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StorageServer]:
    folder = write_shards(tmp_path / "data", val=0)
    make_index(Data("wds", folder))
    with StorageServer(folder) as started:
        yield started


def splits(server: StorageServer, tmp_path: Path, shards: float | None) -> Splits:
    """The data with a cache that has room for so many of its shards."""
    size = size_of(server.folder) // len([*server.folder.glob("*.tar")])
    limit = None if shards is None else f"{int(shards * size)}B"
    found = load_splits(Data("wds", Url(server.url), cache_dir=tmp_path / "cache", cache_size=limit), 0)
    server.reset()
    return found


def one_process() -> Any:
    return SimpleNamespace(process_index=0, local_process_index=0, num_processes=1, is_local_main_process=True)


class Reading:
    """Yields the batches of a sampler, after their images were read."""

    def __init__(self, source: Any, sampler: IndexSampler) -> None:
        self.source, self.sampler = source, sampler

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            try:
                self.source.fetch(batch.ids.tolist())
                yield batch
            except UserError as error:
                yield error


def fetched(server: StorageServer) -> list[str]:
    return [path for method, path, _ in server.log if method == "GET"]


def test_uses_are_those_of_this_nodes_processes() -> None:
    one = Pass(in_order(), SHARD_OF, slice(0, 1), 1, 1).uses(TRAIN + 1)
    assert one.first.tolist() == [0, 2, 4, 6, 8, 10, NEVER] and one.last.tolist() == [1, 3, 5, 7, 9, 11, -NEVER]
    assert one.length == 12
    # Of two nodes with one process each, the second has the second half of each batch: of 32, half of two shards.
    sampler = InOrder(Plan(TRAIN * PER_SHARD, 32, 2, 1), 0)
    second = Pass(sampler, SHARD_OF, slice(1, 2), 2, 1).uses(TRAIN)
    assert second.first.tolist() == [NEVER, 0, NEVER, 1, NEVER, 2]


def test_most_at_once_is_counted_with_a_margin() -> None:
    uses, sizes = Pass(in_order(), SHARD_OF, slice(0, 1), 1, 1).uses(TRAIN), np.full(TRAIN, 10)
    assert [uses.most_at_once(sizes, margin) for margin in (0, 1, 100)] == [10, 20, 60]


@pytest.mark.ci
def test_each_shard_is_there_before_it_is_needed(server: StorageServer, tmp_path: Path) -> None:
    train, sampler = splits(server, tmp_path, None).train, in_order()
    loader = follow([], train, sampler, one_process())
    cache = train.cache  # type: ignore[attr-defined]
    passing = iter(follow(Reading(train, sampler), train, sampler, one_process()))
    next(passing)
    deadline = time.monotonic() + 10
    while len(fetched(server)) < TRAIN and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(fetched(server)) == sorted(cache.shards)
    assert len(list(passing)) == 11
    assert len(fetched(server)) == TRAIN
    assert loader is not None


@pytest.mark.slow
def test_a_small_cache_keeps_what_is_needed_next(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order that begins anew after its end is the worst for removing what was used longest ago: nothing would be
    found again. What is needed last is what was just used."""
    monkeypatch.setattr(ahead, "AHEAD", 1)
    write_shards(server.folder, train=12, val=0)
    for path in server.folder.iterdir():
        os.utime(path, (0, 0))
    make_index(Data("wds", server.folder))
    train = splits(server, tmp_path, 7.2).train
    sampler = InOrder(Plan(len(train), BATCH, 1, 1), 0)
    loader, most = follow(Reading(train, sampler), train, sampler, one_process()), 0
    cache = train.cache  # type: ignore[attr-defined]
    for epoch in range(4):
        sampler.seek(epoch)
        for _ in loader:
            time.sleep(0.03)
            most = max(most, sum(copy.size for copy in cache.copies()))
    assert most <= cache.limit + size_of(server.folder, "train-000.tar")  # whoever needs one now does not wait for room
    # Bélády's rule with 7 of 12: 12 + 3 * 12 * (12 - 7) / (12 - 1) = 28; what was used longest ago: 48.
    assert 28 <= len(fetched(server)) <= 38


@pytest.mark.ci
def test_an_order_that_needs_all_shards_at_a_time_is_refused(server: StorageServer, tmp_path: Path) -> None:
    train = splits(server, tmp_path, 3.0).train
    shuffled = TrainingSampler(Plan(len(train), BATCH, 1, 1), 0)
    with pytest.raises(UserError, match=r"--data\.cache-size .* come from all shards at a time.*--data\.order shards"):
        follow([], train, shuffled, one_process())
    follow([], train, in_order(), one_process())


@pytest.mark.ci
def test_so_is_one_for_which_the_disk_has_no_room(
    server: StorageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = splits(server, tmp_path, None).train
    monkeypatch.setattr(shard_cache, "SPARE", 1 << 60)
    with pytest.raises(UserError, match=r"--data\.cache-dir: .* has room for 0 B: .* all shards at a time"):
        follow([], train, TrainingSampler(Plan(len(train), BATCH, 1, 1), 0), one_process())


@pytest.mark.ci
def test_an_evaluation_fetches_each_shard_once(server: StorageServer, tmp_path: Path) -> None:
    train = splits(server, tmp_path, 4.2).train
    sampler, batches = EvaluationSampler(len(train), BATCH), 0
    for _ in follow(Reading(train, sampler), train, sampler, one_process()):
        time.sleep(0.05)  # of computing: what was read and is done can be removed meanwhile
        batches += 1
    assert batches == 12
    assert sorted(fetched(server)) == sorted({*fetched(server)}) and len(fetched(server)) == TRAIN


@pytest.mark.ci
def test_a_lost_shard_is_said_before_it_is_needed(server: StorageServer, tmp_path: Path) -> None:
    train, sampler = splits(server, tmp_path, None).train, in_order()
    server.fault = lambda method, path, times: "404" if path == "train-003.tar" else None
    loader = follow(Reading(train, sampler), train, sampler, one_process())
    asked: list[str] = []
    train.cache.ask_to_stop = asked.append  # type: ignore[attr-defined]
    seen = []
    for batch in loader:
        seen.append(isinstance(batch, UserError))
        if asked:
            break
    assert len(seen) == 5 and not any(seen)  # batch 6 is the first of that shard: two updates later
    assert f"{server.url}/train-003.tar cannot be read" in asked[0]
