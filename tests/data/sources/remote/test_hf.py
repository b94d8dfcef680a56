"""Shards on the hub, from a server that answers as the hub does where its client asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from hub_server import Hub, hub_of
from huggingface_hub import HfFileSystem
from shard_files import write_shards

from accel_train.config.url import Url
from accel_train.data.sources.remote.storage import Storage, StorageError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    with hub_of(write_shards(tmp_path / "data", train=2)) as server:
        yield server


def storage_of(server: Hub) -> Storage:
    storage = Storage(Url("hf://datasets/somebody/shards"))
    storage._client = HfFileSystem(endpoint=server.url, token=False, skip_instance_cache=True)
    return storage


def test_the_hub_is_listed_and_read(server: Hub, tmp_path: Path) -> None:
    storage = storage_of(server)
    shards = storage.shards(below=True)
    assert shards is not None and [shard.name for shard in shards] == ["train-000.tar", "train-001.tar", "val-000.tar"]
    assert all(shard.sha256 and shard.version for shard in shards)
    copy = tmp_path / "copy"
    copy.touch()
    storage.download(shards[1], copy)
    assert copy.read_bytes() == (server.folder / "train-001.tar").read_bytes()
    content = (server.folder / "train-000.tar").read_bytes()
    (server.folder / "train-000.tar").write_bytes(content[::-1])
    with pytest.raises(StorageError, match="is not the file any more"):
        storage.download(shards[0], copy)
    assert storage.read("info.json") is None
