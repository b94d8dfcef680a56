"""Images in shards on a storage, read from the copies that this node keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from accel_train.config.schema import Data
from accel_train.data.sources.files.index_file import SplitFiles
from accel_train.data.sources.files.tars import TarImages
from accel_train.data.sources.remote.shard_cache import ShardCache
from accel_train.data.sources.splits import Splits, unwrap_subset


class RemoteImages(TarImages):
    """Whoever reads an image fetches its shard if it is not on this node, or waits for the process that does."""

    def __init__(self, root: Path, tars: tuple[str, ...], files: SplitFiles, data: Data, cache: ShardCache) -> None:
        super().__init__(root, tars, files, data)
        self.cache = cache

    def open_tar(self, number: int) -> IO[bytes]:
        """Raises UserError if the shard cannot be fetched."""
        return self.cache.open(self.tars[number])

    def is_near(self, id: int) -> bool:
        return self.cache.has(self.tars[int(self.positions.array[id, 0])])

    def states(self) -> Iterable[str]:
        return (self.cache.shards[tar].state for tar in self.tars)


def when_lost(splits: Splits, ask_to_stop: Callable[[str], None] | None) -> None:
    """Let the shards of these splits, which share a cache, ask for the end of the run if one cannot be fetched."""
    images, _ = unwrap_subset(splits.train)
    if isinstance(images, RemoteImages):
        images.cache.ask_to_stop = ask_to_stop
