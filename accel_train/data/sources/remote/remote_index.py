"""The index of shards on a storage: what is in which of them, and where.

It is kept in the node's cache, with the size and the version of each shard, and is used again as long as the storage
says the same of them. Where it is not there, the file is taken that `accel-train index` writes beside shards in a
folder, and that was uploaded with them. Else all shards are fetched once to make it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from accel_train.config.schema import Data
from accel_train.data.sources.files.index import Progress, index_name, splits_of_index
from accel_train.data.sources.files.index_file import Index, read_index, write_index
from accel_train.data.sources.files.tars import images_in, index_of_trees
from accel_train.data.sources.files.webdataset import Listed, index_of_shards, listed_shards, named_shards, pairs_in
from accel_train.data.sources.remote.folder import RemoteFolder
from accel_train.data.sources.remote.images import RemoteImages
from accel_train.data.sources.remote.parquet import pyarrow
from accel_train.data.sources.remote.shard_cache import FETCHES, ShardCache, size_text
from accel_train.data.sources.remote.storage import Shard, Storage
from accel_train.data.sources.remote.unpacked import UnpackedCache, index_of_parquet, labelled_in, sizes_of
from accel_train.data.sources.splits import Splits, names_root
from accel_train.errors import LOGGER, UserError, first_of

Found = TypeVar("Found")
COLUMNS = ".columns"
"""Among the states of an index of Parquet files: the columns that were given."""


def remote(data: Data) -> Splits:
    """The splits of the shards that `data.root` names: for tar and wds it is a URL, for parquet also a folder.

    Raises UserError.
    """
    cache, index = _cached_index(data)
    return splits_of_index(data, index, lambda files: RemoteImages(names_root(data), index.tars, files, data, cache))


def index_of(data: Data) -> Index:
    """The index of the shards. Raises UserError."""
    return _cached_index(data)[1]


def bytes_to_fetch(data: Data) -> int:
    """Bytes that this node lacks of the shards that `remote` would read to make the index; 0: the index is there. No
    shard is fetched. Raises UserError."""
    with _listed(data) as (cache, folder):
        found = None if data.verify else _ready(data, cache, folder)
        return 0 if found is not None else sum(shard.size for shard in _missing(cache))


def _cached_index(data: Data) -> tuple[ShardCache, Index]:
    with _listed(data) as (cache, folder):
        # To verify, the first process of a node looks; the others use what it has found.
        verify = data.verify and not folder.is_new(_index_file(cache, data.name))
        index = None if verify else _ready(data, cache, folder)
        index = _made(data, cache, folder.lists()) if index is None else index
        if isinstance(cache, UnpackedCache):
            cache.sizes = sizes_of(index)
        return cache, index


@contextlib.contextmanager
def _listed(data: Data) -> Iterator[tuple[ShardCache, RemoteFolder]]:
    """The cache, which knows the shards, for one process of this node at a time. Raises UserError."""
    kind = data.name
    if kind not in ("tar", "wds", "parquet"):
        raise UserError(
            f"--data.root {data.root}: a storage is read by --data.name tar, wds or parquet only, found {data.name}: "
            "pack the images into tar files first (shards), or copy them to a disk."
        )
    if is_parquet := kind == "parquet":
        pyarrow()
    storage = Storage(data.root, ".parquet" if is_parquet else ".tar")
    cache = (UnpackedCache if is_parquet else ShardCache)(data, storage)
    with cache.locked("index"):  # the processes of a node ask the storage one after the other, the first one alone
        is_there = _index_file(cache, kind).exists()
        with RemoteFolder(cache, kind, needs_index=not is_there and not data.verify) as folder:
            cache.shards = {shard.name: shard for shard in folder.shards()}
            yield cache, folder


def _index_file(cache: ShardCache, kind: str) -> Path:
    return cache.folder / index_name(kind)


def _ready(data: Data, cache: ShardCache, folder: RemoteFolder) -> Index | None:
    """The index of the shards as they are now, kept on this node or lying beside them; None if it must be made. Raises
    UserError."""
    root, url, lists = names_root(data), cache.storage.url(index_name(data.name)), folder.lists()
    kept = read_index(_index_file(cache, data.name), root)
    if kept is not None and kept.states == _states(cache, lists):
        return kept
    beside = folder.index().result()
    if beside is None:
        return None
    if difference := _difference(beside, cache):
        LOGGER.warning(
            f"{url} is not used, because it is not the index of these shards: {difference}. Upload the one that "
            f"`accel-train index {data.name} --root FOLDER` writes into a folder with these shards."
        )
        return None
    LOGGER.info(f"{root}: using the index {url}.")
    return _kept(data, cache, beside, lists)


def _states(cache: ShardCache, lists: dict[str, bytes]) -> dict[str, str]:
    """A text for each file on the storage that decides what the index says."""
    shards = {name: shard.state for name, shard in cache.shards.items()}
    return shards | _columns(cache) | {name: text.hex() for name, text in lists.items()}


def _columns(cache: ShardCache) -> dict[str, str]:
    return {COLUMNS: " ".join(map(str, cache.columns))} if isinstance(cache, UnpackedCache) else {}


def _kept(data: Data, cache: ShardCache, index: Index, lists: dict[str, bytes]) -> Index:
    """The index, written into the node's cache."""
    return write_index([_index_file(cache, data.name)], names_root(data), index, _states(cache, lists))


def _difference(beside: Index, cache: ShardCache) -> str:
    """How the index beside the shards differs from what these are now: "" if it is theirs. Their names and sizes are
    compared; times are others on a storage."""
    shards, end = cache.shards, cache.storage.suffix
    sizes = {place: state.partition(" ")[0] for place, state in beside.states.items() if place.endswith(end)}
    if unknown := sorted({*shards} - {*sizes}):
        return f"it does not know {first_of(unknown, 1)}"
    if absent := sorted({*sizes, *beside.tars} - {*shards}):  # it may be anybody's file
        return f"it has {first_of(absent, 1)}, which is not among them"
    if changed := [name for name, shard in shards.items() if sizes[name] != str(shard.size)]:
        name = changed[0]
        return f"{first_of(changed, 1)} has {shards[name].size:,} bytes, in the index {sizes[name]}"
    if beside.states.get(COLUMNS) != _columns(cache).get(COLUMNS):
        return "it was made with other --data.image-column or --data.label-column"
    return beside.mistake.rstrip(".")


def _missing(cache: ShardCache) -> list[Shard]:
    return [shard for shard in cache.shards.values() if not cache.has(shard.name)]


def _made(data: Data, cache: ShardCache, lists: dict[str, bytes]) -> Index:
    """Make the index from the shards, and keep it. Raises UserError."""
    root, kind, names = names_root(data), data.name, list(cache.shards)
    if missing := _missing(cache):
        LOGGER.info(
            f"{root}: fetching {len(missing):,} shards ({size_text(sum(shard.size for shard in missing))}) to make the "
            f"index; {index_name(kind)} beside them would spare this."
        )
    with Progress(root) as progress:
        if kind == "parquet":
            named, rows = cache.storage.names is not None, partial(_through, cache, partial(labelled_in, root))
            index = index_of_parquet(root, names, rows, progress, named=named)
        elif kind == "tar":
            index = index_of_trees(root, names, _through(cache, partial(images_in, root), names), progress)
        else:
            pairs = partial(_through, cache, partial(pairs_in, root))
            index = index_of_shards(root, [*lists, *names], *_splits(root, cache, lists), pairs, progress)
    return _kept(data, cache, index, lists)


def _splits(root: Path, cache: ShardCache, lists: dict[str, bytes]) -> Listed:
    """Which shards belong to which split, and the names of the classes. Raises UserError."""
    for name, text in lists.items():
        listed, classes = listed_shards(root / name, text)
        if cache.storage.names is not None:  # a part of them may be named
            listed = {split: [shard for shard in shards if shard in cache.shards] for split, shards in listed.items()}
            listed = {split: shards for split, shards in listed.items() if shards}
        if absent := [shard for shard in itertools.chain(*listed.values()) if shard not in cache.shards]:
            raise UserError(f"{root / name} lists {absent[0]}, which is not there; upload it, or correct the list.")
        return listed, classes
    return named_shards(root, cache.shards), ()


def _through(cache: ShardCache, look: Callable[[str, Path], Found], names: Sequence[str]) -> Iterator[Found]:
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
