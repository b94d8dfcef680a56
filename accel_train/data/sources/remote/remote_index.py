"""The index of shards on a storage: what is in which of them, and where.

It is kept in the node's cache, with the size and the version of each shard, and is used again as long as the storage
says the same of them. Where it is not there, the file is taken that `accel-train index` writes beside shards in a
folder, and that was uploaded with them. Else all shards are fetched once to make it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.files.index import Progress, index_name, splits_of_index
from accel_train.data.sources.files.index_file import Index, KeptIndex, read_index, write_index
from accel_train.data.sources.files.tars import images_in, index_of_trees
from accel_train.data.sources.files.webdataset import (
    LISTS,
    Listed,
    index_of_shards,
    listed_shards,
    named_shards,
    pairs_in,
)
from accel_train.data.sources.remote.images import RemoteImages
from accel_train.data.sources.remote.shard_cache import FETCHES, ShardCache, size_text
from accel_train.data.sources.remote.storage import Shard, Storage
from accel_train.data.sources.splits import Splits, names_root
from accel_train.errors import LOGGER, UserError
from accel_train.files import atomic_write

Found = TypeVar("Found")


def remote(data: Data) -> Splits:
    """The splits of the shards that the URL `data.root` names: --data.name tar or wds. Raises UserError."""
    cache, index = _cached_index(data)
    sources = {
        split: RemoteImages(names_root(data), index.tars, files, data, cache) for split, files in index.splits.items()
    }
    return splits_of_index(data, index, sources)


def index_of(data: Data) -> Index:
    """The index of the shards. Raises UserError."""
    return _cached_index(data)[1]


def _cached_index(data: Data) -> tuple[ShardCache, Index]:
    kind = data.name
    if kind not in ("tar", "wds"):
        raise UserError(
            f"--data.root {data.root}: a storage is read by --data.name tar or wds only, found {data.name}: pack the "
            "images into tar files first (shards), or copy them to a disk."
        )
    storage = Storage(data.root)
    cache = ShardCache.of(data, storage)
    with cache.locked("index"):  # the processes of a node ask the storage one after the other, the first one alone
        shards = _listing(cache, storage, kind)
        cache.shards = {shard.name: shard for shard in shards}
        return cache, _index(
            data, kind, cache, verify=data.verify and not _newer(_index_file(cache, kind), cache.began)
        )


def _index_file(cache: ShardCache, kind: str) -> Path:
    return cache.folder / index_name(kind)


def _newer(file: Path, than: float) -> bool:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime > than
    return False


def _listing(cache: ShardCache, storage: Storage, kind: str) -> list[Shard]:
    """The shards as the storage has them now; what it told another process of this node since this one began is new
    enough. Raises UserError."""
    file = cache.folder / f"listing-{kind}.json"
    if _newer(file, cache.began):
        with contextlib.suppress(OSError, ValueError, TypeError):
            return [Shard(**shard) for shard in json.loads(file.read_text())]
    shards = storage.shards(below=kind == "wds")
    if shards is None:
        beside = _beside(cache, storage, kind)
        if beside is None:
            raise UserError(
                f"--data.root {storage.folder}: a web server does not list its files, and there is no "
                f"{index_name(kind)}: name the shards, {storage.folder}/train-{{0000..0127}}.tar, or put the index "
                f"there that `accel-train index {kind}` writes beside them in a folder."
            )
        shards = storage.look_up(sorted(place for place in beside.states if place.endswith(".tar")))
    if not shards:
        raise UserError(f"--data.root {storage.folder}: there is no tar file (or no such folder).")
    with contextlib.suppress(OSError):
        atomic_write(file, json.dumps([asdict(shard) for shard in shards]))
    return shards


def _beside(cache: ShardCache, storage: Storage, kind: str) -> KeptIndex | None:
    """The index that lies on the storage. Raises UserError."""
    file = cache.folder / f"beside-{kind}.safetensors"
    if _newer(file, cache.began):
        return read_index(file, Url(storage.folder))
    if not storage.folder.lower().endswith(".tar") and (content := storage.read(index_name(kind))) is not None:
        with contextlib.suppress(OSError):
            atomic_write(file, content)
            return read_index(file, Url(storage.folder))
    return None


def _index(data: Data, kind: str, cache: ShardCache, *, verify: bool) -> Index:
    root, file, storage = names_root(data), _index_file(cache, kind), cache.storage
    lists = {} if kind == "tar" or cache.storage.names else _lists(storage)
    states = {name: shard.state for name, shard in cache.shards.items()} | {
        name: text.hex() for name, text in lists.items()
    }
    kept = read_index(file, root)
    if kept is not None and kept.states == states and not verify:
        return kept.index
    beside = None if verify else _beside(cache, storage, kind)
    if beside is not None and _fits(beside, cache.shards):
        LOGGER.info(f"{root}: using the index {storage.url(index_name(kind))}.")
        index = beside.index
    else:
        missing = [shard.size for shard in cache.shards.values() if not cache.has(shard.name)]
        if missing:
            LOGGER.info(
                f"{root}: fetching {len(missing):,} shards ({size_text(sum(missing))}) to make the index; "
                f"{index_name(kind)} beside them would spare this."
            )
        with Progress(root) as progress:
            index = _made(kind, root, cache, lists, progress)
    written = write_index([file], root, index, states)
    again = read_index(file, root) if written.file else None
    return replace(again.index, was_there=False) if again else written


def _lists(storage: Storage) -> dict[str, bytes]:
    """The file that says which shards belong to which split, if there is one."""
    for name in LISTS:
        if (text := storage.read(name)) is not None:
            return {name: text}
    return {}


def _fits(beside: KeptIndex, shards: dict[str, Shard]) -> bool:
    """Whether the index is that of these shards: their names, and their sizes; times are others on a storage."""
    sizes = {place: state.partition(" ")[0] for place, state in beside.states.items() if place.endswith(".tar")}
    named = {*beside.index.tars} <= {*shards}  # it may be anybody's file
    return named and sizes == {name: str(shard.size) for name, shard in shards.items()} and not beside.index.mistake


def _made(kind: str, root: Path, cache: ShardCache, lists: dict[str, bytes], progress: Progress) -> Index:
    """Raises UserError."""
    names = list(cache.shards)
    if kind == "tar":
        return index_of_trees(root, names, _through(cache, names, partial(images_in, root)), progress)
    listed: Listed = named_shards(root, names), ()
    for name, text in lists.items():
        listed = listed_shards(root / name, lambda _: text)  # noqa: B023 -- called at once
        if absent := [shard for shard in itertools.chain(*listed[0].values()) if shard not in cache.shards]:
            raise UserError(f"{root / name} lists {absent[0]}, which is not there; upload it, or correct the list.")
    look: Callable[[Sequence[str]], Iterable[Any]] = lambda shards: _through(cache, shards, partial(pairs_in, root))  # noqa: E731
    return index_of_shards(root, [*lists, *names], *listed, look, progress)


def _through(cache: ShardCache, names: Sequence[str], look: Callable[[str, Path], Found]) -> Iterator[Found]:
    """What `look` finds in each shard, fetched several at a time. Raises UserError."""

    def of(name: str) -> Found:
        with cache.open(name) as file:  # which another process may remove
            return look(name, Path(f"/dev/fd/{file.fileno()}"))

    with ThreadPoolExecutor(FETCHES, thread_name_prefix="shards") as pool:
        try:
            yield from pool.map(of, names)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
