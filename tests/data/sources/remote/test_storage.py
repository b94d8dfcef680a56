"""What a storage says and sends, with the faults of real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from shard_files import size_of, write_shards
from storage_server import StorageServer

from accel_train.config.url import Url, url_of
from accel_train.data.sources.remote import storage
from accel_train.data.sources.remote.braces import expanded
from accel_train.data.sources.remote.storage import Shard, Storage, StorageError
from accel_train.errors import UserError

NAME = "train-000.tar"
Fault = Callable[[str, str, int], "str | None"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorageServer]:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02, 0.04))
    monkeypatch.setattr(storage, "PART", 4000)
    monkeypatch.setattr(storage, "STALL_SECONDS", 0.5)
    with StorageServer(write_shards(tmp_path / "data", train=2)) as started:
        yield started


def fetched(server: StorageServer, tmp_path: Path, shard: Shard | None = None) -> bytes:
    """What `download` writes."""
    client, copy = Storage(Url(server.url)), tmp_path / "copy"
    copy.touch()
    client.download(shard or client.look_at(NAME), copy)
    return copy.read_bytes()


def gets(*faults: str) -> Fault:
    """The first requests for bytes go wrong so."""
    return lambda method, path, times: faults[times] if method == "GET" and times < len(faults) else None


@pytest.mark.parametrize(
    "faults",
    [(), ("503",), ("reset",), ("truncated",), ("stalled",), ("429", "reset", "500")],
    ids=lambda faults: "-".join(faults) or "none",
)
def test_a_shard_comes_whole_whatever_fails_on_the_way(
    server: StorageServer, tmp_path: Path, faults: tuple[str, ...]
) -> None:
    server.fault = gets(*faults)
    assert fetched(server, tmp_path) == (server.folder / NAME).read_bytes()
    assert server.bytes <= size_of(server.folder, NAME) + 4000 * len(faults)  # only the failed part is sent again


def test_a_server_without_ranges_sends_all_of_it_once(server: StorageServer, tmp_path: Path) -> None:
    server.ranges = False
    assert fetched(server, tmp_path) == (server.folder / NAME).read_bytes()
    assert server.bytes == size_of(server.folder, NAME)


@pytest.mark.ci
@pytest.mark.parametrize(("status", "requests"), [("404", 1), ("403", 1), ("503", 4)])
def test_what_is_not_there_is_one_line_with_the_url(
    server: StorageServer, tmp_path: Path, status: str, requests: int
) -> None:
    shard = Storage(Url(server.url)).look_at(NAME)
    server.reset()
    server.fault = lambda *_: status
    with pytest.raises(StorageError) as error:
        fetched(server, tmp_path, shard)
    assert f"{server.url}/{NAME} cannot be read" in str(error.value) and "\n" not in str(error.value)
    assert status in str(error.value) or (status == "404" and "there is no such file" in str(error.value))
    assert server.requests == requests


def test_content_that_changes_while_it_is_read_is_refused(server: StorageServer, tmp_path: Path) -> None:
    shard = Storage(Url(server.url)).look_at(NAME)
    server.fault = lambda method, path, times: "changed" if (method, times) == ("GET", 1) else None  # its second part
    with pytest.raises(StorageError, match="is not the file any more that it was"):
        fetched(server, tmp_path, shard)


def test_the_answer_with_the_bytes_says_that_they_are_the_same(server: StorageServer, tmp_path: Path) -> None:
    """No request is made to ask only that, but of a server that does not say it."""
    shard = Storage(Url(server.url)).look_at(NAME)
    server.reset()
    fetched(server, tmp_path, shard)
    assert {method for method, _, _ in server.log} == {"GET"}
    server.tags = False
    untagged = Storage(Url(server.url)).look_at(NAME)
    server.reset()
    fetched(server, tmp_path, untagged)
    assert untagged.version == "" and [method for method, _, _ in server.log].count("HEAD") == 1


def test_a_checksum_of_the_storage_is_compared(server: StorageServer, tmp_path: Path) -> None:
    shard = Storage(Url(server.url)).look_at(NAME)
    with pytest.raises(StorageError, match="is not the file any more"):
        fetched(server, tmp_path, Shard(shard.name, shard.size, shard.version, sha256="0" * 64))


def test_braces_are_expanded_as_by_the_shell() -> None:
    assert expanded("a-{08..10}.tar") == ("a-08.tar", "a-09.tar", "a-10.tar")
    assert expanded("{t-{0..1},v}.tar") == ("t-0.tar", "t-1.tar", "v.tar")
    assert expanded("{t/{0..1},v}-{a,}.tar") == ("t/0-a.tar", "t/0-.tar", "t/1-a.tar", "t/1-.tar", "v-a.tar", "v-.tar")
    assert expanded("one.tar") == ("one.tar",)
    many = "{3..1}.tar", "{0..9999999}.tar", "{0..9999}{0..9999}.tar"
    for wrong in (*many, "{a}.tar", "a}.tar", "}{a,b}.tar", "{a,b.tar", "a-{0..1}.zip"):
        with pytest.raises(UserError, match=r"--data\.root"):
            expanded(wrong)


def test_many_names_are_expanded_at_once() -> None:
    began = time.process_time()
    assert len(expanded("{train-{0000..1280},val-{00..49}}.tar")) == 1331
    assert time.process_time() - began < 0.5


def test_a_url_is_read_as_a_browser_does() -> None:
    assert url_of("HTTPS://Host/Shards/") == Url("https://Host/Shards")
    with pytest.raises(UserError, match=r"is given as a path: /data/shards\."):
        url_of("file:///data/shards")


def test_braces_may_name_folders() -> None:
    named = Storage(Url("s3://bucket/shards/{train/{0..1},val/0}.tar"))
    assert (named.folder, named.names) == ("s3://bucket/shards", ("train/0.tar", "train/1.tar", "val/0.tar"))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(UserError, match="nowhere:// is unknown"):
        Storage(Url("nowhere://a/b")).shards(below=False)
