"""How fast the storage is from this node, and what it has: for the doctor."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from accel_train.data.sources.remote.images import RemoteImages
from accel_train.data.sources.remote.shard_cache import FETCHES
from accel_train.data.sources.splits import Splits, unwrap_subset

SAMPLE = 8 << 20
"""Bytes of each of the requests by which the bandwidth is measured."""
ANSWERS = 5


@dataclass(frozen=True)
class Speed:
    """Of the storage, as one node sees it."""

    latency: float
    """Seconds until a request without a body is answered; the median."""
    bandwidth: float
    """Bytes a second, with as many requests at a time as shards are fetched ahead."""
    image_bytes: float
    """Of the shards, for each of their images."""
    missing: int
    """Bytes of the shards that this node does not have yet."""
    wanted: int
    """Bytes that its cache needs: all shards, or --data.cache-size."""


def measure(splits: Splits, *, quick: bool) -> Speed | None:
    """Ask the storage of `splits` for a while; None if they come from no storage. Raises StorageError."""
    images, _ = unwrap_subset(splits.train)
    if not isinstance(images, RemoteImages):
        return None
    cache, shards = images.cache, [images.cache.shards[tar] for tar in images.tars]
    answers = []
    for number in range(ANSWERS):
        began = time.perf_counter()
        cache.storage.look_at(shards[number % len(shards)].name)
        answers.append(time.perf_counter() - began)
    largest = sorted(shards, key=lambda shard: -shard.size)[: 1 if quick else FETCHES]
    began = time.perf_counter()
    with ThreadPoolExecutor(FETCHES) as pool:
        came = sum(pool.map(lambda shard: cache.storage.sample(shard, SAMPLE), largest))
    total = sum(shard.size for shard in shards)
    copies = sum(cache.size_of(shard.name) or shard.size for shard in shards) + cache.beside
    return Speed(
        sorted(answers)[ANSWERS // 2],
        came / (time.perf_counter() - began),
        total / sum(map(len, splits.sources.values())),
        sum(shard.size for shard in shards if not cache.has(shard.name)),
        copies if cache.limit is None else min(copies, cache.limit),
    )
