"""Shards on the hub, from a server that answers as the hub does where its client asks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
pytest.importorskip("aiohttp", reason="accel-train[remote] is not installed")

from huggingface_hub import HfFileSystem
from shard_files import write_shards

from accel_train.config.url import Url
from accel_train.data.sources.remote.storage import Storage, StorageError

COMMIT = "0123456789" * 4


class Hub(ThreadingHTTPServer):
    """The data set somebody/shards, with the files of a folder."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.asked: list[str] = []


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def about(self, path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        sha, size = hashlib.sha256(content).hexdigest(), len(content)
        lfs = {"oid": sha, "size": size, "pointerSize": 130}
        return {"type": "file", "path": path.name, "size": size, "oid": sha[:40], "lfs": lfs}

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        files = sorted(self.server.folder.iterdir())
        file = re.match(r"/datasets/somebody/shards/resolve/[^/]+/([^?]*)", self.path)
        if file is not None and (self.server.folder / file[1]).is_file():
            content = (self.server.folder / file[1]).read_bytes()
            first, last = re.findall(r"\d+", self.headers.get("Range", f"bytes=0-{len(content) - 1}"))
            self.answer(content[int(first) : int(last) + 1], 206)
        elif self.path.startswith("/api/datasets/somebody/shards/tree/"):
            self.answer(json.dumps([self.about(path) for path in files]).encode())
        elif self.path.startswith("/api/datasets/somebody/shards"):
            self.answer(json.dumps({"id": "somebody/shards", "sha": COMMIT, "siblings": []}).encode())
        else:
            self.answer(b"{}", 404)

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(
            json.dumps([self.about(path) for path in self.server.folder.iterdir() if path.name in asked]).encode()
        )

    def answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Hub]:
    server = Hub(write_shards(tmp_path / "data", train=2))
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def storage_of(server: Hub) -> Storage:
    storage = Storage(Url("hf://datasets/somebody/shards"))
    storage._client = HfFileSystem(
        endpoint=f"http://127.0.0.1:{server.server_address[1]}", token=False, skip_instance_cache=True
    )
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
