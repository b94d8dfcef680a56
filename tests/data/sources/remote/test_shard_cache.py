"""The copies of shards on a node, with several processes that want them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import write_shards
from storage_server import StorageServer

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.remote.shard_cache import ShardCache
from accel_train.data.sources.remote.storage import Storage
from accel_train.errors import UserError

NAMES = [f"train-{number:03d}.tar" for number in range(6)]

ANOTHER_PROCESS = """
import sys
from pathlib import Path
from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.remote.shard_cache import ShardCache
from accel_train.data.sources.remote.storage import Storage
url, folder, *names = sys.argv[1:]
storage = Storage(Url(url))
cache = ShardCache(Data(root=Url(url), cache_dir=Path(folder)), storage)
cache.shards = {shard.name: shard for shard in storage.look_up(names)}
print("begins", flush=True)
for name in names:
    cache.open(name).close()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StorageServer]:
    with StorageServer(write_shards(tmp_path / "data", val=0)) as started:
        yield started


def create(server: StorageServer, folder: Path, shards: float | None = None) -> ShardCache:
    """A cache with room for so many of the shards, which are of equal size."""
    size = (server.folder / NAMES[0]).stat().st_size
    limit = None if shards is None else f"{int(shards * size)}B"
    storage = Storage(Url(server.url))
    cache = ShardCache(Data(root=Url(server.url), cache_dir=folder, cache_size=limit), storage)
    cache.shards = {shard.name: shard for shard in storage.look_up(NAMES)}
    server.reset()
    return cache


def there(cache: ShardCache) -> list[str]:
    return [name for name in NAMES if cache.has(name)]


def another(server: StorageServer, folder: Path, *names: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", ANOTHER_PROCESS, server.url, str(folder), *names]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def test_one_download_for_all_processes_and_threads_and_starts(server: StorageServer, tmp_path: Path) -> None:
    cache = create(server, tmp_path / "cache")
    others = [another(server, tmp_path / "cache", *NAMES) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        contents = [file.read() for file in pool.map(cache.open, NAMES * 2)]
    assert [other.wait(60) for other in others] == [0, 0]
    assert contents == [(server.folder / name).read_bytes() for name in NAMES * 2]
    assert sorted(path for method, path, _ in server.log if method == "GET") == NAMES
    server.reset()
    assert create(server, tmp_path / "cache").open(NAMES[3]).read() == contents[3]
    assert server.requests == 0


def test_the_oldest_copy_makes_room_unless_it_is_worth_more(server: StorageServer, tmp_path: Path) -> None:
    cache = create(server, tmp_path / "cache", shards=2.5)
    assert cache.fetch(NAMES[0], worth=100.0) and cache.fetch(NAMES[1], worth=50.0)
    assert not cache.fetch(NAMES[2], worth=40.0)  # both are needed earlier
    assert cache.fetch(NAMES[3], worth=60.0)
    assert there(cache) == [NAMES[0], NAMES[3]]
    cache.set_worth(NAMES[0], 10.0)
    cache.open(NAMES[4])  # who needs it now gets room in any case
    assert there(cache) == [NAMES[3], NAMES[4]]


def test_a_copy_that_is_removed_stays_readable(server: StorageServer, tmp_path: Path) -> None:
    cache = create(server, tmp_path / "cache", shards=1.5)
    with cache.open(NAMES[0]) as file:
        cache.open(NAMES[1]).close()
        assert there(cache) == [NAMES[1]]
        assert file.read() == (server.folder / NAMES[0]).read_bytes()


def test_a_process_that_is_killed_leaves_nothing_that_counts(server: StorageServer, tmp_path: Path) -> None:
    cache = create(server, tmp_path / "cache", shards=1.5)
    server.bandwidth = 10_000.0
    killed = another(server, tmp_path / "cache", NAMES[0])
    deadline = time.monotonic() + 60
    while not cache.copies() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert [copy.complete for copy in cache.copies()] == [False]
    server.bandwidth = None
    assert cache.open(NAMES[1]).read() == (server.folder / NAMES[1]).read_bytes()
    assert there(cache) == [NAMES[1]]


def test_a_copy_that_was_cut_is_fetched_again(server: StorageServer, tmp_path: Path) -> None:
    cache = create(server, tmp_path / "cache")
    cache.open(NAMES[0]).close()
    os.truncate(cache.path(NAMES[0]), 100)
    assert cache.open(NAMES[0]).read() == (server.folder / NAMES[0]).read_bytes()


def test_another_content_on_the_storage_is_another_copy(server: StorageServer, tmp_path: Path) -> None:
    create(server, tmp_path / "cache").open(NAMES[0]).close()
    (server.folder / NAMES[0]).write_bytes((server.folder / NAMES[1]).read_bytes())
    assert create(server, tmp_path / "cache").open(NAMES[0]).read() == (server.folder / NAMES[1]).read_bytes()


def test_a_limit_below_one_shard_is_refused(server: StorageServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data\.cache-size: .*train-000\.tar alone has"):
        create(server, tmp_path / "cache", shards=0.5).open(NAMES[0])


def test_a_folder_that_cannot_be_made_is_refused(server: StorageServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--data\.cache-dir: .* cannot be made"):
        create(server, tmp_path / "file")
