"""Shards on a real web server: runs are those on local shards, and lost or replaced shards end a run in one line."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import helpers
import nginx_server
import pytest

pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from nginx_server import NginxServer
from shard_files import size_of, write_shards

from accel_train.config.schema import Data
from accel_train.config.url import Url
from accel_train.data.sources.remote import storage
from accel_train.data.sources.remote.storage import Storage
from accel_train.data.tools.index import make_index

pytestmark = pytest.mark.skipif(bool(nginx_server.missing()), reason=nginx_server.missing())
SHARDS = 24
BRACES = "{train-{000..023},val-000}.tar"
WORDS = "digits --data.name wds --data.order shards --data.canonical-nodes 1 --data.open-shards 2 --data.workers 1"
WORDS += " --model.image-size 8 --augment.crop resized --batch-size 16 --virtual-batch-size 8 --bitwise true"
WORDS += " --epochs 4 --checkpoint.every-updates 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_shards(tmp_path_factory.mktemp("shards"), train=SHARDS, side=32)
    make_index(Data("wds", folder))
    return folder


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[NginxServer]:
    with NginxServer(folder, tmp_path / "nginx") as started:
        yield started


@pytest.fixture(scope="module")
def local(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run on the local shards."""
    run = tmp_path_factory.mktemp("local") / "run"
    ended = helpers.run(*WORDS.split(), "--data.root", folder, "--output-dir", run)
    assert ended.returncode == 0, ended.stderr
    return weights(run)


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def words(root: str, tmp_path: Path) -> list[object]:
    return [
        *WORDS.split(),
        "--data.root",
        root,
        "--data.cache-dir",
        tmp_path / "cache",
        "--output-dir",
        tmp_path / "run",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("below", ["shards", f"shards/{BRACES}", "no-ranges", "gzip"])
def test_a_run_is_that_on_local_shards(
    server: NginxServer, folder: Path, local: str, tmp_path: Path, below: str
) -> None:
    ended = helpers.run(*words(f"{server.url}/{below}", tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert weights(tmp_path / "run") == local
    shards = [each for each in server.requests() if each[0] == "GET" and each[1].endswith(".tar")]
    assert len(shards) == SHARDS + 1  # each once: they are smaller than a part
    assert {(status, encoding) for _, _, status, _, encoding in shards} == {(200 if below == "no-ranges" else 206, "-")}
    assert sum(size for *_, size, _ in shards) == size_of(folder)


def test_nginx_compresses_for_those_who_want_it(server: NginxServer) -> None:
    """Else the test above would say nothing."""
    asked = urllib.request.Request(f"{server.url}/gzip/train-000.tar", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(asked) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"


@pytest.mark.parametrize("below", ["shards", "no-ranges", "gzip"])
def test_a_shard_of_several_parts_comes_whole(
    server: NginxServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setattr(storage, "PART", 10_000)
    there, copy = Storage(Url(f"{server.url}/{below}")), tmp_path / "copy"
    copy.touch()
    shard = there.look_at("train-000.tar")
    assert shard.size == size_of(folder, "train-000.tar") and shard.version
    there.download(shard, copy)
    assert copy.read_bytes() == (folder / "train-000.tar").read_bytes()
    gets = [each for each in server.requests() if each[0] == "GET"]
    assert len(gets) == (1 if below == "no-ranges" else -(-shard.size // 10_000))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("deleted", "cannot be read: "),
        pytest.param(
            "replaced", "is not the file any more that it was when the run looked at it", marks=pytest.mark.slow
        ),
    ],
)
def test_a_shard_that_is_lost_while_it_trains_ends_the_run_in_one_line(
    server: NginxServer, folder: Path, local: str, tmp_path: Path, change: str, reason: str
) -> None:
    aside = tmp_path / "aside"
    aside.mkdir()
    size = size_of(folder, "train-000.tar")
    # The cache has room for few shards, so others will be fetched while it trains.
    options = [*words(f"{server.url}/shards", tmp_path), "--data.cache-size", f"{10 * size}B"]
    run = helpers.Captured(["-m", "accel_train.train", *options], helpers.environment())
    try:
        wait_for_update(tmp_path / "run" / "status.json", run)
        absent = [path for path in folder.glob("train-*.tar") if not [*(tmp_path / "cache").glob(f"*/*-{path.name}*")]]
        assert absent
        for path in absent:
            content = path.read_bytes()
            path.rename(aside / path.name)
            if change == "replaced":
                path.write_bytes(bytes(reversed(content)))
    finally:
        stdout, stderr = run.communicate()
        for path in aside.iterdir():  # with its time, and so its ETag
            path.replace(folder / path.name)
    assert run.returncode == 0, stderr
    (said,) = [line for line in stdout.splitlines() if "Stopped by data that is lost" in line]
    assert any(f"({server.url}/shards/{path.name} {reason}" in said for path in absent), said
    assert "Traceback" not in stdout + stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "interrupted" and status["update"] > 0
    again = helpers.run(*options)
    assert again.returncode == 0, again.stderr
    assert f"update {status['update']}" in again.stdout
    assert weights(tmp_path / "run") == local


def wait_for_update(status: Path, run: helpers.Captured) -> None:
    """Until one update is trained and saved."""
    deadline = time.monotonic() + 120
    while run.popen.poll() is None and time.monotonic() < deadline:
        if status.exists() and json.loads(status.read_text()).get("update", 0) > 0:
            return
        time.sleep(0.01)
    raise AssertionError(run.communicate())
