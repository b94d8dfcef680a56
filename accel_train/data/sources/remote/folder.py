"""What a start asks a storage of its folder: the shards, the index and the lists beside them.

What needs no other answer is asked at the same time, and each question once for a node: its processes ask one after the
other (the caller holds a lock), and what one was told since another one began is new enough for that one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from accel_train.config.url import Url
from accel_train.data.sources.files.index import index_name
from accel_train.data.sources.files.index_file import Index, read_index
from accel_train.data.sources.files.webdataset import LISTS, listed_shards
from accel_train.data.sources.remote.shard_cache import ShardCache
from accel_train.data.sources.remote.storage import Shard, StorageError
from accel_train.errors import LOGGER, UserError, first_of
from accel_train.files import atomic_write


class RemoteFolder:
    """The answers; used as a context, which ends its threads."""

    def __init__(self, cache: ShardCache, kind: str, *, needs_index: bool) -> None:
        """`kind`: as in --data.name. `needs_index`: the index on the storage is asked for at once, else when needed."""
        self.cache, self.storage, self.kind = cache, cache.storage, kind
        self.storage.client  # noqa: B018 -- made by one thread
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="folder")
        self._lists = self._pool.submit(self._ask_for_lists)
        self._index: Future[Index | None] | None = None
        if needs_index:
            self.index()

    def __enter__(self) -> RemoteFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False)

    def is_new(self, file: Path) -> bool:
        """Whether another process of this node has written the file since this one began."""
        with contextlib.suppress(OSError):
            return file.stat().st_mtime > self.cache.began
        return False

    def shards(self) -> list[Shard]:
        """The shards as the storage has them now. Raises UserError."""
        storage, file = self.storage, self.cache.folder / f"listing-{self.kind}.json"
        if self.is_new(file):
            with contextlib.suppress(OSError, ValueError, TypeError):
                return [Shard(**shard) for shard in json.loads(file.read_text())]
        shards = storage.shards(below=self.kind != "tar")
        if shards is None:
            index = self.index().result()
            if index is None:
                raise UserError(
                    f"--data.root {storage.folder}: a web server does not list its files, and there is no "
                    f"{index_name(self.kind)}: name the shards, {storage.folder}/train-{{0000..0127}}{storage.suffix}, "
                    f"or put the index there that `accel-train index {self.kind}` writes beside them in a folder."
                )
            shards = storage.look_up(sorted(place for place in index.states if place.endswith(storage.suffix)))
        if not shards:
            raise UserError(f"--data.root {storage.folder}: there is no file *{storage.suffix} (or no such folder).")
        with contextlib.suppress(OSError):
            atomic_write(file, json.dumps([asdict(shard) for shard in shards]))
        return shards

    def index(self) -> Future[Index | None]:
        """The index that lies on the storage, asked for once; None if there is none. Its result raises UserError."""
        if self._index is None:
            self._index = self._pool.submit(self._ask_for_index)
        return self._index

    def lists(self) -> dict[str, bytes]:
        """The file that says which shards belong to which split, if there is one. Raises UserError."""
        return self._lists.result()

    def _ask_for_index(self) -> Index | None:
        name, file = index_name(self.kind), self.cache.folder / f"beside-{self.kind}.safetensors"
        said = file.with_suffix(".version")  # by the storage, of the file
        if self.storage.folder.lower().endswith(self.storage.suffix):
            return None
        with contextlib.suppress(OSError, StorageError):
            is_same = self.is_new(file) or said.read_text() == self.storage.look_at(name).version
            if is_same and (kept := read_index(file, Url(self.storage.folder))) is not None:
                return kept
        if (found := self.storage.read(name)) is None:
            return None
        content, version = found
        with contextlib.suppress(OSError):
            said.unlink(missing_ok=True)
            atomic_write(file, content)
            if version:
                atomic_write(said, version)
        if (index := read_index(file, Url(self.storage.folder))) is None:
            LOGGER.warning(
                f"{self.storage.url(name)} is not used, because it is damaged or of another version: upload the one "
                f"that `accel-train index {self.kind} --root FOLDER` writes into a folder with these shards."
            )
        return index

    def _ask_for_lists(self) -> dict[str, bytes]:
        names, file = self.storage.names, self.cache.folder / f"lists-{self.kind}.json"
        if self.kind != "wds" or names == ("",):
            return {}
        if self.is_new(file):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                return {name: bytes.fromhex(text) for name, text in json.loads(file.read_text()).items()}
        with ThreadPoolExecutor(len(LISTS)) as pool:
            answers = zip(LISTS, pool.map(self.storage.read, LISTS), strict=True)
        lists = dict(itertools.islice(((name, found[0]) for name, found in answers if found), 1))  # the first counts
        if names is not None:  # the user has named shards: they may be others than those of the list
            lists = {name: text for name, text in lists.items() if self._has_all(name, text, names)}
        with contextlib.suppress(OSError):
            atomic_write(file, json.dumps({name: text.hex() for name, text in lists.items()}))
        return lists

    def _has_all(self, name: str, text: bytes, shards: tuple[str, ...]) -> bool:
        listed, _ = listed_shards(Url(self.storage.url(name)), text)
        if others := sorted({*shards} - {*itertools.chain(*listed.values())}):
            LOGGER.warning(
                f"{self.storage.url(name)} is not used, because it does not list {first_of(others, 1)}: the names of "
                "the shards give their splits, and the classes are called by their numbers."
            )
        return not others
